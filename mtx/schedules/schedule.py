"""A pipeline schedule as a table: what every stage does in every tick, and where it keeps it.

A **tick** is one step of the pipeline scan: one F, one B and, where they are split, one W, each of
which a stage may sit out. Who makes a schedule (see `makers`) says in which tick each op runs or in
which order; `Schedule` checks that and derives the rest: which stages are idle, which slot of the
stash each microbatch takes, what travels where, when the embedding and the head run. The program
(see `program`) reads the table and knows no schedule's name.

Legend: M microbatches · I items: microbatches or, where sequences are cut, their slices · C chunks
per stage (v) · P stages (p) · T ticks.
Chunk c of stage s is virtual stage virtual_stages[c, s]; 0 takes the embedding, C*P - 1 feeds the
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mtx.schedules.orders import (
    B,
    BadOp,
    F,
    Op,
    Orders,
    W,
    chunks_in_order,
    orders_of,
    pack,
    stages_in_order,
)

IDLE = -1
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """One kind of op (F, B or W) of every tick, which has two, or three where W is split.

    All arrays are int32 [T, P].
    """

    item: np.ndarray  # IDLE where the stage sits it out
    chunk: np.ndarray  # 0 where idle
    slot: np.ndarray  # of the stash: F writes it (where idle, a free one), B reads it; W: its own

    @cached_property
    def busy(self) -> np.ndarray:
        """bool [T, P]"""
        return self.item != IDLE

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Where runs of ops of one chunk begin and end on their stage; bool [T, P] each."""
        begins, ends = np.zeros_like(self.busy), np.zeros_like(self.busy)
        for stage, busy in enumerate(self.busy.T):
            ticks = np.flatnonzero(busy)
            chunk = self.chunk[ticks, stage]
            changes = chunk[1:] != chunk[:-1]
            begins[ticks[np.r_[True, changes]], stage] = True
            ends[ticks[np.r_[changes, True]], stage] = True
        return begins, ends


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Slots for values that wait for the tick that uses them; int32 [T, P] each.

    `slots` is 0 where every value is used in the tick of its arrival: then nothing is kept.
    """

    write: np.ndarray  # the slot for this tick's arrival (a free one where nothing arrives)
    read: np.ndarray  # the slot of the value that this tick uses
    slots: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One way that values take between stages, and their ring at its end."""

    by: int  # from stage s to stage (s + by) mod P; 0: they stay
    ring: Ring
    used: np.ndarray  # bool [T, P]: this tick's op takes its input from here


