"""What the pipeline asks of a model, and all that it knows of one.

Legend: B rows · S sequence (s: shard, t: the next positions) · D hidden
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

Tree = Any


class PipelineModel(Protocol):
    """Functions of local shards, inside of the step's `shard_map`. See `mtx.models.model.Model`.

    ends: the parameters of embedding and head; params: those of one layer; batch: a microbatch's
    arrays [B, S], or a slice of them; place: what `place` said of this call, None where it does not
    matter.
    """

    def embed(self, ends: Tree, batch: Tree, place: Any) -> jax.Array:
        """x_BsD, the same on every stage. Expects the same gradient on every stage."""
        ...

    def block(self, params: Tree, x_BsD: jax.Array, place: Any, *cache: jax.Array) -> Any:
        """x_BsD after one layer; with a cache of earlier slices (x_BsD, its own part of one)."""
        ...

    def loss(self, ends: Tree, x_BsD: jax.Array, batch: Tree) -> jax.Array:
        """The sum of the weighted losses, float32 []; x_BsD is the same on every stage."""
        ...

    def place(self, layer: Any, batch: Tree, samples_B: Any, key: Any, part: Any) -> Any:
        """Where a layer's input stands: the layer (-1: the embedding), the rows' places in the
        global batch (int32 [B]), the step's key (None: no dropout), and which slice it is."""
        ...

    def empty_cache(self, rows: int) -> jax.Array:
        """[B, S, ...]: one layer's keys and values, for sequences in slices."""
        ...

    def extend(
        self, params: Tree, x_BtD: jax.Array, place: Any, keep: Any
    ) -> tuple[jax.Array, Any]:
        """(x_BtD, what `keep` gives back): a layer on the next positions of texts that go on."""
        ...
