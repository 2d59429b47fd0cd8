"""`mtx finetune`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtx.cli.finetuning import FinetuneOptions, by_epochs, make_folder, out_of
from mtx.cli.options import Line, command
from mtx.cli.output import say, write_text
from mtx.cli.process import start_devices
from mtx.config import RunConfig, to_dict
from mtx.errors import UserError

if TYPE_CHECKING:
    from mtx.data import Tokenizer
    from mtx.train.examples import Task


@command("mtx finetune RUN_DIR --task TASK --train FILE...", FinetuneOptions)
def finetune_command(line: Line[FinetuneOptions]) -> None:
    """Fine-tune a BERT to classify or to choose among answers, or another model to chat.

    RUN_DIR is the --out of a training run, or a converted model. A BERT gets a new head on its
    pooled output: for classes, one output per label; for race, one per option of a question. For
    chat, the assistant's words are learned by the whole model or, with --model.lora-rank, only by
    adapters added to it. By default --optimizer.lr is 2e-5 (2e-4 with adapters),
    --optimizer.weight-decay 0.01, a BERT's --model.dropout 0.1, and the layout the run's own.
    --out gets the model, saved after each epoch, with how well it does and how it was made.
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
    """UserError for options that do not apply to the task."""
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
    """By default on the pre-trained run's layout, with microbatches of whole examples."""
    import jax

    from mtx.plan.fit import fit_layout
    from mtx.train.finetune import Finetuning, finetune_run

    options, given = line.options, line.changes("layout")
    whole = -(-pretrained.layout.microbatch // task.options) * task.options
    layout = fit_layout(pretrained.layout, jax.device_count(), {"microbatch": whole, **given})
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
