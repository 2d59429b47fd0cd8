"""ZeRO-1's collectives in buckets: a chunk's parameters are gathered, or its gradients scattered,
one bucket with each pair of layers in a tick (`mtx.schedules.windows` says in which ticks).

A chunk's leaves, shards over the replicas, are laid end to end and cut into equal buckets, so that
each pair of layers has the same traffic beside it, whatever the leaves are. XLA does not start a
collective before a loop and end it after the loop, so buckets are moved inside it.

Legend: N layers of a kind in a chunk · K buckets · d replicas
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.slots import read, write
from mtx.schedules.schedule import Phase, Schedule
from mtx.schedules.windows import Window, gather_windows, scatter_windows
from mtx.sharding.axes import TOKENS
from mtx.sharding.optimizer import DataShard

Tree = Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """How the leaves of a chunk [N, ...] lie end to end."""

    shards: Tree  # DataShards of those leaves, all of which are sharded
    local: Tree  # shapes and dtypes of this device's shards of them

    @property
    def _all(self) -> list[tuple[DataShard, jax.ShapeDtypeStruct]]:
        return list(zip(jax.tree.leaves(self.shards), jax.tree.leaves(self.local), strict=True))

    @property
    def size(self) -> int:
        """Elements of a chunk's shards."""
        return sum(math.prod(local.shape) for _, local in self._all)

    def bucket(self, buckets: int) -> int:
        """Elements of one of `buckets` buckets; the last ones are padded."""
        return -(-self.size // buckets)

    # -- parameters -------------------------------------------------------------------------------

    def parameters(self, chunk: Tree, buckets: int):
        """[K, n] of this device's shards."""
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(chunk)])
        return self._cut(flat[None], buckets)[:, 0]

    @staticmethod
    def gather(bucket):
        """[n] -> [d, n]"""
        return lax.all_gather(bucket, TOKENS)

    def gathered(self, buckets) -> Tree:
        """Leaves [N, ...], from all buckets [K, d, n]."""
        flat, at, leaves = _joined(buckets), 0, []
        for shard, local in self._all:
            size = math.prod(local.shape)
            leaves.append(shard.from_shards(flat[:, at : at + size].reshape(-1, *local.shape)))
            at += size
        return jax.tree.unflatten(jax.tree.structure(self.local), leaves)

    # -- gradients --------------------------------------------------------------------------------

    def gradients(self, chunk: Tree, buckets: int):
        """[K, d, n] of gradients [N, ...]."""
        each = zip(self._all, jax.tree.leaves(chunk), strict=True)
        rows = [shard.to_shards(leaf) for (shard, _), leaf in each]
        flat = jnp.concatenate([row.reshape(row.shape[0], -1) for row in rows], axis=1)
        return self._cut(flat, buckets)

    @staticmethod
    def scatter(bucket):
        """[d, n] -> [n], summed"""
        return lax.psum_scatter(bucket, TOKENS)

    def scattered(self, buckets) -> Tree:
        """This device's shards [N, ...] of the sums, from all buckets [K, n]."""
        flat, at, leaves = buckets.ravel(), 0, []
        for _, local in self._all:
            size = math.prod(local.shape)
            leaves.append(flat[at : at + size].reshape(local.shape))
            at += size
        return jax.tree.unflatten(jax.tree.structure(self.local), leaves)

    def _cut(self, flat, buckets: int):
        """[d, all] -> [K, d, n]"""
        n = self.bucket(buckets)
        padded = jnp.pad(flat, ((0, 0), (0, n * buckets - flat.shape[1])))
        return jnp.swapaxes(padded.reshape(len(flat), buckets, n), 0, 1)


def _joined(buckets):
    """[K, d, n] -> [d, K n]"""
    return jnp.swapaxes(buckets, 0, 1).reshape(buckets.shape[1], -1)


class Cargo(NamedTuple):
    """What a tick moves beside its layers."""

    buckets: jax.Array  # [K, ...]
    first: jax.Array  # int32 [], the tick's first bucket
    move: Callable

    def read(self, n) -> jax.Array:
        """The bucket that moves with the tick's layer n."""
        return read(self.buckets, self.first + n)

    def write(self, moved: jax.Array, bucket: jax.Array, n) -> jax.Array:
        return write(moved, bucket, self.first + n)


