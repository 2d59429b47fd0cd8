"""A steady tick of a compiled step as a picture: what a device computes and what is on its way.

There is a row for each kind of computation, and one for the collectives over each axis of the mesh;
time is to scale. Where a collective has nothing beside it, computation waits: a band goes through
all rows there, and the row of the collective says for how long.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mtx.errors import UserError
from mtx.plan.compiled import Span, Tick
from mtx.plan.plan import Plan
from mtx.plan.summary import title
from mtx.view import picture
from mtx.view.picture import BACKWARD, COMMUNICATION, FAINT, FORWARD, INK, LIMIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.0  # inches: a notebook's cell, or a page of 680 pixels
_KINDS = {"matmul": "matmuls", "attention": "attention", "other": "all else"}
_COLOURS = {"matmul": FORWARD, "attention": "#7fb0e0", "other": BACKWARD}
_BAND = "#f6d5d2"
_PARTS = {
    "woven": "layers, F and B woven", "F": "layers, F", "B": "layers, B", "W": "W", "head": "head",
    "embed": "embedding", "embed_backward": "its gradient",
}  # fmt: skip
_LETTER = (
    0.01  # of what is drawn: about as wide as a letter; what is narrower than its text gets none
)


def draw_tick(plan: Plan, path: str | Path | None = None) -> Figure:
    """A steady tick of the step that was compiled for a plan, saved to `path` if given. UserError
    if none was compiled for a GPU, and for the file as in `mtx.view.plan.draw_plan`."""
    tick = plan.compiled_tick
    if tick is None:
        raise UserError("plan.compiled has no tick to draw; compile the plan for a GPU")
    rows = 0.28 * len(_rows(tick))
    figure = picture.new_figure(_WIDTH, 1.9 + 2 * rows, path)
    picture.figure_title(figure, f"{title(plan)}: a steady tick, compiled", 10)
    above, below = figure.subplots(2, 1)
    fill_tick(above, tick, 0.0, tick.drawn_s)
    above.set_xlabel("")
    fill_tick(below, tick, *_closer(tick))
    figure.supxlabel(_caption(tick), x=0.008, ha="left", fontsize=8)
    return picture.save_figure(figure, path)


def fill_tick(axes: Axes, tick: Tick, start_s: float, end_s: float) -> None:
    """The rows of `draw_tick`, from `start_s` to `end_s` of the tick."""
    rows, letter_s = _rows(tick), _LETTER * (end_s - start_s)
    waits = [span for span in tick.spans if span.exposed]
    for span in waits:
        axes.axvspan(1e3 * span.start_s, _end_ms(span), color=_BAND, linewidth=0, zorder=0)
    for place, name in enumerate(rows):
        colour = _COLOURS.get(name, COMMUNICATION)
        for exposed, shade in ((False, colour), (True, LIMIT)):
            bars = [(1e3 * span.start_s, 1e3 * span.seconds) for span in tick.spans
                    if (span.row, span.exposed) == (name, exposed)]  # fmt: skip
            axes.broken_barh(bars, (place - 0.36, 0.72), facecolors=shade, linewidth=0)
    for row, begun_s, seconds in _stretches(waits):
        if seconds > 3 * letter_s:
            axes.text(
                1e3 * (begun_s + seconds / 2), rows.index(row) + 0.36, f"{1e3 * seconds:.2g}",
                ha="center", va="top", fontsize=6.5, color=LIMIT, clip_on=True,
            )  # fmt: skip
    for part, begun_s, seconds in _parts(tick):
        begun_s, ended_s = max(begun_s, start_s), min(begun_s + seconds, end_s)
        axes.plot([1e3 * begun_s, 1e3 * ended_s], [-0.6, -0.6], "|-", color=FAINT, linewidth=1)
        if ended_s - begun_s > len(_PARTS[part]) * letter_s:
            axes.text(
                5e2 * (begun_s + ended_s), -0.68, _PARTS[part], ha="center", va="bottom",
                fontsize=7, color=INK,
            )  # fmt: skip
    picture.name_rows(axes, [_KINDS.get(row, f"over {row}") for row in rows])
    axes.set_ylim(len(rows) - 0.2, -1.0)
    axes.set_xlim(1e3 * start_s, 1e3 * end_s)
    picture.plain_axes(axes, "", "milliseconds; red: a collective that nothing is beside")


def _closer(tick: Tick) -> tuple[float, float]:
    """(start, end) of the sixth of the tick in which most is exposed."""
    length_s = tick.drawn_s / 6
    waits = [(span.start_s, span.start_s + span.seconds) for span in tick.spans if span.exposed]

    def exposed_s(start_s: float) -> float:
        end_s = start_s + length_s
        return sum(max(0.0, min(end_s, end) - max(start_s, start)) for start, end in waits)

    starts = [0.0, *(min(start, tick.drawn_s - length_s) for start, _ in waits)]
    start_s = max(starts, key=exposed_s)
    return start_s, start_s + length_s


def _rows(tick: Tick) -> list[str]:
    """The names of the rows: computations, then collectives, those that take longest first."""
    taken_s: dict[str, float] = defaultdict(float)
    for span in tick.spans:
        taken_s[span.row] += span.seconds
    ordered = sorted(taken_s, key=lambda row: -taken_s[row])
    return [*_KINDS, *(row for row in ordered if row not in _KINDS)]


def _end_ms(span: Span) -> float:
    return 1e3 * (span.start_s + span.seconds)


def _stretches(waits: Iterable[Span]) -> list[tuple[str, float, float]]:
    """(row, start, seconds) of waits; those that follow each other in one row are merged."""
    ordered = sorted(waits, key=lambda span: (span.row, span.start_s))
    return _one_by_one(((span.row, span) for span in ordered), gap_s=1e-9)


def _parts(tick: Tick) -> list[tuple[str, float, float]]:
    """(part of the step, start, seconds), one after the other."""
    own = [span for span in tick.spans if span.exposed or span.row in _KINDS]
    ordered = sorted(own, key=lambda span: span.start_s)
    return _one_by_one(
        ((span.part, span) for span in ordered if span.part in _PARTS), gap_s=tick.drawn_s
    )


def _one_by_one(
    spans: Iterable[tuple[str, Span]], *, gap_s: float
) -> list[tuple[str, float, float]]:
    """(name, start, seconds); within the gap, those of one name are merged."""
    found: list[tuple[str, float, float]] = []
    for name, span in spans:
        last, start_s, seconds = found[-1] if found else ("", 0.0, 0.0)
        if name == last and span.start_s - start_s - seconds < gap_s:
            found[-1] = name, start_s, max(seconds, span.start_s + span.seconds - start_s)
        else:
            found.append((name, span.start_s, span.seconds))
    return found


def _caption(tick: Tick) -> str:
    """28.0 ms, the mean of 183 ticks: matmuls 86.1%, ..., exposed over tensor 1.5%."""
    spent_s: dict[str, float] = defaultdict(float)
    for one in tick.spent:
        spent_s[_KINDS.get(one.what, one.what)] += one.seconds
    ordered = sorted(spent_s.items(), key=lambda row: (row[0] not in _KINDS.values(), -row[1]))
    said = ", ".join(f"{name} {part_s / tick.seconds:.1%}" for name, part_s in ordered)
    mean = f"{1e3 * tick.seconds:.3g} ms, the mean of {tick.count} ticks: {said}."
    drawn = (
        f"Drawn: one with all that a tick may have, {1e3 * tick.drawn_s:.3g} ms, and a sixth of it."
    )
    return textwrap.fill(f"{mean} {drawn}", 110)
