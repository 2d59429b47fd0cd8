"""`mtx evaluate`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mtx.cli.convert import Dtype
from mtx.cli.options import check_writable, parse, split_name, start_devices, write_text
from mtx.config import Layout, RunConfig, to_dict
from mtx.errors import UserError
from mtx.fields import Between
from mtx.sizes import Interval, Seed, Tokens, VirtualDevices, Width

if TYPE_CHECKING:
    from mtx.data import Tokenizer
    from mtx.step.state import TrainState
    from mtx.step.trainer import Trainer
    from mtx.train.examples import Task

_Text = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_Batch = Annotated[int, Between(0, 2**24)]
_Step = Annotated[Interval | None, tyro.conf.arg(metavar="INT")]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    # mlm: masked tokens; classes: of mtx finetune
    task: Literal["perplexity", "lambada", "race", "mlm", "classes"] = "perplexity"
    path: tuple[str, ...] = ()  # text files; lambada, race, classes: files or folders of JSON
    json: _Flag = False  # the results as JSON, instead of a table
    out: _Text = None  # a file for the results, as JSON
    step: _Step = None  # of the checkpoint; the newest where not given
    batch: _Batch = 0  # sequences at a time; 0: about as many as in training, at least 16
    stride: Tokens = 32  # perplexity: tokens from one window to the next; each scores so many
    wikitext: Literal["auto", "yes", "no"] = "auto"  # perplexity: detokenise WikiText's words
    strict: bool = True  # lambada: the whole last word, not the last token alone
    mask_fraction: float = 0.15  # mlm: of the tokens
    mask_run: Width = 3  # mlm: words masked together, at most
    seed: Seed = 0  # mlm: of what is masked
    dtype: Dtype = "auto"  # to compute in; auto: what the run has computed in
    layout: Layout = field(default_factory=Layout)  # the run's own where nothing is said of it
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs


@dataclass(frozen=True, kw_only=True)
class _First:
    """What must be known before the other options can have their defaults."""

    virtual_devices: VirtualDevices = 0
    step: _Step = None


def evaluate_command(arguments: list[str]) -> None:
    """Measure a trained model: perplexity, LAMBADA, multiple choice, masked tokens.

    RUN_DIR is the --out of a training run, or of mtx finetune. Its newest checkpoint is read on the
    layout that --layout... says, whatever the run's was; without, on its own, or on a part of that
    where there are fewer devices.
    """
    directory, rest = split_name(arguments)
    prog = "mtx evaluate RUN_DIR --task TASK --path FILE..."
    if directory is None or "-h" in rest or "--help" in rest:
        parse(rest, EvaluateOptions(), prog=prog, about=evaluate_command)
        raise UserError("mtx evaluate RUN_DIR: name the directory of a training run (its --out)")
    first = parse(arguments_of(rest, "--virtual-devices", "--step"), _First(), prog=prog)
    start_devices(first.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.plan.fit import fit_layout
    from mtx.train.finetune import finetuned_task

    checkpoints = Checkpoints(directory)
    run = checkpoints.run(first.step)
    default = EvaluateOptions(layout=fit_layout(run.layout, jax.device_count()))
    options = parse(rest, default, prog=prog, about=evaluate_command)
    _check(options)
    trainer = _trainer(run, options, finetuned_task(checkpoints, first.step))
    start_s = time.perf_counter()
    with progress_bar(options.task, silent=jax.process_index() != 0) as report:
        evaluate = TASKS[options.task](options, trainer, checkpoints.tokenizer(first.step), report)
        state = checkpoints.restore(trainer, first.step)
        scores = dataclasses.asdict(evaluate(state))
    if jax.process_index() != 0:
        return
    results = {
        "task": options.task,
        "path": list(options.path),
        **scores,
        "elapsed_s": round(time.perf_counter() - start_s, 3),
        "checkpoint": {"directory": str(checkpoints.directory), "step": int(state.step)},
        "model": to_dict(trainer.run.model),
        "layout": to_dict(trainer.run.layout),
        "global_batch": trainer.run.global_batch,
    }
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        _print_table(results, trainer)
    if options.out is not None:
        write_text(Path(options.out), json.dumps(results, indent=1) + "\n")


def arguments_of(arguments: list[str], *names: str) -> list[str]:
    """Those of `arguments` that are the options `names`, with their values."""
    found = []
    for place, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name.replace("_", "-") in names:
            values = takewhile(lambda a: not a.startswith("--"), arguments[place + 1 :])
            found += [argument] if equals else [argument, *values]
    return found


def computing_in(run: RunConfig, dtype: Dtype) -> RunConfig:
    """`run` with another type of matmuls and activations; its checkpoints hold float32."""
    if dtype == "auto":
        return run
    return dataclasses.replace(run, model=dataclasses.replace(run.model, compute_dtype=dtype))


_OF_TASKS = {  # options that change nothing but what these measure
    "stride": "perplexity", "wikitext": "perplexity", "strict": "lambada", "mask_fraction": "mlm",
    "mask_run": "mlm", "seed": "mlm",
}  # fmt: skip


def _check(options: EvaluateOptions) -> None:
    for name, task in _OF_TASKS.items():
        value = getattr(options, name)
        if options.task != task and value != getattr(EvaluateOptions(), name):
            raise UserError(f"{name}={value} is for the task {task}, not {options.task}")
    if not options.path:
        raise UserError("--path is missing: it names the files to evaluate on")
    if options.batch < 0:
        raise UserError(
            f"batch={options.batch} must be at least 0 (0: about as many as in training)"
        )
    check_writable(options.out)


def _trainer(run: RunConfig, options: EvaluateOptions, head: Task | None) -> Trainer:
    """head: of a fine-tuned model."""
    from mtx.evaluation.score import evaluation_run
    from mtx.step.trainer import Trainer
    from mtx.train.finetune import FinetuneTrainer

    if head is not None and options.task != head.kind:
        raise UserError(
            f"the model has been fine-tuned for the task {head.kind}, not {options.task}"
        )
    needs_head = options.task == "classes" or (options.task == "race" and not run.model.causal)
    if head is None and needs_head:
        raise UserError(
            f"the model has no head for the task {options.task}; mtx finetune makes one"
        )
    run = evaluation_run(computing_in(run, options.dtype), options.layout, batch=options.batch)
    return Trainer(run) if head is None else FinetuneTrainer(run, head)


# --- tasks ----------------------------------------------------------------------------------------
# Each reads its files and checks them, and returns what evaluates a state.

Evaluate = Callable[["TrainState"], Any]
Prepare = Callable[[EvaluateOptions, "Trainer", "Tokenizer", Callable[[int, int], None]], Evaluate]


def _perplexity(options, trainer, tokenizer, report) -> Evaluate:
    from mtx.data.documents import read_documents
    from mtx.evaluation.perplexity import is_wikitext, perplexity

    texts = read_documents(options.path).texts
    marked = any(map(is_wikitext, texts))
    wikitext = marked if options.wikitext == "auto" else options.wikitext == "yes"
    return lambda state: perplexity(
        trainer, state, tokenizer, texts, stride=options.stride, wikitext=wikitext, report=report
    )


def _lambada(options, trainer, tokenizer, report) -> Evaluate:
    from mtx.evaluation.cloze import cloze, read_passages

    texts = read_passages(options.path)
    return lambda state: cloze(
        trainer, state, tokenizer, texts, strict=options.strict, report=report
    )


def _race(options, trainer, tokenizer, report) -> Evaluate:
    from mtx.evaluation.choice import choice, read_race

    questions = read_race(options.path)
    if trainer.run.model.family == "bert":
        from mtx.train.examples import encode_questions

        return _judge(trainer, encode_questions(trainer.task, tokenizer, questions), report)
    return lambda state: choice(trainer, state, tokenizer, questions, report=report)


def _classes(options, trainer, tokenizer, report) -> Evaluate:
    from mtx.train.examples import encode_labelled, read_labelled

    examples = encode_labelled(trainer.task, tokenizer, read_labelled(options.path))
    return _judge(trainer, examples, report)


def _judge(trainer, examples: list, report) -> Evaluate:
    return lambda state: trainer.judge(state, examples, report=report)


def _mlm(options, trainer, tokenizer, report) -> Evaluate:
    from mtx.data.documents import read_documents
    from mtx.data.masked import Masking
    from mtx.evaluation.masked import masked_perplexity

    texts = read_documents(options.path).texts
    masking = Masking(fraction=options.mask_fraction, run=options.mask_run)
    return lambda state: masked_perplexity(
        trainer, state, tokenizer, texts, masking=masking, seed=options.seed, report=report
    )


TASKS: dict[str, Prepare] = {
    "perplexity": _perplexity,
    "lambada": _lambada,
    "race": _race,
    "mlm": _mlm,
    "classes": _classes,
}


# --- what is said ---------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar(task: str, *, silent: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; it takes (rows done, all rows)."""
    if silent or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(task), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(line, completed=done, total=total)


def _print_table(results: dict, trainer: Trainer) -> None:
    checkpoint, layout = results["checkpoint"], trainer.run.layout
    rows = {
        "checkpoint": f"{checkpoint['directory']}, step {checkpoint['step']:,}",
        "layout": f"data {layout.data} x pipe {layout.pipe} x tensor {layout.tensor}, batches of "
        f"{trainer.run.global_batch:,}, in {trainer.run.model.compute_dtype}",
    }
    for name, value in results.items():
        if isinstance(value, bool):
            rows[name] = "yes" if value else "no"
        elif isinstance(value, int | float):
            rows[name] = _number(name, value)
        elif isinstance(value, str):
            rows[name] = value
        elif value is None and results.get("wikitext") is not False:
            rows[name] = "undefined"
    del rows["global_batch"]
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name.replace('_', ' '):<{width}}{value}")


def _number(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if name.startswith(("accuracy", "chance")):
        return f"{value:.2%}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
