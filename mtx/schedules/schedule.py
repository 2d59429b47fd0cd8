"""A pipeline schedule as a table: what every stage does in every tick, and where it keeps values.

A **tick** is one step of the pipeline scan: one F, one B and, if W is split from B, one W, each of
which a stage may skip. A maker (see `makers`) gives the tick in which each op runs, or the order of
ops; `Schedule` checks that and derives the rest: which stages are idle, which slot of the stash
each microbatch takes, what travels where, when the embedding and the head run. The program (see
`program`) reads the table and knows no schedule's name.

Legend: M microbatches · I items: microbatches or, if sequences are cut, their slices · C chunks
per stage (v) · P stages (p) · T ticks.
Chunk c of stage s is virtual stage virtual_stages[c, s]; 0 takes the embedding, C*P - 1 feeds the
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mtx.errors import require_kind
from mtx.schedules.orders import (
    KINDS,
    B,
    BadOp,
    F,
    Op,
    Orders,
    W,
    check_placement,
    check_ticks,
    chunks_in_order,
    orders_of,
    pack,
    stages_in_order,
)
from mtx.schedules.slots import IDLE, Half, Ring, Route, assign_slots, cache, ring, routes, tabulate

MOST_PHASES = 8


def looped_placement(stages: int, virtual: int) -> np.ndarray:
    """int [C, P]: round the stages, chunk after chunk (Narayanan et al., SC'21)."""
    return np.arange(virtual * stages).reshape(virtual, stages)


def vee_placement(stages: int, virtual: int = 2) -> np.ndarray:
    """int [C, P]: up the stages and down again, as a V (Qi et al. 2024): the last stage holds two
    in a row, the first stage the first and the last."""
    virtual_stages = looped_placement(stages, virtual)
    virtual_stages[1::2] = virtual_stages[1::2, ::-1]
    return virtual_stages


class Phase(NamedTuple):
    """The ticks [start, stop), and whether any stage has an F, a B or a W in them."""

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A checked table. Ticks and virtual stages define it; the rest is derived from them."""

    name: str
    tables: tuple[np.ndarray, ...]  # ticks int [I, C, P] of F, B and, if split from B, W
    virtual_stages: np.ndarray  # int [C, P]
    slices: int  # of each microbatch's sequences
    orders: Orders  # what a runtime with a program per stage runs
    head_ahead: int = 0  # ticks from the head to the B that it feeds

    @classmethod
    def from_ticks(
        cls,
        name: str,
        forward_ticks: np.ndarray,
        backward_ticks: np.ndarray,
        weight_ticks: np.ndarray | None = None,
        *,
        virtual_stages: np.ndarray | None = None,
        slices: int = 1,
        orders: Orders | None = None,
    ) -> Schedule:
        """The schedule that runs F, B and W of (item, chunk, stage) in the given ticks [I, C, P].

        virtual_stages: int [C, P], looped by default. orders: those of a runtime with a program per
        stage, if it would run the ops in another order than that of the ticks. Raises UserError if
        these are not such arrays, or about the first op that overlaps another or runs before its
        input.
        """
        tables = (forward_ticks, backward_ticks)
        tables += () if weight_ticks is None else (weight_ticks,)
        tables = check_ticks(name, tables, slices)
        _, chunks, stages = tables[F].shape
        if virtual_stages is None:
            virtual_stages = looped_placement(stages, chunks)
        virtual_stages = check_placement(name, virtual_stages, stages, chunks=chunks)
        schedule = cls(
            name=name, tables=tables, virtual_stages=virtual_stages, slices=slices,
            orders=orders or orders_of(*tables),
        )  # fmt: skip
        schedule._check_inputs_ready()
        _ = schedule.halves  # which finds ops that share a tick
        return schedule

    @classmethod
    def from_orders(
        cls, name: str, orders: Orders, *, virtual_stages: np.ndarray | None = None, slices: int = 1
    ) -> Schedule:
        """The schedule whose stages run these orders, each op in the earliest possible tick.

        Raises UserError if an op is missing or twice, or stages wait for one another for ever.
        """
        require_kind("orders", orders, Orders, "Orders, as of mtx.Orders.from_lists")
        if virtual_stages is None:
            virtual_stages = looped_placement(len(orders.kind), int(orders.chunk.max()) + 1)
        virtual_stages = check_placement(name, virtual_stages, len(orders.kind))
        forward, backward, weight = pack(name, orders, virtual_stages, slices)
        return cls.from_ticks(
            name, forward, backward, weight, virtual_stages=virtual_stages, slices=slices,
            orders=orders,
        )  # fmt: skip

    @cached_property
    def woven(self) -> Schedule:
        """The same for ticks whose F and B run side by side: the head runs a tick before the B that
        it feeds, and all B and W run a tick later if one would be in the tick of its F."""
        last = np.s_[:, *self.last_virtual_stage]
        late = int((self.backward_ticks[last] == self.forward_ticks[last]).any())
        forward, *others = self.tables
        tables = (forward, *(table + late for table in others))
        return replace(self, tables=tables, head_ahead=1)

    def __repr__(self) -> str:
        slices = f", slices={self.slices}" if self.slices > 1 else ""
        return (
            f"Schedule({self.name!r}, stages={self.stages}, microbatches={self.microbatches}, "
            f"virtual={self.virtual}{slices}, ticks={self.ticks})"
        )

    @property
    def items(self) -> int:
        return self.forward_ticks.shape[0]

    @property
    def microbatches(self) -> int:
        return self.items // self.slices

    @property
    def virtual(self) -> int:
        return self.forward_ticks.shape[1]

    @property
    def stages(self) -> int:
        return self.forward_ticks.shape[2]

    @property
    def split(self) -> bool:
        """Whether W is an op of its own."""
        return len(self.tables) > W

    @property
    def forward_ticks(self) -> np.ndarray:
        return self.tables[F]

    @property
    def backward_ticks(self) -> np.ndarray:
        return self.tables[B]

    @property
    def weight_ticks(self) -> np.ndarray | None:
        return self.tables[W] if self.split else None

    @cached_property
    def ticks(self) -> int:
        return 1 + max(int(table.max()) for table in self.tables)

    # -- what runs, and which slots it uses -------------------------------------------------------

    @cached_property
    def _stash(self) -> Ring:
        """Slots of the stash from F to B."""
        computes = np.zeros(self.ticks, bool)
        for phase in self.phases:
            computes[phase.start : phase.stop] = phase.forward
        return assign_slots(self.forward_ticks, self.backward_ticks, self.ticks, computes)

    @property
    def slots(self) -> int:
        """R, ring slots of the stash, from F to B."""
        return self._stash.slots

    @cached_property
    def weight_stash(self) -> Ring | None:
        """Slots of the stash from B to W; None if they are not split."""
        if self.weight_ticks is None:
            return None
        return assign_slots(self.backward_ticks, self.weight_ticks, self.ticks)

    @cached_property
    def halves(self) -> tuple[Half, ...]:
        """F, B and, if it is split, W: in the order in which a tick runs them."""
        slots = [self._stash.write, self._stash.read]
        slots += [self.weight_stash.read] if self.weight_stash else []
        return tuple(
            tabulate(self.name, kind, table, self.ticks, slot, self.slices)
            for kind, (table, slot) in enumerate(zip(self.tables, slots, strict=True))
        )

    @property
    def forward(self) -> Half:
        return self.halves[F]

    @property
    def backward(self) -> Half:
        return self.halves[B]

    @property
    def weight(self) -> Half | None:
        return self.halves[W] if self.split else None

    @cached_property
    def receives(self) -> tuple[Route, ...]:
        """Routes of activations, from the stage of the virtual stage before."""
        senders = _senders(self.virtual_stages, -1)
        return routes(self._arrivals[F], self.forward_ticks, self.ticks, senders)

    @cached_property
    def gradient_receives(self) -> tuple[Route, ...]:
        """Routes of gradients, from the stage of the virtual stage after."""
        senders = _senders(self.virtual_stages, 1)
        return routes(self._arrivals[B], self.backward_ticks, self.ticks, senders)

    @cached_property
    def outputs(self) -> Ring:
        """Slots of the last virtual stage's output until the head reads it."""
        last = self.virtual_stages == self.virtual_stages.max()
        read = self.backward_ticks - self.head_ahead
        return ring(np.where(last, self.forward_ticks, IDLE), read, self.ticks)

    @cached_property
    def cache(self) -> Ring | None:
        """Slots of a sliced sequence's keys and values, from its first F to its last B: given for
        each F and B of it. None if sequences are not sliced."""
        return cache(self.forward_ticks, self.backward_ticks, 0, self.slices, self.ticks)

    @cached_property
    def gradient_cache(self) -> Ring | None:
        """Slots of the gradients of these keys and values, from the first B to the last."""
        ticks, last = self.backward_ticks, self.slices - 1
        return cache(ticks, ticks, last, self.slices, self.ticks)

    @cached_property
    def first_virtual_stage(self) -> tuple[int, int]:
        """(chunk, stage) of the virtual stage that takes the embedding."""
        return tuple(np.argwhere(self.virtual_stages == 0)[0].tolist())

    @cached_property
    def last_virtual_stage(self) -> tuple[int, int]:
        """(chunk, stage) of the virtual stage that feeds the head."""
        return tuple(np.argwhere(self.virtual_stages == self.virtual_stages.max())[0].tolist())

    @cached_property
    def embed(self) -> np.ndarray:
        """int32 [T]: the item that enters virtual stage 0 in this tick, or IDLE."""
        return by_tick(self.forward_ticks[:, *self.first_virtual_stage], self.ticks)

    def enters(self, ahead: int) -> np.ndarray:
        """int32 [T]: `embed` as it is `ahead` ticks after each tick."""
        return np.append(self.embed, np.full(ahead, IDLE, np.int32))[ahead:]

    @cached_property
    def head(self) -> np.ndarray:
        """int32 [T]: the item whose loss is computed in this tick, or IDLE."""
        ticks = self.backward_ticks[:, *self.last_virtual_stage] - self.head_ahead
        return by_tick(ticks, self.ticks)

    @cached_property
    def embed_backward(self) -> np.ndarray:
        """int32 [T]: the item whose gradient leaves virtual stage 0 in this tick, or IDLE."""
        return by_tick(self.backward_ticks[:, *self.first_virtual_stage], self.ticks)

    def left(self, before: int) -> np.ndarray:
        """int32 [T]: `embed_backward` as it was `before` ticks before each tick."""
        return np.append(np.full(before, IDLE, np.int32), self.embed_backward)[: self.ticks]

    @cached_property
    def in_flight(self) -> np.ndarray:
        """int [P]: the most (item, chunk) that wait between F and B at once, per stage."""
        return _most_waiting(self.forward, self.backward)

    @cached_property
    def weights_in_flight(self) -> np.ndarray:
        """int [P]: the most (item, chunk) that wait between B and W at once, per stage."""
        if self.weight is None:
            return np.zeros(self.stages, int)
        return _most_waiting(self.backward, self.weight)

    @property
    def receive_slots(self) -> int:
        """Slots of one stage for inputs that are used in a later tick than they arrive in."""
        routes = (*self.receives, *self.gradient_receives)
        return self.outputs.slots + sum(route.ring.slots for route in routes)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks, cut where F, B or W begin or cease to occur on any stage.

        A value that arrives for a later F or B is received by the F or B of the tick in which it
        arrives, even if all stages are idle in it. A table that changes too often is cut so that
        the fewest ticks get a kind of op none of their stages has: each phase is a scan to compile.
        """
        kinds = np.zeros((self.ticks, 3), bool)
        for kind, table in enumerate(self.tables):
            kinds[table[table != IDLE], kind] = True
        for kind, arrival in enumerate(self._arrivals):
            kinds[arrival[arrival != IDLE], kind] = True
        cuts = 1 + np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1))
        edges = np.array([0, *cuts, self.ticks])
        kinds = kinds[edges[:-1]]
        while len(kinds) > MOST_PHASES:
            both, length = kinds[1:] | kinds[:-1], np.diff(edges)
            idle_before = (both & ~kinds[:-1]).sum(axis=1) * length[:-1]
            idle_after = (both & ~kinds[1:]).sum(axis=1) * length[1:]
            at = int((idle_before + idle_after).argmin())
            kinds[at] = both[at]
            kinds, edges = np.delete(kinds, at + 1, axis=0), np.delete(edges, at + 1)
        return tuple(
            Phase(int(a), int(b), *row)
            for a, b, row in zip(edges[:-1], edges[1:], kinds.tolist(), strict=True)
        )

    @cached_property
    def _arrivals(self) -> tuple[np.ndarray, np.ndarray]:
        """Ticks [I, C, P] in which the inputs of F and of B arrive from their neighbours; IDLE if
        none does."""
        chunks, stages = (
            order(self.virtual_stages) for order in (chunks_in_order, stages_in_order)
        )
        forward, backward = (ticks[:, chunks, stages] for ticks in self.tables[:2])  # [I, C*P]
        arrival, gradient_arrival = np.full_like(forward, IDLE), np.full_like(backward, IDLE)
        arrival[:, 1:] = forward[:, :-1] + 1
        gradient_arrival[:, :-1] = backward[:, 1:] + 1
        return arrival[:, self.virtual_stages], gradient_arrival[:, self.virtual_stages]

    def _check_inputs_ready(self) -> None:
        """Raises BadOp about the first op that runs before its input is there."""
        forward, backward, *weight = self.tables
        arrival, gradient_arrival = self._arrivals
        first = np.arange(self.items) % self.slices == 0
        slice_before, slice_after = np.roll(forward, 1, axis=0), np.roll(backward, -1, axis=0)
        slice_before[first], slice_after[np.roll(first, -1)] = IDLE, IDLE
        before = "before the {} of the {} has finished"
        checks = [
            (F, forward < 0, "before the first tick"),
            (F, forward < arrival, before.format("F", "virtual stage before it")),
            (F, forward <= slice_before, before.format("F", "slice before it")),
            (B, backward < gradient_arrival, before.format("B", "virtual stage after it")),
            (B, backward < forward, "before its own F has finished"),
            (B, backward <= slice_after, before.format("B", "slice after it")),
        ]
        checks += [(W, ticks < backward, "before its own B has finished") for ticks in weight]
        for kind, early, what in checks:
            if early.any():
                i, c, s = np.argwhere(early)[0].tolist()
                when = ", ".join(
                    f"{KINDS[k]} in tick {table[i, c, s]}" for k, table in enumerate(self.tables)
                )
                part = f", slice {i % self.slices}" if self.slices > 1 else ""
                raise BadOp(
                    f"schedule {self.name!r}: at microbatch {i // self.slices}{part}, chunk {c}, "
                    f"stage {s} {KINDS[kind]} runs {what} ({when})",
                    stage=s, op=Op(kind, i, c),
                )  # fmt: skip


def _most_waiting(first: Half, then: Half) -> np.ndarray:
    starts = first.busy.cumsum(axis=0)
    ends = np.vstack([np.zeros((1, starts.shape[1]), int), then.busy.cumsum(axis=0)[:-1]])
    return (starts - ends).max(axis=0)


def _senders(virtual_stages: np.ndarray, step: int) -> np.ndarray:
    """int [C, P]: the stage of the virtual stage `step` places further; its own at the end."""
    stage = stages_in_order(virtual_stages)
    return stage[np.clip(virtual_stages + step, 0, len(stage) - 1)]


def by_tick(ticks_I: np.ndarray, ticks: int) -> np.ndarray:
    """int32 [T]: the item of each tick, or IDLE."""
    item = np.full(ticks, IDLE, np.int32)
    item[ticks_I] = np.arange(len(ticks_I))
    return item
