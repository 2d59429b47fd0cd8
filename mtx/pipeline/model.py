"""What the pipeline asks of a model, and all that it knows about one.

Legend: B rows · S sequence (s: shard, t: the next positions) · D hidden · L layers · V padded
vocabulary (v: shard)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

Tree = Any
# Floating point, [B, s, ...] each; {"x": x_BsD} as a rule. The head reads x and the leaves with the
# same positions; other leaves may have different ones, such as an encoder's.
Stream = dict[str, jax.Array]
# Takes {name: leaves [n, B, h, t, K]} of the next positions, to be kept; returns all that is kept
# under those names, [n, B, h, S, K], these included, or None if there are no earlier positions. A
# `State` (`mtx.sharding.sequence`) replaces the one before; None instead of leaves changes nothing.
Keep = Callable[[dict[str, Tree | None]], dict[str, Tree] | None]


class PipelineModel(Protocol):
    """A model as a pattern of layers of one or more kinds, between an embedding and a head.

    Parameters are {"embed": ..., "head": ..., "layers": {kind: ...}}, nested dicts with the leaves
    of a layer, or of layers stacked. Functions of a microbatch work on local shards, inside of the
    step's `shard_map`. Their arguments:

    shared: {"embed": ..., "head": ...}, the same on every stage, vocabulary sharded over `pipe` too
    params: the parameters of one layer
    batch: a microbatch's arrays [B, S], or a slice of them; tokens, targets, weights as a rule
    stream: what goes from layer to layer and from stage to stage
    context: what `context` returned for this call
    """

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kind of each of the L layers, in model order. A kind's name is a plain word."""
        ...

    # -- parameters -------------------------------------------------------------------------------

    @property
    def shapes(self) -> Tree:
        """The float32 shape of every parameter; a tree like `specs`."""
        ...

    @property
    def specs(self) -> Tree:
        """The PartitionSpec of every parameter; {kind: of one layer}, like `params`."""
        ...

    @property
    def roles(self) -> Tree:
        """The role of every parameter (`mtx.sharding.parameter`); a tree like `specs`."""
        ...

    @property
    def dims(self) -> Tree:
        """The names of every parameter's dims, a tuple, or () if none are given; a tree like
        `specs`."""
        ...

    @property
    def trained(self) -> Tree:
        """Which parameters are trained, bool; the others are frozen. A tree like `specs`."""
        ...

    @property
    def inputs(self) -> Tree:
        """How many of a matrix's first dims are inputs; a tree like `specs`."""
        ...

    @property
    def rules(self) -> Tree:
        """The rule of every state: (state, the sum of its cotangents in a step) -> the next state;
        None for all other parameters. A tree like `specs`."""
        ...

    @property
    def vocab_rows(self) -> int:
        """V, the size of a dim that `specs` shards over `pipe`."""
        ...

    def init_shared(self, seed: Any) -> Tree:
        """Float32 {"embed": ..., "head": ...}, global shapes, vocabulary padded."""
        ...

    def init_layer(self, kind: str, seed: Any, layer: Any) -> Tree:
        """Float32 parameters of a layer, global shapes; `layer` is int32 []."""
        ...

    # -- batches ----------------------------------------------------------------------------------

    def batch_fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a training batch of that many rows; a batch may have others as well."""
        ...

    def weigh(self, batch: Tree, total: Callable) -> Tree:
        """The batch, with weights computed from the global one; `total` sums an array over that."""
        ...

    # -- a microbatch -----------------------------------------------------------------------------

    def context(
        self, layer: Any, batch: Tree, samples_B: Any, rng: Any, part: Any, busy: Any
    ) -> Any:
        """What a layer is told besides its input: which layer it is (int32 []; -1: the embedding),
        the rows' numbers in the global batch (int32 [B]), the step's random key (uint32 [2]; None:
        no dropout), which slice of the sequence this is, and whether the stage computes anything
        that counts (bool []; None: it does). None if none of it matters."""
        ...

    def embed(self, shared: Tree, batch: Tree, context: Any) -> Stream:
        """The stream before the first layer, the same on every stage. Expects the same gradient on
        every stage."""
        ...

    def layer(self, kind: str, params: Tree, stream: Stream, context: Any, *cache: Tree) -> Any:
        """The stream after a layer. For a slice of the sequence, given the cache of earlier ones
        (`empty_cache`): (stream, this slice's own part of the cache, [B, S / slices, ...])."""
        ...

    def loss(self, shared: Tree, stream: Stream, batch: Tree) -> jax.Array:
        """The sum of the weighted losses, float32 []; the stream is the same on every stage."""
        ...

    def losses(self, shared: Tree, stream: Stream, batch: Tree) -> dict[str, jax.Array]:
        """The losses whose sum training minimises, by name, float32 [] each: "loss" as above, and
        any that layers add themselves."""
        ...

    def head_positions(self, shared: Tree, stream: Stream) -> int:
        """How many positions of a shard of the sequence `loss` and `scores` are given at once, with
        the batch's arrays cut to these. Arrays with one value a row come in the first call only."""
        ...

    def scores(self, shared: Tree, stream: Stream, batch: Tree) -> tuple[jax.Array, jax.Array]:
        """(losses, hits) float32 [B, S] of batch["targets"], unweighted: a hit is 1 where the
        target is the likeliest token."""
        ...

    def next_logits(self, shared: Tree, stream: Stream, positions_B: Any) -> jax.Array:
        """logits_Bv float32, this device's part of the vocabulary, at each row's position."""
        ...

    # -- sequences in slices, and texts that are continued ----------------------------------------

    def empty_cache(self, kind: str, rows: int) -> Tree:
        """[B, S, ...] each: what a layer hands from slice to slice, keys and values as a rule; no
        leaves if it needs nothing of earlier slices."""
        ...

    def empty_past(self, kind: str, rows: int, length: int) -> dict[str, Tree]:
        """[n, B, h, S, K] each, or a `State`: what a layer keeps of texts up to that length, by the
        names that it gives to `keep`; {} if it keeps nothing."""
        ...

    def extend(self, kind: str, params: Tree, stream: Stream, context: Any, keep: Keep) -> Stream:
        """The stream after a layer on the next t positions of texts: those in `context`, or the
        first t. The last that counts is batch["last"], int32 [B]. What is to be kept is given to
        `keep`, each name once."""
        ...
