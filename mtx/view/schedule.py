"""A schedule as text, and as what a notebook shows.

`timeline_text` shows the table, tick by tick; `run_text` shows a simulation, on a time axis.
Microbatches, slices and chunks are counted from 0, as in files, traces and pictures.

Legend: T ticks · P stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mtx.errors import UserError
from mtx.schedules.formats_text import op_text
from mtx.schedules.orders import KINDS, F, orders_of
from mtx.schedules.schedule import IDLE, Schedule
from mtx.schedules.simulate import Simulation
from mtx.view.picture import Picture, ink, shade
from mtx.view.spans import Shown, count, describe, run_title, shares, waits
from mtx.view.timeline import draw_timeline

__all__ = [
    "draw_timeline", "op_order", "run_markup", "run_text", "show", "timeline_markup",
    "timeline_text",
]  # fmt: skip

NOTHING, WAITING, SEVERAL = "·", "~", "#"
_ALONE = 0.8  # of the working time: with less for any kind, they take turns


def show(shown: Shown | Sequence[Shown], *, memory: bool = True) -> Picture:
    """The timeline of schedules or simulations, one above the other, for a notebook to show."""
    return Picture(figure=draw_timeline(shown, memory=memory))


def op_order(schedule: Schedule) -> list[list[str]]:
    """Each stage's ops in the order of the table: "F<microbatch>.<chunk>" and so on, from 0."""
    orders = orders_of(*schedule.tables)
    return [
        [op.describe(schedule.slices) for op in orders.of(stage)]
        for stage in range(schedule.stages)
    ]


# --- the table ------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """What a stage does in one part of a tick, or of the time."""

    text: str
    kind: int = IDLE
    chunk: int = 0
    chunks: int = 1

    def markup(self) -> str:
        """In colour, for `rich`."""
        if self.kind == IDLE:
            return self.text if self.text == SEVERAL else f"[bright_black]{self.text}[/]"
        colour = shade(self.kind, self.chunk, self.chunks)
        return f"[{ink(colour)} on {colour}]{self.text}[/]"


def timeline_text(schedule: Schedule, width: int | None = None) -> str:
    """The table as plain text: a title, one row a stage, and a line that explains the notation.

    Ticks are set apart by `|`. Where that is wider than `width` characters, ticks in the middle are
    left out.
    """
    return _timeline(schedule, width, lambda cell: cell.text)


def timeline_markup(schedule: Schedule, width: int | None = None) -> str:
    """`timeline_text` in colours, as markup for `rich`."""
    return _timeline(schedule, width, _Cell.markup)


def _timeline(schedule: Schedule, width: int | None, render: Callable[[_Cell], str]) -> str:
    runs = np.stack([half.busy.any(axis=1) for half in schedule.halves], axis=1)
    columns = [np.flatnonzero(kinds).tolist() for kinds in runs]  # the kinds of every tick
    wide = _longest(schedule)
    label = len(f"stage {schedule.stages - 1} ")
    widths = [len(kinds) * (wide + 1) or 1 for kinds in columns]
    head, tail = _fitting(widths, width and width - label - 1)
    left_out = schedule.ticks - head - tail
    lines = [describe(schedule) + f", {count(schedule.ticks, 'tick')}"]
    lines[0] += f"; {left_out} ticks in the middle left out" if left_out else ""
    for stage in range(schedule.stages):
        ticks = [
            " ".join(render(_tick_cell(schedule, kind, tick, stage, wide))
                     for kind in columns[tick])
            for tick in [*range(head), *range(schedule.ticks - tail, schedule.ticks)]
        ]  # fmt: skip
        if left_out:
            ticks.insert(head, "…")
        lines.append(f"stage {stage} ".rjust(label) + "|" + "|".join(ticks) + "|")
    return "\n".join([*lines, f"{_notation(schedule)}; |: a tick ends"])


def _notation(schedule: Schedule) -> str:
    """What the labels mean, by the example of the last op of all."""
    item, chunk = schedule.items - 1, schedule.virtual - 1
    microbatch, part = divmod(item, schedule.slices)
    of = f"microbatch {microbatch}"
    of += f", slice {part}" if schedule.slices > 1 else ""
    of += f", chunk {chunk}" if schedule.virtual > 1 else ""
    others = "B and W" if schedule.split else "B"
    label = op_text(F, item, chunk, schedule)
    return f"{label}: F of {of}, counted from 0; {others} likewise; {NOTHING}: idle"


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


