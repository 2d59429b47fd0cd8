"""The ops of each stage in order: a schedule as a runtime with a program per stage sees it.

An op is F, B or W of one (item, chunk). An **item** is a microbatch or, if sequences are cut,
one slice of it: item = microbatch * slices + slice. `pack` turns orders into the ticks of a table
that runs in lock-step, `orders_of` turns ticks into orders.

Legend: I items · C chunks · P stages · K ops of one stage
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mtx.errors import UserError, require_kind, shown

F, B, W = range(3)
KINDS = "FBW"
NEVER = np.iinfo(np.int32).max


class Op(NamedTuple):
    """One op of one stage."""

    kind: int  # F, B or W
    item: int
    chunk: int

    def describe(self, slices: int = 1) -> str:
        """ "F3.1": F of microbatch 3, chunk 1; "F3/2.1" if sequences are cut: its slice 2."""
        item = f"{self.item}" if slices == 1 else f"{self.item // slices}/{self.item % slices}"
        return f"{KINDS[self.kind]}{item}.{self.chunk}"


class BadOp(UserError):
    """An impossible schedule, with the op that shows it."""

    def __init__(self, message: str, *, stage: int, op: Op):
        super().__init__(message)
        self.stage, self.op = stage, op


@dataclass(frozen=True, kw_only=True, eq=False)
class Orders:
    """The ops of every stage, in the order in which it runs them; int32 [P, K] each.

    Every stage runs the same number of ops: F and B, and W if they are split, of every item and
    chunk.
    """

    kind: np.ndarray
    item: np.ndarray
    chunk: np.ndarray

    @classmethod
    def from_lists(cls, stages: Sequence[Iterable[tuple[int, int, int]]]) -> Orders:
        """Orders from one list of (kind, item, chunk) per stage."""
        use = "a list of (kind, item, chunk) for each stage"
        require_kind("orders", stages, Iterable, use)
        rows = []
        for stage, ops in enumerate(stages):
            require_kind(f"orders of stage {stage}", ops, Iterable, use)
            rows.append(_ops_of(stage, list(ops)))
        if not rows:
            raise UserError("orders of no stage: give a list of (kind, item, chunk) for each")
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            short = int(np.argmin(lengths))
            raise UserError(
                f"stage {short} has {lengths[short]} ops and stage {int(np.argmax(lengths))} has "
                f"{max(lengths)}; every stage must run each microbatch through all of its chunks"
            )
        ops = np.stack(rows)
        return cls(kind=ops[..., 0], item=ops[..., 1], chunk=ops[..., 2])

    @classmethod
    def from_kinds(
        cls, stages: Sequence[Sequence[int]], microbatches: int, *, chunks: int = 1
    ) -> Orders:
        """Orders from chunks * kind + chunk of every op of a stage. The n-th op with a given number
        is of microbatch n; ops beyond the last microbatch are dropped."""
        rows = []
        for codes in stages:
            code = np.array(codes, np.int32)
            item = np.empty_like(code)
            for one in range(3 * chunks):
                mine = code == one
                item[mine] = np.arange(mine.sum())
            rows.append(np.stack([code // chunks, item, code % chunks])[:, item < microbatches])
        kind, item, chunk = np.stack(rows, axis=1)
        return cls(kind=kind, item=item, chunk=chunk)

    @property
    def split(self) -> bool:
        """Whether W is an op of its own, so that B is only the gradient of the input."""
        return bool((self.kind == W).any())

    def of(self, stage: int) -> list[Op]:
        columns = (array[stage].tolist() for array in (self.kind, self.item, self.chunk))
        return [Op(*op) for op in zip(*columns, strict=True)]


def _ops_of(stage: int, ops: list) -> np.ndarray:
    """int32 [K, 3]"""
    what = f"stage {stage} runs"
    rows = _whole_numbers(what, ops, ("op", "(kind, item, chunk)"))
    bad = (rows < 0) | (rows >= NEVER)
    if rows.shape[1] != 3 or bad.any() or (rows[:, 0] > W).any():
        first = rows[int((bad.any(axis=1) | (rows[:, 0] > W)).argmax())].tolist()
        raise UserError(
            f"{what} {shown(tuple(first))}; an op is (kind, item, chunk), its kind F={F}, B={B} or "
            f"W={W}"
        )
    return rows.astype(np.int32)


def _whole_numbers(what: str, values: Any, dims: tuple[str, ...]) -> np.ndarray:
    """`values` as an int array of these dims; UserError if they cannot be one."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.ndim != len(dims) or not array.size or array.dtype.kind not in "iu":
        raise UserError(
            f"{what} {' '.join(shown(values).split())}, {array.dtype} {list(array.shape)}; give "
            f"whole numbers [{', '.join(dims)}]"
        )
    return array if array.dtype == np.int32 else array.astype(np.int64)


