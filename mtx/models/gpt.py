"""GPT as Megatron-LM trains it: pre-LN blocks, learned positions, GELU, tied or untied output.

Legend: B rows · S sequence (s: shard) · D hidden · H heads (h: shard) · K head size ·
F feed-forward (f: shard) · n = 3 for q, k, v
"""

from __future__ import annotations

from flax import nnx
from jax import lax

from mtx.config import ModelConfig
from mtx.models.attention import (
    AttentionKernel,
    Projected,
    attention,
    attention_with_dropout,
    keys_and_values,
    separate,
    sliced_attention,
)
from mtx.models.cached import Keep, cached_attention, kept_of
from mtx.models.ends import Ends
from mtx.models.layers import LayerNorm, gelu
from mtx.models.model import Model
from mtx.models.place import Place, first_position
from mtx.sharding.linear import ColumnLinear, RowLinear, output_std
from mtx.sharding.mesh import Axes
from mtx.sharding.random import dropout_rows, fold

_ATTENTION_SITE, _MLP_SITE, _SCORES_SITE = range(3)  # of dropout


class Attention(nnx.Module):
    """Self-attention, heads split over `tensor`. Other families project otherwise."""

    def __init__(self, config: ModelConfig, *, axes: Axes, kernel: AttentionKernel, rngs: nnx.Rngs):
        self.config = config
        self.kernel = kernel
        self.axes = axes
        self.make_projections(rngs)

    def make_projections(self, rngs: nnx.Rngs) -> None:
        """`qkv` and `out`."""
        config, (heads, size) = self.config, (self.config.heads, self.config.head_size)
        self.qkv = ColumnLinear(
            config.hidden, (3, heads, size), split=1, std=config.init_std, axes=self.axes, rngs=rngs
        )
        self.out = RowLinear(
            (heads, size), config.hidden, std=output_std(config.init_std, config.layers),
            axes=self.axes, rngs=rngs,
        )  # fmt: skip

    def project(self, x_BsD, place: Place | None) -> Projected:
        """Queries, keys and values, as `mtx.models.attention` takes them."""
        return (self.qkv(x_BsD),)

    def of_slice(self, x_BsD, place: Place, cache_BSngK):
        """(output, this slice's keys and values), n = 2, with those of earlier slices in a cache"""
        projected = self.project(x_BsD, place)
        own_BbngK = keys_and_values(projected)
        slices = cache_BSngK.shape[1] // own_BbngK.shape[1]
        return self.out(sliced_attention(projected, cache_BSngK, place.part, slices)), own_BbngK

    def of_text(self, x_BtD, place: Place | None, keep: Keep):
        """(output, what `keep` gives back): see `Model.extend`."""
        projected = self.project(x_BtD, place)
        held_nBgSK, kept = keep(kept_of(projected))
        if held_nBgSK is None:
            return self.out(attention(projected, causal=True, kernel=self.kernel)), kept
        q_BthK, _, _ = separate(projected)
        return self.out(cached_attention(q_BthK, held_nBgSK, place.positions_BS)), kept

    def __call__(self, x_BsD, place: Place | None):
        projected, causal = self.project(x_BsD, place), self.config.causal
        segments_BS = None if place is None else place.segments_BS
        rate = self.config.attention_dropout
        if place is None or place.key is None or not rate:
            return self.out(attention(projected, segments_BS, causal=causal, kernel=self.kernel))
        heads = projected[0].shape[-2]
        o_BShK = attention_with_dropout(
            projected, segments_BS, causal=causal, rate=rate,
            key=fold(place.key, place.layer, _SCORES_SITE), samples_B=place.samples_B,
            first_head=lax.axis_index(self.axes.tensor) * heads if self.axes.tensor else 0,
        )  # fmt: skip
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
        self.gelu = config.gelu

    def __call__(self, x_BsD):
        return self.down(gelu(self.up(x_BsD), self.gelu))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        norm: type = LayerNorm,
        attention: type = Attention,
        mlp: type = MLP,
        axes: Axes,
        kernel: AttentionKernel,
        rngs: nnx.Rngs,
    ):
        """norm, attention, mlp: the modules that a block is made of."""
        self.attention_norm = norm(config.hidden, epsilon=config.norm_epsilon)
        self.attention = attention(config, axes=axes, kernel=kernel, rngs=rngs)
        self.mlp_norm = norm(config.hidden, epsilon=config.norm_epsilon)
        self.mlp = mlp(config, axes=axes, rngs=rngs)
        self.dropout = config.dropout
        self.axes = axes

    def __call__(self, x_BsD, place: Place | None = None, cache_BSngK=None):
        """x_BsD -> x_BsD; for a slice of the sequence, (x_BsD, its keys and values). Without a
        place, no dropout."""
        if cache_BSngK is None:
            h_BsD = self.attention(self.attention_norm(x_BsD), place)
            return self._after_attention(x_BsD, h_BsD, place)
        h_BsD, own = self.attention.of_slice(self.attention_norm(x_BsD), place, cache_BSngK)
        return self._after_attention(x_BsD, h_BsD, place), own

    def extend(self, x_BtD, place: Place | None, keep: Keep):
        """(x_BtD, what `keep` gives back): see `Model.extend`."""
        h_BtD, kept = self.attention.of_text(self.attention_norm(x_BtD), place, keep)
        return self._after_attention(x_BtD, h_BtD, place), kept

    def _after_attention(self, x_BsD, h_BsD, place):
        x_BsD = x_BsD + self.drop_attention(h_BsD, place)
        h_BsD = self.mlp(self.mlp_norm(x_BsD))
        return x_BsD + self.drop_mlp(h_BsD, place)

    def drop_attention(self, h_BsD, place: Place | None):
        """The dropout before attention's residual addition."""
        return self._drop(h_BsD, place, _ATTENTION_SITE)

    def drop_mlp(self, h_BsD, place: Place | None):
        """The dropout before the MLP's."""
        return self._drop(h_BsD, place, _MLP_SITE)

    def _drop(self, h_BsD, place, site):
        if place is None or place.key is None or not self.dropout:
            return h_BsD
        key = fold(place.key, place.layer, site)
        first = first_position(h_BsD, self.axes, place)
        return dropout_rows(h_BsD, self.dropout, key, place.samples_B, first)


class GPT(Model):
    """Megatron-LM's GPT, and GPT-2."""

    def make_ends(self, rngs: nnx.Rngs) -> Ends:
        return Ends(
            self.config, norm=LayerNorm, learned_positions=True, axes=self.axes,
            vocab_rows=self.vocab_rows, rngs=rngs,
        )  # fmt: skip

    def make_block(self, rngs: nnx.Rngs) -> Block:
        return Block(self.config, axes=self.axes, kernel=self.kernel, rngs=rngs)
