"""Tokens on their way to their experts and back: none is dropped here, whatever the router says.

Each expert has room for slightly more than its even share of a device's tokens. Tokens that do not
fit wait for further, smaller rounds, as many as the fullest expert of the group needs: hardly ever
one (`Layout.expert_room`). So shapes are fixed, memory is bounded, and values depend neither on
room nor on layout. Tokens are sorted by expert; every move, also in the backward pass, is a gather
by index.

Each device along `Axes.experts` has e of the E experts. "alltoall": a token is sent to the devices
of its experts, n k room D (R-1)/R elements there and as many back. "gathered": all these devices
gather all tokens and reduce-scatter the results, n D (R-1) elements each.

Legend: n tokens of a device · k choices of a token · E experts (e: of a device) · R devices that
share them · C room of an expert for the tokens of one device · D hidden
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.mesh import Axes

Tree = Any
# (weights of e experts, x_emD, gates float32 [e, m, 1]) -> y_emD, each row times its gate
Compute = Callable[[Tree, jax.Array, jax.Array], jax.Array]
_LATER = 4  # rounds after the first have a quarter of its room
_UNIT = 8  # tensor cores take multiples of this many rows
PRODUCTS = "of_experts"  # the name of experts' matmuls in a program
_MOST = 2**31  # rows that int32 counts; `mtx.costs.trace` traces more, which nobody runs
LATER_ROUNDS = "later_rounds"  # the name of what runs only if experts are too full


class Queues(NamedTuple):
    """The choices that wait at each expert, in the order of tokens; int32."""

    order: jax.Array  # [n k] choices (token * k + rank), by expert
    starts_E: jax.Array  # where each expert's choices begin in `order`
    counts_E: jax.Array
    expert_nk: jax.Array  # the expert of each choice; E: no expert
    place_nk: jax.Array  # of each choice in the queue of its expert

    @classmethod
    def of(cls, ids_nk, experts: int) -> Queues:
        """ids: of experts; ids from `experts` on are choices of no expert."""
        ids = jnp.minimum(ids_nk.ravel(), experts)
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
        numbers = jnp.arange(order.size, dtype=jnp.int32)
        places = (
            jnp.zeros_like(order)
            .at[order]
            .set(numbers, unique_indices=True, wrap_negative_indices=False)
        )
        counts = (ids[:, None] == jnp.arange(experts, dtype=ids.dtype)).sum(0, dtype=jnp.int32)
        starts = jnp.cumsum(counts) - counts
        place = places - jnp.append(starts, 0)[ids]
        return cls(order, starts, counts, ids.reshape(ids_nk.shape), place.reshape(ids_nk.shape))

    def slots(self, first, room: int):
        """(the choice in each slot [E, C] of a round that takes `room` places from `first` on,
        whether there is one)"""
        places = first + jnp.arange(room, dtype=jnp.int32)
        last = min(self.order.size, _MOST) - 1
        at = jnp.minimum(self.starts_E[:, None] + places, last)
        return _rows(self.order, at), places < self.counts_E[:, None]

    def slots_of(self, first, room: int):
        """(the slot [n, k] of each choice, among E times C, whether it has one)"""
        places = self.place_nk - first
        there = (self.expert_nk < len(self.counts_E)) & (places >= 0) & (places < room)
        return jnp.where(there, self.expert_nk * room + places, 0), there

    @property
    def ranks(self) -> range:
        return range(self.expert_nk.shape[1])


def _rows(array, at):
    """array[at] without counting from the end: for that JAX would add the number of rows, which in
    a plan is more than `_MOST`."""
    return array.at[at].get(wrap_negative_indices=False)


def _zero_unless(there, rows):
    return jnp.where(there.reshape(*there.shape, *(1,) * (rows.ndim - there.ndim)), rows, 0)


def _sum_of_choices(queues: Queues, y_ECD, first):
    """[n, D]: for each token the sum over the slots of its choices, taken in float32."""
    experts, room, size = y_ECD.shape
    rows, total = y_ECD.reshape(experts * room, size), 0
    slots_nk, there_nk = queues.slots_of(first, room)
    for rank in queues.ranks:
        found = _rows(rows, slots_nk[:, rank])
        total += _zero_unless(there_nk[:, rank], found).astype(jnp.float32)
    return jnp.asarray(total).astype(y_ECD.dtype)


def _of_tokens(queues: Queues, x_nD, first, room: int):
    choice_EC, used_EC = queues.slots(first, room)
    return _zero_unless(used_EC, _rows(x_nD, choice_EC // len(queues.ranks)))


@custom_vjp(3)
def to_slots(x_nD, queues: Queues, first, room: int):
    """x_ECD: the tokens in a round's slots, zeros in empty slots. Backward: `from_slots`."""
    return _of_tokens(queues, x_nD, first, room)