class Phase(NamedTuple):
    """The ticks [start, stop), in which some stage has an F, a B, or a W."""

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A checked table. Ticks and virtual stages define it, the rest is derived from them."""

    name: str
    forward_ticks: np.ndarray  # int [I, C, P]
    backward_ticks: np.ndarray  # int [I, C, P]
    weight_ticks: np.ndarray | None  # int [I, C, P]; None: B is both gradients
    virtual_stages: np.ndarray  # int [C, P]
    slices: int  # of each microbatch's sequences
    orders: Orders  # what a runtime with a program per stage runs
    forward: Half
    backward: Half
    weight: Half | None
    slots: int  # R, ring slots of the stash, from F to B
    weight_stash: Ring | None  # from B to W
    receives: tuple[Route, ...]  # activations from the stage of the virtual stage before
    gradient_receives: tuple[Route, ...]  # gradients from the stage of the virtual stage after
    outputs: Ring  # the last virtual stage's output, until the head reads it
    # Of a sliced sequence: keys and values, from its first F to its last B; and their gradients,
    # from its first B to its last. Slots for each F and B of it.
    cache: Ring | None
    gradient_cache: Ring | None

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

        virtual_stages: int [C, P], looped where not given. orders: where a runtime with a program
        per stage would run the ops in another order than that of the ticks. Raises UserError naming
        the first op that overlaps another or runs before its input.
        """
        if virtual_stages is None:
            virtual_stages = looped_placement(forward_ticks.shape[2], forward_ticks.shape[1])
        tables = [forward_ticks, backward_ticks]
        tables += [] if weight_ticks is None else [weight_ticks]
        _check_inputs_ready(name, tables, virtual_stages, slices)
        ticks = 1 + max(int(table.max()) for table in tables)
        stash = _assign_slots(forward_ticks, backward_ticks, ticks)
        slots = [stash.write, stash.read]
        weight_stash = None
        if weight_ticks is not None:
            weight_stash = _assign_slots(backward_ticks, weight_ticks, ticks)
            slots.append(weight_stash.read)
        halves = [
            _tabulate(name, kind, table, ticks, slot, slices)
            for kind, (table, slot) in enumerate(zip(tables, slots))
        ]
        arrival, gradient_arrival = _arrivals(forward_ticks, backward_ticks, virtual_stages)
        at_head = np.where(virtual_stages == virtual_stages.max(), forward_ticks, IDLE)
        return cls(
            name=name,
            forward_ticks=forward_ticks,
            backward_ticks=backward_ticks,
            weight_ticks=weight_ticks,
            virtual_stages=virtual_stages,
            slices=slices,
            orders=orders or orders_of(forward_ticks, backward_ticks, weight_ticks),
            forward=halves[F],
            backward=halves[B],
            weight=halves[W] if weight_ticks is not None else None,
            slots=stash.slots,
            weight_stash=weight_stash,
            receives=_routes(arrival, forward_ticks, ticks, _senders(virtual_stages, -1)),
            gradient_receives=_routes(
                gradient_arrival, backward_ticks, ticks, _senders(virtual_stages, 1)
            ),
            outputs=_ring(at_head, backward_ticks, ticks),
            cache=_cache(forward_ticks, backward_ticks, 0, slices, ticks),
            gradient_cache=_cache(backward_ticks, backward_ticks, slices - 1, slices, ticks),
        )

    @classmethod
    def from_orders(
        cls, name: str, orders: Orders, *, virtual_stages: np.ndarray | None = None, slices: int = 1
    ) -> Schedule:
        """The schedule whose stages run these orders, each op in the earliest tick that can be.

        Raises UserError where an op is missing or twice, or stages wait for one another for ever.
        """
        if virtual_stages is None:
            virtual_stages = looped_placement(len(orders.kind), int(orders.chunk.max()) + 1)
        forward, backward, weight = pack(name, orders, virtual_stages, slices)
        return cls.from_ticks(
            name,
            forward,
            backward,
            weight,
            virtual_stages=virtual_stages,
            slices=slices,
            orders=orders,
        )

    def __repr__(self) -> str:
        slices = f", slices={self.slices}" if self.slices > 1 else ""
        return (
            f"Schedule({self.name!r}, stages={self.stages}, microbatches={self.microbatches}, "
            f"virtual={self.virtual}{slices}, ticks={self.ticks})"
        )

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The timeline, in a notebook. The one import that runs upward, when a notebook asks."""
        from mtx.view.schedule import show

        return show(self)._repr_png_()

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
    def ticks(self) -> int:
        return self.forward.item.shape[0]

    @property
    def split(self) -> bool:
        """Whether W is an op of its own."""
        return self.weight is not None

    @property
    def halves(self) -> tuple[Half, ...]:
        """F, B and, where it is split, W: in the order in which a tick runs them."""
        return (self.forward, self.backward) + ((self.weight,) if self.weight else ())

    @cached_property
    def first_virtual_stage(self) -> tuple[int, int]:
        """(chunk, stage) of the one that takes the embedding."""
        return tuple(np.argwhere(self.virtual_stages == 0)[0].tolist())

    @cached_property
    def last_virtual_stage(self) -> tuple[int, int]:
        """(chunk, stage) of the one that feeds the head."""
        return tuple(np.argwhere(self.virtual_stages == self.virtual_stages.max())[0].tolist())

    @cached_property
    def embed(self) -> np.ndarray:
        """int32 [T]: the item that enters virtual stage 0 in this tick, or IDLE."""
        return by_tick(self.forward_ticks[:, *self.first_virtual_stage], self.ticks)

    @cached_property
    def head(self) -> np.ndarray:
        """int32 [T]: the item whose loss is computed in this tick, or IDLE."""
        return by_tick(self.backward_ticks[:, *self.last_virtual_stage], self.ticks)

    @cached_property
    def embed_backward(self) -> np.ndarray:
        """int32 [T]: the item whose gradient leaves virtual stage 0 in this tick, or IDLE."""
        return by_tick(self.backward_ticks[:, *self.first_virtual_stage], self.ticks)

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
        """Inputs of one stage that are kept for a later tick than that of their arrival."""
        routes = (*self.receives, *self.gradient_receives)
        return self.outputs.slots + sum(route.ring.slots for route in routes)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks cut where F, B or W begin or cease to occur on any stage.

        What arrives for a later F or B is taken in by the F or B of its tick, even if all stages
        sit it out. A table that changes too often is cut where the fewest ticks get a kind of op
        that none of their stages has: each phase is a scan of its own to compile.
        """
        kinds = np.zeros((self.ticks, 3), bool)
        for kind, half in enumerate(self.halves):
            kinds[:, kind] = half.busy.any(axis=1)
        arrivals = _arrivals(self.forward_ticks, self.backward_ticks, self.virtual_stages)
        for kind, arrival in enumerate(arrivals):
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


