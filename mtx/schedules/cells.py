"""The ops that a file holds, each with its place there: checked, then made into a schedule.

Every mistake is one line that names the row and the column, counted from 1 as in a spreadsheet.

Legend: N ops of the whole file · C chunks · P stages · I items
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np

from mtx.errors import UserError
from mtx.schedules.orders import BadOp, Op, Orders, W, chunks_in_order, pack
from mtx.schedules.schedule import Schedule

WHOLE = -1  # the slice of an op that names none
MOST_STAGES, MOST_COLUMNS = 1024, 2**16


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Ops as a file has them, stage after stage and in order; arrays are int [N]."""

    stage: np.ndarray
    kind: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    slice: np.ndarray  # WHOLE if the file names none
    tick: np.ndarray | None  # None: rows are orders
    row: np.ndarray  # in the file, from 1
    column: np.ndarray  # in the file, from 1
    texts: list[str]  # of each op, as the file has it
    stages: int
    # an op as the file writes it, from its kind, its virtual stage, and "3" or "3/2"
    notation: Callable[[int, int, str], str]
    where: str = ""  # in front of every place, if a file holds more than one table
    placement: np.ndarray | None = None  # int [C, P]; None: by the ops, chunks in their order

    @cached_property
    def slices(self) -> int:
        return max(1, 1 + int(self.slice.max()))

    @cached_property
    def item(self) -> np.ndarray:
        return self.microbatch * self.slices + np.maximum(self.slice, 0)

    @property
    def items(self) -> int:
        return (int(self.microbatch.max()) + 1) * self.slices

    @cached_property
    def split(self) -> bool:
        return bool((self.kind == W).any())

    @cached_property
    def virtual_stages(self) -> np.ndarray:
        """int [C, P]"""
        if self.placement is not None:
            return self.placement
        owner = np.zeros(int(self.virtual_stage.max()) + 1, int)
        owner[self.virtual_stage] = self.stage
        return np.argsort(owner, kind="stable").reshape(self.stages, -1).T

    @cached_property
    def chunk(self) -> np.ndarray:
        return chunks_in_order(self.virtual_stages)[self.virtual_stage]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.split, self.items, self.slices, *self.virtual_stages.shape

    @property
    def orders(self) -> Orders:
        """The orders of the stages. All have equally many ops: `check` has made sure of that."""
        columns = (self.kind, self.item, self.chunk)
        kind, item, chunk = (array.astype(np.int32).reshape(self.stages, -1) for array in columns)
        return Orders(kind=kind, item=item, chunk=chunk)

    def refuse(self, index: int, what: str) -> NoReturn:
        """Raises UserError about one op."""
        raise misplaced(
            int(self.row[index]), int(self.column[index]), what, text=self.texts[index],
            where=self.where,
        )  # fmt: skip

    def describe(self, kind: int, virtual_stage: int, item: int) -> str:
        return self.notation(kind, virtual_stage, item_text(item, self.slices))


def misplaced(row: int, column: int, what: str, *, text: str = "", where: str = "") -> UserError:
    """The error for a mistake at one place of a file."""
    shown = f" ({shorten(text)})" if text else ""
    return UserError(f"{where}row {row}, column {column}{shown}: {what}")


def lines_of(text: str) -> list[str]:
    """The lines of a file, with any line endings, without empty ones at its end."""
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")


def item_text(item: int, slices: int) -> str:
    """ "3", or "3/2" if sequences are cut."""
    return f"{item}" if slices == 1 else f"{item // slices}/{item % slices}"


