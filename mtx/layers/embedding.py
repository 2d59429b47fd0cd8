"""The embedding: tokens, sharded over the vocabulary, with learned positions, types and a norm for
models that have them.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context, dropout, first_position, places_of
from mtx.layers.norm import Norm
from mtx.layers.sublayer import Build
from mtx.sharding.collectives import shard_of_sequence
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import Keys, normal, normal_rows
from mtx.sharding.vocab import VOCAB, embed_tokens

_SITE = 2**31 - 1  # for dropout's keys, as its layer number: higher than any layer's


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The config of an embedding."""

    vocab: int  # V, before padding
    positions: int | None = None  # number of learned positions
    types: int = 0  # number of token types: batch["types"] int32 [B, S]
    norm: Norm | None = None
    scale: float | None = None  # multiplies the tokens' rows
    dropout: float = 0.0

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        """rows: V, padded"""
        return EmbeddingModule(self, build, rows, rngs)


def token_table(vocab: int, rows: int, build: Build, keys: Keys):
    """[V, D], each row from its own key, so that its values do not depend on the padding."""
    ids = jnp.arange(rows)
    return build.init_std * normal_rows(keys, ids, build.hidden) * (ids < vocab)[:, None]


class EmbeddingModule(nnx.Module):
    """tokens [V, D], positions [S, D], types [n, D], norm"""

    def __init__(self, config: Embedding, build: Build, rows: int, rngs: nnx.Rngs):
        def table(of: str, size: int):
            values = build.init_std * normal(rngs.params, (size, build.hidden))
            return parameter(values, spec=P(None, None), role="embedding", dims=(of, "hidden"))

        self.config, self.axes = config, build.axes
        tokens = token_table(config.vocab, rows, build, rngs.params)
        dims = "vocabulary", "hidden"
        self.tokens = parameter(tokens, spec=P(VOCAB, None), role="embedding", dims=dims)
        if config.positions is not None:
            self.positions = table("positions", config.positions)
        if config.types:
            self.types = table("types", config.types)
        if config.norm is not None:
            self.norm = config.norm.module(build.hidden)

    def __call__(self, batch, context: Context | None = None):
        """x_BsD of batch["tokens"] int32 [B, S], the same on every stage. Expects the same gradient
        on every stage."""
        config = self.config
        x_BsD = embed_tokens(self.tokens[...], batch["tokens"], self.axes)
        if config.scale is not None:
            x_BsD = x_BsD * jnp.asarray(config.scale, x_BsD.dtype)
        if config.positions is not None:
            x_BsD = self._add_positions(x_BsD, batch.get("positions"), context)
        if config.types:
            x_BsD += self.types[...][_local_part(batch["types"], self.axes)]
        if config.norm is not None:
            x_BsD = self.norm(x_BsD)
        return dropout(x_BsD, config.dropout, self.axes, context, _SITE)

    def _add_positions(self, x_BsD, positions_BS, context):
        """x plus rows of the position table: at the batch's positions, or in sequence order."""
        table_SD = self.positions[...]
        if positions_BS is None and self.axes.context is not None:
            return x_BsD + table_SD[places_of(x_BsD, self.axes, context)]
        if positions_BS is None:
            first = first_position(x_BsD, self.axes, context)
            return x_BsD + lax.dynamic_slice_in_dim(table_SD, first, x_BsD.shape[1])
        return x_BsD + table_SD[_local_part(positions_BS, self.axes)]


def _local_part(a_BS, axes: Axes):
    """This device's part of an array over positions; with sequence parallelism a_Bs."""
    return shard_of_sequence(a_BS, axes.tensor if axes.sequence_parallel else None)
