"""An encoder and a decoder in one pattern of layers, as in T5 (Raffel et al. 2020).

Encoder layers update one leaf of the stream. Decoder layers update another and read the encoder's,
which the last encoder layer norms. The bias of each head for each bucket of distances, the same for
all layers, is a leaf too, so that its gradient is summed from layer to layer and stage to stage.

In a batch: inputs int32 [B, E], segments int32 [B, E], 1 for text and 0 for padding; tokens, which
begin with the token that every text of the decoder begins with, targets and weights [B, S].

Legend: B rows · S sequence (s: shard; t: the next positions) · E the encoder's (e: shard) ·
D hidden · H heads (h: shard) · K head size · N buckets · n: q, k, v, or the latter two
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context, dropout, positions_of
from mtx.layers.embedding import Embedding, EmbeddingModule
from mtx.layers.head import Fields, NextToken
from mtx.layers.layer import Kind, Layer, Stream
from mtx.layers.relative import (
    Relative,
    attention_of_text,
    relative_attention,
    with_dropout,
)
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.linear import ColumnLinear, RowLinear
from mtx.sharding.parameter import parameter
from mtx.sharding.random import fold, normal
from mtx.sharding.sequence import State

ENCODER, BIAS = "encoder", "relative"  # leaves of the stream: x_BeD, and [1, 1, 2, N, h] float32
_SITE = 2**31 - 2  # for dropout's keys, like the embedding's _SITE for the decoder's tokens
Tree = Any


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelativeAttention:
    """The config of self-attention with a bias, or of a decoder's attention to the encoder, which
    has no bias."""

    heads: int  # H
    size: int  # K
    rules: Relative
    crosses: bool = False
    dropout: float = 0.0  # on the probabilities
    looks_around = True

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return RelativeAttentionModule(self, build, rngs)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        """[n, B, h, S, K], n = 2: keys and values."""
        shape = 2, rows, self.heads // build.axes.tensor_shards, length, self.size
        return jnp.zeros(shape, build.dtype)


class RelativeAttentionModule(nnx.Module):
    """qkv and out; if it crosses, q, kv and out. The projections have no biases."""

    def __init__(self, config: RelativeAttention, build: Build, rngs: nnx.Rngs):
        self.config, self.build = config, build
        heads, size = config.heads, config.size

        def projection(parts: dict[str, int]):
            return ColumnLinear(
                build.hidden, (*parts.values(), heads, size), split=len(parts), std=build.init_std,
                axes=build.axes, rngs=rngs, bias=False,
                dims=("hidden", *parts, "heads", "head size"),
            )  # fmt: skip

        if config.crosses:
            self.q, self.kv = projection({}), projection({"k v": 2})
        else:
            self.qkv = projection({"q k v": 3})
        self.out = RowLinear(
            (heads, size), build.hidden, std=build.output_std, axes=build.axes, rngs=rngs,
            bias=False, dims=("heads", "head size", "hidden"),
        )  # fmt: skip

    def of_itself(self, x_BsD, bias_Nh, context: Context | None, seen_BS=None):
        """What is added to the stream, for a sequence that sees itself."""
        q_BShK, keys, values = _parts(self.qkv(x_BsD))
        return self._attended(q_BShK, keys, values, bias_Nh, seen_BS, context)

    def of_encoder(self, x_BsD, encoder_BeD, context: Context | None, seen_BE):
        """What is added to the stream, for a sequence that sees the encoder's."""
        keys, values = _parts(self.kv(encoder_BeD))
        return self._attended(self.q(x_BsD), keys, values, None, seen_BE, context)

    def _attended(self, q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, context: Context | None):
        config, tensor, heads = self.config, self.build.axes.tensor, q_BShK.shape[2]
        arrays = q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT
        if context is None or context.rng is None or not config.dropout:
            return self.out(relative_attention(*arrays, config.rules))
        o_BShK = with_dropout(
            *arrays, config.rules, rate=config.dropout,
            key=fold(context.rng, context.layer, self.build.site), samples_B=context.samples_B,
            first_head=lax.axis_index(tensor) * heads if tensor else 0,
        )  # fmt: skip
        return self.out(o_BShK)

    # -- generated text ---------------------------------------------------------------------------

    def text_of_itself(self, x_BtD, bias_Nh, context: Context | None, keep: Keep):
        """As `of_itself`, with the keys and values that `keep` holds of earlier positions."""
        qkv_BtnhK = self.qkv(x_BtD)
        held_nBhSK = keep(jnp.transpose(qkv_BtnhK[:, :, 1:], (2, 0, 3, 1, 4)))
        if held_nBhSK is None:
            q_BthK, keys, values = _parts(qkv_BtnhK)
            return self._attended(q_BthK, keys, values, bias_Nh, None, context)
        places_Bt, size = positions_of(context, x_BtD.shape[1]), held_nBhSK.shape[3]
        bias_BhtS = self.config.rules.bias_of_places(bias_Nh, places_Bt, size)
        seen_B1tS = (jnp.arange(size) <= places_Bt[..., None])[:, None]
        return self.out(attention_of_text(qkv_BtnhK[:, :, 0], held_nBhSK, bias_BhtS, seen_B1tS))

    def text_of_encoder(self, x_BtD, encoder_BeD, context: Context | None, keep: Keep, seen_BE):
        """As `of_encoder`; the first pass keeps the encoder's keys and values for later ones."""
        if encoder_BeD is None:
            held: Any = keep(None)
            seen_B11E = held.arrays["seen"][0][:, :1, None]
            return self.out(attention_of_text(self.q(x_BtD), held.arrays["kv"], None, seen_B11E))
        kv_BEnhK = self.kv(encoder_BeD)
        seen_BhE = jnp.broadcast_to(
            True if seen_BE is None else seen_BE[:, None],
            (len(kv_BEnhK), kv_BEnhK.shape[3], kv_BEnhK.shape[1]),
        )
        keep(State({"kv": jnp.transpose(kv_BEnhK, (2, 0, 3, 1, 4)), "seen": seen_BhE[None]}))
        keys, values = _parts(kv_BEnhK)
        return self._attended(self.q(x_BtD), keys, values, None, seen_BE, context)


