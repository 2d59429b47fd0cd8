"""Layers that read retrieved text, as in RETRO (Borgeaud et al. 2022, algorithm 1).

A text is cut into chunks, and each chunk has neighbours: texts that begin like it. A small encoder
reads each neighbour in both directions, and the decoder's state of the chunk that it was found for.
From then on some of the decoder's layers attend to the result: the last position of a chunk, and
those after it up to the last but one of the next chunk, see the neighbours of the former.

    chunks        | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 |     positions, chunks of 4
    that attend          [3 4 5 6] [7 8 9 10] [11]      to neighbours of chunk 0, 1, 2

So a position depends on the neighbours of a chunk only if it is the end of that chunk or after it.
The encoder's output is a leaf of the stream. Queries and keys are rotated by their positions
(`rotary`): those of a neighbour count from its beginning, which is where its chunk begins.

In a batch, besides tokens, targets and weights: neighbours int32 [B, N], the tokens of the first
chunk's neighbours one after another, then of the second's, and so on.

Legend: B rows · S sequence (s: shard) · C = S / M chunks · M tokens of a chunk · k neighbours of
one · R tokens of a neighbour · N = C k R (n: shard) · D hidden · E the encoder's hidden · G rows of
attention: B C, or B C k · Q queries · T keys · h heads · K head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context, dropout
from mtx.layers.embedding import Embedding, EmbeddingModule, token_table
from mtx.layers.head import Fields, NextToken
from mtx.layers.layer import Kind, Layer, Stream
from mtx.layers.relative import Relative, relative_attention, with_dropout
from mtx.layers.rotary import Rotary, rotate
from mtx.layers.sublayer import Build
from mtx.sharding.linear import ColumnLinear, RowLinear
from mtx.sharding.parameter import parameter
from mtx.sharding.random import fold
from mtx.sharding.vocab import VOCAB, embed_tokens

NEIGHBOURS = "neighbours"  # the leaf of the stream, e_BnE, and the field of a batch
_SITE = 2**31 - 3  # for dropout's keys, like the embedding's _SITE for the decoder's tokens
_ENCODERS = 2**24  # added to a layer's number for the random numbers of its encoder layer
_ALL_SEEN = Relative(causal=False)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How texts are cut into chunks, and how much is retrieved for each."""

    chunk: int  # M
    neighbours: int  # k
    retrieved: int  # R

    def tokens(self, sequence: int) -> int:
        """N, the tokens of all neighbours of a row."""
        return sequence // self.chunk * self.neighbours * self.retrieved

    @property
    def places(self):
        """int32 [k R]: the places of the tokens of a chunk's neighbours, each counted from its own
        beginning."""
        return jnp.tile(jnp.arange(self.retrieved), self.neighbours)


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChunkedAttention:
    """The config that all attention to and of neighbours has in common."""

    chunks: Chunks
    heads: int  # H
    size: int  # K
    rotary: Rotary
    dropout: float = 0.0  # on the probabilities
    looks_around = True


