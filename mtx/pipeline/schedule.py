"""A pipeline schedule as a table: what every stage does in every tick, and where it keeps it.

A **tick** is one step of the pipeline scan: one F half and one B half, either of which a stage may
sit out. A maker (see `makers`) only says in which tick each op runs, as two arrays of ticks
[M, C, P]; `Schedule.from_ticks` checks them and derives the rest: which stages are idle, which slot
of the stash each microbatch takes, when the embedding and the head run. The program (see `program`)
reads the table and knows no schedule's name.

Legend: M microbatches · C chunks per stage (v) · P stages (p) · T ticks.
Stage s holds the model pieces c*P + s; piece 0 takes the embedding, piece C*P - 1 feeds the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mtx.errors import UserError

IDLE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """One half (F or B) of every tick; all arrays are int32 [T, P]."""

    microbatch: np.ndarray  # IDLE where the stage sits the half out
    chunk: np.ndarray  # 0 where idle
    slot: np.ndarray  # of the stash: F writes it (where idle, a free one), B reads it

    @cached_property
    def busy(self) -> np.ndarray:
        """bool [T, P]"""
        return self.microbatch != IDLE


@dataclass(frozen=True, kw_only=True, eq=False)
class Mailbox:
    """Slots for values that arrive before the tick that uses them; int32 [T, P] each.

    `slots` is 0 where every value is used in the tick of its arrival: then nothing is kept.
    """

    write: np.ndarray  # the slot for this tick's arrival (a free one where nothing arrives)
    read: np.ndarray  # the slot of the value that this tick uses
    slots: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The ticks [start, stop), in which some stage has an F half, a B half, or both."""

    start: int
    stop: int
    forward: bool
    backward: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A checked table. The two arrays of ticks define it, the rest is derived from them."""

    name: str
    forward_ticks: np.ndarray  # int [M, C, P]
    backward_ticks: np.ndarray  # int [M, C, P]
    forward: Half
    backward: Half
    slots: int  # R, ring slots of the stash
    inbox: Mailbox  # activations from the stage before
    gradient_inbox: Mailbox  # gradients from the stage after
    outbox: Mailbox  # the last piece's output, until the head reads it

    @classmethod
    def from_ticks(cls, name: str, forward_ticks: np.ndarray, backward_ticks: np.ndarray):
        """The schedule that runs F and B of (microbatch, chunk, stage) in the given ticks.

        Raises UserError naming the first op that overlaps another or runs before its input.
        """
        _check_inputs_ready(name, forward_ticks, backward_ticks)
        ticks = int(backward_ticks.max()) + 1
        forward_microbatch, forward_chunk = _tabulate(name, "F", forward_ticks, ticks)
        backward_microbatch, backward_chunk = _tabulate(name, "B", backward_ticks, ticks)
        stash = _assign_slots(forward_ticks, backward_ticks, ticks)
        arrival, gradient_arrival = _arrivals(forward_ticks, backward_ticks)
        at_head = np.full_like(forward_ticks, IDLE)
        at_head[:, -1, -1] = forward_ticks[:, -1, -1]
        return cls(
            name=name,
            forward_ticks=forward_ticks,
            backward_ticks=backward_ticks,
            forward=Half(microbatch=forward_microbatch, chunk=forward_chunk, slot=stash.write),
            backward=Half(microbatch=backward_microbatch, chunk=backward_chunk, slot=stash.read),
            slots=stash.slots,
            inbox=_mailbox(arrival, forward_ticks, ticks),
            gradient_inbox=_mailbox(gradient_arrival, backward_ticks, ticks),
            outbox=_mailbox(at_head, backward_ticks, ticks),
        )

    @property
    def microbatches(self) -> int:
        return self.forward_ticks.shape[0]

    @property
    def virtual(self) -> int:
        return self.forward_ticks.shape[1]

    @property
    def stages(self) -> int:
        return self.forward_ticks.shape[2]

    @property
    def ticks(self) -> int:
        return self.forward.microbatch.shape[0]

    @cached_property
    def embed(self) -> np.ndarray:
        """int32 [T]: the microbatch that enters piece 0 in this tick, or IDLE."""
        return by_tick(self.forward_ticks[:, 0, 0], self.ticks)

    @cached_property
    def head(self) -> np.ndarray:
        """int32 [T]: the microbatch whose loss is computed in this tick, or IDLE."""
        return by_tick(self.backward_ticks[:, -1, -1], self.ticks)

    @cached_property
    def embed_backward(self) -> np.ndarray:
        """int32 [T]: the microbatch whose gradient leaves piece 0 in this tick, or IDLE."""
        return by_tick(self.backward_ticks[:, 0, 0], self.ticks)

    @cached_property
    def in_flight(self) -> np.ndarray:
        """int [P]: the most (microbatch, chunk) that wait between F and B at once, per stage."""
        starts = self.forward.busy.cumsum(axis=0)
        ends = np.vstack([np.zeros(self.stages, int), self.backward.busy.cumsum(axis=0)[:-1]])
        return (starts - ends).max(axis=0)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks cut where F or B halves begin or cease to occur on any stage."""
        kinds = np.stack([self.forward.busy.any(axis=1), self.backward.busy.any(axis=1)], axis=1)
        cuts = 1 + np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1))
        edges = [0, *cuts.tolist(), self.ticks]
        return tuple(
            Phase(start=a, stop=b, forward=bool(kinds[a, 0]), backward=bool(kinds[a, 1]))
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        )