def _parts(a_BSnhK):
    """n arrays [B, S, h, K]"""
    return tuple(a_BSnhK[:, :, n] for n in range(a_BSnhK.shape[2]))


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EncoderKind(Kind):
    """A layer of the encoder: "attention", and other sublayers that look at no other position."""

    last: bool = False  # the encoder's last norm follows

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return EncoderLayer(self, build, rngs)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        return {}


class EncoderLayer(Layer):
    """A `Layer` of the encoder, with end_norm if it is the last one."""

    def __init__(self, kind: EncoderKind, build: Build, rngs: nnx.Rngs):
        super().__init__(kind, build, rngs)
        self.is_last = kind.last
        if kind.last:
            self.end_norm = kind.norm.module(build.hidden)

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        seen_BE, bias_Nh = _seen(context), stream[BIAS][0, 0, 0]

        def run(name, module, h_BeD):
            if name == "attention":
                return module.of_itself(h_BeD, bias_Nh, context, seen_BE)
            return module(h_BeD, context)

        x_BeD = self._applied({"x": stream[ENCODER]}, context, run)["x"]
        return stream | {ENCODER: self.end_norm(x_BeD) if self.is_last else x_BeD}

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        """The first pass has the encoder's text; later ones do not, and change nothing."""
        return self(stream, context) if ENCODER in stream else stream


@dataclass(frozen=True, kw_only=True)
class DecoderKind(Kind):
    """A layer of the decoder: "attention", "cross" and other sublayers."""

    cross_size: int  # E, how many of the encoder's positions are kept

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return DecoderLayer(self, build, rngs)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        by_name: dict[str, Any] = dict(self.sublayers)
        kv = by_name["cross"].empty_past(build, rows, self.cross_size)
        seen = jnp.zeros(kv.shape[1:4], bool)[None]
        own = by_name["attention"].empty_past(build, rows, length)
        return {"attention": own, "cross": State({"kv": kv, "seen": seen})}


class DecoderLayer(Layer):
    """A `Layer` of the decoder."""

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        def run(name, module, h_BsD):
            if name == "attention":
                return module.of_itself(h_BsD, stream[BIAS][0, 0, 1], context)
            if name == "cross":
                return module.of_encoder(h_BsD, stream[ENCODER], context, _seen(context))
            return module(h_BsD, context)

        return self._applied(stream, context, run)

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        def run(name, module, h_BtD):
            def keep_own(own):
                held = keep({name: own})
                return None if held is None else held[name]

            if name == "attention":
                return module.text_of_itself(h_BtD, stream[BIAS][0, 0, 1], context, keep_own)
            if name == "cross":
                encoder, seen = stream.get(ENCODER), _seen(context)
                return module.text_of_encoder(h_BtD, encoder, context, keep_own, seen)
            return module(h_BtD, context)

        return self._applied(stream, context, run)


def _seen(context: Context | None):
    """bool [B, E]: the encoder's positions that are text; None: all."""
    if context is None or context.segments_BS is None:
        return None
    return context.segments_BS > 0


# -- embedding and head ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderEmbedding(Embedding):
    """The config of an embedding that encoder and decoder share, with the biases."""

    buckets: int  # N
    heads: int  # H

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return EncoderDecoderEmbeddingModule(self, build, rows, rngs)


class EncoderDecoderEmbeddingModule(EmbeddingModule):
    """tokens [V, D], with a standard deviation of 1; encoder_bias and decoder_bias [N, H]"""

    def __init__(self, config: EncoderDecoderEmbedding, build: Build, rows: int, rngs: nnx.Rngs):
        super().__init__(config, replace(build, init_std=1.0), rows, rngs)

        def bias():
            values = build.init_std * normal(rngs.params, (config.buckets, config.heads))
            dims = "buckets", "heads"
            return parameter(values, spec=P(None, "tensor"), role="embedding", dims=dims)

        self.encoder_bias, self.decoder_bias = bias(), bias()

    def leaves(self, batch, context: Context | None = None) -> Stream:
        """The stream's leaves besides the decoder's x. The bias is float32, because its gradients
        are summed; its second dim, of size 1, is the one that has positions in other leaves."""
        tables = self.encoder_bias[...], self.decoder_bias[...]
        leaves = {BIAS: jnp.stack(tables).astype(jnp.float32)[None, None]}
        if "inputs" in batch:
            x_BeD = super().__call__({"tokens": batch["inputs"]})
            rate = self.config.dropout
            leaves[ENCODER] = dropout(x_BeD, rate, self.axes, context, _SITE)
        return leaves


@dataclass(frozen=True, kw_only=True)
class DecoderHead(NextToken):
    """The config of the decoder's head."""

    encoder_sequence: int  # E

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        inputs = jax.ShapeDtypeStruct((rows, self.encoder_sequence), jnp.int32)
        return super().batch_fields(rows, sequence) | {"inputs": inputs, "segments": inputs}
