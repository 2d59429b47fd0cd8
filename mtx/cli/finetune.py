"""`mtx finetune`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mtx.cli.evaluate import arguments_of, progress_bar
from mtx.cli.options import parse, split_name, start_devices, write_text
from mtx.config import Layout, to_dict
from mtx.errors import UserError
from mtx.sizes import Interval, Seed, Sequences, Step, VirtualDevices

_Step = Annotated[Interval | None, tyro.conf.arg(metavar="INT")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    task: Literal["classes", "race"] = "classes"  # tell classes apart, or choose an answer
    train: tuple[str, ...] = ()  # JSON lines with "text", "text_pair" if any, "label"; RACE's files
    valid: tuple[str, ...] = ()  # the same, to judge the model by after each epoch
    out: str = "runs/finetuned"  # checkpoint and results
    epochs: Step = 3  # passes over the examples
    batch: Sequences = 32  # examples a step
    lr: float = 2e-5  # the largest learning rate: after the warm-up
    warmup_fraction: float = 0.06  # of the steps; then the rate falls linearly to 0
    weight_decay: float = 0.01  # not applied to biases and norms
    dropout: float = 0.1  # in the model and on its pooled output
    seed: Seed = 0  # of the head, the order of the examples, and dropout
    step: _Step = None  # of the pre-trained checkpoint; the newest where not given
    layout: Layout = field(default_factory=Layout)  # the run's own where nothing is said of it
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs
    json: _Flag = False  # the results as JSON, instead of a line an epoch


@dataclass(frozen=True, kw_only=True)
class _First:
    """What must be known before the other options can have their defaults."""

    task: Literal["classes", "race"] = "classes"
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    virtual_devices: VirtualDevices = 0
    step: _Step = None


def finetune_command(arguments: list[str]) -> None:
    """Teach a pre-trained BERT to tell classes apart, or to choose among answers.

    RUN_DIR is the --out of a BERT's training run. A new head stands on its pooled output: for
    classes, one output for each label; for race, one for each option of a question. The model with
    the head, saved after each epoch, its accuracy and how it came about lie in --out.
    """
    directory, rest = split_name(arguments)
    prog = "mtx finetune RUN_DIR --task TASK --train FILE... --valid FILE..."
    if directory is None or "-h" in rest or "--help" in rest:
        parse(rest, FinetuneOptions(), prog=prog, about=finetune_command)
        raise UserError("mtx finetune RUN_DIR: name the directory of a BERT's run (its --out)")
    names = ("--task", "--train", "--valid", "--virtual-devices", "--step")
    first = parse(arguments_of(rest, *names), _First(), prog=prog)
    files = {"train": first.train, "valid": first.valid}
    for option, given in files.items():
        if not given:
            raise UserError(f"--{option} is missing: it names files of examples")
    records = {name: _read(first.task, given) for name, given in files.items()}
    start_devices(first.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.launch.shared import require_shared
    from mtx.train.finetune import (
        FinetuneTrainer,
        Finetuning,
        check_family,
        finetune_run,
        start_from,
    )

    checkpoints = Checkpoints(directory)
    pretrained, tokenizer = checkpoints.run(first.step), checkpoints.tokenizer(first.step)
    check_family(pretrained.model)
    task, examples = _encode(first.task, records, tokenizer, pretrained.model.sequence)
    default = FinetuneOptions(layout=_layout(pretrained.layout, jax.device_count(), task.options))
    options = parse(rest, default, prog=prog, about=finetune_command)
    how = Finetuning(**{name: getattr(options, name) for name in to_dict(Finetuning())})
    run = finetune_run(pretrained, options.layout, task, how, examples=len(examples["train"]))
    run = replace(run, out=options.out)
    require_shared(Path(options.out))
    out = Checkpoints(Path(options.out) / "checkpoints", keep=1)
    if out.steps():
        raise UserError(f"{out.directory} has a checkpoint already; use another out")
    trainer = FinetuneTrainer(run, task)
    state = start_from(trainer, checkpoints, first.step)
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
        written = json.dumps(results, indent=1)
        write_text(Path(options.out) / "finetune.json", written + "\n")
        said = f"finished   accuracy {epochs[-1]['accuracy']:.2%}: {out.directory}"
        print(written if options.json else said)


def _read(task: str, names: tuple[str, ...]) -> list:
    from mtx.evaluation.choice import read_race
    from mtx.train.examples import read_labelled

    return read_race(names) if task == "race" else read_labelled(names)


def _encode(task: str, records: dict, tokenizer, sequence: int):
    """(the task, examples to train on and to judge by)"""
    from mtx.train import examples

    train = records["train"]
    if task == "race":
        found = examples.multiple_choice(tokenizer, train, sequence=sequence)
        encode = examples.encode_questions
    else:
        labels = examples.classes_of(train)
        found = examples.classification(tokenizer, labels, sequence=sequence)
        encode = examples.encode_labelled
    return found, {name: encode(found, tokenizer, some) for name, some in records.items()}


def _layout(layout: Layout, devices: int, options: int) -> Layout:
    """The run's own, its microbatches of whole examples."""
    from mtx.plan.fit import fit_layout

    layout = fit_layout(layout, devices)
    return replace(layout, microbatch=-(-layout.microbatch // options) * options)


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

    with progress_bar("training", silent=silent) as report:

        def end_of_step(step: int, loss: float) -> None:
            losses.append(loss)
            report(step, trainer.run.steps)

        finetune(trainer, state, examples["train"], on_step=end_of_step, on_epoch=end_of_epoch)
    return epochs
