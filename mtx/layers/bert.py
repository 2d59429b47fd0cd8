"""BERT's heads: for masked tokens and for the order of two texts (Devlin et al. 2019), and the one
on whole rows that fine-tuning trains.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard) · C outputs
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

from mtx.layers.head import Fields, fields_of_targets, row_at
from mtx.layers.kernels import head_positions
from mtx.layers.mlp import Activation, activate
from mtx.layers.norm import Norm
from mtx.layers.sublayer import Build
from mtx.sharding.collectives import reduce_from
from mtx.sharding.linear import matmul
from mtx.sharding.parameter import parameter
from mtx.sharding.random import dropout_rows, key_data, normal
from mtx.sharding.vocab import VOCAB, vocab_logits, vocab_losses, vocab_scores


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """The config of both heads that BERT is pretrained with.

    In a batch: types int32 [B, S]; segments int32 [B, S], 1 for text and 0 for padding; order int32
    [B], the binary head's label, below 0 if there is none. A step's loss is the mean over the
    masked tokens plus the mean over the rows that have an order.
    """

    vocab: int
    norm: Norm
    final_norm: bool  # one after the last layer
    activation: Activation

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return PretrainingHead(self, build, rows, rngs)

    def positions(self, rows: int, positions: int, vocab: int) -> int:
        return head_positions(rows, positions, vocab)

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        fields = fields_of_targets(rows, sequence)
        text, order = fields["tokens"], jax.ShapeDtypeStruct((rows,), jnp.int32)
        return fields | {"types": text, "segments": text, "order": order}

    def weigh(self, batch: Any, total: Callable) -> Any:
        """The batch with order_weights: the number of masked tokens over the number of rows with an
        order, for each such row. The sum of both losses, divided by the number of masked tokens, is
        then the sum of their means."""
        if "order" not in batch:
            return batch
        counts = batch["order"] >= 0
        rows, tokens = total(counts), total(batch["weights"])
        weight = tokens / jnp.maximum(rows, 1)
        return batch | {"order_weights": counts * weight}


class Dense(nnx.Module):
    """x W + b, the same on every device: small compared with the layers."""

    def __init__(
        self, inputs: int, outputs: int, *, std: float, rngs: nnx.Rngs, dims=("inputs", "hidden")
    ):
        w = std * normal(rngs.params, (inputs, outputs))
        self.w = parameter(w, spec=P(None, None), role="matrix", dims=dims)
        b = jnp.zeros(outputs, jnp.float32)
        self.b = parameter(b, spec=P(None), role="bias", dims=dims[1:])

    def __call__(self, x_BSD):
        return matmul(x_BSD, self.w[...]) + self.b[...]


class MaskedHead(Dense):
    """D -> D, GELU and a norm before the token table, and a bias for each token after it."""

    def __init__(self, config: Pretraining, build: Build, rows: int, rngs: nnx.Rngs):
        super().__init__(build.hidden, build.hidden, std=build.init_std, rngs=rngs)
        self.norm = config.norm.module(build.hidden)
        bias = jnp.zeros(rows, jnp.float32)
        self.bias = parameter(bias, spec=P(VOCAB), role="bias", dims=("vocabulary",))
        self.activation: Activation = config.activation

    def __call__(self, x_BsD):
        return self.norm(activate(super().__call__(x_BsD), self.activation))


class Pooler(nnx.Module):
    """Base of heads on whole rows: the last norm, and a layer on the first position."""

    def __init__(self, config: Pretraining | Classes, build: Build, rngs: nnx.Rngs):
        if config.final_norm:
            self.norm = config.norm.module(build.hidden)
        self.axes = build.axes

    def make_pooler(self, build: Build, rngs: nnx.Rngs) -> None:
        self.pooler = Dense(build.hidden, build.hidden, std=build.init_std, rngs=rngs)

    def final(self, x_BsD):
        return self.norm(x_BsD) if hasattr(self, "norm") else x_BsD

    def pooled(self, x_BsD):
        """tanh(x W + b) [B, D] of the first position. With sequence parallelism only the first
        device of `tensor` has it, and only the first of `context`; on the others the values are to
        be ignored."""
        return jnp.tanh(self.pooler(self.final(x_BsD)[:, :1]))[:, 0]

    def of_first_position(self, value):
        """The `value` of the device that holds the first position, on every device of `tensor`; 0
        on the other devices of `context`."""
        if self.axes.context is not None:
            value = jnp.where(lax.axis_index(self.axes.context) == 0, value, 0)
        if not self.axes.sequence_parallel:
            return value
        mine = lax.axis_index(self.axes.tensor) == 0
        return reduce_from(jnp.where(mine, value, 0), self.axes.tensor)


class PretrainingHead(Pooler):
    """norm, masked, pooler, binary"""

    def __init__(self, config: Pretraining, build: Build, rows: int, rngs: nnx.Rngs):
        super().__init__(config, build, rngs)
        self.masked = MaskedHead(config, build, rows, rngs)
        self.make_pooler(build, rngs)
        self.binary = Dense(
            build.hidden, 2, std=build.init_std, rngs=rngs, dims=("hidden", "orders")
        )
        self.vocab = config.vocab

    def next_logits(self, tokens_vD, x_BsD, positions_B):
        """logits_Bv in float32 of the masked-token head at one position per row."""
        x_B1D = self.masked(row_at(self.final(x_BsD), positions_B, self.axes))
        return vocab_logits(x_B1D, tokens_vD, self.vocab, self.axes, self.masked.bias[...])[:, 0]

    def scores(self, tokens_vD, x_BsD, batch):
        """(losses, hits) float32 [B, S] of the masked-token head: see `vocab_scores`."""
        return self._of_targets(vocab_scores, tokens_vD, x_BsD, batch)

    def loss(self, tokens_vD, x_BsD, batch):
        """The sum of the weighted losses of both heads, float32 []."""
        loss_BS = self._of_targets(vocab_losses, tokens_vD, x_BsD, batch)
        masked = (loss_BS * batch["weights"]).sum()
        if "order" not in batch:
            return masked
        logits_B2 = self.binary(self.pooled(x_BsD)[:, None])[:, 0].astype(jnp.float32)
        log_p_B2 = jax.nn.log_softmax(logits_B2)
        label_B = jnp.maximum(batch["order"], 0)
        loss_B = -jnp.take_along_axis(log_p_B2, label_B[:, None], axis=1)[:, 0]
        return masked + self.of_first_position((loss_B * batch["order_weights"]).sum())

    def _of_targets(self, function, tokens_vD, x_BsD, batch):
        x_BsD, bias_v = self.masked(self.final(x_BsD)), self.masked.bias[...]
        return function(x_BsD, tokens_vD, batch["targets"], self.vocab, self.axes, bias_v)


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The config of a head on whole rows: the pooled first position, dropout, and a linear layer
    (Devlin et al. 2019, section 4.1).

    With `options` = 1 each row is an example, and the head has one output per class. With more,
    that many consecutive rows are the options of one example, and the head has one output.

    In a batch, besides BERT's tokens, types and segments: labels int32 [B], the class, or 1 for the
    right option and 0 for the others; weights float32 [B, S], 1 at the first position of the first
    row of each example that counts; rng int32 [B], random numbers that the head's dropout is
    computed from, absent if there is no dropout.
    """

    outputs: int  # C
    options: int
    norm: Norm
    final_norm: bool
    dropout: float

    @classmethod
    def instead_of(cls, head: Pretraining, *, outputs: int, options: int, dropout: float):
        """The config that replaces that of the heads a BERT was pretrained with."""
        return cls(
            outputs=outputs, options=options, norm=head.norm, final_norm=head.final_norm,
            dropout=dropout,
        )  # fmt: skip

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return ClassifierHead(self, build, rngs)

    def positions(self, rows: int, positions: int, vocab: int) -> int:
        """All of them, since this head has no logits of tokens."""
        return positions

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        fields, number = fields_of_targets(rows, sequence), jax.ShapeDtypeStruct((rows,), jnp.int32)
        text = fields.pop("targets")
        return fields | {"types": text, "segments": text, "labels": number, "rng": number}

    def weigh(self, batch: Any, total: Callable) -> Any:
        return batch


class ClassifierHead(Pooler):
    """norm, pooler, classifier"""

    def __init__(self, config: Classes, build: Build, rngs: nnx.Rngs):
        super().__init__(config, build, rngs)
        self.make_pooler(build, rngs)
        self.classifier = Dense(
            build.hidden, config.outputs, std=build.init_std, rngs=rngs, dims=("hidden", "classes")
        )
        self.config = config

    def log_probabilities(self, x_BsD, rng_B=None):
        """float32 [B, C]: the log-probability of each class, or of each option among those of its
        example. See `pooled` for which devices have it."""
        h_B1D, options = self.pooled(x_BsD)[:, None], self.config.options
        if rng_B is not None and self.config.dropout:
            h_B1D = dropout_rows(h_B1D, self.config.dropout, key_data(0), rng_B, jnp.arange(1))
        logits_BC = self.classifier(h_B1D)[:, 0].astype(jnp.float32)
        if options == 1:
            return jax.nn.log_softmax(logits_BC)
        return jax.nn.log_softmax(logits_BC.reshape(-1, options)).reshape(logits_BC.shape)

    def scores(self, tokens_vD, x_BsD, batch):
        """(-ln of each probability, 1 for an example's largest and 0 for its others), float32
        [B, C]."""
        log_p_BC = self.of_first_position(self.log_probabilities(x_BsD))
        examples = log_p_BC.reshape(-1, self.config.options * log_p_BC.shape[-1])
        hits = jax.nn.one_hot(examples.argmax(-1), examples.shape[-1])
        return -log_p_BC, hits.reshape(log_p_BC.shape)

    def loss(self, tokens_vD, x_BsD, batch):
        """The sum of the examples' weighted losses, float32 []."""
        log_p_BC, options = self.log_probabilities(x_BsD, batch.get("rng")), self.config.options
        labels_B, weights_B = batch["labels"], batch["weights"][:, 0]
        if options == 1:
            right_B = jnp.take_along_axis(log_p_BC, labels_B[:, None], axis=1)[:, 0]
        else:
            right_B = log_p_BC[:, 0] * labels_B
            weights_B = jnp.repeat(weights_B[::options], options)
        return self.of_first_position(-(right_B * weights_B).sum())
