"""A stage's parameters: always gathered or, with zero=3, gathered a chunk or a layer at a time.

With zero=3 every device keeps its shard over the replicas of its layers' parameters. A chunk is
gathered when a run of its ops begins, and its gradients are reduce-scattered when the run ends:
under a breadth-first table v times a step for F and v times for B, under 1F1B with every group of
microbatches. The collectives are in branches that all replicas take together. A layer is gathered
by its F and its B, as part of them (`LayerShards`).

Legend: C chunks · N layers of a kind in a chunk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline import slots
from mtx.sharding.fp8 import arrays_of, is_quantised
from mtx.sharding.parameter import chosen

Tree = Any


@dataclass(frozen=True, eq=False)
class LayerShards:
    """How one layer's parameters are sharded over the replicas."""

    shards: Tree
    inputs: Tree  # how many of a matrix's first dims are inputs
    trained: Tree

    def gather(self, params: Tree) -> Tree:
        gather = partial(_gathered, stacked=0)
        with jax.named_scope("all_gather"):
            return jax.tree.map(gather, params, self.shards, self.inputs, is_leaf=is_quantised)

    def reduce_scatter(self, gradients: Tree) -> Tree:
        """Gradients, reduce-scattered in float32; those of what is not sharded as they are."""

        def scatter(gradient, shard):
            if shard.dim is None:
                return gradient
            return shard.reduce_scatter(gradient.astype(jnp.float32), stacked=False)

        with jax.named_scope("reduce_scatter"):
            return jax.tree.map(scatter, gradients, chosen(self.shards, self.trained))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of a stage's layers."""

    layers: Tree  # {kind: leaves [C, N, ...]}, shards over the replicas with zero=3
    inputs: Tree  # how many of a matrix's first dims are inputs
    shards: Tree  # how a chunk's leaves [N, ...] are sharded over them; None: no chunk is gathered
    trained: Tree  # which of them are trained; the others have no gradients
    row_of: Callable  # (kind, chunk) -> where the chunk's layers of the kind lie in their stack

    @property
    def layer(self) -> Tree:
        """Shapes and dtypes of one layer's parameters of each kind, as F and B are given them."""
        held = self.gathered(jax.eval_shape(self.start))
        return jax.eval_shape(lambda all: jax.tree.map(lambda a: a[0, 0], all), held)

    def start(self) -> Tree:
        """[1, N, ...] zeros, before a chunk is gathered; None if all are gathered."""
        if self.shards is None:
            return None
        return _zeros(jax.eval_shape(lambda: self._gather(0)))

    def gathered(self, chunk: Tree) -> Tree:
        """[1, N, ...], the chunk that was gathered; or all, [C, N, ...]."""
        return self.layers if chunk is None else chunk

    def all_gather(self, held: Tree, wanted, chunk) -> Tree:
        """The chunk of that number, gathered, if it is wanted; otherwise the one that is held."""
        if held is None:
            return None
        with jax.named_scope("all_gather"):
            return lax.cond(wanted, self._gather, lambda _: held, chunk)

    def _gather(self, chunk) -> Tree:
        def gather(row, a, shard, inputs):
            whole = _gathered(slots.read(a, row), shard, inputs, stacked=1)
            return jax.tree.map(lambda a: a[None], whole)

        def of_kind(kind: str) -> Tree:
            trees = self.layers[kind], self.shards[kind], self.inputs[kind]
            own = partial(gather, self.row_of(kind, chunk))
            return jax.tree.map(own, *trees, is_leaf=is_quantised)

        return {kind: of_kind(kind) for kind in self.layers}

    def sums(self) -> Tree:
        """Float32 zeros like the gradients' shards; None if gradients are summed later."""
        if self.shards is None:
            return None
        return _zeros(chosen(arrays_of(self.layers), self.trained), jnp.float32)

    def reduce_scatter(self, gradients: Tree, sums: Tree, done, chunk) -> tuple[Tree, Tree]:
        """(gradients, sums). If a run of the chunk's ops is done, its gradients are added to the
        sums over the replicas, and are zeros again. Leaves may be None: gradients that are made
        elsewhere."""
        if sums is None:
            return gradients, sums

        def scatter(gradients, sums):
            def add(row, gradient, total, shard):
                if gradient is None:
                    return total
                return slots.add(total, shard.reduce_scatter(gradient[0]), row)

            def of_kind(kind: str) -> Tree:
                trees = gradients[kind], sums[kind], shards[kind]
                own = partial(add, self.row_of(kind, chunk))
                return jax.tree.map(own, *trees, is_leaf=lambda a: a is None)

            shards = chosen(self.shards, self.trained)
            added = {kind: of_kind(kind) for kind in gradients}
            return jax.tree.map(jnp.zeros_like, gradients), added

        with jax.named_scope("reduce_scatter"):
            return lax.cond(done, scatter, lambda *kept: kept, gradients, sums)


def _gathered(a, shard, inputs: int, *, stacked: int):
    """A parameter of a layer, or of layers in `stacked` dims, whole. One in float8 is transposed as
    well, if it is not yet."""

    def whole(a):
        return shard.gather(a, a.dtype, stacked=bool(stacked))

    if not is_quantised(a):
        return whole(a)
    a = a.apply(whole)
    return a.with_transposed(inputs, stacked) if a.transposed is None else a


def _zeros(tree: Tree, dtype=None) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree)
