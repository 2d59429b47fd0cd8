"""Where a schedule keeps values: the ops of every tick, and the slots that they write and read.

Legend as in `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mtx.schedules.orders import KINDS, BadOp, Op

IDLE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """One half of every tick: its F, B or W. A tick has two halves, or three if W is split from B.

    All arrays are int32 [T, P].
    """

    item: np.ndarray  # IDLE where the stage has no such op
    chunk: np.ndarray  # 0 where idle
    slot: np.ndarray  # of the stash: F writes it (a free one if idle), B reads it; W has its own

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

    `slots` is 0 if every value is used in the tick of its arrival: then nothing is kept.
    """

    write: np.ndarray  # the slot for this tick's arrival (a free one if nothing arrives)
    read: np.ndarray  # the slot of the value that this tick uses
    slots: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One route of values between stages, and the ring that holds them at its end."""

    by: int  # from stage s to stage (s + by) mod P; 0: they stay
    ring: Ring
    used: np.ndarray  # bool [T, P]: this tick's op takes its input from here


def tabulate(
    name: str, kind: int, ticks_ICP: np.ndarray, ticks: int, slot: np.ndarray, slices: int
) -> Half:
    """The half that runs these ops in the given ticks. BadOp if two are in one tick of a stage."""
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
            f"schedule {name!r}: stage {s0} has two {KINDS[kind]} ops in tick {tick}, "
            f"{op.describe(slices)} and {other.describe(slices)}",
            stage=s0, op=op,
        )  # fmt: skip
    return Half(item=item, chunk=chunk, slot=slot)


def routes(
    arrival: np.ndarray, use: np.ndarray, ticks: int, senders: np.ndarray
) -> tuple[Route, ...]:
    """The routes of the inputs of these ops. senders: int [C, P], the stage that sends each."""
    stages = use.shape[2]
    by_CP = (np.arange(stages) - senders) % stages
    travels = arrival != IDLE
    i, c, s = np.nonzero(travels)
    found = []
    for by in np.unique(by_CP[c, s]):
        mine = travels & (by_CP == by)
        used = np.zeros((ticks, stages), bool)
        used[use[mine], np.nonzero(mine)[2]] = True
        kept = ring(np.where(mine, arrival, IDLE), use, ticks)
        found.append(Route(by=int(by), ring=kept, used=used))
    return tuple(found)


def cache(begin: np.ndarray, end: np.ndarray, first: int, slices: int, ticks: int) -> Ring | None:
    """One slot for each (microbatch, chunk), held from the `begin` of slice `first` to the `end` of
    slice 0; `write` and `read` give it at every begin and end of a slice. None without slices."""
    if slices == 1:
        return None
    part = np.arange(len(begin))[:, None, None] % slices
    write_ticks = np.where(part == first, begin, IDLE)
    read_ticks = np.roll(np.where(part == 0, end, IDLE), first, axis=0)
    held = assign_slots(write_ticks, read_ticks, ticks)
    stage = np.broadcast_to(np.arange(begin.shape[2]), begin.shape)
    slot = np.repeat(held.write[begin, stage][first::slices], slices, axis=0)
    held.write[begin, stage], held.read[end, stage] = slot, slot
    return held


def ring(arrival: np.ndarray, use: np.ndarray, ticks: int) -> Ring:
    waits = (arrival != IDLE) & (arrival != use)
    if not waits.any():
        nothing = np.zeros((ticks, use.shape[2]), np.int32)
        return Ring(write=nothing, read=nothing, slots=0)
    return assign_slots(arrival, use, ticks)


def assign_slots(
    write_ticks: np.ndarray, read_ticks: np.ndarray, ticks: int, writes: np.ndarray | None = None
) -> Ring:
    """Gives each item the lowest slot that is free from its write to its read, both included.

    This is interval colouring: no assignment needs fewer slots. A stage without a write in a tick
    is given a free slot, so that a program may write in every tick, or in those of `writes`, bool
    [T], without harm.
    """
    stages = write_ticks.shape[2]
    stage = np.broadcast_to(np.arange(stages), write_ticks.shape)
    items = write_ticks != IDLE
    until = np.full((ticks, stages), IDLE)  # when the value written in each tick is read
    until[write_ticks[items], stage[items]] = read_ticks[items]
    write = np.zeros((ticks, stages), np.int32)
    read = np.zeros((ticks, stages), np.int32)
    held_until = np.full((stages, 8), IDLE)  # per slot: the tick of its next read
    every = np.arange(stages)
    for tick in range(ticks) if writes is None else np.flatnonzero(writes):
        slot = (held_until < tick).argmax(axis=1)
        if (held_until[every, slot] >= tick).any():  # a stage has no free slot
            held_until = np.pad(
                held_until, ((0, 0), (0, held_until.shape[1])), constant_values=IDLE
            )
            slot = (held_until < tick).argmax(axis=1)
        write[tick] = slot
        busy = np.flatnonzero(until[tick] != IDLE)
        held_until[busy, slot[busy]] = until[tick, busy]
        read[until[tick, busy], busy] = slot[busy]
    return Ring(write=write, read=read, slots=int(write.max()) + 1)