def check_ticks(name: str, tables: Sequence[Any], slices: int) -> tuple[np.ndarray, ...]:
    """`tables` as arrays int [I, C, P]; UserError if they are not, or if their shapes differ."""
    dims = "item", "chunk", "stage"
    arrays = tuple(
        _whole_numbers(f"schedule {name!r}: the ticks of {kind} are", table, dims)
        for kind, table in zip(KINDS, tables)
    )
    shapes = [array.shape for array in arrays]
    if len(set(shapes)) > 1:
        raise UserError(
            f"schedule {name!r}: the ticks of {KINDS[: len(arrays)]} have the shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}; give all the same"
        )
    if slices < 1 or shapes[0][0] % slices:
        raise UserError(
            f"schedule {name!r}: slices={slices} must divide its {shapes[0][0]} items, which are "
            "microbatches times slices"
        )
    return arrays


def check_placement(
    name: str, virtual_stages: Any, stages: int, *, chunks: int | None = None
) -> np.ndarray:
    """`virtual_stages` as an array int [C, P]; UserError if it is not one, has other sizes, or does
    not have each virtual stage once."""
    what = f"schedule {name!r}: virtual_stages are"
    array = _whole_numbers(what, virtual_stages, ("chunk", "stage"))
    sizes = (len(array) if chunks is None else chunks, stages)
    if array.shape != sizes or (np.sort(array, axis=None) != np.arange(array.size)).any():
        raise UserError(
            f"{what} {shown(array.tolist())}; give each of 0 to {sizes[0] * stages - 1} once, "
            f"[chunk, stage] {list(sizes)}"
        )
    return array


def stages_in_order(virtual_stages_CP: np.ndarray) -> np.ndarray:
    """int [C*P]: the stage of every virtual stage, in model order."""
    stage = np.broadcast_to(np.arange(virtual_stages_CP.shape[1]), virtual_stages_CP.shape)
    return stage.ravel()[np.argsort(virtual_stages_CP.ravel())]


def chunks_in_order(virtual_stages_CP: np.ndarray) -> np.ndarray:
    """int [C*P]: the chunk that every virtual stage is on its stage, in model order."""
    chunk = np.broadcast_to(np.arange(len(virtual_stages_CP))[:, None], virtual_stages_CP.shape)
    return chunk.ravel()[np.argsort(virtual_stages_CP.ravel())]


def orders_of(*tables: np.ndarray) -> Orders:
    """The orders given by ticks [I, C, P] of F, B and, if split, W: by tick, then by kind."""
    items, chunks, stages = tables[0].shape
    when = np.stack([3 * ticks.astype(np.int64) + kind for kind, ticks in enumerate(tables)])
    order = np.argsort(when.reshape(-1, stages), axis=0, kind="stable").T
    kind, rest = np.divmod(order, items * chunks)
    item, chunk = np.divmod(rest, chunks)
    return Orders(
        kind=kind.astype(np.int32), item=item.astype(np.int32), chunk=chunk.astype(np.int32)
    )


