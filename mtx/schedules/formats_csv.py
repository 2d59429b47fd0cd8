"""Schedules as CSV, in the notation of `torch.distributed.pipelining`.

One row per stage, one op per cell: `{virtual_stage}{kind}{microbatch}`, empty if the stage idles.
Kinds are F, and B if the backward is whole, or I and W if it is split. If sequences are cut, for
which torch has no notation: `{virtual_stage}{kind}{microbatch}/{slice}`.

A **tick** has one column for each kind that any stage runs in it, in the order F, B or I, W. So a
column whose kind does not come after that of the previous column begins the next tick. An empty
column ends a tick that would otherwise continue; any other empty column is a tick without work.

Rows are **orders** instead, as in most of torch's own tables, if one column mixes kinds, or if no
row leaves a cell empty before its last op. Each op then runs in the earliest possible tick. A B
among I and W is an I followed by its W.

Cells of communication (`0SEND_F3`, `0UNSHARD`, `0REDUCE_GRAD`) are skipped: our step sends,
gathers and reduces by itself, as the ops need it.
"""

from __future__ import annotations

import re

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
from mtx.schedules.orders import B, F, W
from mtx.schedules.schedule import Schedule

_LETTERS = {False: "FB", True: "FIW"}  # of the kinds, by whether the backward is split
_KINDS = {"F": F, "B": B, "W": W, "I": B + 3}  # modulo 3: the kind
_ENDED = W + 1  # in place of the previous column's kind: its tick has ended
_OP = re.compile(r"([0-9]{1,6})([FIBW])([0-9]{1,6})(?:/([0-9]{1,6}))?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"[0-9]{1,6}(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|(SEND|RECV)_[FB]))[0-9]{0,6}"
)


def to_csv(schedule: Schedule, *, orders: bool = False) -> str:
    """The ticks as CSV; with `orders`, what a runtime with a program per stage runs, without gaps.

    torch's `_PipelineScheduleRuntime._load_csv` reads either, unless sequences are cut.
    """
    letters = _LETTERS[schedule.split]
    virtual_stages = schedule.virtual_stages.tolist()

    def cell(kind: int, item: int, chunk: int, stage: int) -> str:
        return f"{virtual_stages[chunk][stage]}{letters[kind]}{item_text(item, schedule.slices)}"

    if orders:
        stages = range(schedule.stages)
        rows = [[cell(*op, stage) for op in schedule.orders.of(stage)] for stage in stages]
        return "".join(",".join(row) + "\n" for row in rows)
    places = _columns(schedule)
    rows = [[""] * (1 + int(places.max())) for _ in range(schedule.stages)]
    for kind, half in enumerate(schedule.halves):
        tick, stage = np.nonzero(half.busy)
        columns = (places[tick, kind], half.item[tick, stage], half.chunk[tick, stage], stage)
        for column, item, chunk, s in zip(*(array.tolist() for array in columns)):
            rows[s][column] = cell(kind, item, chunk, s)
    return "".join(",".join(row) + "\n" for row in rows)


