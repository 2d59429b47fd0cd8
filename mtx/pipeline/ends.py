"""Embedding and head of a microbatch, each in parts around what they send.

Ticks in which nothing enters or leaves the pipeline skip them, by a conditional, and what is sent
inside a conditional has nothing beside it. So a woven tick sends outside of them, in every tick:
what comes last in the embedding, what its gradient and the head begin with, and the sums of the
head's gradient. If one send waits for another, only one of the two can lie beside all layers of a
tick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.costs import is_nested
from mtx.pipeline.model import Stream
from mtx.schedules.schedule import IDLE
from mtx.strand import Strand, axes_of, is_matmul, needed_of, variables_of
from mtx.vjp import Arrays

Tree = Any
_ITEM = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Entering:
    """A microbatch's embedding, as a function of its number, int32 [].

    Every device has some rows of the table, and all need the sum: over `tensor`, then over `pipe`.
    """

    own: Strand  # this device's rows
    first: Strand  # the sum over `tensor`, from what `own` gives and the number
    second: Strand  # the sum over `pipe`, from what `first` gives and the number
    rest: Strand  # from what `second` gives and the number

    @classmethod
    def of(cls, embed: Callable) -> Entering:
        """The parts of `embed(item)`, which gives a tree of arrays."""
        strand = Strand.of(embed, _ITEM)
        needed, first = _next_collectives(strand)
        done = needed | first
        before, rest = strand.divided(done | set().union(*_next_collectives(strand, done)))
        needed, first = _next_collectives(before)
        begun, second = before.divided(needed | first)
        own, first = begun.divided(_next_collectives(begun)[0])
        return cls(own=own, first=first, second=second, rest=rest)

    def of_device(self, item) -> Arrays:
        """What this device adds to the sums; zeros if nothing enters."""

        def nothing(_):
            return tuple(jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.own.outvars)

        return lax.cond(item != IDLE, lambda item: tuple(self.own(item)), nothing, item)

    def over_tensor(self, own: Arrays, item) -> Arrays:
        return tuple(self.first(*own, item))

    def over_pipe(self, begun: Arrays, item) -> Arrays:
        return tuple(self.second(*begun, item))

    def whole(self, summed: Arrays, item) -> list:
        """Leaves of the embedding, on every stage."""
        return self.rest(*summed, item)


def _next_collectives(strand: Strand, done: Collection[int] = ()) -> tuple[set[int], set[int]]:
    """(the places of what these collectives need, the places of the collectives that wait for no
    others than those in `done`). Without any, the first are those of what the outputs need."""
    found, behind = set(), set()
    for place, eqn in enumerate(strand.eqns):
        waits = behind.intersection(variables_of(eqn.invars))
        if axes_of(eqn) and not waits and place not in done:
            found.add(place)
        if place in found or waits:
            behind.update(eqn.outvars)
    read = [var for place in found for var in variables_of(strand.eqns[place].invars)]
    return needed_of(strand.eqns, read if found else strand.outvars), found


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Losses and gradients of a microbatch, as a function of its y and its number, int32 [].

    Every device has some rows of the table, so the gradient of what is multiplied by them is a sum
    over all devices: over `tensor`, then over `pipe`. Each part takes the outputs of those before
    it, the latest first, then the leaves of y and the number; outputs of `losses` and `of_all` are
    only for `own`.
    """

    gathers: Strand  # those of y that come before all matmuls and other collectives
    losses: Strand  # up to what the losses gather
    of_all: Strand  # the same, gathered
    own: Strand  # up to what this device adds to the sums over devices
    over_tensor: Strand  # the sums, the second of what the first gives; a single sum is the second
    over_pipe: Strand
    early: Strand  # the outputs that wait for no sum
    late: Strand  # the others
    is_early: tuple[bool, ...]  # for each loss and each gradient of a parameter

    @classmethod
    def of(cls, function: Callable, stream: Stream) -> Leaving:
        """The parts of `function(stream, item)`: losses, parameters' gradients, the stream's."""
        losses, parameters, _ = jax.eval_shape(function, stream, _ITEM)
        strand = Strand.of(function, stream, _ITEM)
        gathers, rest = strand.divided(_gathered(strand, strand.invars[:-1]))
        forward = needed_of(rest.eqns, rest.outvars[: len(jax.tree.leaves(losses))])
        needed, sums = _next_collectives(rest, forward)
        own, rest = rest.divided(forward | needed if sums else ())
        begun, own = own.divided(_next_collectives(own)[0] if sums else ())
        of_all, own = own.divided(_next_collectives(own)[1] if sums else ())
        added = rest.outvars[: len(jax.tree.leaves((losses, parameters)))]
        is_early = tuple(bool(sums) and not _has_collectives(rest, var) for var in added)
        late = [True] * (len(rest.outvars) - len(added))  # of the stream
        early = rest.choose([*is_early, *(False for _ in late)])
        over_tensor = rest.part((), rest.invars, ())
        over_pipe, rest = _divided_at_sums(rest)
        if _next_collectives(rest)[1]:
            over_tensor = over_pipe
            over_pipe, rest = _divided_at_sums(rest)
        late = rest.choose([*(not one for one in is_early), *late])
        return cls(
            gathers=gathers, losses=begun, of_all=of_all, own=own, over_tensor=over_tensor,
            over_pipe=over_pipe, early=early, late=late, is_early=is_early,
        )  # fmt: skip

    def before_losses(self, given: Arrays) -> Arrays:
        """`given` without what `of_all` and `losses` have given."""
        return given[len(self.of_all.outvars) + len(self.losses.outvars) :]

    def with_early(self, sums: Tree, given: Arrays) -> Tree:
        """The sums of losses and of parameters' gradients, plus what waits for no sum over
        devices."""
        return self._added(sums, list(self.early(*given)), self.is_early)

    def with_late(self, sums: Tree, given: Arrays) -> tuple[Tree, list]:
        """(the sums plus the others, leaves of the gradient of y)"""
        values, is_late = list(self.late(*given)), [not one for one in self.is_early]
        return self._added(sums, values, is_late), values[sum(is_late) :]

    @staticmethod
    def _added(sums: Tree, values: list, wanted: Sequence[bool]) -> Tree:
        leaves, structure = jax.tree.flatten(sums)
        value = iter(values)
        added = [
            total + next(value).astype(total.dtype) if one else total
            for total, one in zip(leaves, wanted, strict=True)
        ]
        return structure.unflatten(added)


