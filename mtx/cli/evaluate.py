"""`mtx evaluate`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mtx.cli.finetune import read_examples
from mtx.cli.opened import AnyLayout, ComputedIn, changed
from mtx.cli.options import File, Flag, Line, command
from mtx.cli.output import Report, check_writable, facts, progress, say, write_text
from mtx.cli.process import start_devices
from mtx.config import Layout, RunConfig, to_dict
from mtx.errors import UserError
from mtx.fields import Between
from mtx.sizes import Interval, Seed, Tokens, VirtualDevices, Width

if TYPE_CHECKING:
    from mtx.data import Tokenizer
    from mtx.step.state import TrainState
    from mtx.step.trainer import Trainer
    from mtx.train.examples import Task

_Batch = Annotated[int, Between(0, 2**24)]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    # what to measure; mlm: masked tokens; classes: for a model of mtx finetune
    task: Literal["perplexity", "lambada", "race", "mlm", "classes"] = "perplexity"
    path: tuple[str, ...] = ()  # text files; lambada, race, classes: files or folders of JSON
    json: Flag = False  # print the results as JSON instead of a table
    out: File = None  # write the results to this file, as JSON
    step: Interval | None = None  # the checkpoint's step; by default the newest
    batch: _Batch = 0  # sequences at a time; 0: about as many as in training, at least 16
    stride: Tokens = 32  # perplexity: tokens from one window to the next; each scores as many
    wikitext: Literal["auto", "yes", "no"] = "auto"  # perplexity: detokenise WikiText's words
    strict: bool = True  # lambada: score the whole last word, not only the last token
    mask_fraction: float = 0.15  # mlm: fraction of the tokens to mask
    mask_run: Width = 3  # mlm: the most words masked together
    seed: Seed = 0  # mlm: seed for what is masked
    virtual_devices: VirtualDevices = 0  # CPU devices to create, for a machine without GPUs
    model: object = field(default_factory=ComputedIn)
    layout: Layout = field(default_factory=AnyLayout)


@command("mtx evaluate RUN_DIR --task TASK --path FILE...", EvaluateOptions)
def evaluate_command(line: Line[EvaluateOptions]) -> None:
    """Measure a trained model: perplexity, LAMBADA, multiple choice, masked tokens.

    RUN_DIR is the --out of a training run, or of mtx finetune. Its newest checkpoint is loaded
    onto the layout that --layout... gives, whatever the run's was; layout fields not given are the
    run's own, reduced if there are fewer devices.
    """
    options = line.options
    _check(options)
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.train.finetune import finetuned_task

    checkpoints, step = Checkpoints(line.names[0]), options.step
    run, layout = changed(checkpoints.run(step), line, jax.device_count())
    trainer = _trainer(run, layout, options, finetuned_task(checkpoints, step))
    start_s = time.perf_counter()
    with progress("rows", said=options.task, silent=jax.process_index() != 0) as report:
        evaluate = _prepare(options, trainer, checkpoints.tokenizer(step), report)
        state = checkpoints.restore(trainer, step)
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
    say(results, _lines(results, trainer), as_json=options.json)
    if options.out is not None:
        write_text(options.out, json.dumps(results, indent=1) + "\n")


_OF_TASKS = {  # options that only one task uses
    "stride": "perplexity", "wikitext": "perplexity", "strict": "lambada", "mask_fraction": "mlm",
    "mask_run": "mlm", "seed": "mlm",
}  # fmt: skip


def _check(options: EvaluateOptions) -> None:
    for name, task in _OF_TASKS.items():
        value = getattr(options, name)
        if options.task != task and value != getattr(EvaluateOptions(), name):
            raise UserError(f"{name}={value} is for the task {task}, not {options.task}")
    check_writable(options.out)


def _trainer(
    run: RunConfig, layout: Layout, options: EvaluateOptions, head: Task | None
) -> Trainer:
    """head: the task of a fine-tuned model; None for other models."""
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
    run = evaluation_run(run, layout, batch=options.batch)
    return Trainer(run) if head is None else FinetuneTrainer(run, head)


# --- tasks ----------------------------------------------------------------------------------------


def _prepare(
    options: EvaluateOptions, trainer: Any, tokenizer: Tokenizer, report: Report
) -> Callable[[TrainState], Any]:
    """Read and check the task's files; returns a function that evaluates a state."""
    path, task = options.path, options.task
    if task == "classes" or (task == "race" and trainer.run.model.family == "bert"):
        from mtx.train.examples import encode

        examples = encode(trainer.task, tokenizer, read_examples(task, path))
        return lambda state: trainer.judge(state, examples, report=report)
    if task == "race":
        from mtx.evaluation.choice import choice, read_race

        questions = read_race(path)
        return lambda state: choice(trainer, state, tokenizer, questions, report=report)
    if task == "lambada":
        from mtx.evaluation.cloze import cloze, read_passages

        texts, strict = read_passages(path), options.strict
        return lambda state: cloze(trainer, state, tokenizer, texts, strict=strict, report=report)
    from mtx.data.documents import read_documents

    texts = read_documents(path).texts
    if task == "mlm":
        from mtx.data.masked import Masking
        from mtx.evaluation.masked import masked_perplexity

        masking = Masking(fraction=options.mask_fraction, run=options.mask_run)
        return lambda state: masked_perplexity(
            trainer, state, tokenizer, texts, masking=masking, seed=options.seed, report=report
        )
    from mtx.evaluation.perplexity import is_wikitext, perplexity

    marked = any(map(is_wikitext, texts))
    wikitext = marked if options.wikitext == "auto" else options.wikitext == "yes"
    return lambda state: perplexity(
        trainer, state, tokenizer, texts, stride=options.stride, wikitext=wikitext, report=report
    )


# --- output --------------------------------------------------------------------------------------


def _lines(results: dict, trainer: Trainer) -> list[str]:
    checkpoint, layout = results["checkpoint"], trainer.run.layout
    rows = {
        "checkpoint": f"{checkpoint['directory']}, step {checkpoint['step']:,}",
        "layout": f"data {layout.data} x pipe {layout.pipe} x tensor {layout.tensor}, batches of "
        f"{trainer.run.global_batch:,}, in {trainer.run.model.compute_dtype}",
    }
    for name, value in results.items():
        known = value is not None or results.get("wikitext") is not False
        if known and name != "global_batch" and not isinstance(value, dict | list):
            rows[name.replace("_", " ")] = _text(name, value)
    return facts(rows, max(map(len, rows)) + 2)


def _text(name: str, value: bool | float | str | None) -> str:
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if name.startswith(("accuracy", "chance")):
        return f"{value:.2%}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
