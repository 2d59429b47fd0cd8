"""Schedules and simulations as text, and as what a notebook shows.

A schedule is shown as its table, tick by tick; a simulation as its ops on a time axis.
Microbatches, slices and chunks are counted from 0, as in files, traces and pictures.

Legend: T ticks · P stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from mtx.errors import UserError, require_kind
from mtx.schedules.formats_text import op_text
from mtx.schedules.orders import KINDS, F, Op, orders_of
from mtx.schedules.schedule import IDLE, Schedule
from mtx.schedules.simulate import Simulation
from mtx.view.picture import Picture, ink, shade
from mtx.view.spans import Shown, count, describe, run_title, shares, waits
from mtx.view.timeline import draw_timeline

NOTHING, WAITING, SEVERAL = "·", "~", "#"
_ALONE = 0.8  # of the working time: if no kind has this much, they take turns


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


def timeline_text(shown: Shown, width: int | None = None) -> str:
    """A title, one row per stage, and a line that explains the notation, as plain text.

    A schedule's ticks are separated by `|`; if that is wider than `width` characters, ticks in the
    middle are left out. A simulation fills `width` (None: 100), and every character is the same
    time: an op begins with its label if that fits; if ops are narrower, each character is the
    letter of the kind that takes its time. UserError if nothing would fit.
    """
    return timeline_in_colours(shown, width).plain


def timeline_in_colours(shown: Shown, width: int | None = None) -> Text:
    """`timeline_text` as rich prints it in colours."""
    require_kind("shown", shown, (Schedule, Simulation), "a schedule, or a simulation of one")
    if isinstance(shown, Schedule):
        title, rows, notation = _table(shown, width)
    else:
        title, rows, notation = _axis(shown, width or 100)
    label = len(f"stage {len(rows) - 1} ")
    named = [
        Text(f"stage {stage} ".rjust(label)).append_text(row) for stage, row in enumerate(rows)
    ]
    return Text("\n").join([Text(title), *named, Text(notation)])


_Lines = tuple[str, list[Text], str]  # title, the stages' rows without their names, notation


def _op(op: Op, schedule: Schedule, width: int, *, left: bool = False) -> Text:
    colour, label = shade(op.kind, op.chunk, schedule.virtual), op_text(*op, schedule)
    return Text(label.ljust(width) if left else label.rjust(width), f"{ink(colour)} on {colour}")


def _still(text: str) -> Text:
    return Text(text, "bright_black")


def _longest(schedule: Schedule) -> int:
    """The length of the longest label, in characters."""
    return len(op_text(F, schedule.items - 1, schedule.virtual - 1, schedule))


def _notation(schedule: Schedule) -> str:
    """What the labels mean, with the last op of all as the example."""
    item, chunk = schedule.items - 1, schedule.virtual - 1
    microbatch, part = divmod(item, schedule.slices)
    of = f"microbatch {microbatch}"
    of += f", slice {part}" if schedule.slices > 1 else ""
    of += f", chunk {chunk}" if schedule.virtual > 1 else ""
    others = "B and W" if schedule.split else "B"
    label = op_text(F, item, chunk, schedule)
    return f"{label}: F of {of}, counted from 0; {others} likewise; {NOTHING}: idle"


# --- the table ------------------------------------------------------------------------------------


def _table(schedule: Schedule, width: int | None) -> _Lines:
    runs = np.stack([half.busy.any(axis=1) for half in schedule.halves], axis=1)
    columns = [np.flatnonzero(kinds).tolist() for kinds in runs]  # the kinds of every tick
    wide = _longest(schedule)
    widths = [len(kinds) * (wide + 1) or 1 for kinds in columns]
    head, tail = _fitting(widths, width and width - len(f"stage {schedule.stages - 1} |"))
    left_out = schedule.ticks - head - tail
    title = f"{describe(schedule)}, {count(schedule.ticks, 'tick')}"
    title += f"; {left_out} ticks in the middle left out" if left_out else ""

    def cell(kind: int, tick: int, stage: int) -> Text:
        half = schedule.halves[kind]
        item, chunk = int(half.item[tick, stage]), int(half.chunk[tick, stage])
        if item == IDLE:
            return _still(NOTHING.rjust(wide))
        return _op(Op(kind, item, chunk), schedule, wide)

    rows = []
    for stage in range(schedule.stages):
        ticks = [
            Text(" ").join(cell(kind, tick, stage) for kind in columns[tick])
            for tick in [*range(head), *range(schedule.ticks - tail, schedule.ticks)]
        ]
        if left_out:
            ticks.insert(head, Text("…"))
        rows.append(Text("|").join([Text(), *ticks, Text()]))
    return title, rows, f"{_notation(schedule)}; |: a tick ends"


def _fitting(widths: list[int], available: int | None) -> tuple[int, int]:
    """How many ticks of the beginning and of the end fit; all if `available` is None."""
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


# --- a simulation ---------------------------------------------------------------------------------


def _axis(run: Simulation, width: int) -> _Lines:
    schedule, label = run.schedule, len(f"stage {run.schedule.stages - 1} ")
    columns = width - label - 2
    if columns < 8:
        raise UserError(f"width={width} leaves no room for a timeline; use at least {label + 10}")
    lengths = run.end - run.start
    shortest = lengths[lengths > 1e-9 * run.makespan].min() * columns / run.makespan
    if shortest >= _longest(schedule) + 1:  # rounding takes less than one character
        cells, notation = _op_cells(run, columns), _notation(schedule)
    else:
        kinds = ", ".join(KINDS[: len(schedule.halves)])
        cells = _share_cells(run, columns)
        notation = f"{kinds}: what takes the time; {SEVERAL}: they take turns; {NOTHING}: idle"
    notation += f"; {WAITING}: waiting for data" if run.times.comm else ""
    title = f"{run_title(run)}; a character is {run.makespan / columns:.3g}"
    return title, [Text().join([Text("|"), *row, Text("|")]) for row in cells], notation


def _op_cells(run: Simulation, columns: int) -> list[list[Text]]:
    """The rows of all stages: their ops, and what is between them."""
    schedule, orders, origin = run.schedule, run.orders, run.start.min()

    def place(moments: np.ndarray) -> list[int]:
        return np.rint((moments - origin) * columns / run.makespan).astype(int).tolist()

    rows = []
    for stage in range(schedule.stages):
        waiting = np.zeros(columns, bool)
        for first, last in zip(*map(place, waits(run, stage))):
            waiting[first:last] = True
        idle = "".join(np.where(waiting, WAITING, NOTHING))
        row, at = [], 0
        starts, ends = place(run.start[stage]), place(run.end[stage])
        for op, first, last in zip(orders.of(stage), starts, ends):
            row.append(_still(idle[at:first]))
            if last > first:
                row.append(_op(op, schedule, last - first, left=True))
            at = last
        rows.append([*row, _still(idle[at:])])
    return rows


def _share_cells(run: Simulation, columns: int) -> list[list[Text]]:
    """The rows of all stages: what takes most of every character's time."""
    edges = np.linspace(run.start.min(), run.end.max(), columns + 1)
    taken = shares(run, edges)  # [P, N, 5]
    working = taken[..., :3].sum(axis=-1)
    most = taken[..., :3].argmax(axis=-1)
    most[taken[..., :3].max(axis=-1) < _ALONE * working] = 3
    still = 4 + (taken[..., 4] >= taken[..., 3])
    most = np.where(working >= 0.5, most, still)
    colours = [shade(kind) for kind in range(3)]
    known = [Text(kind, f"{ink(colour)} on {colour}") for kind, colour in zip(KINDS, colours)]
    known += [Text(SEVERAL), _still(WAITING), _still(NOTHING)]
    return [[known[index] for index in row] for row in most.tolist()]
