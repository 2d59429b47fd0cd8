"""`mtx finetune`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mtx.cli.opened import AnyLayout
from mtx.cli.options import Flag, Line, command, part
from mtx.cli.output import progress, say, write_text
from mtx.cli.process import start_devices
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.sizes import Interval, Seed, Sequences, Step, VirtualDevices

if TYPE_CHECKING:
    from mtx.data import Tokenizer
    from mtx.train.examples import Task

_MODEL = part(ModelConfig, "dropout")
_OPTIMIZER = part(OptimizerConfig, "lr", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    task: Literal["classes", "race"] = "classes"  # tell classes apart, or choose an answer
    train: tuple[str, ...] = ()  # JSON lines with "text", "text_pair" if any, "label"; RACE's files
    valid: tuple[str, ...] = ()  # the same, to judge the model by after each epoch
    out: str = "runs/finetuned"  # checkpoint and results
    epochs: Step = 3  # passes over the examples
    batch: Sequences = 32  # examples a step
    warmup_fraction: float = 0.06  # of the steps; then the rate falls linearly to 0
    seed: Seed = 0  # of the head, the order of the examples, and dropout
    step: Interval | None = None  # of the pre-trained checkpoint; the newest where not given
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs
    json: Flag = False  # the results as JSON, instead of a line an epoch
    model: object = field(default_factory=_MODEL)
    optimizer: object = field(default_factory=_OPTIMIZER)
    layout: Layout = field(default_factory=AnyLayout)


@command("mtx finetune RUN_DIR --task TASK --train FILE... --valid FILE...", FinetuneOptions)
def finetune_command(line: Line[FinetuneOptions]) -> None:
    """Teach a pre-trained BERT to tell classes apart, or to choose among answers.

    RUN_DIR is the --out of a BERT's training run. A new head stands on its pooled output: for
    classes, one output for each label; for race, one for each option of a question. Where they are
    not given, --optimizer.lr is 2e-5, --optimizer.weight-decay 0.01, --model.dropout 0.1, and the
    layout the run's own. The model with the head, saved after each epoch, its accuracy and how it
    came about lie in --out.
    """
    options, files = line.options, {"train": line.options.train, "valid": line.options.valid}
    records = {name: read_examples(options.task, given) for name, given in files.items()}
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.launch.shared import require_shared
    from mtx.train.examples import encode
    from mtx.train.finetune import FinetuneTrainer, check_family, start_from

    checkpoints, step = Checkpoints(line.names[0]), options.step
    pretrained, tokenizer = checkpoints.run(step), checkpoints.tokenizer(step)
    check_family(pretrained.model)
    kind, sequence = options.task, pretrained.model.sequence
    task = _task(kind, tokenizer, records["train"], sequence)
    examples = {name: encode(task, tokenizer, some) for name, some in records.items()}
    run = _run(line, pretrained, task, len(examples["train"]))
    require_shared(Path(options.out))
    out = Checkpoints(Path(options.out) / "checkpoints", keep=1)
    if out.steps():
        raise UserError(f"{out.directory} has a checkpoint already; use another out")
    trainer = FinetuneTrainer(run, task)
    state = start_from(trainer, checkpoints, step)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={options.out} cannot be made ({error.strerror}); use another"
        ) from None
    described = {"labels": list(task.labels), "options": task.options}

    def save(state, epochs: list[dict]) -> None:
        out.save(trainer, state, tokenizer=tokenizer, extra=described | {"epochs": list(epochs)})

    with out:
        epochs = _train(trainer, state, examples, save, silent=options.json)
    if jax.process_index() == 0:
        results = {
            "task": options.task, **epochs[-1], **described, "epochs": epochs,
            "run": to_dict(trainer.run),
        }  # fmt: skip
        write_text(Path(options.out, "finetune.json"), json.dumps(results, indent=1) + "\n")
        said = f"finished   accuracy {epochs[-1]['accuracy']:.2%}: {out.directory}"
        say(results, [said], as_json=options.json)


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


def _train(trainer, state, examples: dict, save: Callable, *, silent: bool) -> list[dict]:
    """What was reached after each epoch; `save` gets the state and these, epoch by epoch."""
    import jax

    from mtx.train.finetune import finetune

    epochs, losses, silent = [], [], silent or jax.process_index() != 0
    if not silent:
        print("compiling  the step: it can take minutes", flush=True)

    def end_of_epoch(epoch: int, state) -> None:
        judged = trainer.judge(state, examples["valid"])
        epochs.append({
            "epoch": epoch, "train_loss": sum(losses) / len(losses), "valid_loss": judged.loss,
            "accuracy": judged.accuracy,
        })  # fmt: skip
        losses.clear()
        if not silent:
            said = "  ".join(
                f"{k.replace('_', ' ')} {v:.4f}" for k, v in epochs[-1].items() if k != "epoch"
            )
            print(f"epoch {epoch:>4}  {said}", flush=True)
        save(state, epochs)

    with progress("rows", said="training", silent=silent) as report:

        def end_of_step(step: int, loss: float) -> None:
            losses.append(loss)
            report(step, trainer.run.steps)

        finetune(trainer, state, examples["train"], on_step=end_of_step, on_epoch=end_of_epoch)
    return epochs
