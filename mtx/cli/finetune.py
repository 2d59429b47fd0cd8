"""`mtx finetune`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtx.cli.opened import AnyLayout
from mtx.cli.options import Flag, Line, command, part
from mtx.cli.output import progress, say, write_text
from mtx.cli.process import start_devices
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.sizes import Interval, Seed, Sequences, Step, VirtualDevices

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.data import Tokenizer
    from mtx.train.examples import Task

_MODEL = part(ModelConfig, "dropout", "lora_rank", "lora_alpha", "lora_on")
_OPTIMIZER = part(OptimizerConfig, "lr", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    # tell classes apart, choose an answer, or answer as an assistant
    task: Literal["classes", "race", "chat"] = "classes"
    # JSON lines with "text", "text_pair" if any, "label"; RACE's files; chat: with "messages"
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()  # the same, to judge the model by after each epoch
    out: str = "runs/finetuned"  # checkpoint and results
    epochs: Step = 3  # passes over the examples
    batch: Sequences = 32  # examples a step; chat: rows of conversations
    warmup_fraction: float = 0.06  # of the steps; then the rate falls linearly to 0
    seed: Seed = 0  # of the head, the order of the examples, and dropout
    held_out: float = 0.05  # chat: of the conversations, to judge by where valid is not given
    template: Literal["auto", "chatml"] = "auto"  # chat: the model's own where it has one, or ChatML
    long: Literal["refuse", "skip"] = "refuse"  # chat: conversations that no row can hold
    step: Interval | None = None  # of the pre-trained checkpoint; the newest where not given
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs
    json: Flag = False  # the results as JSON, instead of a line an epoch
    model: object = field(default_factory=_MODEL)
    optimizer: object = field(default_factory=_OPTIMIZER)
    layout: Layout = field(default_factory=AnyLayout)


@command("mtx finetune RUN_DIR --task TASK --train FILE...", FinetuneOptions)
def finetune_command(line: Line[FinetuneOptions]) -> None:
    """Teach a pre-trained BERT to tell classes apart or to choose among answers, or another model to
    answer.

    RUN_DIR is the --out of a training run, or a converted model. A BERT gets a new head on its
    pooled output: for classes, one output for each label; for race, one for each option of a
    question. chat: the assistant's words are learned, by all of the model or, with
    --model.lora-rank, by adapters beside it alone. Where they are not given, --optimizer.lr is 2e-5
    (2e-4 with adapters), --optimizer.weight-decay 0.01, a BERT's --model.dropout 0.1, and the layout
    the run's own. The model, saved after each epoch, how well it does and how it came about lie in
    --out.
    """
    options, files = line.options, {"train": line.options.train, "valid": line.options.valid}
    _check(line)
    if options.task == "chat":
        from mtx.cli.finetune_chat import finetune_chat

        return finetune_chat(line)
    records = {name: read_examples(options.task, given) for name, given in files.items()}
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.train.examples import encode
    from mtx.train.finetune import FinetuneTrainer, check_family, finetune, start_from

    checkpoints, step = Checkpoints(line.names[0]), options.step
    pretrained, tokenizer = checkpoints.run(step), checkpoints.tokenizer(step)
    check_family(pretrained.model)
    kind, sequence = options.task, pretrained.model.sequence
    task = _task(kind, tokenizer, records["train"], sequence)
    examples = {name: encode(task, tokenizer, some) for name, some in records.items()}
    run = _run(line, pretrained, task, len(examples["train"]))
    out = out_of(options.out)
    trainer = FinetuneTrainer(run, task)
    state = start_from(trainer, checkpoints, step)
    make_folder(options.out)
    described = {"labels": list(task.labels), "options": task.options}

    def save(state, epochs: list[dict]) -> None:
        out.save(trainer, state, tokenizer=tokenizer, extra=described | {"epochs": list(epochs)})

    def judge(state) -> dict:
        judged = trainer.judge(state, examples["valid"])
        return {"valid_loss": judged.loss, "accuracy": judged.accuracy}

    train = partial(finetune, trainer, state, examples["train"])
    with out:
        epochs = by_epochs(train, judge, save, steps=run.steps, silent=options.json)
    if jax.process_index() == 0:
        results = {
            "task": options.task, **epochs[-1], **described, "epochs": epochs,
            "run": to_dict(trainer.run),
        }  # fmt: skip
        write_text(Path(options.out, "finetune.json"), json.dumps(results, indent=1) + "\n")
        said = f"finished   accuracy {epochs[-1]['accuracy']:.2%}: {out.directory}"
        say(results, [said], as_json=options.json)


_OF_CHAT = "held_out", "template", "long"


def _check(line: Line[FinetuneOptions]) -> None:
    """UserError for options that change nothing of the task."""
    options, changes = line.options, line.changes("model")
    if options.task == "chat":
        if "dropout" in changes:
            raise UserError("dropout is for classes and race; a chat has the model's own")
        if options.valid and options.held_out != FinetuneOptions.held_out:
            raise UserError(f"held_out={options.held_out} and valid both say what to judge by")
        return
    if not options.valid:
        raise UserError(f"--valid is missing; task={options.task} is judged by it")
    for name in _OF_CHAT:
        if getattr(options, name) != getattr(FinetuneOptions, name):
            raise UserError(f"{name}={getattr(options, name)} is for task=chat; leave it out")
    for name in changes.keys() - {"dropout"}:
        raise UserError(f"{name}={changes[name]} is for task=chat; leave it out")


def _run(
    line: Line[FinetuneOptions], pretrained: RunConfig, task: Task, examples: int
) -> RunConfig:
    """On the pre-trained run's layout, its microbatches of whole examples, where none is given."""
    import jax

    from mtx.plan.fit import fit_layout
    from mtx.train.finetune import Finetuning, finetune_run

    options, layout = line.options, fit_layout(pretrained.layout, jax.device_count())
    whole = -(-layout.microbatch // task.options) * task.options
    layout = replace(layout, **{"microbatch": whole, **line.changes("layout")})
    how = Finetuning(
        epochs=options.epochs, batch=options.batch, warmup_fraction=options.warmup_fraction,
        seed=options.seed, **line.changes("model"), **line.changes("optimizer"),
    )  # fmt: skip
    run = finetune_run(pretrained, layout, task, how, examples=examples)
    return replace(run, out=options.out)


def read_examples(task: str, names: tuple[str, ...]) -> list:
    from mtx.evaluation.choice import read_race
    from mtx.train.examples import read_labelled

    return read_race(names) if task == "race" else read_labelled(names)


def _task(kind: str, tokenizer: Tokenizer, train: list, sequence: int) -> Task:
    from mtx.data.special_tokens import find_special_tokens
    from mtx.train.examples import Task, classes_of, multiple_choice

    if kind == "race":
        return multiple_choice(tokenizer, train, sequence=sequence)
    special = find_special_tokens(tokenizer)
    return Task(labels=classes_of(train), special=special, sequence=sequence)


def by_epochs(
    train: Callable, judge: Callable[[Any], dict], save: Callable, *, steps: int, silent: bool
) -> list[dict]:
    """What was reached after each epoch, by what `judge` says of the state; `save` gets the state
    and all of these. train: takes on_step and on_epoch, as `mtx.train.finetune.finetune`."""
    import jax

    epochs, losses, silent = [], [], silent or jax.process_index() != 0
    if not silent:
        print("compiling  the step: it can take minutes", flush=True)

    def end_of_epoch(epoch: int, state) -> None:
        train_loss = sum(losses) / len(losses)
        epochs.append({"epoch": epoch, "train_loss": train_loss, **judge(state)})
        losses.clear()
        if not silent:
            numbers = ((k, v) for k, v in epochs[-1].items() if isinstance(v, float))
            said = "  ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in numbers)
            print(f"epoch {epoch:>4}  {said}", flush=True)
        save(state, epochs)

    with progress("rows", said="training", silent=silent) as report:

        def end_of_step(step: int, loss: float) -> None:
            losses.append(loss)
            report(step, steps)

        train(on_step=end_of_step, on_epoch=end_of_epoch)
    return epochs


def out_of(name: str) -> Checkpoints:
    """The checkpoints that are to be made. UserError where there are some."""
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.launch.shared import require_shared

    require_shared(Path(name))
    out = Checkpoints(Path(name) / "checkpoints", keep=1)
    if out.steps():
        raise UserError(f"{out.directory} has a checkpoint already; use another out")
    return out


def make_folder(name: str) -> None:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={name} cannot be made ({error.strerror}); use another") from None