def _tick_cell(schedule: Schedule, kind: int, tick: int, stage: int, width: int) -> _Cell:
    half = schedule.halves[kind]
    item, chunk = int(half.item[tick, stage]), int(half.chunk[tick, stage])
    if item == IDLE:
        return _Cell(NOTHING.rjust(width))
    return _Cell(op_text(kind, item, chunk, schedule).rjust(width), kind, chunk, schedule.virtual)


def _longest(schedule: Schedule) -> int:
    """Characters of the longest label."""
    return len(op_text(F, schedule.items - 1, schedule.virtual - 1, schedule))


# --- a simulation ---------------------------------------------------------------------------------


def run_text(run: Simulation, width: int = 100) -> str:
    """A simulation as plain text of `width` characters: a title, one row a stage, the notation.

    Every character is as much time. An op begins with its label where that fits; where the ops are
    narrower, each character is the letter of the kind that takes its time.
    """
    return _run(run, width, lambda cell: cell.text)


def run_markup(run: Simulation, width: int = 100) -> str:
    """`run_text` in colours, as markup for `rich`."""
    return _run(run, width, _Cell.markup)


def _run(run: Simulation, width: int, render: Callable[[_Cell], str]) -> str:
    schedule = run.schedule
    label = len(f"stage {schedule.stages - 1} ")
    columns = width - label - 2
    if columns < 8:
        raise UserError(f"width={width} leaves no room for a timeline; use at least {label + 10}")
    lengths = run.end - run.start
    shortest = lengths[lengths > 1e-9 * run.makespan].min() * columns / run.makespan
    single = shortest >= _longest(schedule) + 1  # what rounding takes is less than one character
    cells = _op_cells(run, columns) if single else _share_cells(run, columns)
    rows = [
        f"{f'stage {stage}'.rjust(label - 1)} |{''.join(map(render, row))}|"
        for stage, row in enumerate(cells)
    ]
    kinds = ", ".join(KINDS[: len(schedule.halves)])
    crowded = f"{kinds}: what takes the time; {SEVERAL}: they take turns; {NOTHING}: idle"
    notation = _notation(schedule) if single else crowded
    notation += f"; {WAITING}: waiting for data" if run.times.comm else ""
    title = f"{run_title(run)}; a character is {run.makespan / columns:.3g}"
    return "\n".join([title, *rows, notation])


def _op_cells(run: Simulation, columns: int) -> list[list[_Cell]]:
    """What every stage does, op by op, and what is between them."""
    schedule, orders = run.schedule, run.orders
    scale, origin = columns / run.makespan, run.start.min()
    rows = []
    for stage in range(schedule.stages):
        waiting = np.zeros(columns, bool)
        for first, last in zip(*waits(run, stage)):
            waiting[round((first - origin) * scale) : round((last - origin) * scale)] = True
        idle = "".join(np.where(waiting, WAITING, NOTHING))
        row, at = [], 0
        starts = np.rint((run.start[stage] - origin) * scale).astype(int).tolist()
        ends = np.rint((run.end[stage] - origin) * scale).astype(int).tolist()
        for op, first, last in zip(orders.of(stage), starts, ends):
            label = op_text(*op, schedule)
            if first > at:
                row.append(_Cell(idle[at:first]))
            if last > first:
                text = label.ljust(last - first)
                row.append(_Cell(text, op.kind, op.chunk, schedule.virtual))
            at = last
        rows.append([*row, _Cell(idle[at:])] if at < columns else row)
    return rows


def _share_cells(run: Simulation, columns: int) -> list[list[_Cell]]:
    """What takes every character's time, for the most part."""
    edges = np.linspace(run.start.min(), run.end.max(), columns + 1)
    taken = shares(run, edges)  # [P, N, 5]
    working = taken[..., :3].sum(axis=-1)
    most = taken[..., :3].argmax(axis=-1)
    most[taken[..., :3].max(axis=-1) < _ALONE * working] = 3
    still = 4 + (taken[..., 4] >= taken[..., 3])
    most = np.where(working >= 0.5, most, still)
    known = [_Cell(kind, index) for index, kind in enumerate(KINDS)]
    known += [_Cell(SEVERAL), _Cell(WAITING), _Cell(NOTHING)]
    return [[known[index] for index in row] for row in most.tolist()]