def shorten(text: str) -> str:
    """At most 40 characters of any text, all of them printable."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 40 else text[:37] + "..."


def check(cells: Cells) -> None:
    """Raises UserError unless every stage runs every op of its virtual stages exactly once."""
    _check_slices(cells)
    _check_counted(cells, cells.microbatch, "microbatch")
    _check_counted(cells, cells.virtual_stage, "virtual stage")
    _check_placement(cells)
    _check_once(cells)


def build(name: str, cells: Cells, *, run: Cells | None = None) -> Schedule:
    """The schedule that these cells hold. run: the orders of the stages, if they differ from those
    of the ticks. UserError with the place of the first mistake."""
    check(cells)
    held = {"virtual_stages": cells.virtual_stages, "slices": cells.slices}
    orders = None
    if run is not None:
        check(run)
        if run.shape != cells.shape:
            run.refuse(0, "the orders do not run the same ops as the ticks")
        orders = run.orders
        with _pointing(name, run):
            pack(name, orders, run.virtual_stages, run.slices)
    with _pointing(name, cells):
        if cells.tick is None:
            return Schedule.from_orders(name, cells.orders, **held)
        tables = np.zeros((2 + cells.split, cells.items, *cells.virtual_stages.shape), np.int32)
        tables[cells.kind, cells.item, cells.chunk, cells.stage] = cells.tick
        return Schedule.from_ticks(name, *tables, orders=orders, **held)


@contextmanager
def _pointing(name: str, cells: Cells) -> Iterator[None]:
    """Raises an error about an op as an error about its cell."""
    try:
        yield
    except BadOp as error:
        op: Op = error.op
        mine = (cells.stage == error.stage) & (cells.kind == op.kind) & (cells.item == op.item)
        what = str(error).removeprefix(f"schedule {name!r}").removeprefix(":").strip()
        cells.refuse(int((mine & (cells.chunk == op.chunk)).argmax()), what)


def _check_slices(cells: Cells) -> None:
    if cells.slices > 1 and (cells.slice == WHOLE).any():
        what = "names no slice, though other ops do: give every microbatch as microbatch/slice"
        cells.refuse(int((cells.slice == WHOLE).argmax()), what)
    _check_counted(cells, np.maximum(cells.slice, 0), "slice")


def _check_counted(cells: Cells, values: np.ndarray, noun: str) -> None:
    """Checks that `values` count from 0 without gaps."""
    found = np.unique(values)
    if found[-1] != len(found) - 1:
        gap = f"{noun} {int((found != np.arange(len(found))).argmax())} is missing"
        what = f"{noun} {found[-1]}, and {gap}; they count from 0 without gaps"
        cells.refuse(int(values.argmax()), what)


def _check_placement(cells: Cells) -> None:
    """Checks that every virtual stage is on one stage, and that stages have equally many."""
    pairs, first, count = np.unique(
        cells.virtual_stage * cells.stages + cells.stage, return_index=True, return_counts=True
    )
    virtual_stage, stage = np.divmod(pairs, cells.stages)
    twice = np.flatnonzero(virtual_stage[1:] == virtual_stage[:-1])
    if len(twice):
        rivals = np.flatnonzero(virtual_stage == virtual_stage[twice[0]])
        # The stage with fewer of its ops is the more likely slip.
        wrong = rivals[_rarest(count[rivals])]
        home = int(first[rivals[count[rivals].argmax()]])
        cells.refuse(
            int(first[wrong]),
            f"virtual stage {virtual_stage[wrong]} stands in row {cells.row[home]} too, in column "
            f"{cells.column[home]}; a virtual stage is on one stage",
        )
    held = np.bincount(stage, minlength=cells.stages)
    if (held != held[0]).any():
        usual = int(np.bincount(held).argmax())
        other = int((held != usual).argmax())
        mine = np.flatnonzero(stage == other)
        wrong = mine[_rarest(count[mine])] if held[other] > usual else mine[0]
        cells.refuse(
            int(first[wrong]),
            f"stage {other} holds {held[other]} virtual stages ({_listed(virtual_stage[mine])}), "
            f"stage {int((held == usual).argmax())} holds {usual}; all stages hold as many",
        )


def _rarest(count: np.ndarray) -> int:
    """The index of the smallest count, of several the last."""
    return len(count) - 1 - int(count[::-1].argmin())


def _listed(numbers: np.ndarray) -> str:
    shown = ", ".join(str(number) for number in numbers[:6].tolist())
    return shown + (", ..." if len(numbers) > 6 else "")


def _check_once(cells: Cells) -> None:
    kinds, items = 3 if cells.split else 2, cells.items
    code = (cells.virtual_stage * kinds + cells.kind) * items + cells.item
    order = np.argsort(code, kind="stable")
    again = np.flatnonzero(code[order][1:] == code[order][:-1])
    if len(again):
        once, twice = sorted((int(order[again[0]]), int(order[again[0] + 1])))
        op = cells.describe(*_op_of(cells, once))
        cells.refuse(
            twice,
            f"{op} stands in row {cells.row[once]}, column {cells.column[once]} too; an op runs "
            "once",
        )
    virtual_stages = int(cells.virtual_stage.max()) + 1
    if len(code) == virtual_stages * kinds * items:
        return
    virtual_stage = int(np.bincount(cells.virtual_stage).argmin())
    mine = cells.virtual_stage == virtual_stage
    kind = int(np.bincount(cells.kind[mine], minlength=kinds).argmin())
    have = np.sort(cells.item[mine & (cells.kind == kind)])
    gaps = np.flatnonzero(have != np.arange(len(have)))
    item = int(gaps[0]) if len(gaps) else len(have)
    missing = cells.describe(kind, virtual_stage, item)
    partner = mine & (cells.item == item)
    if partner.any():
        cells.refuse(int(partner.argmax()), f"its {missing} is missing")
    stage = int(cells.stage[mine.argmax()])
    last = len(cells.stage) - 1 - int((cells.stage[::-1] == stage).argmax())
    cells.refuse(
        last, f"the row ends without {missing}; every virtual stage takes all microbatches"
    )


def _op_of(cells: Cells, index: int) -> tuple[int, int, int]:
    return int(cells.kind[index]), int(cells.virtual_stage[index]), int(cells.item[index])
