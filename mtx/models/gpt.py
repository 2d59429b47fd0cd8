"""GPT as Megatron-LM trains it: pre-LN blocks, learned positions, GELU, tied or untied output.

Modules are Flax NNX, written for the local shard: the same module runs on one device with
`Axes()`, and that is the reference of the tests. Every `nnx.Param` carries its PartitionSpec.

`GPT` is what the pipeline sees: three functions, embed, block and loss, over plain trees of
parameters {"ends": ..., "block": ...}, the block's leaves stacked over layers.

Legend: B rows · S sequence (s: shard) · D hidden · H heads (h: shard) · K head size ·
F feed-forward (f: shard) · V padded vocabulary (v: shard) · L layers · n = 3 for q, k, v
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig, Recompute
from mtx.models.layers import (
    AttentionKernel,
    LayerNorm,
    attention_with_dropout,
    causal_attention,
    gelu,
    sliced_attention,
)
from mtx.sharding.collectives import all_gather_sequence
from mtx.sharding.linear import MATMUL_OUTPUT, ColumnLinear, RowLinear, output_std
from mtx.sharding.mesh import Axes
from mtx.sharding.random import dropout_rows, fold, key_data
from mtx.sharding.vocab import embed_tokens, vocab_logits, vocab_losses

VOCAB = ("pipe", "tensor")  # the axes of a vocabulary-sharded dim
_ONE_DEVICE = Axes()
_ATTENTION_SITE, _MLP_SITE, _SCORES_SITE, _EMBED_SITE = range(4)  # of dropout


class Place(NamedTuple):
    """Where a block's input stands; its random numbers follow from this and nothing else."""

    layer: jax.Array  # int32 []
    samples_B: jax.Array  # int32 [B]: rows of the global batch
    key: jax.Array  # uint32 [2]: the step's key
    part: jax.Array  # int32 []: which slice of the sequence; 0 where it is whole


class Attention(nnx.Module):
    """Causal self-attention, heads split over `tensor`."""

    def __init__(self, config: ModelConfig, *, axes: Axes, kernel: AttentionKernel, rngs: nnx.Rngs):
        heads, size = config.heads, config.head_size
        self.qkv = ColumnLinear(
            config.hidden, (3, heads, size), split=1, std=config.init_std, axes=axes, rngs=rngs
        )
        self.out = RowLinear(
            (heads, size), config.hidden, std=output_std(config.init_std, config.layers), axes=axes,
            rngs=rngs,
        )  # fmt: skip
        self.dropout = config.attention_dropout
        self.kernel = kernel
        self.axes = axes

    def of_slice(self, x_BsD, place: Place, cache_BSnhK):
        """(output, this slice's keys and values), n = 2, with those of earlier slices in a cache"""
        qkv_BbnhK = self.qkv(x_BsD)
        slices = cache_BSnhK.shape[1] // qkv_BbnhK.shape[1]
        o_BbhK = sliced_attention(qkv_BbnhK, cache_BSnhK, place.part, slices)
        return self.out(o_BbhK), qkv_BbnhK[:, :, 1:]

    def __call__(self, x_BsD, place: Place | None):
        qkv_BSnhK = self.qkv(x_BsD)
        if place is None or not self.dropout:
            return self.out(causal_attention(qkv_BSnhK, self.kernel))
        heads = qkv_BSnhK.shape[3]
        o_BShK = attention_with_dropout(
            qkv_BSnhK,
            rate=self.dropout,
            key=fold(place.key, place.layer, _SCORES_SITE),
            samples_B=place.samples_B,
            first_head=lax.axis_index(self.axes.tensor) * heads if self.axes.tensor else 0,
        )
        return self.out(o_BShK)


