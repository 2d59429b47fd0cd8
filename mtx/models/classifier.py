"""BERT with a head on whole rows, for fine-tuning: the pooled first position, dropout, and a linear
layer (Devlin et al. 2019, §4.1).

With `options` = 1 a row is an example, and the head has an output for each class. With more, so
many rows after one another are an example, its options, and the head has one output.

Of a batch, beside BERT's tokens, types and segments: labels int32 [B], the class, or 1 for the
right option and 0 for the others; weights float32 [B, S], 1 at the first position of the first row
of each example that counts; draws int32 [B], random numbers from which the head's dropout follows,
absent where there is none.

Legend: B rows · S sequence (s: shard) · D hidden · C outputs
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mtx.config import ModelConfig, Recompute
from mtx.models.attention import AttentionKernel
from mtx.models.bert import Bert, BertEnds, Dense
from mtx.sharding.mesh import Axes
from mtx.sharding.random import dropout_rows, key_data


class ClassifierEnds(BertEnds):
    """BERT's embeddings and pooler, without its heads, and the new one."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        outputs: int,
        options: int,
        axes: Axes,
        vocab_rows: int,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, axes=axes, vocab_rows=vocab_rows, rngs=rngs)
        del self.head, self.binary
        self.classifier = Dense(config.hidden, outputs, std=config.init_std, rngs=rngs)
        self.options = options

    def log_probabilities(self, x_BsD, draws_B=None):
        """float32 [B, C]: of each class, or of each option among those of its example. See
        `pooled` for which devices have it."""
        h_B1D = self.pooled(x_BsD)[:, None]
        if draws_B is not None and self.config.dropout:
            h_B1D = dropout_rows(h_B1D, self.config.dropout, key_data(0), draws_B, 0)
        logits_BC = self.classifier(h_B1D)[:, 0].astype(jnp.float32)
        if self.options == 1:
            return jax.nn.log_softmax(logits_BC)
        return jax.nn.log_softmax(logits_BC.reshape(-1, self.options)).reshape(logits_BC.shape)

    def scores(self, x_BsD, batch):
        """(-ln of each probability, 1 for the largest of an example and 0 for the others), float32
        [B, C]."""
        log_p_BC = self.of_first_position(self.log_probabilities(x_BsD))
        examples = log_p_BC.reshape(-1, self.options * log_p_BC.shape[-1])
        hits = jax.nn.one_hot(examples.argmax(-1), examples.shape[-1])
        return -log_p_BC, hits.reshape(log_p_BC.shape)

    def loss(self, x_BsD, batch):
        """The sum of the examples' weighted losses, float32 []."""
        log_p_BC = self.log_probabilities(x_BsD, batch.get("draws"))
        labels_B, weights_B = batch["labels"], batch["weights"][:, 0]
        if self.options == 1:
            right_B = jnp.take_along_axis(log_p_BC, labels_B[:, None], axis=1)[:, 0]
        else:
            right_B = log_p_BC[:, 0] * labels_B
            weights_B = jnp.repeat(weights_B[:: self.options], self.options)
        return self.of_first_position(-(right_B * weights_B).sum())


class Classifier(Bert):
    """A BERT that tells classes or options apart."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        outputs: int,
        options: int,
        axes: Axes,
        recompute: Recompute,
        kernel: AttentionKernel,
        vocab_shards: int,
        slices: int,
    ):
        self.outputs, self.options = outputs, options
        super().__init__(
            config, axes=axes, recompute=recompute, kernel=kernel, vocab_shards=vocab_shards,
            slices=slices,
        )  # fmt: skip

    def make_ends(self, rngs: nnx.Rngs) -> ClassifierEnds:
        return ClassifierEnds(
            self.config, outputs=self.outputs, options=self.options, axes=self.axes,
            vocab_rows=self.vocab_rows, rngs=rngs,
        )  # fmt: skip

    def batch_fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        fields = super().batch_fields(rows)
        number = fields.pop("order")
        del fields["targets"]
        return fields | {"labels": number, "draws": number}
