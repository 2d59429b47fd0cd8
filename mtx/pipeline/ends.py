"""Embedding and head of a microbatch, each in parts around what they send.

Ticks in which nothing enters the pipeline, or leaves it, skip them, by a conditional; and what is
sent inside of one has nothing beside it. So a woven tick sends outside of them, in every tick: what
comes last in the embedding, what its gradient and the head begin with, and the sums of the head's
gradient. Of two sends of which one waits for the other only one can lie beside all layers of a
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
    """A microbatch's embedding, of its number, int32 [].

    Every device has some rows of the table, and all need the sum: over `tensor`, then over `pipe`.
    """

    own: Strand  # this device's rows
    first: Strand  # of what `own` gives, and the number: the sum over `tensor`
    second: Strand  # of what `first` gives, and the number: the sum over `pipe`
    rest: Strand  # of what `second` gives, and the number

    @classmethod
    def of(cls, embed: Callable) -> Entering:
        """Of `embed(item)`, a tree of arrays."""
        strand = Strand.of(embed, _ITEM)
        needed, first = _next_collectives(strand)
        done = needed | first
        before, rest = strand.divided(done | set().union(*_next_collectives(strand, done)))
        needed, first = _next_collectives(before)
        begun, second = before.divided(needed | first)
        own, first = begun.divided(_next_collectives(begun)[0])
        return cls(own=own, first=first, second=second, rest=rest)

    def of_device(self, item) -> Arrays:
        """What this device adds to the sums; zeros where nothing enters."""

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
    """The places of the collectives that wait for no other but those that are done, and before them
    of all that they need; without any, of what the outputs need."""
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
    """Losses and gradients of a microbatch, of its y and its number, int32 [].

    Every device has some rows of the table, and what is multiplied by them gets its gradient from
    all: a sum over `tensor`, then over `pipe`. Each part takes what those before it have given, the
    latest first, then the leaves of y and the number; what `losses` and `of_all` give is only for
    `own`.
    """

    gathers: Strand  # of y, before all matmuls and other collectives
    losses: Strand  # up to what the losses gather
    of_all: Strand  # that gathered
    own: Strand  # up to what this device adds to the sums
    over_tensor: Strand  # the sums, one of what the other gives; of one alone it is the second
    over_pipe: Strand
    early: Strand  # the outputs that wait for no sum
    late: Strand  # the others
    is_early: tuple[bool, ...]  # of losses and gradients of parameters

    @classmethod
    def of(cls, function: Callable, stream: Stream) -> Leaving:
        """Of `function(stream, item)`: losses, gradients of parameters, that of the stream."""
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
        """Without what `of_all` and `losses` have given."""
        return given[len(self.of_all.outvars) + len(self.losses.outvars) :]

    def with_early(self, sums: Tree, given: Arrays) -> Tree:
        """Sums of losses and of gradients of parameters, with those that wait for no sum."""
        return self._added(sums, list(self.early(*given)), self.is_early)

    def with_late(self, sums: Tree, given: Arrays) -> tuple[Tree, list]:
        """(the same with the others, leaves of the gradient of y)"""
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
    """Whether an output waits for one."""
    return any(axes_of(strand.eqns[place]) for place in needed_of(strand.eqns, [output]))


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """A function of a stream and of a microbatch's number that first gathers what it needs of the
    stream, if it does so before all matmuls and other collectives."""

    first: Strand  # up to what is gathered
    rest: Strand

    @classmethod
    def of(cls, function: Callable, stream: Stream) -> Gathering:
        """Of `function(stream, item)`, a tree of arrays."""
        strand = Strand.of(function, stream, _ITEM)
        places = _gathered(strand, strand.invars[:-1])
        first, rest = strand.divided(places)
        return cls(first=first, rest=rest)

    def begin(self, stream: Stream, item) -> Arrays:
        return tuple(self.first(*jax.tree.leaves(stream), item))

    def add_up(self, totals: Tree, begun: Arrays, stream: Stream, item) -> Tree:
        """What the function gives, gradients, added to sums of them in float32. Those of some rows
        of a table, or of one part of it, are added there, and the table is not gone through."""
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
    """The outputs that are zeros but for what one equation writes, or adds, into them; which."""
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
    """value, more: what `eqn` is given beside zeros; without one, what is added."""
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
    """The places of the collectives of what follows from the stream, and of what they need, where
    that is no other collective, no matmul and no function of its own."""
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