def _divided_at_sums(strand: Strand) -> tuple[Strand, Strand]:
    needed, found = _next_collectives(strand)
    return strand.divided(needed | found if found else ())


def _has_collectives(strand: Strand, output) -> bool:
    """Whether an output waits for a collective."""
    return any(axes_of(strand.eqns[place]) for place in needed_of(strand.eqns, [output]))


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """A function of a stream and of a microbatch's number. What it gathers of the stream is a part
    by itself, if that comes before all matmuls and other collectives."""

    first: Strand  # up to what is gathered
    rest: Strand

    @classmethod
    def of(cls, function: Callable, stream: Stream) -> Gathering:
        """The two parts of `function(stream, item)`, which gives a tree of arrays."""
        strand = Strand.of(function, stream, _ITEM)
        places = _gathered(strand, strand.invars[:-1])
        first, rest = strand.divided(places)
        return cls(first=first, rest=rest)

    def begin(self, stream: Stream, item) -> Arrays:
        return tuple(self.first(*jax.tree.leaves(stream), item))

    def add_up(self, totals: Tree, begun: Arrays, stream: Stream, item) -> Tree:
        """The sums, float32, plus the gradients that the function gives. Those of only some rows of
        a table, or of one part of it, are added there, without a pass over the table."""
        leaves, writes = jax.tree.leaves(totals), _writes(self.rest)
        eqns = [eqn for eqn in self.rest.eqns if writes.keys().isdisjoint(eqn.outvars)]
        outvars = [
            atom
            for var in self.rest.outvars
            for atom in (writes[var].invars[1:] if var in writes else (var,))
        ]
        values = iter(
            self.rest.part(eqns, self.rest.invars, outvars)(*begun, *jax.tree.leaves(stream), item)
        )
        for place, var in enumerate(self.rest.outvars):
            eqn: Any = writes.get(var)
            given = [next(values) for _ in (eqn.invars[1:] if eqn else (var,))]
            leaves[place] = _added_to(leaves[place], eqn, *given)
        return jax.tree.unflatten(jax.tree.structure(totals), leaves)


def _writes(strand: Strand) -> dict:
    """{output: equation}: outputs that are zeros except for what one equation writes or adds."""
    made = {var: eqn for eqn in strand.eqns for var in eqn.outvars}
    read = [var for eqn in strand.eqns for var in variables_of(eqn.invars)]
    outputs = variables_of(strand.outvars)

    def is_written(var) -> bool:
        eqn = made.get(var)
        if eqn is None or eqn.primitive.name not in ("scatter-add", "dynamic_update_slice"):
            return False
        zeros = made.get(eqn.invars[0])
        if zeros is None or zeros.primitive.name != "broadcast_in_dim":
            return False
        return getattr(zeros.invars[0], "val", 1) == 0 and [*read, *outputs].count(var) == 1

    return {var: made[var] for var in outputs if is_written(var)}


def _added_to(total, eqn, value, *more):
    """total plus a gradient: `value`, or what `eqn` makes of zeros, `value` and `more`."""
    if eqn is None:
        return total + value.astype(total.dtype)
    if eqn.primitive.name == "dynamic_update_slice":
        there = lax.dynamic_slice(total, more, value.shape)
        return lax.dynamic_update_slice(total, there + value.astype(total.dtype), more)
    indices, (updates,) = value, more
    names = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
    given = {name: eqn.params[name] for name in names}
    return lax.scatter_add(total, indices, updates.astype(total.dtype), **given)


def _gathered(strand: Strand, stream: list) -> set[int]:
    """The places of the collectives on what follows from the stream, and of what these need, unless
    that includes another collective, a matmul or a nested function."""
    found: set[int] = set()
    for place, eqn in enumerate(strand.eqns):
        if not axes_of(eqn):
            continue
        needed = needed_of(strand.eqns[:place], eqn.invars)
        before = [strand.eqns[i] for i in needed]
        read = {var for one in (eqn, *before) for var in variables_of(one.invars)}
        if read.isdisjoint(stream) or any(map(_is_heavy, before)):
            continue
        found |= {place, *needed}
    return found


def _is_heavy(eqn) -> bool:
    return bool(axes_of(eqn)) or is_matmul(eqn) or is_nested(eqn)