def _along_pieces(ticks_MCP: np.ndarray) -> np.ndarray:
    """[M, C, P] as [M, C*P], in the order of the model."""
    return ticks_MCP.reshape(len(ticks_MCP), -1)


def _arrivals(forward_ticks: np.ndarray, backward_ticks: np.ndarray):
    """Ticks [M, C, P] at which each op's input arrives from its neighbour; IDLE where none does."""
    forward, backward = _along_pieces(forward_ticks), _along_pieces(backward_ticks)
    arrival, gradient_arrival = np.full_like(forward, IDLE), np.full_like(backward, IDLE)
    arrival[:, 1:] = forward[:, :-1] + 1
    gradient_arrival[:, :-1] = backward[:, 1:] + 1
    return arrival.reshape(forward_ticks.shape), gradient_arrival.reshape(backward_ticks.shape)


def _check_inputs_ready(name: str, forward_ticks: np.ndarray, backward_ticks: np.ndarray) -> None:
    arrival, gradient_arrival = _arrivals(forward_ticks, backward_ticks)
    for late, what in (
        (forward_ticks < np.maximum(arrival, 0), "F runs before the F of the piece before it"),
        (backward_ticks < gradient_arrival, "B runs before the B of the piece after it"),
        (backward_ticks < forward_ticks, "B runs before its own F"),
    ):
        if late.any():
            m, c, s = np.argwhere(late)[0]
            raise UserError(
                f"schedule {name!r}: at microbatch {m}, chunk {c}, stage {s} {what} has finished "
                f"(F in tick {forward_ticks[m, c, s]}, B in tick {backward_ticks[m, c, s]})"
            )


def _tabulate(name: str, op: str, ticks_MCP: np.ndarray, ticks: int):
    """The (microbatch, chunk) tables int32 [T, P] of ops that run in the given ticks."""
    microbatches, chunks, stages = ticks_MCP.shape
    microbatch = np.full((ticks, stages), IDLE, np.int32)
    chunk = np.zeros((ticks, stages), np.int32)
    m, c, s = np.indices(ticks_MCP.shape)
    microbatch[ticks_MCP, s] = m
    chunk[ticks_MCP, s] = c
    if (microbatch != IDLE).sum() != ticks_MCP.size:
        lost = (microbatch[ticks_MCP, s] != m) | (chunk[ticks_MCP, s] != c)
        m0, c0, s0 = np.argwhere(lost)[0]
        raise UserError(
            f"schedule {name!r}: stage {s0} has two {op} ops in tick {ticks_MCP[m0, c0, s0]}, one "
            f"of them microbatch {m0}, chunk {c0}"
        )
    return microbatch, chunk


def by_tick(ticks_M: np.ndarray, ticks: int) -> np.ndarray:
    """int32 [T]: the microbatch of each tick, or IDLE."""
    microbatch = np.full(ticks, IDLE, np.int32)
    microbatch[ticks_M] = np.arange(len(ticks_M))
    return microbatch


def _mailbox(arrival: np.ndarray, use: np.ndarray, ticks: int) -> Mailbox:
    waits = (arrival != IDLE) & (arrival != use)
    if not waits.any():
        nothing = np.zeros((ticks, use.shape[2]), np.int32)
        return Mailbox(write=nothing, read=nothing, slots=0)
    return _assign_slots(arrival, use, ticks)


def _assign_slots(write_ticks: np.ndarray, read_ticks: np.ndarray, ticks: int) -> Mailbox:
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
        if (held_until >= tick).all(axis=1).any():
            held_until = np.pad(
                held_until, ((0, 0), (0, held_until.shape[1])), constant_values=IDLE
            )
        slot = (held_until < tick).argmax(axis=1)
        write[tick] = slot
        busy = until[tick] != IDLE
        held_until[every[busy], slot[busy]] = until[tick, busy]
        read[until[tick, busy], every[busy]] = slot[busy]
    return Mailbox(write=write, read=read, slots=int(write.max()) + 1)
