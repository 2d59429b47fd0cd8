"""Schedules as text: one row per stage, as one would write them on a board.

    placement vee
    stage 0: |F0.0|    |F1.0|F0.1 B0.1|...
    stage 1: |    |F0.0|...

An op is a kind (F, B or W), a microbatch (`3/2`: its slice 2) and a chunk, which may be left out if
stages have only one. `|` comes before, between and after ticks, each of which runs at most one F,
one B and one W, in this order. Without any `|`, rows are orders, and each op runs in the earliest
possible tick. The label of a row may be left out, and `#` begins a comment. Virtual stages are
looped unless the file says otherwise: `placement vee`, or the virtual stages of every stage by
chunk, `placement 0,3 1,2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtx.schedules.cells import (
    MOST_COLUMNS,
    MOST_STAGES,
    WHOLE,
    Cells,
    build,
    item_text,
    lines_of,
    misplaced,
)
from mtx.schedules.orders import KINDS
from mtx.schedules.schedule import IDLE, Schedule, looped_placement, vee_placement

_OP = re.compile(r"([FBW])([0-9]{1,6})(?:/([0-9]{1,6}))?(?:\.([0-9]{1,6}))?")
_TOKEN = re.compile(r"\||[^\s|]+")
_PLACEMENT = re.compile(r"\s*placement\b")
_STAGE = re.compile(r"\s*stage\s+([0-9]{1,6})\s*:")


class Row(NamedTuple):
    """One row of text, and its place in the file."""

    number: int  # in the file, from 1
    before: int  # characters of the line before it
    text: str


def to_text(schedule: Schedule, *, orders: bool = False) -> str:
    """The ticks as text in columns; with `orders`, what a runtime with a program per stage runs."""
    rows = order_rows(schedule) if orders else tick_rows(schedule)
    width = len(f"stage {schedule.stages - 1}")
    labelled = [f"{f'stage {stage}'.rjust(width)}: {row}\n" for stage, row in enumerate(rows)]
    placement = placement_words(schedule.virtual_stages)
    head = "" if placement == "looped" else f"placement {placement}\n"
    return head + "".join(labelled)


def placement_words(virtual_stages: np.ndarray) -> str:
    virtual, stages = virtual_stages.shape
    if (virtual_stages == looped_placement(stages, virtual)).all():
        return "looped"
    if (virtual_stages == vee_placement(stages, virtual)).all():
        return "vee"
    return " ".join(",".join(map(str, held)) for held in virtual_stages.T.tolist())


def tick_rows(schedule: Schedule) -> list[str]:
    rows: list[list[str]] = [[] for _ in range(schedule.stages)]
    halves = [(half.item.tolist(), half.chunk.tolist()) for half in schedule.halves]
    for tick in range(schedule.ticks):
        cells = [
            " ".join(
                op_text(kind, item[tick][stage], chunk[tick][stage], schedule)
                for kind, (item, chunk) in enumerate(halves)
                if item[tick][stage] != IDLE
            )
            for stage in range(schedule.stages)
        ]
        width = max(map(len, cells))
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell.ljust(width))
    return ["|" + "|".join(row) + "|" for row in rows]


def order_rows(schedule: Schedule) -> list[str]:
    return [
        " ".join(op_text(*op, schedule) for op in schedule.orders.of(stage))
        for stage in range(schedule.stages)
    ]


def op_text(kind: int, item: int, chunk: int, schedule: Schedule) -> str:
    """An op, counting everything from 0: "F3" of microbatch 3, "F3.1" if stages have chunks."""
    place = f".{chunk}" if schedule.virtual > 1 else ""
    return f"{KINDS[kind]}{item_text(item, schedule.slices)}{place}"


def from_text(text: str, name: str = "text") -> Schedule:
    """The schedule that a text holds.

    UserError with row and column, in characters, if it holds none that can run.
    """
    placement = Row(1, 0, "looped")
    given = False
    rows: list[Row] = []
    for number, line in enumerate(lines_of(text), 1):
        line = line.partition("#")[0].rstrip()
        if not line.strip():
            continue
        if match := _PLACEMENT.match(line):
            if given or rows:
                raise misplaced(number, 1, "`placement` stands once, before the stages", text=line)
            placement, given = Row(number, match.end(), line[match.end() :]), True
            continue
        label = _STAGE.match(line)
        if label and int(label[1]) != len(rows):
            what = f"expected stage {len(rows)} here: every stage has one row, in their order"
            raise misplaced(number, 1, what, text=label[0].strip())
        before = label.end() if label else 0
        rows.append(Row(number, before, line[before:]))
    if not rows:
        raise misplaced(1, 1, "the file holds no op; every row is a stage, with its ops")
    return from_rows(name, placement, rows)


def _place(placement: Row, stages: int, virtual: int) -> np.ndarray:
    """int [C, P]: the virtual stages given by "looped", "vee" or every stage's numbers."""
    words = placement.text.split()
    if words == ["vee"]:
        return vee_placement(stages, virtual)
    if words == ["looped"]:
        return looped_placement(stages, virtual)
    by_stage = [word.split(",") for word in words]
    numbers = [number for held in by_stage for number in held]
    if (
        len(by_stage) != stages
        or len(set(map(len, by_stage))) != 1
        or not all(re.fullmatch("[0-9]{1,6}", number) for number in numbers)
        or sorted(map(int, numbers)) != list(range(len(numbers)))
    ):
        raise misplaced(
            placement.number, placement.before + 1,
            "expected placement looped, placement vee, or as many virtual stages for each of the "
            f"{stages} stages, which count from 0 without gaps, as in: placement 0,3 1,2",
            text=placement.text.strip(),
        )  # fmt: skip
    return np.array([[int(number) for number in held] for held in by_stage]).T