def _most_waiting(first: Half, then: Half) -> np.ndarray:
    starts = first.busy.cumsum(axis=0)
    ends = np.vstack([np.zeros((1, starts.shape[1]), int), then.busy.cumsum(axis=0)[:-1]])
    return (starts - ends).max(axis=0)


def _in_model_order(ticks_ICP: np.ndarray, virtual_stages: np.ndarray) -> np.ndarray:
    """[I, C, P] as [I, C*P], in the order of the model."""
    return ticks_ICP[:, chunks_in_order(virtual_stages), stages_in_order(virtual_stages)]


def _senders(virtual_stages: np.ndarray, step: int) -> np.ndarray:
    """int [C, P]: the stage of the virtual stage `step` places further on; its own at the end."""
    stage = stages_in_order(virtual_stages)
    return stage[np.clip(virtual_stages + step, 0, len(stage) - 1)]


def _arrivals(forward_ticks: np.ndarray, backward_ticks: np.ndarray, virtual_stages: np.ndarray):
    """Ticks [I, C, P] at which each op's input arrives from its neighbour; IDLE where none does."""
    forward, backward = (
        _in_model_order(forward_ticks, virtual_stages),
        _in_model_order(backward_ticks, virtual_stages),
    )
    arrival, gradient_arrival = np.full_like(forward, IDLE), np.full_like(backward, IDLE)
    arrival[:, 1:] = forward[:, :-1] + 1
    gradient_arrival[:, :-1] = backward[:, 1:] + 1
    return arrival[:, virtual_stages], gradient_arrival[:, virtual_stages]


def _check_inputs_ready(
    name: str, tables: list[np.ndarray], virtual_stages: np.ndarray, slices: int
) -> None:
    forward, backward = tables[:2]
    arrival, gradient_arrival = _arrivals(forward, backward, virtual_stages)
    first = np.arange(len(forward)) % slices == 0
    last = np.roll(first, -1)
    slice_before, slice_after = np.roll(forward, 1, axis=0), np.roll(backward, -1, axis=0)
    slice_before[first], slice_after[last] = IDLE, IDLE
    checks = [
        (F, forward < 0, "F runs before the first tick"),
        (F, forward < arrival, "F runs before the F of the virtual stage before it has finished"),
        (F, forward <= slice_before, "F runs before the F of the slice before it has finished"),
        (
            B,
            backward < gradient_arrival,
            "B runs before the B of the virtual stage after it has finished",
        ),
        (B, backward < forward, "B runs before its own F has finished"),
        (B, backward <= slice_after, "B runs before the B of the slice after it has finished"),
    ]
    if len(tables) == 3:
        checks.append((W, tables[W] < backward, "W runs before its own B has finished"))
    for kind, late, what in checks:
        if late.any():
            i, c, s = (int(index) for index in np.argwhere(late)[0])
            when = ", ".join(
                f"{'FBW'[k]} in tick {table[i, c, s]}" for k, table in enumerate(tables)
            )
            where = f"microbatch {i // slices}" + (f", slice {i % slices}" if slices > 1 else "")
            raise BadOp(
                f"schedule {name!r}: at {where}, chunk {c}, stage {s} {what} ({when})",
                stage=s, op=Op(kind, i, c),
            )  # fmt: skip