class Traffic:
    """The windows of a call of a pipeline, while it is traced, and the chunks gathered so far."""

    def __init__(self, schedule: Schedule, layers: Tree, shards: Tree):
        """layers: {kind: leaves [C, N, ...]}, this device's shards of parameters; shards: how a
        chunk's leaves are sharded."""
        self._layers, self._shards = layers, shards
        local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), layers)
        self._transfers = Transfers(shards=shards, local=local)
        self._gathers = {w: self._transfers.gather for w in gather_windows(schedule) if w.ticks}
        self._scatters = {w: self._transfers.scatter for w in scatter_windows(schedule) if w.ticks}
        self._buckets: Any = None
        later = {window.chunk for window in self._gathers}
        self._virtual = schedule.virtual
        self.chunks = {  # {chunk: {kind: leaves [1, N, ...]}}
            chunk: jax.tree.map(
                lambda a, shard, c=chunk: shard.gather(a[c], a.dtype)[None], layers, shards
            )
            for chunk in range(schedule.virtual)
            if chunk not in later
        }
        self._sums: dict[int, Tree] = {}

    @property
    def stacked(self) -> Tree:
        """Shapes and dtypes of all chunks, gathered: {kind: leaves [C, N, ...]}."""
        first = next(iter(self.chunks.values()))
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((self._virtual, *a.shape[1:]), a.dtype), first
        )

    def window(self, phase: Phase) -> Window | None:
        """The window that a phase lies in, if any."""
        every = (*self._gathers, *self._scatters)
        return next((w for w in every if w.start <= phase.start < w.stop), None)

    def begin(self, window: Window, layers: int, gradients: Tree):
        """Prepare what is to be moved, before the first tick of a window; returns zeros for where
        it goes. gradients: {kind: leaves [C, N, ...]} as they are then."""
        count = window.ticks * layers
        if window in self._gathers:
            of_chunk = jax.tree.map(lambda a: a[window.chunk], self._layers)
            self._buckets = self._transfers.parameters(of_chunk, count)
        else:
            of_chunk = jax.tree.map(lambda a: a[window.chunk], gradients)
            self._buckets = self._transfers.gradients(of_chunk, count)
        shape = jax.eval_shape(self._move(window), self._buckets[0])
        return jnp.zeros((count, *shape.shape), shape.dtype)

    def cargo(self, window: Window, first) -> Cargo:
        return Cargo(self._buckets, first, self._move(window))

    def _move(self, window: Window) -> Callable:
        return (self._gathers | self._scatters)[window]

    def end(self, window: Window, moved: jax.Array) -> None:
        """Take what has been moved, after the last tick of a window."""
        if window in self._gathers:
            gathered = self._transfers.gathered(moved)
            self.chunks[window.chunk] = jax.tree.map(lambda a: a[None], gathered)
        else:
            self._sums[window.chunk] = self._transfers.scattered(moved)

    def of(self, chunk: int) -> Tree:
        """A chunk's parameters; for one not gathered yet, which idle ops ask for, another's."""
        return self.chunks.get(chunk, next(iter(self.chunks.values())))

    def any_of(self, chunk) -> Tree:
        """The parameters of a chunk that only the device knows, int32 []."""
        each = map(self.of, range(self._virtual))
        return jax.tree.map(lambda *chunks: lax.select_n(chunk, *chunks), *each)

    def comes_before(self, phase: Phase) -> bool:
        """Whether a chunk's gather has ended right before a phase."""
        return phase.start in {window.stop for window in self._gathers}

    def sums_of(self, gradients: Tree) -> Tree:
        """{kind: leaves [C, N, ...]}: this device's shards of the sums, after the last tick."""

        def sums(chunk: int) -> Tree:
            of_chunk = jax.tree.map(lambda a: a[chunk], gradients)
            return jax.tree.map(lambda a, shard: shard.reduce_scatter(a), of_chunk, self._shards)

        each = [self._sums.get(c) or sums(c) for c in range(self._virtual)]
        return jax.tree.map(lambda *chunks: jnp.stack(chunks), *each)