class ChunkedAttentionModule(nnx.Module):
    """qkv and out; if keys are of another leaf, q, kv and out. The projections have no biases."""

    def __init__(
        self, config: ChunkedAttention, build: Build, rngs: nnx.Rngs, *, keys_of: int | None = None
    ):
        """keys_of: the width of the other leaf."""
        self.config, self.build = config, build
        heads, size = config.heads, config.size

        def projection(inputs: int, parts: dict[str, int]):
            return ColumnLinear(
                inputs, (*parts.values(), heads, size), split=len(parts), std=build.init_std,
                axes=build.axes, rngs=rngs, bias=False,
                dims=("hidden", *parts, "heads", "head size"),
            )  # fmt: skip

        if keys_of is None:
            self.qkv = projection(build.hidden, {"q k v": 3})
        else:
            self.q, self.kv = projection(build.hidden, {}), projection(keys_of, {"k v": 2})
        self.out = RowLinear(
            (heads, size), build.hidden, std=build.output_std, axes=build.axes, rngs=rngs,
            bias=False, dims=("heads", "head size", "hidden"),
        )  # fmt: skip

    def attend(self, queries, keys, values, places, context: Context | None):
        """o_GQhK of queries [G, Q, h, K] to all T keys of their row; places: int32 [Q] and [T]"""
        config, tensor, heads = self.config, self.build.axes.tensor, queries.shape[2]
        q_GQhK, k_GThK = (
            rotate(a, at, config.rotary) for a, at in zip((queries, keys), places, strict=True)
        )
        q_GQhK = q_GQhK * jnp.asarray(config.size**-0.5, q_GQhK.dtype)
        arrays = q_GQhK, k_GThK, values, None, None, _ALL_SEEN
        if context is None or context.rng is None or not config.dropout:
            return relative_attention(*arrays)
        samples_B, rows = context.samples_B, len(q_GQhK)
        assert samples_B is not None
        parts = rows // len(samples_B)
        return with_dropout(
            *arrays, rate=config.dropout, key=fold(context.rng, context.layer, self.build.site),
            samples_B=(samples_B[:, None] * parts + jnp.arange(parts)).reshape(rows),
            first_head=lax.axis_index(tensor) * heads if tensor else 0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NeighbourAttention(ChunkedAttention):
    """The config of a neighbour's attention to itself, in both directions."""

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return NeighbourAttentionModule(self, build, rngs)


class NeighbourAttentionModule(ChunkedAttentionModule):
    """qkv, out"""

    def __call__(self, e_BnE, context: Context | None = None):
        qkv_BNphK, size = self.qkv(e_BnE), self.config.chunks.retrieved
        rows_GRphK = _in_rows(qkv_BNphK, size)
        q_GRhK, k_GRhK, v_GRhK = (rows_GRphK[:, :, p] for p in range(3))
        places = jnp.arange(size)
        o_GRhK = self.attend(q_GRhK, k_GRhK, v_GRhK, (places, places), context)
        return self.out(o_GRhK.reshape(*qkv_BNphK.shape[:2], *o_GRhK.shape[2:]))


@dataclass(frozen=True, kw_only=True)
class StateAttention(ChunkedAttention):
    """The config of a neighbour's attention to the decoder's state of the chunk that it was found
    for."""

    hidden: int  # D

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return StateAttentionModule(self, build, rngs, keys_of=self.hidden)


class StateAttentionModule(ChunkedAttentionModule):
    """q, kv, out"""

    def __call__(self, e_BnE, x_BsD, context: Context | None = None):
        chunks = self.config.chunks
        q_BNhK, kv_BSphK = self.q(e_BnE), self.kv(x_BsD)
        kv_GMphK = _in_rows(kv_BSphK, chunks.chunk)
        places = chunks.places
        o_GQhK = self.attend(
            _in_rows(q_BNhK, len(places)), kv_GMphK[:, :, 0], kv_GMphK[:, :, 1],
            (places, jnp.arange(chunks.chunk)), context,
        )  # fmt: skip
        return self.out(o_GQhK.reshape(q_BNhK.shape))


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossAttention(ChunkedAttention):
    """The config of a decoder's attention to the neighbours of the chunk before each position."""

    encoder_hidden: int  # E

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return ChunkedCrossAttentionModule(self, build, rngs, keys_of=self.encoder_hidden)


class ChunkedCrossAttentionModule(ChunkedAttentionModule):
    """q, kv, out"""

    def __call__(self, x_BsD, e_BnE, context: Context | None = None):
        """What is added: 0 at the first M - 1 positions, before the end of the first chunk."""
        chunks = self.config.chunks
        q_BShK, kv_BNphK = self.q(x_BsD), self.kv(e_BnE)
        before = chunks.chunk - 1
        places = chunks.places
        kv_GTphK = _in_rows(kv_BNphK, len(places))
        o_GMhK = self.attend(
            _in_rows(_shifted(q_BShK, before), chunks.chunk), kv_GTphK[:, :, 0],
            kv_GTphK[:, :, 1], (before + jnp.arange(chunks.chunk), places), context,
        )  # fmt: skip
        return self.out(_shifted(o_GMhK.reshape(q_BShK.shape), -before))


def _in_rows(a_BS, size: int):
    """[B, S, ...] -> [B S / size, size, ...]"""
    return a_BS.reshape(-1, size, *a_BS.shape[2:])


def _shifted(a_BS, by: int):
    """The array with the values from place i + by at place i, zeros where there are none."""
    nothing = jnp.zeros_like(a_BS[:, : abs(by)])
    parts = (a_BS[:, by:], nothing) if by >= 0 else (nothing, a_BS[:, :by])
    return jnp.concatenate(parts, axis=1)


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EncoderKind(Kind):
    """A layer of the encoder: "attention", "state" if it reads the decoder's state, and "mlp"."""

    hidden: int  # E
    last: bool = False  # the encoder's last norm follows

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return EncoderLayer(self, build, rngs)


class EncoderLayer(Layer):
    """A `Layer` for the neighbours, with read_norm of the decoder's state if it reads that, and
    end_norm if it is the last."""

    def __init__(self, kind: EncoderKind, build: Build, rngs: nnx.Rngs):
        super().__init__(kind, replace(build, hidden=kind.hidden), rngs)
        self.reads, self.is_last = "state" in dict(kind.sublayers), kind.last
        if self.reads:
            self.read_norm = kind.norm.module(build.hidden)
        if kind.last:
            self.end_norm = kind.norm.module(kind.hidden)

    def __call__(self, stream: Stream, context: Context | None = None, cache: Any = None):
        """The neighbours after the layer, e_BnE."""
        if context is not None:  # random numbers other than the decoder's of this layer
            context = context._replace(layer=context.layer + _ENCODERS)
        state_BsD = self.read_norm(stream["x"]) if self.reads else None

        def run(name, module, h_BnE):
            if name == "state":
                return module(h_BnE, state_BsD, context)
            return module(h_BnE, context)

        e_BnE = self._applied({"x": stream[NEIGHBOURS]}, context, run)["x"]
        return self.end_norm(e_BnE) if self.is_last else e_BnE


@dataclass(frozen=True, kw_only=True)
class RetroKind(Kind):
    """A layer of the decoder, which may read neighbours ("cross"), and then one of the encoder, if
    `encoder` is given."""

    encoder: EncoderKind | None = None

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return RetroLayer(self, build, rngs)


class RetroLayer(Layer):
    """A `Layer` of the decoder, and encoder, if there is one."""

    def __init__(self, kind: RetroKind, build: Build, rngs: nnx.Rngs):
        super().__init__(kind, build, rngs)
        self.encodes = kind.encoder is not None
        if kind.encoder is not None:
            self.encoder = kind.encoder.module(build, rngs)

    def __call__(self, stream: Stream, context: Context | None = None, cache: Any = None):
        def run(name, module, h_BsD):
            if name == "cross":
                return module(h_BsD, stream[NEIGHBOURS], context)
            return module(h_BsD, context)

        stream = self._applied(stream, context, run)
        return stream | {NEIGHBOURS: self.encoder(stream, context)} if self.encodes else stream


# -- embedding and head ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetroEmbedding(Embedding):
    """The config of an embedding of tokens, and of the tokens of neighbours."""

    encoder_hidden: int  # E; if it is D, both use the same table

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return RetroEmbeddingModule(self, build, rows, rngs)


class RetroEmbeddingModule(EmbeddingModule):
    """tokens [V, D], and neighbours [V, E] if E is not D"""

    def __init__(self, config: RetroEmbedding, build: Build, rows: int, rngs: nnx.Rngs):
        super().__init__(config, build, rows, rngs)
        self.shares = config.encoder_hidden == build.hidden
        if not self.shares:
            own = replace(build, hidden=config.encoder_hidden)
            table = token_table(config.vocab, rows, own, rngs.params)
            dims = "vocabulary", "hidden"
            self.neighbours = parameter(table, spec=P(VOCAB, None), role="embedding", dims=dims)

    def leaves(self, batch, context: Context | None = None) -> Stream:
        """The stream's leaves besides the decoder's x."""
        table_vE = self.tokens[...] if self.shares else self.neighbours[...]
        e_BnE = embed_tokens(table_vE, batch[NEIGHBOURS], self.axes)
        return {NEIGHBOURS: dropout(e_BnE, self.config.dropout, self.axes, context, _SITE)}


@dataclass(frozen=True, kw_only=True)
class RetroHead(NextToken):
    """The config of a head that predicts the next token, for batches with neighbours."""

    chunks: Chunks

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        neighbours = jax.ShapeDtypeStruct((rows, self.chunks.tokens(sequence)), jnp.int32)
        return super().batch_fields(rows, sequence) | {NEIGHBOURS: neighbours}
