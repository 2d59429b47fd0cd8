"""A ring of devices along an axis, or groups of neighbours on it, and what they send each other.

Legend: c devices of a ring, of which this one is number r
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.sharding.mesh import Axes

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Ring:
    """c devices of an axis: every `stride`-th."""

    axis: str
    devices: int  # of the axis
    size: int  # c
    stride: int = 1
    # On CPUs a ppermute waits for all devices of the mesh, even in a branch that only some take.
    permutes: bool = True

    @classmethod
    def of(cls, axes: Axes) -> Ring:
        """The ring of all devices of `context`."""
        assert axes.context is not None
        devices = axes.context_shards
        return cls(axis=axes.context, devices=devices, size=devices, permutes=axes.permutes)

    def split(self, inner: int) -> tuple[Ring, Ring]:
        """Groups of `inner` neighbours, and the rings that go from group to group."""
        rings = self.devices // inner
        common = {"axis": self.axis, "devices": self.devices, "permutes": self.permutes}
        return Ring(size=inner, **common), Ring(size=rings, stride=inner, **common)

    @property
    def index(self):
        """r, int32 []"""
        return lax.axis_index(self.axis) // self.stride % self.size

    @property
    def _groups(self) -> list[list[int]] | None:
        """The axis's devices, ring by ring; None: all of them are one ring."""
        if self.size == self.devices:
            return None
        span = self.size * self.stride
        first = [f + s for f in range(0, self.devices, span) for s in range(self.stride)]
        return [list(range(f, f + span, self.stride)) for f in first]

    # -- whole arrays ------------------------------------------------------------------------------

    def all_gather(self, x: Tree, axis: int | None = None) -> Tree:
        """The arrays of all devices, concatenated along dim `axis`; None: stacked along a new first
        one."""
        return jax.tree.map(
            lambda a: lax.all_gather(
                a, self.axis, axis=axis or 0, tiled=axis is not None,
                axis_index_groups=self._groups,
            ),
            x,
        )  # fmt: skip

    def reduce_scatter(self, x: Tree) -> Tree:
        """The sum over devices of arrays [c, ...], of which each device gets its own part."""
        return jax.tree.map(
            lambda a: lax.psum_scatter(a, self.axis, axis_index_groups=self._groups), x
        )

    def all_to_all(self, x, *, split: int, join: int):
        """Every device sends each device a part of its dim `split`, and concatenates the parts that
        it receives along dim `join`."""
        return lax.all_to_all(x, self.axis, split, join, axis_index_groups=self._groups, tiled=True)

    # -- from device to device ---------------------------------------------------------------------

    def from_device(self, x: Tree, source: Callable[[int], int | None]) -> Tree:
        """On device r, what device `source(r)` has; if that is None, values that must not be used.
        No device may send to two."""
        sources = [source(number) for number in range(self.size)]
        if not self.permutes:
            of_all = self.all_gather(x)
            wanted = jnp.asarray(np.array([each or 0 for each in sources]))[self.index]
            return jax.tree.map(lambda a: a[wanted], of_all)
        groups = self._groups or [list(range(self.devices))]
        pairs = [
            (group[source], group[number])
            for group in groups
            for number, source in enumerate(sources)
            if source is not None
        ]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis, pairs), x)

    def shift(self, x: Tree) -> Tree:
        """What the device before this one has."""
        return self.from_device(x, lambda number: (number - 1) % self.size)

    # -- around the ring ---------------------------------------------------------------------------

    def go_round(self, own: Tree, state: Tree, body: Callable) -> Tree:
        """The state after state = body(i, what device r - i has, state) for i = 1 to c - 1. No send
        depends on the body beside it."""
        if self.size == 1:
            return state

        def step(carry, i):
            arrived, state = carry
            return (self.shift(arrived), body(i, arrived, state)), None

        carry, _ = lax.scan(step, (self.shift(own), state), jnp.arange(1, self.size - 1))
        arrived, state = carry
        return body(self.size - 1, arrived, state)

    def go_round_and_add(self, own: Tree, state: Tree, body: Callable) -> tuple[Tree, Tree]:
        """(the state, the sum of the parts that the other devices have for this one), after
        state, part = body(i, what device r - i has, state) for i = 1 to c - 1; each part is for
        device r - i. The sums follow the arrays they belong to, one step behind. c > 1."""
        arrived = self.shift(own)
        following = self.shift(arrived) if self.size > 2 else None
        state, sums = body(1, arrived, state)
        if following is not None:

            def step(carry, i):
                arrived, sums, state = carry
                following, sums = self.shift(arrived), self.shift(sums)
                state, part = body(i, arrived, state)
                return (following, jax.tree.map(jnp.add, sums, part), state), None

            carry = following, sums, state
            (arrived, sums, state), _ = lax.scan(step, carry, jnp.arange(2, self.size - 1))
            sums = self.shift(sums)
            state, part = body(self.size - 1, arrived, state)
            sums = jax.tree.map(jnp.add, sums, part)
        return state, self.shift(sums)

    def through_all(self, own: Tree, state: Tree, body: Callable) -> Tree:
        """Like `go_round`, but what devices have is gathered at once."""
        of_all = self.all_gather(own)

        def step(state, i):
            return body(i, self._of(of_all, i), state), None

        return lax.scan(step, state, jnp.arange(1, self.size))[0]

    def through_all_and_add(self, own: Tree, state: Tree, body: Callable) -> tuple[Tree, Tree]:
        """Like `go_round_and_add`, but what devices have is gathered at once; the sums are a
        reduce-scatter."""
        of_all = self.all_gather(own)

        def step(state, i):
            return body(i, self._of(of_all, i), state)

        state, parts = lax.scan(step, state, jnp.arange(1, self.size))
        # parts[i - 1] is for device r - i
        numbers = (self.index - 1 - jnp.arange(self.size)) % self.size
        parts = jax.tree.map(lambda a: jnp.concatenate([a, jnp.zeros_like(a[:1])])[numbers], parts)
        return state, self.reduce_scatter(parts)

    def _of(self, of_all: Tree, i) -> Tree:
        """What device r - i has, out of what all devices have."""
        number = (self.index - i) % self.size
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, 0, False), of_all)