def from_rows(
    name: str, placement: Row, rows: Sequence[Row], run: Sequence[Row] | None = None
) -> Schedule:
    """A schedule from one row per stage, in ticks or orders. run: orders, if not those of ticks."""
    if run is None:
        return build(name, _cells(rows, placement, ""))
    cells, orders = _cells(rows, placement, "ticks, "), _cells(run, placement, "orders, ")
    if cells.tick is None or orders.tick is not None:
        wrong, what = (cells, "without") if cells.tick is None else (orders, "with")
        wrong.refuse(0, f"{wrong.where.strip(', ')} {what} |; ticks have them and orders do not")
    return build(name, cells, run=orders)


def _cells(rows: Sequence[Row], placement: Row, where: str) -> Cells:
    """The ops of these rows."""
    if len(rows) > MOST_STAGES:
        raise misplaced(rows[MOST_STAGES].number, 1, f"more than {MOST_STAGES} stages", where=where)
    found: list[tuple[int, ...]] = []
    texts: list[str] = []
    ticks = [_ops(row, stage, where, found, texts) for stage, row in enumerate(rows)]
    for row, count in zip(rows, ticks, strict=True):
        if count != ticks[0]:
            have = ["no |" if n is None else f"{n} ticks" for n in (count, ticks[0])]
            what = f"{have[0]}, and {have[1]} on stage 0; all stages have as many, or none has any"
            raise misplaced(row.number, row.before + len(row.text), what, where=where)
    stage, row, column, tick, kind, microbatch, part, chunk = np.array(found, np.int64).T
    if chunk.max() >= len(chunk):
        far = int(chunk.argmax())
        raise misplaced(int(row[far]), int(column[far]), "there are fewer ops than chunks",
                        text=texts[far], where=where)  # fmt: skip
    held_CP = _place(placement, len(rows), max(1, int(chunk.max()) + 1))
    outside = chunk >= len(held_CP)
    chunks = f"stages have {len(held_CP)} chunk{'s' if len(held_CP) > 1 else ''}"
    virtual_stage = held_CP[np.where(outside, 0, chunk), stage]
    several = len(held_CP) > 1
    cells = Cells(
        stage=stage, kind=kind, virtual_stage=virtual_stage, microbatch=microbatch, slice=part,
        tick=None if ticks[0] is None else tick, row=row, column=column, texts=texts,
        stages=len(rows), where=where, placement=held_CP,
        notation=lambda kind, k, item: (
            f"{KINDS[kind]}{item}" + f".{np.argwhere(held_CP == k)[0, 0]}" * several
        ),
    )  # fmt: skip
    if outside.any():
        cells.refuse(int(outside.argmax()), f"{chunks}, counted from 0")
    if several and (chunk == WHOLE).any():
        cells.refuse(int((chunk == WHOLE).argmax()), f"names no chunk; {chunks}, such as F0.1")
    if int(chunk.max()) + 1 < len(held_CP) and several:
        cells.refuse(int(chunk.argmax()), f"{chunks}, and no op is of the last one")
    return cells


def _ops(
    row: Row, stage: int, where: str, found: list[tuple[int, ...]], texts: list[str]
) -> int | None:
    """Appends the ops of one row; returns its number of ticks, or None if it is an order."""
    tokens = list(_TOKEN.finditer(row.text))
    bars = sum(token[0] == "|" for token in tokens)
    start = row.before + 1
    if len(tokens) == bars:
        raise misplaced(row.number, start, "the row holds no op; every row is a stage", where=where)
    if bars and not (tokens[0][0] == tokens[-1][0] == "|"):
        raise misplaced(
            row.number, start, "a row in ticks begins and ends with |, as in |F0|F1 B0|",
            where=where,
        )  # fmt: skip
    if bars > MOST_COLUMNS:
        raise misplaced(row.number, start, f"more than {MOST_COLUMNS:,} ticks", where=where)
    tick, before = -1, -1
    for token in tokens:
        if token[0] == "|":
            tick, before = tick + 1, -1
            continue
        match = _OP.fullmatch(token[0])
        what = "expected F, B or W with microbatch and chunk, such as F0.1"
        if match:
            kind = KINDS.index(match[1])
            numbers = [WHOLE if n is None else int(n) for n in match.groups()[1:]]
            found.append((stage, row.number, start + token.start(), tick, kind, *numbers))
            texts.append(token[0])
            what = "one tick runs at most one F, one B and one W, in this order"
        if not match or (bars and kind <= before):
            raise misplaced(
                row.number, start + token.start(), what, text=token[0], where=where
            )  # fmt: skip
        before = kind
    return bars - 1 if bars else None
