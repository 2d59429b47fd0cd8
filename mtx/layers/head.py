"""Heads, which compute losses, scores and logits from the last layer's output.

A head is called with the token table, which it uses if it has no table of its own.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.embedding import token_table
from mtx.layers.kernels import head_positions
from mtx.layers.norm import Norm, scaled
from mtx.layers.sublayer import Build
from mtx.sharding.collectives import all_gather_sequence
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.sequence import places
from mtx.sharding.vocab import VOCAB, vocab_logits, vocab_losses, vocab_scores

Fields = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """The config of a head that predicts the next token."""

    vocab: int
    norm: Norm | None  # None: the last layer has it
    tied: bool  # its table is the embedding's
    scale: float = 1.0  # multiplies the logits
    softcap: float | None = None  # c tanh(logit / c) (Gemma 2)
    second_weight: float = 0.0  # of the loss of the token after the next (`mtx.layers.multi_token`)

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        """rows: V, padded"""
        return NextTokenHead(self, build, rows, rngs)

    def positions(self, rows: int, positions: int, vocab: int) -> int:
        """How many positions are taken at once: see `mtx.layers.kernels.head_positions`."""
        return head_positions(rows, positions, vocab)

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        """The arrays of a training batch of that many rows; a batch may have others as well."""
        return fields_of_targets(rows, sequence)

    def weigh(self, batch: Any, total: Callable) -> Any:
        """The batch with weights that follow from the global one; `total` sums an array over it."""
        return batch


def fields_of_targets(rows: int, sequence: int) -> Fields:
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    shape = rows, sequence
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


class NextTokenHead(nnx.Module):
    """norm, unless the last layer has it, and output [V, D] if it is not tied"""

    def __init__(self, config: NextToken, build: Build, rows: int, rngs: nnx.Rngs):
        self.config, self.axes = config, build.axes
        if config.norm is not None:
            self.norm = config.norm.module(build.hidden)
        if not config.tied:
            table = token_table(config.vocab, rows, build, rngs.params)
            dims = "vocabulary", "hidden"
            self.output = parameter(table, spec=P(VOCAB, None), role="head", dims=dims)

    def _normed(self, x_BsD):
        """The input of the table, with the logits' scale."""
        x_BsD = x_BsD if self.config.norm is None else self.norm(x_BsD)
        return scaled(x_BsD, self.config.scale)

    def _table(self, tokens_vD):
        return tokens_vD if self.config.tied else self.output[...]

    def next_logits(self, tokens_vD, x_BsD, positions_B):
        """logits_Bv in float32 of one position per row, -inf for padding; x is the same on every
        stage."""
        x_B1D = self._normed(row_at(x_BsD, positions_B, self.axes))
        table_vD, config = self._table(tokens_vD), self.config
        return vocab_logits(x_B1D, table_vD, config.vocab, self.axes, None, config.softcap)[:, 0]

    def scores(self, tokens_vD, x_BsD, batch):
        """(losses, hits) float32 [B, S] of batch["targets"]: see `vocab_scores`."""
        return self._of_targets(vocab_scores, tokens_vD, x_BsD, batch)

    def loss(self, tokens_vD, x_BsD, batch):
        """The sum of the weighted losses of all positions, float32 []."""
        loss_BS = self._of_targets(vocab_losses, tokens_vD, x_BsD, batch)
        return (loss_BS * batch["weights"]).sum()

    def _of_targets(self, function, tokens_vD, x_BsD, batch):
        table_vD, config = self._table(tokens_vD), self.config
        return function(
            self._normed(x_BsD), table_vD, batch["targets"], config.vocab, self.axes, None,
            config.softcap,
        )  # fmt: skip


def row_at(x_BsD, positions_B, axes: Axes):
    """x_B1D of one position per row, on every device."""
    x_BSD = all_gather_sequence(x_BsD, axes.tensor if axes.sequence_parallel else None)
    if axes.context is not None:
        own_BS1 = (places(x_BSD.shape[1], axes) == positions_B[:, None])[..., None]
        return lax.psum(jnp.where(own_BS1, x_BSD, 0).sum(axis=1, keepdims=True), axes.context)
    return jnp.take_along_axis(x_BSD, positions_B[:, None, None], axis=1)
