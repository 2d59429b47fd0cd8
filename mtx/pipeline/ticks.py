"""A schedule as one stage sees it: its columns of the table, as arrays that a scan can run over.

Legend: T ticks
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtx.pipeline.slots import read
from mtx.schedules.schedule import IDLE, Half, Route, Schedule


class Op(NamedTuple):
    """F, B or W of one tick on this stage; int32 [] (the whole table: [T])."""

    item: jax.Array  # IDLE if the stage sits it out
    chunk: jax.Array
    held: jax.Array  # the index of that chunk in the gathered parameters and gradients
    slot: jax.Array  # of the stash; for W, of what waits for it
    deferred: jax.Array | None = None  # B, if W is split: the slot that takes what W needs
    cache: jax.Array | None = None  # slot of keys and values, if sequences are sliced
    cache_gradient: jax.Array | None = None

    @property
    def busy(self):
        return self.item != IDLE


class Receive(NamedTuple):
    """One ring in one tick; int32 [] (the whole table: [T])."""

    arrives: jax.Array  # the slot of what arrives
    uses: jax.Array  # the slot of the input
    used: jax.Array  # bool: whether the input is here


class Following(NamedTuple):
    """The F of the next tick, and what it receives; int32 [] (the whole table: [T])."""

    forward: Op
    receives: tuple[Receive, ...]


class Tick(NamedTuple):
    """One row of the table, as this stage sees it; int32 [] (the whole table: [T])."""

    forward: Op
    backward: Op
    weight: Op | None
    receives: tuple[Receive, ...]
    gradient_receives: tuple[Receive, ...]
    gather: jax.Array  # bool: F begins another chunk, whose parameters are to be gathered
    gather_back: jax.Array  # the same for B
    scatter: tuple[jax.Array, ...]  # bool: B, W are done with a chunk: scatter its gradients
    output: jax.Array  # outputs slot that takes the last virtual stage's output
    head_input: jax.Array  # outputs slot that the head reads
    embed: jax.Array  # items, or IDLE, the same on every stage
    head: jax.Array
    embed_backward: jax.Array
    coming: Op | None  # the B of the next tick, if this one prepares for it
    following: Following | None = None  # its F, if a woven tick prepares it


def ticks_of(
    schedule: Schedule, stage, *, zero_slot: bool, one_chunk: bool, ahead: bool = False
) -> Tick:
    """The columns of stage number `stage`, int32 []; leaves [T].

    zero_slot: an idle W reads the slot after the last. one_chunk: parameters and gradients of one
    chunk at a time are gathered. ahead: a tick prepares for the next one.
    """

    def column(table: np.ndarray) -> jax.Array:
        return read(jnp.asarray(table.T), stage)

    def op(half: Half, deferred=None, cache=None, cache_gradient=None) -> Op:
        held = np.zeros_like(half.chunk) if one_chunk else half.chunk
        rings = (None if a is None else column(a) for a in (deferred, cache, cache_gradient))
        return Op(*map(column, (half.item, half.chunk, held, half.slot)), *rings)

    def receives(routes: tuple[Route, ...]) -> tuple[Receive, ...]:
        rings = [(route.ring.write, route.ring.read, route.used) for route in routes]
        return tuple(Receive(*map(column, ring)) for ring in rings)

    weight, waits = None, None
    if schedule.weight and schedule.weight_stash:
        weight, waits = op(schedule.weight), schedule.weight_stash.write
        if zero_slot:
            slot = jnp.where(weight.busy, weight.slot, schedule.weight_stash.slots)
            weight = weight._replace(slot=slot)
    keys, dkeys = schedule.cache, schedule.gradient_cache
    return Tick(
        forward=op(schedule.forward, cache=keys and keys.write),
        backward=op(schedule.backward, waits, keys and keys.read, dkeys and dkeys.write),
        weight=weight,
        receives=receives(schedule.receives),
        gradient_receives=receives(schedule.gradient_receives),
        gather=column(schedule.forward.runs[0]),
        gather_back=column(schedule.backward.runs[0]),
        scatter=tuple(column(half.runs[1]) for half in schedule.halves[1:]),
        output=column(schedule.outputs.write),
        head_input=column(schedule.outputs.read),
        embed=jnp.asarray(schedule.embed),
        head=jnp.asarray(schedule.head),
        embed_backward=jnp.asarray(schedule.embed_backward),
        coming=op(_next(schedule.backward)) if ahead else None,
    )


def _next(half: Half) -> Half:
    """The half of the next tick in each tick; in the last, that of the first."""
    columns = {"item": half.item, "chunk": half.chunk, "slot": half.slot}
    return Half(**{name: np.roll(each, -1, axis=0) for name, each in columns.items()})
