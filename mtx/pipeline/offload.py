"""Residuals that wait between F and B in two parts: one on the device, one in the host's memory.

A fraction of a layer's bytes is offloaded (Zhao et al. 2024, MEMO): whole arrays, and the first
tokens of one more. Copies overlap with computation: F copies a layer's part out beside the next
layer, and that of its last layer beside the first layer of the next F; B copies a layer's part back
beside the layer that it runs just before, and that of its first one beside the last layer of the
previous B. So each layer is copied once each way, and one layer's part in each direction waits on
the device for its copy.

Copies are `device_put` to another memory space of the same device. XLA:GPU puts the host's rings in
pinned memory and makes the copies asynchronous; XLA:CPU has one memory and leaves them out.

Legend: N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.costs.cost import dim_of_tokens, on_host
from mtx.pipeline.own import Own
from mtx.pipeline.slots import read, write
from mtx.pipeline.ticks import Op
from mtx.vjp import Arrays

Tree = Any
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Parts(NamedTuple):
    """Arrays, each cut in two; None for a part without elements."""

    device: tuple
    host: tuple


class Left(NamedTuple):
    """The part for the host that the last F has left on the device."""

    parts: Tree  # {kind: that of its last layer in the chunk}
    slot: jax.Array  # where it goes, int32 []
    chunk: jax.Array


@dataclass(frozen=True, kw_only=True)
class Offload:
    """The rules by which layers' residuals go to the host and come back."""

    fraction: float
    residuals: dict[str, Arrays]  # {kind: of one layer}; shapes and dtypes
    last: Callable  # (chunk, kind) -> the index of its last layer of the kind; -1 without layers
    some_empty: bool  # some chunks have no layers

    def rings(self, zeros: Callable[[Callable[[str], Tree]], Tree]) -> Tree:
        """{kind: parts of leaves [R, N, ...]}; `zeros` makes them from the shapes of a layer."""
        rings = zeros(self._shapes)
        return {
            kind: ring._replace(host=jax.device_put(ring.host, HOST))
            for kind, ring in rings.items()
        }

    def nothing_left(self) -> Left:
        zeros = lambda a: jnp.zeros(a.shape, a.dtype)  # noqa: E731
        parts = {kind: jax.tree.map(zeros, self._shapes(kind).host) for kind in self.residuals}
        return Left(parts, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def _shapes(self, kind: str) -> Parts:
        return jax.eval_shape(self._cut, self.residuals[kind])

    # -- F ----------------------------------------------------------------------------------------

    def copy_out(self, own: Own, op: Op, left: Left, stream: Tree) -> Tree:
        """Copy to the host what the layer before, or the last F, has left; returns the stream."""
        is_first = own.index == 0
        slot = jnp.where(is_first, left.slot, op.slot)
        index = jnp.where(is_first, self.last(left.chunk, own.kind), own.index - 1)
        # Tied to the layer's input, the copy begins before the layer.
        slot, index, stream = lax.optimization_barrier((slot, index, stream))
        ring, part = own.trees["ring"], jax.device_put(own.trees["left"], HOST)
        own.trees["ring"] = ring._replace(host=write(ring.host, part, slot, index))
        return stream

    def leave(self, own: Own, residuals: Arrays, stream: Tree) -> Tree:
        """Write what stays on the device to the ring; the rest waits. Returns the stream."""
        (device, host), ring = self._cut(residuals), own.trees["ring"]
        own.trees["ring"] = ring._replace(device=write(ring.device, device, *own.at["ring"]))
        # Always true. Without it XLA lets the layer write over what the layer before has left, once
        # that is copied.
        own.trees["left"] = _where(own.index >= 0, host, own.trees["left"])
        return stream

    def left_after(self, op: Op, before: Left, parts: Tree) -> Left:
        """What is left after the op's F; if its chunk has no layers, what was left `before`."""
        place = op.slot, op.chunk
        if self.some_empty:
            place = _where(self._is_empty(op.chunk), (before.slot, before.chunk), place)
        return Left(parts, *place)

    # -- B ----------------------------------------------------------------------------------------

    def fetch(self, op: Op, rings: Tree, left: Left) -> Tree:
        """{kind: the host's part of the last layer in the op's chunk}, for its B."""
        return {
            kind: _where(
                op.slot == left.slot, left.parts[kind],
                _back(ring, op.slot, self.last(op.chunk, kind)),
            )
            for kind, ring in rings.items()
        }  # fmt: skip

    def just_left(self, op: Op, left: Left, ahead: Tree) -> Tree:
        """`ahead`, or what is left if the op is the B of this tick's F."""
        return _where(op.slot == left.slot, left.parts, ahead)

    def copy_back(
        self, own: Own, op: Op, coming: Op, ring: Parts, dstream: Tree
    ) -> tuple[Tree, Arrays, tuple]:
        """(dstream, the layer's residuals, what is copied back beside it): the host's part of the
        layer that B runs next or, at the end, of the first one that the next tick's B, `coming`,
        runs."""
        is_first = own.index == 0
        slot = jnp.where(is_first, coming.slot, op.slot)
        index = jnp.where(is_first, self.last(coming.chunk, own.kind), own.index - 1)
        slot, index, dstream = lax.optimization_barrier((slot, index, dstream))
        fetched = _back(ring, slot, index)
        parts = Parts(read(ring.device, op.slot, own.index), own.trees["ahead"])
        return dstream, self._join(parts, self.residuals[own.kind]), fetched

    def keep(self, own: Own, coming: Op, left: Left, fetched: tuple, dstream: Tree) -> Tree:
        """Keep what was copied back beside the layer as `ahead`; returns the layer's dstream."""
        fetched, dstream = lax.optimization_barrier((fetched, dstream))
        still_here = (own.index == 0) & (coming.slot == left.slot)
        own.trees["ahead"] = _where(still_here, left.parts[own.kind], fetched)
        return dstream

    def ahead_after(self, op: Op, coming: Op, rings: Tree, left: Left, ahead: Tree) -> Tree:
        """What is ahead after the op's B. Without layers nothing was copied back beside them."""
        if not self.some_empty:
            return ahead
        fetch = lambda: self.fetch(coming, rings, left)  # noqa: E731
        with jax.named_scope("empty"):
            return lax.cond(self._is_empty(op.chunk), fetch, lambda: ahead)

    def _is_empty(self, chunk) -> jax.Array:
        (kind,) = self.residuals
        return self.last(chunk, kind) < 0

    # -- parts ------------------------------------------------------------------------------------

    def _cut(self, arrays: Arrays) -> Parts:
        """Arrays cut in two, both parts still on the device."""
        device, host = [], []
        for array, (dim, first) in zip(arrays, self._places(arrays), strict=True):
            whole = array.shape[dim] if first else 0
            host.append(lax.slice_in_dim(array, 0, first, axis=dim) if first else None)
            rest = lax.slice_in_dim(array, first, whole, axis=dim) if first < whole else None
            device.append(rest if first else array)
        return Parts(tuple(device), tuple(host))

    def _places(self, arrays: Arrays) -> list[tuple[int, int]]:
        """For each array, the dim that is cut and how much of it goes to the host."""
        dims = [dim_of_tokens(array.shape) for array in arrays]
        cut = [(dim, a) for dim, a in zip(dims, arrays, strict=True) if dim is not None]
        gone = on_host([(a.shape[dim], a.size * a.dtype.itemsize) for dim, a in cut], self.fraction)
        firsts = iter(gone)
        return [(0, 0) if dim is None else (dim, next(firsts)) for dim in dims]

    def _join(self, parts: Parts, like: Arrays) -> Arrays:
        """The arrays that were cut, with shapes as in `like`."""
        joined = []
        for device, host, (dim, _) in zip(*parts, self._places(like), strict=True):
            both = [part for part in (host, device) if part is not None]
            joined.append(both[0] if len(both) == 1 else jnp.concatenate(both, dim))
        return tuple(joined)


def _back(ring: Parts, slot, index) -> tuple:
    """The host's part of a layer's residuals, on the device."""
    return jax.device_put(read(ring.host, slot, index), DEVICE)


def _where(condition, these: Tree, others: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), these, others)
