"""A schedule as text and as a picture: which stage does what in every tick.

The picture shows the table as the pipeline program runs it, in lock-step: in every tick each stage
does its F half and then its B half, and the tick lasts as long as its longest stage.

Microbatches are counted from 1 in text and picture, as in figure 4 of Narayanan et al., SC'21, and
from 0 in `op_order`, as in the table.

Legend: T ticks · P stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mtx.errors import UserError
from mtx.pipeline.schedule import IDLE, Half, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Darkest and lightest shade; the chunks go from dark (first) to light (last) as in SC'21, figure 4.
FORWARD_SHADES = ("#1d4f91", "#9cc4ee")
BACKWARD_SHADES = ("#1d6b3a", "#a3d9a5")
IDLE_COLOUR = "#ececec"

_SUFFIXES = (".svg", ".png", ".pdf")
_INCHES_PER_OP = 0.18  # of the shorter op, where the picture may choose its own width
_EDGED_OP_INCHES = 0.08  # a narrower op has no edge, and is a bitmap in an SVG
_NARROWEST_OP_INCHES, _LOWEST_ROW_INCHES = 0.02, 0.1  # below either, shares are drawn, not ops
_SMALLEST_FONT_POINTS = 4.5
_MOST_SWATCHES = 4  # with more chunks than this, the legend lists the first and the last
_BINS = 800  # of time, about, in the picture of shares

Swatches = list[tuple[str, str]]  # colour and text of the legend


def op_order(schedule: Schedule) -> list[list[str]]:
    """Each stage's ops in the order in which it runs them: "F<microbatch>.<chunk>" or "B...".

    Both count from 0. Within a tick F comes before B.
    """
    orders: list[list[str]] = [[] for _ in range(schedule.stages)]
    for tick in range(schedule.ticks):
        for op, half in (("F", schedule.forward), ("B", schedule.backward)):
            for stage in np.flatnonzero(half.busy[tick]):
                microbatch, chunk = half.item[tick, stage], half.chunk[tick, stage]
                orders[stage].append(f"{op}{microbatch}.{chunk}")
    return orders


# --- text -----------------------------------------------------------------------------------------


def timeline_text(schedule: Schedule, width: int | None = None) -> str:
    """The timeline as plain text: a title, one row a stage, and a line that explains the notation.

    Ticks are set apart by `|`. Where that is wider than `width` characters, ticks in the middle are
    left out.
    """
    return _timeline(schedule, width, _plain_cell)


def timeline_markup(schedule: Schedule, width: int | None = None) -> str:
    """`timeline_text` with F in blue and B in green, as markup for `rich`."""
    return _timeline(schedule, width, _markup_cell)


class _Op(NamedTuple):
    """What a stage does in one half of a tick."""

    forward: bool
    microbatch: int  # IDLE where it sits the half out
    chunk: int
    chunks: int  # of the schedule


def _timeline(schedule: Schedule, width: int | None, render: Callable) -> str:
    columns = _columns(schedule)  # of every tick
    cell = len(_label(_Op(True, schedule.microbatches - 1, schedule.virtual - 1, schedule.virtual)))
    label = len(f"stage {schedule.stages - 1} ")
    head, tail = _fitting([len(c) * (cell + 1) for c in columns], width and width - label - 1)
    left_out = schedule.ticks - head - tail
    lines = [_title(schedule) + (f"; {left_out} ticks in the middle left out" if left_out else "")]
    for stage in range(schedule.stages):
        ticks = [
            " ".join(render(_op(half, tick, stage, schedule), cell) for half in columns[tick])
            for tick in [*range(head), *range(schedule.ticks - tail, schedule.ticks)]
        ]
        if left_out:
            ticks.insert(head, "…")
        lines.append(f"stage {stage} ".rjust(label) + "|" + "|".join(ticks) + "|")
    lines.append(_notation(schedule))
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    stages = _count(schedule.stages, "stage")
    if schedule.virtual > 1:
        stages += f" of {schedule.virtual} chunks"
    microbatches = _count(schedule.microbatches, "microbatch")
    return f"{schedule.name}: {stages}, {microbatches}, {_count(schedule.ticks, 'tick')}"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _notation(schedule: Schedule) -> str:
    chunks = f", chunks {_letters(0)} to {_letters(schedule.virtual - 1)}"
    return (
        f"1a: F of microbatch 1, chunk a; 1A: its B{chunks if schedule.virtual > 1 else ''}; "
        "·: idle; |: a tick ends"
    )


def _columns(schedule: Schedule) -> list[list[Half]]:
    """The halves that any stage runs in each tick, F first."""
    forward = schedule.forward.busy.any(axis=1)
    backward = schedule.backward.busy.any(axis=1)
    return [
        [schedule.forward] * bool(f) + [schedule.backward] * bool(b)
        for f, b in zip(forward, backward, strict=True)
    ]


def _fitting(widths: list[int], available: int | None) -> tuple[int, int]:
    """How many ticks of the beginning and of the end fit; all, where `available` is None."""
    if available is None or sum(widths) <= available:
        return len(widths), 0
    head = tail = 0
    left = available - len("…|")
    while True:
        from_head = head <= tail
        left -= widths[head] if from_head else widths[-1 - tail]
        if left < 0:
            return head, tail
        head, tail = head + from_head, tail + (not from_head)


def _op(half: Half, tick: int, stage: int, schedule: Schedule) -> _Op:
    return _Op(
        forward=half is schedule.forward,
        microbatch=int(half.item[tick, stage]),
        chunk=int(half.chunk[tick, stage]),
        chunks=schedule.virtual,
    )


def _label(op: _Op) -> str:
    if op.microbatch == IDLE:
        return "·"
    letters = _letters(op.chunk)
    return f"{op.microbatch + 1}{letters if op.forward else letters.upper()}"


def _letters(chunk: int) -> str:
    """a, b, … z, aa, ab, … as a spreadsheet names its columns."""
    before, last = divmod(chunk, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + last)


def _plain_cell(op: _Op, width: int) -> str:
    return _label(op).rjust(width)


def _markup_cell(op: _Op, width: int) -> str:
    text = _plain_cell(op, width)
    if op.microbatch == IDLE:
        return f"[bright_black]{text}[/]"
    colour = _shade(FORWARD_SHADES if op.forward else BACKWARD_SHADES, op.chunk, op.chunks)
    return f"[{_ink(colour)} on {colour}]{text}[/]"


# --- colours --------------------------------------------------------------------------------------


def _rgb(colour: str) -> np.ndarray:
    """float [3] in [0, 1]"""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def _hex(rgb: np.ndarray) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _shade(shades: tuple[str, str], chunk: int, chunks: int) -> str:
    """The colour of a chunk: from the dark shade (first chunk) to the light one (last chunk)."""
    dark, light = _rgb(shades[0]), _rgb(shades[1])
    mixed = dark + (light - dark) * (chunk / (chunks - 1) if chunks > 1 else 0.3)
    return _hex(mixed)


def _ink(colour: str) -> str:
    """The colour of text that is readable on `colour`."""
    luminance = _rgb(colour) @ np.array([0.2126, 0.7152, 0.0722])  # Rec. 709
    return "#ffffff" if luminance < 0.5 else "#10243c"


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LockStep:
    """When ops run in lock-step. The times are those of one chunk, in any unit."""

    schedule: Schedule
    forward_time: float = 1.0
    backward_time: float = 2.0

    def __post_init__(self):
        for name in ("forward_time", "backward_time"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0")

    @cached_property
    def edges(self) -> np.ndarray:
        """float [T + 1]: when each tick starts, and when the last one ends.

        A tick lasts as long as its longest stage: one in which nobody has a B is only an F long.
        """
        lengths_TP = (
            self.schedule.forward.busy * self.forward_time
            + self.schedule.backward.busy * self.backward_time
        )
        return np.concatenate([[0.0], lengths_TP.max(axis=1).cumsum()])

    @property
    def total(self) -> float:
        return float(self.edges[-1])

    @property
    def idle_share(self) -> float:
        """Of the time of all stages together, the share in which they wait."""
        ops = self.schedule.microbatches * self.schedule.virtual
        return 1 - ops * (self.forward_time + self.backward_time) / self.total

    def starts(self, half: Half, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """The ticks in which the stage runs that half, and when the half starts in each of them."""
        ticks = np.flatnonzero(half.busy[:, stage])
        starts = self.edges[ticks]
        if half is self.schedule.backward:
            starts = starts + self.schedule.forward.busy[ticks, stage] * self.forward_time
        return ticks, starts


# --- picture --------------------------------------------------------------------------------------


def draw_timeline(
    schedule: Schedule,
    path: str | Path | None = None,
    *,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
) -> Figure:
    """A picture of the schedule in lock-step, saved to `path` (.svg, .png or .pdf) if given.

    The times are those of one chunk, in any unit. Where the ops are too many to be seen one by
    one, the picture shows each stage's share of F, B and idling over time instead.
    Raises UserError where matplotlib is missing, `path` ends otherwise or a time is not positive.
    """
    if path is not None and Path(path).suffix.lower() not in _SUFFIXES:
        raise UserError(f"path={str(path)!r} must end with one of {', '.join(_SUFFIXES)}")
    run = LockStep(schedule=schedule, forward_time=forward_time, backward_time=backward_time)
    figure_class = _import_figure()
    ops_long = run.total / min(forward_time, backward_time)
    width = float(np.clip(ops_long * _INCHES_PER_OP, 7.0, 15.0))
    rows_height = float(np.clip(schedule.stages * 0.36, 1.4, 7.0))
    figure = figure_class(figsize=(width, rows_height + 1.5), layout="constrained")
    axes = figure.add_subplot()
    op_inches = 0.93 * width / ops_long  # the rest is the labels of the stages
    if op_inches < _NARROWEST_OP_INCHES or rows_height / schedule.stages < _LOWEST_ROW_INCHES:
        swatches = _draw_shares(axes, run)
    else:
        swatches = _draw_ops(axes, run, op_inches)
    _frame(axes, run)
    _legend(figure, swatches)
    if path is not None:
        _save(figure, Path(path))
    return figure


def _import_figure() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return Figure


def _save(figure: Figure, path: Path) -> None:
    """Text stays text in an SVG, and the same picture gives the same bytes."""
    import matplotlib

    fonts = ["DejaVu Sans", "Verdana"]
    settings = {"svg.fonttype": "none", "svg.hashsalt": "mtx", "font.sans-serif": fonts}
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context(settings):
        figure.savefig(path, dpi=150, metadata=undated.get(path.suffix.lower()))


def _draw_ops(axes: Axes, run: LockStep, op_inches: float) -> Swatches:
    """One box an op, with its microbatch where there is room."""
    schedule = run.schedule
    font_points = min(8.5, op_inches * 72 / (0.66 * len(str(schedule.microbatches))))
    wide = op_inches > _EDGED_OP_INCHES
    for stage in range(schedule.stages):
        row = (stage - 0.42, 0.84)
        axes.broken_barh([(0, run.total)], row, facecolors=IDLE_COLOUR, zorder=1)
        for half, length, shades in (
            (schedule.forward, run.forward_time, FORWARD_SHADES),
            (schedule.backward, run.backward_time, BACKWARD_SHADES),
        ):
            ticks, starts = run.starts(half, stage)
            colours = [_shade(shades, c, schedule.virtual) for c in half.chunk[ticks, stage]]
            axes.broken_barh(
                [(start, length) for start in starts], row, facecolors=colours, edgecolors="white",
                linewidth=0.7 if wide else 0.0, rasterized=not wide, zorder=2,
            )  # fmt: skip
            if font_points < _SMALLEST_FONT_POINTS:
                continue
            for tick, start, colour in zip(ticks, starts, colours, strict=True):
                axes.text(
                    start + length / 2, stage, str(half.item[tick, stage] + 1), ha="center",
                    va="center_baseline", color=_ink(colour), fontsize=font_points, zorder=3,
                )  # fmt: skip
    return _op_swatches(schedule.virtual)


def _op_swatches(chunks: int) -> Swatches:
    listed = range(chunks) if chunks <= _MOST_SWATCHES else (0, chunks - 1)
    swatches = [
        (_shade(shades, chunk, chunks), f"{op}, chunk {chunk}" if chunks > 1 else op)
        for op, shades in (("F", FORWARD_SHADES), ("B", BACKWARD_SHADES))
        for chunk in listed
    ]
    return [*swatches, (IDLE_COLOUR, "idle")]


def _draw_shares(axes: Axes, run: LockStep) -> Swatches:
    """Each stage's share of F, B and idling, as the mixture of their colours.

    A bin of time is a whole number of ticks of one phase: other bins would beat with the ticks and
    show stripes.
    """
    schedule = run.schedule
    ticks = -(-schedule.ticks // _BINS)
    working = [phase for phase in schedule.phases if phase.forward or phase.backward]
    starts = np.concatenate([np.arange(phase.start, phase.stop, ticks) for phase in working])
    bins = run.edges[[*starts, schedule.ticks]]
    forward, backward = (
        np.add.reduceat(half.busy, starts, axis=0, dtype=int) * time / np.diff(bins)[:, None]
        for half, time in (
            (schedule.forward, run.forward_time),
            (schedule.backward, run.backward_time),
        )
    )
    shares = np.stack([forward, backward, 1 - forward - backward], axis=-1)  # [bins, P, 3]
    one_chunk = (_shade(FORWARD_SHADES, 0, 1), _shade(BACKWARD_SHADES, 0, 1), IDLE_COLOUR)
    palette = np.stack([_rgb(colour) for colour in one_chunk])
    colours = np.clip(shares.swapaxes(0, 1) @ palette, 0, 1)
    axes.pcolormesh(bins, np.arange(schedule.stages + 1) - 0.5, colours, rasterized=True)
    both = np.average(palette[:2], axis=0, weights=(run.forward_time, run.backward_time))
    colours = (one_chunk[0], _hex(both), *one_chunk[1:])
    return list(zip(colours, ("F", "F and B in turn", "B", "idle"), strict=True))


def _frame(axes: Axes, run: LockStep) -> None:
    """Axes, title, and the phases of the schedule above the rows."""
    stages = run.schedule.stages
    axes.set_xlim(0, run.total)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_title(
        f"{_title(run.schedule)}, idle {run.idle_share:.1%} of the time", loc="left", fontsize=10.5,
        pad=18,
    )  # fmt: skip
    labelled = range(0, stages, -(-stages // 16))
    axes.set_yticks(labelled, [f"stage {stage}" for stage in labelled])
    axes.set_xlabel(
        f"time (F of one chunk: {run.forward_time:g}, B: {run.backward_time:g})", fontsize=8.5
    )
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    _bracket_phases(axes, run)


def _bracket_phases(axes: Axes, run: LockStep) -> None:
    """Above the rows: where only F, F and B, or only B occur."""
    from matplotlib.transforms import offset_copy

    above = offset_copy(axes.get_xaxis_transform(), axes.figure, y=8, units="points")
    gap = 0.002 * run.total
    for phase in run.schedule.phases:
        start, stop = run.edges[phase.start] + gap, run.edges[phase.stop] - gap
        axes.plot(
            [start, stop], [1, 1], transform=above, clip_on=False, color="#a0a0a0", linewidth=0.9,
            marker="|", markersize=5,
        )  # fmt: skip
        if stop - start > 0.06 * run.total:
            axes.text(
                (start + stop) / 2, 1, " and ".join(["F"] * phase.forward + ["B"] * phase.backward),
                transform=above, ha="center", va="center", fontsize=8.5, color="#404040",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
            )  # fmt: skip


def _legend(figure: Figure, swatches: Swatches) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=colour, label=text) for colour, text in swatches],
        loc="outside lower right", ncols=len(swatches), fontsize=8.5, frameon=False,
        handlelength=1.2, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip
