"""What stands before the first block and after the last: embeddings, final norm, output layer.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig
from mtx.models.place import Place, first_position
from mtx.sharding.collectives import all_gather_sequence, shard_of_sequence
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import dropout_rows, fold
from mtx.sharding.vocab import embed_tokens, vocab_logits, vocab_losses, vocab_scores

VOCAB = ("pipe", "tensor")  # the axes of a vocabulary-sharded dim
_EMBEDDING = 2**31 - 1  # of dropout's keys: its place among the layers, beyond any


def token_table(config: ModelConfig, vocab_rows: int, key):
    """[V, D], each row from a key of its own: its values do not depend on the padding."""
    rows = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), config.hidden))
    ids = jnp.arange(vocab_rows)
    return config.init_std * rows(ids) * (ids < config.vocab)[:, None]


def add_positions(x_BsD, table_SD, positions_BS, axes: Axes, place: Place | None):
    """x with the rows of a table of positions: those of the batch, or one after the other."""
    if positions_BS is None:
        first = first_position(x_BsD, axes, place)
        return x_BsD + lax.dynamic_slice_in_dim(table_SD, first, x_BsD.shape[1])
    return x_BsD + table_SD[local_part(positions_BS, axes)]


def local_part(a_BS, axes: Axes):
    """This device's part of what stands at each position; with sequence parallelism a_Bs."""
    return shard_of_sequence(a_BS, axes.tensor if axes.sequence_parallel else None)


def drop_embedding(x_BsD, config: ModelConfig, axes: Axes, place: Place | None):
    """The embedding's dropout."""
    if place is None or place.key is None or not config.dropout:
        return x_BsD
    first, key = first_position(x_BsD, axes, place), fold(place.key, _EMBEDDING)
    return dropout_rows(x_BsD, config.dropout, key, place.samples_B, first)


class Ends(nnx.Module):
    """Of a model that predicts the next token."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        norm: type,
        learned_positions: bool,
        axes: Axes,
        vocab_rows: int,
        rngs: nnx.Rngs,
    ):
        """norm: LayerNorm or RMSNorm."""
        self.tokens = parameter(
            token_table(config, vocab_rows, rngs.params()), spec=P(VOCAB, None), role="embedding"
        )
        if learned_positions:
            shape = (config.sequence, config.hidden)
            positions = config.init_std * jax.random.normal(rngs.params(), shape)
            self.positions = parameter(positions, spec=P(None, None), role="embedding")
        self.norm = norm(config.hidden, epsilon=config.norm_epsilon)
        if not config.tied:
            table = token_table(config, vocab_rows, rngs.params())
            self.output = parameter(table, spec=P(VOCAB, None), role="head")
        self.learned_positions = learned_positions
        self.config = config
        self.axes = axes

    def embed(self, batch, place: Place | None = None):
        """x_BsD, the same on every stage. Expects the same gradient on every stage."""
        x_BsD = embed_tokens(self.tokens[...], batch["tokens"], self.axes)
        if self.learned_positions:
            positions_BS = batch.get("positions")
            x_BsD = add_positions(x_BsD, self.positions[...], positions_BS, self.axes, place)
        return drop_embedding(x_BsD, self.config, self.axes, place)

    def _table(self):
        return (self.tokens if self.config.tied else self.output)[...]

    def next_logits(self, x_BsD, positions_B):
        """logits_Bv in float32 of one position a row, padding -inf; x the same on every stage."""
        x_B1D = row_at(self.norm(x_BsD), positions_B, self.axes)
        return vocab_logits(x_B1D, self._table(), self.config.vocab, self.axes)[:, 0]

    def scores(self, x_BsD, batch):
        """(losses, hits) float32 [B, S] of batch["targets"]: see `vocab_scores`."""
        targets, vocab = batch["targets"], self.config.vocab
        return vocab_scores(self.norm(x_BsD), self._table(), targets, vocab, self.axes)

    def loss(self, x_BsD, batch):
        """The sum of the weighted losses of all positions, float32 []."""
        x_BsD, vocab = self.norm(x_BsD), self.config.vocab
        loss_BS = vocab_losses(x_BsD, self._table(), batch["targets"], vocab, self.axes)
        return (loss_BS * batch["weights"]).sum()


def row_at(x_BsD, positions_B, axes: Axes):
    """x_B1D of one position a row, on every device."""
    x_BSD = all_gather_sequence(x_BsD, axes.tensor if axes.sequence_parallel else None)
    return jnp.take_along_axis(x_BSD, positions_B[:, None, None], axis=1)