def _columns(schedule: Schedule) -> np.ndarray:
    """int [T, kinds]: the column of each kind of each tick, -1 where no stage runs it."""
    runs = np.stack([half.busy.any(axis=1) for half in schedule.halves], axis=1)
    columns = np.full(runs.shape, -1)
    free, before = 0, _ENDED
    for tick, kinds in enumerate(runs.tolist()):
        first = kinds.index(True) if any(kinds) else _ENDED
        if before < first:
            free += 1  # an empty column, else this tick would be read as part of the one before
            before = _ENDED
        free += first == _ENDED  # a tick without work
        for kind in np.flatnonzero(kinds).tolist():
            columns[tick, kind] = free
            free, before = free + 1, kind
    return columns


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that a CSV holds; chunks are numbered by their virtual stages, lowest first.

    UserError with row and column, from 1 as in a spreadsheet, if it holds none that can run.
    """
    lines = lines_of(text)
    if len(lines) > MOST_STAGES:
        raise misplaced(MOST_STAGES + 1, 1, f"more than {MOST_STAGES} rows; a row is a stage")
    # stage, column, kind letter, virtual stage, microbatch, slice
    found: list[tuple[int, ...]] = []
    texts: list[str] = []
    read_over: list[tuple[int, int]] = []  # stage and column of communication
    for stage, line in enumerate(lines):
        before = len(found)
        for column, cell in enumerate(line.split(",")):
            if cell and (cell := cell.strip().strip('"').strip()):
                ops = _ops(cell, stage, column)
                found += [(stage, column, *op) for op in ops]
                texts += [cell] * len(ops)
                read_over += [] if ops else [(stage, column)]
        if len(found) == before:
            raise misplaced(stage + 1, 1, "the row holds no op; every row is a stage, with its ops")
    table = np.array(found, np.int64)
    stage, column, letter = table.T[:3]
    if (column >= MOST_COLUMNS).any():
        far = int((column >= MOST_COLUMNS).argmax())
        raise misplaced(
            int(stage[far]) + 1, int(column[far]) + 1, f"more than {MOST_COLUMNS:,} columns",
            text=texts[far],
        )  # fmt: skip
    split = bool((letter >= W).any())
    whole = (letter == B) & split
    if split and (letter != W).all() and not whole.any():
        inputs = int((letter == _KINDS["I"]).argmax())
        raise misplaced(
            int(stage[inputs]) + 1, int(column[inputs]) + 1, "I is the input gradient alone, "
            "and no op is a W, the weights'; give each I its W, or write B for both",
            text=texts[inputs],
        )  # fmt: skip
    tick = None if whole.any() else _ticks(stage, column, letter % 3, read_over)
    if whole.any():
        again = np.repeat(np.arange(len(table)), 1 + whole)
        table, texts = table[again], [texts[i] for i in again.tolist()]
        table[1:, 2][again[1:] == again[:-1]] = W
    stage, column, letter, virtual_stage, microbatch, part = table.T
    cells = Cells(
        stage=stage, kind=letter % 3, virtual_stage=virtual_stage, microbatch=microbatch,
        slice=part, tick=tick, row=stage + 1, column=column + 1, texts=texts, stages=len(lines),
        notation=lambda kind, virtual_stage, item: f"{virtual_stage}{_LETTERS[split][kind]}{item}",
    )  # fmt: skip
    return build(name, cells)


def _ops(cell: str, stage: int, column: int) -> list[tuple[int, int, int, int]]:
    """(letter, virtual stage, microbatch, slice) of each op in a cell: one op, those that torch
    overlaps, or none if it is communication."""
    if match := _OP.fullmatch(cell):
        virtual_stage, letter, microbatch, part = match.groups()
        part = WHOLE if part is None else int(part)
        return [(_KINDS[letter], int(virtual_stage), int(microbatch), part)]
    if match := _OVERLAP.fullmatch(cell):
        return [op for one in match[1].split(";") for op in _ops(one.strip(), stage, column)]
    if _COMMUNICATION.fullmatch(cell):
        return []
    what = (
        "expected virtual stage, F, B, I or W, and microbatch, such as 0F3, or nothing where idle"
    )
    raise misplaced(stage + 1, column + 1, what, text=cell or "nothing between two ;")


def _ticks(
    stage: np.ndarray, column: np.ndarray, kind: np.ndarray, read_over: list[tuple[int, int]]
) -> np.ndarray | None:
    """The tick of each cell, or None if rows are orders. read_over: cells that are not empty but
    hold no op."""
    of_column = np.full(int(column.max()) + 1, -1)
    of_column[column] = kind
    if (of_column[column] != kind).any():
        return None
    stages = int(stage.max()) + 1
    last = np.zeros(stages, int)
    np.maximum.at(last, stage, column)
    filled = np.bincount(stage, minlength=stages)
    np.add.at(filled, [s for s, c in read_over if c < last[s]], 1)
    if stages > 1 and (filled == last + 1).all():
        return None  # in a first tick, all stages but one would lack their input
    ticks, tick, before = [], -1, _ENDED
    for this in of_column.tolist():
        tick += before == _ENDED or 0 <= this <= before
        before = _ENDED if this < 0 else this
        ticks.append(tick)
    return np.array(ticks)[column]