to_slots.defvjp(
    lambda x_nD, queues, first, room: (_of_tokens(queues, x_nD, first, room), (queues, first)),
    lambda room, saved, dx_ECD: (_sum_of_choices(saved[0], dx_ECD, saved[1]), None, None),
)


@custom_vjp()
def from_slots(y_ECD, queues: Queues, first):
    """y_nD, the sum of each token's choices in the slots of a round. Backward: `to_slots`."""
    return _sum_of_choices(queues, y_ECD, first)


def _from_slots_backward(saved, dy_nD):
    queues, first, room = saved
    return _of_tokens(queues, dy_nD, first, room.shape[1]), None, None


from_slots.defvjp(
    lambda y_ECD, queues, first: (
        _sum_of_choices(queues, y_ECD, first),
        (queues, first, jnp.zeros((0, y_ECD.shape[1]))),
    ),
    _from_slots_backward,
)


@custom_vjp(3)
def gates_to_slots(gates_nk, queues: Queues, first, room: int):
    """[E, C, 1]: the gate of the choice in each slot, 0 in empty slots."""
    choice_EC, used_EC = queues.slots(first, room)
    return _zero_unless(used_EC, _rows(gates_nk.ravel(), choice_EC))[..., None]


def _gates_backward(room, saved, dgates_EC1):
    queues, first = saved
    slots_nk, there_nk = queues.slots_of(first, room)
    return _zero_unless(there_nk, _rows(dgates_EC1.ravel(), slots_nk)), None, None


gates_to_slots.defvjp(
    lambda gates_nk, queues, first, room: (
        gates_to_slots(gates_nk, queues, first, room),
        (queues, first),
    ),
    _gates_backward,
)


# -- from device to device -------------------------------------------------------------------------


@custom_vjp(1)
def _exchange(parts, axes: tuple[str, ...]):
    """[R, ...]: what all devices have for this one, from what this one has for each. Backward: the
    same."""
    return lax.all_to_all(parts, axes, 0, 0, tiled=True)


_exchange.defvjp(
    lambda parts, axes: (_exchange(parts, axes), None),
    lambda axes, _, d: (_exchange(d, axes),),
)


def _sum_of_own(x, axes: tuple[str, ...]):
    """This device's part of x along the first dim, summed over all devices."""
    return lax.psum_scatter(x.reshape(lax.axis_size(axes), -1, *x.shape[1:]), axes)


@custom_vjp(1)
def _gather(x, axes: tuple[str, ...]):
    """Forward: all-gather along the first dim. Backward: reduce-scatter."""
    return lax.all_gather(x, axes, axis=0, tiled=True)


_gather.defvjp(
    lambda x, axes: (_gather(x, axes), None),
    lambda axes, _, d: (_sum_of_own(d, axes),),
)


@custom_vjp(1)
def _scatter(x, axes: tuple[str, ...]):
    """Forward: reduce-scatter along the first dim. Backward: all-gather."""
    return _sum_of_own(x, axes)