def check_complete(name: str, orders: Orders, items: int, chunks: int) -> None:
    """Raises UserError unless every stage runs each of its ops exactly once."""
    kinds = 3 if orders.split else 2
    for stage in range(len(orders.kind)):
        kind, item, chunk = (array[stage] for array in (orders.kind, orders.item, orders.chunk))
        outside = (item < 0) | (item >= items) | (chunk < 0) | (chunk >= chunks)
        if outside.any():
            op = orders.of(stage)[int(outside.argmax())]
            raise BadOp(
                f"schedule {name!r}: stage {stage} runs {op.describe()}, outside of its {items} "
                f"microbatches and {chunks} chunks",
                stage=stage, op=op,
            )  # fmt: skip
        count = np.bincount(
            (kind * items + item) * chunks + chunk, minlength=kinds * items * chunks
        )
        if (count != 1).any():
            code = int((count != 1).argmax())
            op = Op(code // (items * chunks), code // chunks % items, code % chunks)
            how = "never" if count[code] == 0 else f"{count[code]} times"
            raise BadOp(
                f"schedule {name!r}: stage {stage} runs {op.describe()} {how}; every stage runs "
                f"{', '.join(KINDS[:kinds])} of each microbatch and chunk once",
                stage=stage, op=op,
            )  # fmt: skip


def pack(
    name: str, orders: Orders, virtual_stages_CP: np.ndarray, slices: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The earliest ticks (F, B, W), int32 [I, C, P], in which stages can run these orders.

    In a tick each stage runs at most one F, one B and one W, in this order, as far as they come
    next in its list and their inputs have arrived: from another stage, in the tick before at the
    latest. Raises UserError if the stages wait for one another for ever.
    """
    chunks, stages = virtual_stages_CP.shape
    items = int(orders.item.max()) + 1
    check_complete(name, orders, items, chunks)
    last_virtual_stage = chunks * stages - 1
    virtual_stage = virtual_stages_CP.tolist()
    # Ticks by kind and virtual stage: ticks[kind][item][virtual_stage]
    done = [[[NEVER] * (last_virtual_stage + 1) for _ in range(items)] for _ in range(3)]
    forward, backward, weight = done
    lists = [
        list(zip(*(array[stage].tolist() for array in (orders.kind, orders.item, orders.chunk))))
        for stage in range(stages)
    ]
    ops = len(lists[0])
    position = [0] * stages
    left, tick = stages * ops, 0
    while left:
        before = left
        for stage in range(stages):
            at = position[stage]
            order = lists[stage]
            taken = -1
            while at < ops:
                kind, item, chunk = order[at]
                if kind <= taken:
                    break
                k = virtual_stage[chunk][stage]
                if kind == F:
                    ready = k == 0 or forward[item][k - 1] < tick
                    if ready and item % slices:
                        ready = forward[item - 1][k] < tick
                elif kind == B:
                    ready = forward[item][k] <= tick
                    ready = ready and (k == last_virtual_stage or backward[item][k + 1] < tick)
                    if ready and item % slices < slices - 1:
                        ready = backward[item + 1][k] < tick
                else:
                    ready = backward[item][k] <= tick
                if not ready:
                    break
                done[kind][item][k] = tick
                taken = kind
                at += 1
            left -= at - position[stage]
            position[stage] = at
        if left == before:
            _raise_deadlock(name, orders, position, slices)
        tick += 1
    by_virtual_stage = [np.array(table, np.int32)[:, virtual_stages_CP] for table in done]
    return by_virtual_stage[0], by_virtual_stage[1], by_virtual_stage[2] if orders.split else None


def _raise_deadlock(name: str, orders: Orders, position: Sequence[int], slices: int) -> None:
    ops = orders.kind.shape[1]
    stuck = [stage for stage, at in enumerate(position) if at < ops]
    waiting = [f"stage {s} for the input of {orders.of(s)[position[s]].describe(slices)}"
               for s in stuck[:4]]  # fmt: skip
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    raise BadOp(
        f"schedule {name!r} stands still: {', '.join(waiting)}{more}",
        stage=stuck[0], op=orders.of(stuck[0])[position[stuck[0]]],
    )  # fmt: skip