class MLP(nnx.Module):
    """D -> F, GELU, F -> D, with F split over `tensor`."""

    def __init__(self, config: ModelConfig, *, axes: Axes, rngs: nnx.Rngs):
        self.up = ColumnLinear(
            config.hidden, (config.ffn_hidden,), split=0, std=config.init_std, axes=axes, rngs=rngs
        )
        self.down = RowLinear(
            (config.ffn_hidden,), config.hidden, std=output_std(config.init_std, config.layers),
            axes=axes, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x_BsD):
        return self.down(gelu(self.up(x_BsD)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, axes: Axes, kernel: AttentionKernel, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.hidden, epsilon=config.norm_epsilon)
        self.attention = Attention(config, axes=axes, kernel=kernel, rngs=rngs)
        self.mlp_norm = LayerNorm(config.hidden, epsilon=config.norm_epsilon)
        self.mlp = MLP(config, axes=axes, rngs=rngs)
        self.dropout = config.dropout
        self.axes = axes

    def __call__(self, x_BsD, place: Place | None = None, cache_BSnhK=None):
        """x_BsD -> x_BsD; for a slice of the sequence, (x_BsD, its keys and values). Without a
        place, no dropout."""
        if cache_BSnhK is None:
            h_BsD = self.attention(self.attention_norm(x_BsD), place)
            return self._after_attention(x_BsD, h_BsD, place)
        h_BsD, own = self.attention.of_slice(self.attention_norm(x_BsD), place, cache_BSnhK)
        return self._after_attention(x_BsD, h_BsD, place), own

    def _after_attention(self, x_BsD, h_BsD, place):
        x_BsD = x_BsD + self._drop(h_BsD, place, _ATTENTION_SITE)
        h_BsD = self.mlp(self.mlp_norm(x_BsD))
        return x_BsD + self._drop(h_BsD, place, _MLP_SITE)

    def _drop(self, h_BsD, place, site):
        if place is None or not self.dropout:
            return h_BsD
        key = fold(place.key, place.layer, site)
        first = first_position(h_BsD, self.axes, place)
        return dropout_rows(h_BsD, self.dropout, key, place.samples_B, first)


class Ends(nnx.Module):
    """What stands before the first block and after the last: embeddings, final norm, output."""

    def __init__(self, config: ModelConfig, *, axes: Axes, vocab_rows: int, rngs: nnx.Rngs):
        def table(key):
            """[V, D], each row from a key of its own: its values do not depend on the padding."""
            rows = jax.vmap(
                lambda row: jax.random.normal(jax.random.fold_in(key, row), config.hidden)
            )
            ids = jnp.arange(vocab_rows)
            return config.init_std * rows(ids) * (ids < config.vocab)[:, None]

        self.tokens = nnx.Param(table(rngs.params()), spec=P(VOCAB, None))
        shape = (config.sequence, config.hidden)
        positions = config.init_std * jax.random.normal(rngs.params(), shape)
        self.positions = nnx.Param(positions, spec=P(None, None))
        self.norm = LayerNorm(config.hidden, epsilon=config.norm_epsilon)
        if not config.tied:
            self.output = nnx.Param(table(rngs.params()), spec=P(VOCAB, None))
        self.config = config
        self.axes = axes

    def embed(self, tokens_BS, place: Place | None = None):
        """x_BsD, the same on every stage. Expects the same gradient on every stage."""
        x_BsD = embed_tokens(self.tokens[...], tokens_BS, self.axes)
        first = first_position(x_BsD, self.axes, place)
        x_BsD += lax.dynamic_slice_in_dim(self.positions[...], first, x_BsD.shape[1])
        if place is None or not self.config.dropout:
            return x_BsD
        key = fold(place.key, _EMBED_SITE)
        return dropout_rows(x_BsD, self.config.dropout, key, place.samples_B, first)

    def _table(self):
        return (self.tokens if self.config.tied else self.output)[...]

    def next_logits(self, x_BsD, positions_B):
        """logits_Bv in float32 of one position a row, padding -inf; x the same on every stage."""
        x_BsD = self.norm(x_BsD)
        x_BSD = all_gather_sequence(
            x_BsD, self.axes.tensor if self.axes.sequence_parallel else None
        )
        x_B1D = jnp.take_along_axis(x_BSD, positions_B[:, None, None], axis=1)
        return vocab_logits(x_B1D, self._table(), self.config.vocab, self.axes)[:, 0]

    def loss(self, x_BsD, targets_BS, weights_BS):
        """The sum of the weighted losses of all positions, float32 []."""
        x_BsD, vocab = self.norm(x_BsD), self.config.vocab
        loss_BS = vocab_losses(x_BsD, self._table(), targets_BS, vocab, self.axes)
        return (loss_BS * weights_BS).sum()


def first_position(x_BsD, axes: Axes, place: Place | None):
    """The global position of this shard's first row."""
    part = 0 if place is None else place.part
    if not axes.sequence_parallel:
        return part * x_BsD.shape[1]
    shards = lax.axis_size(axes.tensor)
    return (part * shards + lax.axis_index(axes.tensor)) * x_BsD.shape[1]


class GPT:
    """A GPT as the pipeline sees it. Parameters: {"ends": {...}, "block": {...}}.

    `axes` are those that the functions' local shards are written for; `Axes()` is one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        axes: Axes = _ONE_DEVICE,
        recompute: Recompute = "none",
        kernel: AttentionKernel = "blocked",
        vocab_shards: int = 1,
        slices: int = 1,
    ):
        self.config = config
        self.slices = slices
        self.kernel = kernel
        self.axes = axes
        self.recompute = recompute
        self.vocab_rows = config.padded_vocab(vocab_shards)
        ends = nnx.eval_shape(lambda: self._ends(nnx.Rngs(params=0)))
        block = nnx.eval_shape(lambda: self._block(nnx.Rngs(params=0)))
        self._ends_graph, ends_state = nnx.split(ends)
        self._block_graph, block_state = nnx.split(block)
        self.specs = {"ends": _specs(ends_state), "block": _specs(block_state)}  # of one layer

    def _ends(self, rngs):
        return Ends(self.config, axes=self.axes, vocab_rows=self.vocab_rows, rngs=rngs)

    def _block(self, rngs):
        return Block(self.config, axes=self.axes, kernel=self.kernel, rngs=rngs)

    def init_ends(self, seed: int):
        """Float32 parameters of the ends, global shapes, vocabulary padded."""
        return nnx.to_pure_dict(nnx.state(self._ends(nnx.Rngs(params=_init_key(seed, -1)))))

    def init_block(self, seed: int, layer):
        """Float32 parameters of one layer, global shapes."""
        return nnx.to_pure_dict(nnx.state(self._block(nnx.Rngs(params=_init_key(seed, layer)))))

    def place(self, layer, samples_B, key, part=0) -> Place | None:
        """Where a block's input stands; None where that does not matter: whole sequences, no
        dropout."""
        if self.slices == 1 and not (self.config.dropout or self.config.attention_dropout):
            return None
        layer, samples_B, part = (jnp.asarray(a, jnp.int32) for a in (layer, samples_B, part))
        return Place(layer, samples_B, key, part)

    def empty_cache(self, rows: int):
        """[B, S, n, h, K], n = 2: the keys and values of one layer, for slices of sequences."""
        heads = self.config.heads // (lax.axis_size(self.axes.tensor) if self.axes.tensor else 1)
        shape = rows, self.config.sequence, 2, heads, self.config.head_size
        return jnp.zeros(shape, jnp.dtype(self.config.compute_dtype))

    def embed(self, ends, batch, place: Place | None = None):
        """x_BsD of batch["tokens"] int32 [B, S]."""
        return nnx.merge(self._ends_graph, ends).embed(batch["tokens"], place)

    def block(self, params, x_BsD, place: Place | None = None, *cache):
        """x_BsD -> x_BsD, with the parameters of one layer; for a slice of the sequence, with the
        keys and values of earlier ones, (x_BsD, its own)."""

        def run(params, x_BsD, place, *cache):
            return nnx.merge(self._block_graph, params)(x_BsD, place, *cache)

        if self.recompute == "none":
            return run(params, x_BsD, place, *cache)
        policy = None  # "full": keep the block's input alone
        if self.recompute == "selective":
            policy = jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT)
        return jax.checkpoint(run, policy=policy, prevent_cse=False)(params, x_BsD, place, *cache)

    def next_logits(self, ends, x_BsD, positions_B):
        """logits_Bv float32, this device's part of the vocabulary, after each row's position."""
        return nnx.merge(self._ends_graph, ends).next_logits(x_BsD, positions_B)

    def loss(self, ends, x_BsD, batch):
        """The sum of the losses of batch["targets"] int32 [B, S], weighted by batch["weights"]."""
        return nnx.merge(self._ends_graph, ends).loss(x_BsD, batch["targets"], batch["weights"])


def _init_key(seed: int, layer):
    key = fold(key_data(seed), layer + 1)
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _specs(state: nnx.State) -> dict:
    """The PartitionSpec of every parameter, as a plain nested dict."""
    return {
        name: value.get_metadata()["spec"] if isinstance(value, nnx.Variable) else _specs(value)
        for name, value in state.items()
    }
