"""What a training run prints: a header, then a progress bar in a terminal or else plain lines."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax
from flax.traverse_util import flatten_dict
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from mtx.config import RunConfig, to_dict
from mtx.plan.flops import parameters
from mtx.schedules.simulate import bubble_text, simulate
from mtx.step.trainer import Trainer
from mtx.train.metrics import StepRecord

# Without a terminal, a line for about every twentieth of the run, but no less often than this:
_PLAIN_LINES, _PLAIN_STEPS, _PLAIN_S = 20, 100, 60.0


class Report:
    """Prints a run's progress to `console`. Only process 0 says anything."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console()
        self._silent = jax.process_index() != 0
        moving = self._console.is_terminal and not self._console.is_jupyter
        self._bar = _Bar(self._console) if moving and not self._silent else None
        self._last_step = 0
        self._every = 1  # steps between plain lines
        self._last_line_s = 0.0

    def lines(self, lines: Iterable[str]) -> None:
        """Prints each line as it is, without markup or added line breaks."""
        if self._silent:
            return
        for line in lines:
            self._console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def line(self, line: str) -> None:
        self.lines([line])

    @contextmanager
    def progress(self, first: int, last: int) -> Iterator[None]:
        """Shows progress while training goes from `first` finished steps to `last`."""
        self._last_step = last
        self._every = min(max(1, (last - first) // _PLAIN_LINES), _PLAIN_STEPS)
        if self._bar is None:
            yield
            return
        self._bar.add_task("training", total=last, completed=first)
        with self._bar:
            yield

    def step(self, record: StepRecord) -> None:
        numbers = step_text(record)
        if self._bar is not None:
            self._bar.numbers = numbers
            self._bar.update(self._bar.task_ids[-1], completed=record.step, refresh=False)
        if not record.finite:
            self.line(f"step {record.step:>6,}  {numbers}  gradients not finite: update skipped")
        elif self._bar is None and self._is_due(record.step):
            self.line(f"step {record.step:>6,}  {numbers}")
            self._last_line_s = time.monotonic()

    def _is_due(self, step: int) -> bool:
        waited_s = time.monotonic() - self._last_line_s
        return step % self._every == 0 or step == self._last_step or waited_s >= _PLAIN_S


class _Bar(Progress):
    """A progress bar, and below it the numbers of the last step."""

    def __init__(self, console: Console):
        self.numbers = ""
        super().__init__(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers)


def step_text(record: StepRecord) -> str:
    """A step's numbers; TFLOP/s are those of one device."""
    mfu = "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
    loss = f"loss {record.loss:.4f}"
    if record.second_loss is not None:
        loss += f"  second token {record.second_loss:.4f}"
    if record.imbalance is not None:
        loss += f"  fullest expert {record.imbalance:.2f}"
    return (
        f"{loss}  lr {record.learning_rate:.2e}  norm {record.gradient_norm:.3f}  "
        f"{record.step_s:.3f} s  {record.tokens_per_s:,.0f} tokens/s  TFLOP/s a device: "
        f"{_significant(record.tflops_model)} model, {_significant(record.tflops_sc21)} SC'21{mfu}"
    )


def header(trainer: Trainer, data: str, out: os.PathLike) -> list[str]:
    """What is about to run, and on what. `data` describes the text."""
    layout, model = trainer.run.layout, trainer.run.model
    devices = jax.devices()
    kind = devices[0].device_kind
    used = "" if layout.devices == len(devices) else f", of which {layout.devices:,} are used"
    processes = f" in {jax.process_count():,} processes" if jax.process_count() > 1 else ""
    return [
        f"devices    {len(devices):,} x {kind}{processes}{used}",
        f"layout     {layout.mesh_text}",
        f"schedule   {_schedule_text(trainer)}",
        *(f"           chosen: {reason}" for reason in trainer.reasons),
        f"model      {parameters(model):,} parameters in {model.layers} layers, hidden "
        f"{model.hidden:,}, sequence {model.sequence:,}, {model.compute_dtype}",
        f"data       {data}",
        f"out        {out}",
    ]


def changes(before: RunConfig, now: RunConfig) -> list[str]:
    """How the config of a continued run differs from that of the run that wrote its checkpoint."""
    old, new = (flatten_dict(to_dict(run), sep=".") for run in (before, now))
    changed = [
        f"{name} {old[name]} -> {value}"
        for name, value in new.items()
        if value != old[name] and name not in ("out", "resume")
    ]
    return [f"changed    {', '.join(changed)}"] if changed else []


def _schedule_text(trainer: Trainer) -> str:
    """The schedule, and its table's bubble in lock-step, with F, B and W equally long."""
    table, layout = trainer.schedule, trainer.run.layout
    slices = f", slices = {table.slices}" if table.slices > 1 else ""
    idle = bubble_text(simulate(table, model="lockstep").bubble_over_ideal)
    woven = ", woven ticks" if layout.weave == "on" else ""
    return (
        f"{layout.schedule}, v = {table.virtual}, m = {table.microbatches}{slices}{woven}: {idle}, "
        "F, B and W taking equally long"
    )


def _significant(value: float) -> str:
    """Three significant digits, without an exponent: 142, 19.5, 0.000140."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(digits, 0)}f}"
