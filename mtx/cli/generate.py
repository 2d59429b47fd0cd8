"""`mtx generate`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mtx.cli.convert import Dtype
from mtx.cli.evaluate import computing_in
from mtx.cli.options import check_writable, parse, split_name, start_devices, write_text
from mtx.config import Layout
from mtx.errors import UserError
from mtx.files import read_text
from mtx.paths import user_path
from mtx.sizes import Interval, Seed, Sequences, Tokens, VirtualDevices

if TYPE_CHECKING:
    from mtx.evaluation.generate import Progress

_Name = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Step = Annotated[Interval | None, tyro.conf.arg(metavar="INT")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: tuple[str, ...] = ()  # one text or several; without one, a new document begins
    prompt_file: _Name = None  # one prompt a line; .jsonl: JSON objects with a "prompt"
    tokens: Tokens = 200  # at most, after each prompt
    temperature: float = 0.8  # 0: always the most likely token
    top_k: Interval = 0  # of so many of the most likely tokens; 0: of all
    top_p: float = 1.0  # of as few of the most likely as have this probability together
    stop: tuple[str, ...] = ()  # a text ends before any of these strings
    stop_token: tuple[int, ...] = ()  # or before any of these tokens
    seed: Seed = 0  # of what is drawn
    batch: Sequences = 64  # prompts at a time
    json: _Flag = False  # the texts as JSON lines
    out: _Name = None  # a file for the texts, as JSON lines; they are then not printed
    step: _Step = None  # of the checkpoint; the newest where not given
    dtype: Dtype = "auto"  # to compute in; auto: what the run has computed in
    layout: Layout = field(default_factory=Layout)  # the run's own where nothing is said of it
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs


def generate_command(arguments: list[str]) -> None:
    """Let a trained model go on from a text.

    RUN_DIR is the --out of a training run. Its newest checkpoint is read on the layout that
    --layout... says, whatever the run's was; without, on its own, or on a part of that where there
    are fewer devices. On a terminal, it says at the end how fast it was.
    """
    directory, rest = split_name(arguments)
    prog = "mtx generate RUN_DIR"
    options = parse(rest, GenerateOptions(), prog=prog, about=generate_command)
    if directory is None:
        raise UserError("mtx generate RUN_DIR: name the directory of a training run (its --out)")
    from mtx.evaluation.sampling import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    prompts = _prompts(options)
    check_writable(options.out)
    start_devices(options.virtual_devices)
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.evaluation.generate import Generator, check_asked
    from mtx.plan.fit import fit_layout
    from mtx.step.trainer import Trainer

    checkpoints = Checkpoints(directory)
    run = computing_in(checkpoints.run(options.step), options.dtype)
    check_asked(run.model, tokens=options.tokens, seed=options.seed, batch=options.batch)
    fitted = GenerateOptions(layout=fit_layout(run.layout, jax.device_count()))
    options = parse(rest, fitted, prog=prog, about=generate_command)
    layout, step = options.layout, options.step
    trainer = Trainer(replace(run, layout=layout, global_batch=layout.data * layout.microbatch))
    state, tokenizer = checkpoints.restore(trainer, step), checkpoints.tokenizer(step)
    generator = Generator(trainer, state, tokenizer, batch=options.batch)
    del state  # the generator has what it needs
    with _progress_bar(silent=jax.process_index() != 0) as report:
        completions = generator.complete(
            prompts, tokens=options.tokens, sampling=sampling, seed=options.seed, report=report,
            stop=(*options.stop, *options.stop_token),
        )  # fmt: skip
    if jax.process_index() == 0:
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in completions)
        if options.out is not None:
            write_text(Path(options.out), lines)
        if options.json:
            print(lines, end="")
        elif options.out is None:
            print("\n\n".join(each.prompt + each.text for each in completions))


def _prompts(options: GenerateOptions) -> Sequence[str]:
    if options.prompt_file is None:
        return options.prompt or ("",)
    if options.prompt:
        raise UserError("--prompt and --prompt-file both say what to begin with; give one of them")
    path = user_path(options.prompt_file)
    if path.suffix in (".jsonl", ".ndjson"):
        from mtx.evaluation.files import read_records, text_field

        return [text_field(record, "prompt", where) for where, record in read_records([str(path)])]
    lines = read_text(path, "prompt_file").splitlines()
    if not lines:
        raise UserError(f"prompt_file={path} is empty; write one prompt on each of its lines")
    return lines


@contextlib.contextmanager
def _progress_bar(*, silent: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar of tokens on stderr, where that is a terminal, and at last a line with their rate."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    start_s, marks = time.perf_counter(), []
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, transient=True) as bar:
        line = bar.add_task("compiling", total=None)

        def report(progress: Progress) -> None:
            marks.append((time.perf_counter() - start_s, progress.drawn))
            said = f"{progress.drawn:,} tokens"
            bar.update(line, completed=progress.done, total=progress.most, description=said)

        yield report
    console.print(_rate(marks), highlight=False)


def _rate(marks: Sequence[tuple[float, int]]) -> str:
    """What the reports' times, in seconds, and tokens say of speed: that of the first ones, which
    wait for the compiler, apart."""
    said = f"first tokens after {marks[0][0]:.1f} s"
    if len(marks) < 3:
        return said
    (begin_s, begin), (end_s, end) = marks[1], marks[-1]
    return f"{said}, then {(end - begin) / (end_s - begin_s):,.1f} tokens/s"