def _tabulate(
    name: str, kind: int, ticks_ICP: np.ndarray, ticks: int, slot: np.ndarray, slices: int
) -> Half:
    """The ops that run in the given ticks."""
    stages = ticks_ICP.shape[2]
    item = np.full((ticks, stages), IDLE, np.int32)
    chunk = np.zeros((ticks, stages), np.int32)
    i, c, s = np.indices(ticks_ICP.shape)
    item[ticks_ICP, s] = i
    chunk[ticks_ICP, s] = c
    if (item != IDLE).sum() != ticks_ICP.size:
        lost = (item[ticks_ICP, s] != i) | (chunk[ticks_ICP, s] != c)
        i0, c0, s0 = (int(index) for index in np.argwhere(lost)[0])
        tick, op = ticks_ICP[i0, c0, s0], Op(kind, i0, c0)
        other = Op(kind, int(item[tick, s0]), int(chunk[tick, s0]))
        raise BadOp(
            f"schedule {name!r}: stage {s0} has two {'FBW'[kind]} ops in tick {tick}, "
            f"{op.describe(slices)} and {other.describe(slices)}",
            stage=s0, op=op,
        )  # fmt: skip
    return Half(item=item, chunk=chunk, slot=slot)


def _routes(
    arrival: np.ndarray, use: np.ndarray, ticks: int, senders: np.ndarray
) -> tuple[Route, ...]:
    """The ways that the inputs of these ops take; `senders`: int [C, P], where each comes from."""
    stages = use.shape[2]
    by_CP = (np.arange(stages) - senders) % stages
    travels = arrival != IDLE
    i, c, s = np.nonzero(travels)
    routes = []
    for by in np.unique(by_CP[c, s]):
        mine = travels & (by_CP == by)
        used = np.zeros((ticks, stages), bool)
        used[use[mine], np.nonzero(mine)[2]] = True
        ring = _ring(np.where(mine, arrival, IDLE), use, ticks)
        routes.append(Route(by=int(by), ring=ring, used=used))
    return tuple(routes)


def _cache(begin: np.ndarray, end: np.ndarray, first: int, slices: int, ticks: int) -> Ring | None:
    """One slot for each (microbatch, chunk), from the `begin` of slice `first` to the `end` of
    slice 0; `write` and `read` hold it at every begin and end of a slice. None without slices."""
    if slices == 1:
        return None
    part = np.arange(len(begin))[:, None, None] % slices
    write_ticks = np.where(part == first, begin, IDLE)
    read_ticks = np.roll(np.where(part == 0, end, IDLE), first, axis=0)
    held = _assign_slots(write_ticks, read_ticks, ticks)
    stage = np.broadcast_to(np.arange(begin.shape[2]), begin.shape)
    slot = np.repeat(held.write[begin, stage][first::slices], slices, axis=0)
    held.write[begin, stage], held.read[end, stage] = slot, slot
    return held


def by_tick(ticks_I: np.ndarray, ticks: int) -> np.ndarray:
    """int32 [T]: the item of each tick, or IDLE."""
    item = np.full(ticks, IDLE, np.int32)
    item[ticks_I] = np.arange(len(ticks_I))
    return item


def _ring(arrival: np.ndarray, use: np.ndarray, ticks: int) -> Ring:
    waits = (arrival != IDLE) & (arrival != use)
    if not waits.any():
        nothing = np.zeros((ticks, use.shape[2]), np.int32)
        return Ring(write=nothing, read=nothing, slots=0)
    return _assign_slots(arrival, use, ticks)


def _assign_slots(write_ticks: np.ndarray, read_ticks: np.ndarray, ticks: int) -> Ring:
    """Gives each item the lowest slot that is free from its write to its read, both included.

    That is interval colouring: no assignment needs fewer slots. A stage without a write in a tick
    is given a slot that nobody holds, so that a program which writes in every tick does no harm.
    """
    stages = write_ticks.shape[2]
    stage = np.broadcast_to(np.arange(stages), write_ticks.shape)
    items = write_ticks != IDLE
    until = np.full((ticks, stages), IDLE)  # the read of what is written in each tick
    until[write_ticks[items], stage[items]] = read_ticks[items]
    write = np.zeros((ticks, stages), np.int32)
    read = np.zeros((ticks, stages), np.int32)
    held_until = np.full((stages, 8), IDLE)  # per slot: the tick of its next read
    every = np.arange(stages)
    for tick in range(ticks):
        slot = (held_until < tick).argmax(axis=1)
        if (held_until[every, slot] >= tick).any():  # a stage has no free one
            held_until = np.pad(
                held_until, ((0, 0), (0, held_until.shape[1])), constant_values=IDLE
            )
            slot = (held_until < tick).argmax(axis=1)
        write[tick] = slot
        busy = np.flatnonzero(until[tick] != IDLE)
        held_until[busy, slot[busy]] = until[tick, busy]
        read[until[tick, busy], busy] = slot[busy]
    return Ring(write=write, read=read, slots=int(write.max()) + 1)