_scatter.defvjp(
    lambda x, axes: (_scatter(x, axes), None),
    lambda axes, _, d: (lax.all_gather(d, axes, axis=0, tiled=True),),
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a device's tokens reach their experts, and what the experts compute."""

    compute: Compute
    experts: int  # E
    room: int  # C, in the first round
    later: int  # the same in each later round
    axes: tuple[str, ...]  # along which experts are split
    shards: int  # R
    gathers: bool  # all devices gather all tokens; otherwise each token is sent

    @classmethod
    def of(
        cls, compute: Compute, *, experts: int, tokens: int, choices: int, rows: int, axes: Axes
    ):
        """The way for `tokens` of a device, in `rows` rows, with `choices` of experts each."""
        room = math.ceil(axes.expert_room * (tokens // rows) * choices / experts)
        room = room if room <= _UNIT else -(-room // _UNIT) * _UNIT
        later = -(-room // _LATER)
        return cls(
            compute=compute, experts=experts, room=min(rows * room, tokens), later=rows * later,
            axes=axes.experts, shards=axes.expert_shards,
            gathers=axes.expert_dispatch == "gathered",
        )  # fmt: skip

    @property
    def _alone(self) -> bool:
        return not self.axes

    def queues(self, ids_nk) -> Queues:
        """The queues of this device's tokens at all experts; if it gathers, those of all tokens at
        its own experts."""
        if self._alone or not self.gathers:
            return Queues.of(ids_nk, self.experts)
        own = self.experts // self.shards
        ids = lax.all_gather(ids_nk, self.axes, axis=0, tiled=True)
        ids = ids - lax.axis_index(self.axes) * own
        return Queues.of(jnp.where((ids >= 0) & (ids < own), ids, own), own)

    def rounds_after_first(self, queues: Queues):
        """The number of later rounds, int32 [], the same on all devices that share experts."""
        left = jnp.maximum(queues.counts_E.max() - self._first_room, 0)
        rounds = -(-left // self._later_room)
        return rounds if self._alone else lax.pmax(rounds, self.axes)

    @property
    def _first_room(self) -> int:
        return self.room * (self.shards if self.gathers else 1)

    @property
    def _later_room(self) -> int:
        return self.later * (self.shards if self.gathers else 1)

    def first_round(self, queues: Queues, x_nD, gates_nk, weights: Tree):
        """y_nD of the choices that fit the first round."""
        return self._round(queues, 0, self._first_room, x_nD, gates_nk, weights)

    def later_round(self, queues: Queues, number, x_nD, gates_nk, weights: Tree):
        """y_nD of later round `number`, counted from 0."""
        first = self._first_room + number * self._later_room
        return self._round(queues, first, self._later_room, x_nD, gates_nk, weights)

    def _round(self, queues: Queues, first, room: int, x_nD, gates_nk, weights: Tree):
        gathers = self.gathers and not self._alone
        if gathers:
            x_nD, gates_nk = _gather(x_nD, self.axes), _gather(gates_nk, self.axes)
        x_ECD = to_slots(x_nD, queues, first, room)
        gates_EC1 = gates_to_slots(gates_nk, queues, first, room)
        if not self._alone and not gathers:
            y_emD = self.compute(weights, self._send(x_ECD), self._send(gates_EC1))
            y_ECD = self._send_back(y_emD, room)
        else:
            y_ECD = self.compute(weights, x_ECD, gates_EC1)
        y_nD = from_slots(y_ECD, queues, first)
        return _scatter(y_nD, self.axes) if gathers else y_nD

    def _send(self, x_ECD):
        """[e, R C, D]: what all devices have for this one's experts."""
        parts = x_ECD.reshape(self.shards, -1, *x_ECD.shape[1:])
        parts = jnp.swapaxes(_exchange(parts, self.axes), 0, 1)
        return parts.reshape(parts.shape[0], -1, *parts.shape[3:])

    def _send_back(self, y_emD, room: int):
        """The inverse of `_send`."""
        parts = y_emD.reshape(len(y_emD), self.shards, room, -1)
        return _exchange(jnp.swapaxes(parts, 0, 1), self.axes).reshape(self.experts, room, -1)


@custom_vjp(4)
def through_experts(x_nD, gates_nk, ids_nk, weights: Tree, way: Way):
    """y_nD: for each token the sum of its experts' outputs, times their gates.

    ids_nk int32, `way.experts` for a choice of no expert; gates_nk float32; weights: of this
    device's e experts. Only the first round's residuals are kept for the backward pass; later
    rounds run again.
    """
    return _forward(x_nD, gates_nk, ids_nk, weights, way)[0]


def _forward(x_nD, gates_nk, ids_nk, weights, way):
    queues = way.queues(ids_nk)
    more = way.rounds_after_first(queues)
    y_nD, vjp = jax.vjp(partial(way.first_round, queues), x_nD, gates_nk, weights)

    def add(carry):
        number, total = carry
        return number + 1, total + way.later_round(queues, number, x_nD, gates_nk, weights)

    with jax.named_scope(LATER_ROUNDS):
        _, y_nD = lax.while_loop(lambda carry: carry[0] < more, add, (jnp.int32(0), y_nD))
    return y_nD, (vjp, queues, more, x_nD, gates_nk, weights)


def _backward(way, saved, dy_nD):
    vjp, queues, more, x_nD, gates_nk, weights = saved
    dx_nD, dgates_nk, dweights = vjp(dy_nD)

    @partial(jax.jit, inline=True)  # traced once for both loops, which are the same without it
    def pull_back(number):
        later = partial(way.later_round, queues, number)
        return jax.vjp(later, x_nD, gates_nk, weights)[1](dy_nD)

    # Two loops, so that W can be cut off: the loop of the weights' gradients needs no other part.
    def loop(these: slice, total):
        def add(carry):
            number, total = carry
            return number + 1, jax.tree.map(jnp.add, total, pull_back(number)[these])

        with jax.named_scope(LATER_ROUNDS):
            return lax.while_loop(lambda carry: carry[0] < more, add, (jnp.int32(0), total))[1]

    dx_nD, dgates_nk = loop(slice(0, 2), (dx_nD, dgates_nk))
    (dweights,) = loop(slice(2, 3), (dweights,))
    return dx_nD, dgates_nk, None, dweights


through_experts.defvjp(_forward, _backward)
