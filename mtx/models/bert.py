"""BERT as in Megatron-LM (Shoeybi et al. 2019, section 3 and figure 7): attention both ways, token
types, a head for masked tokens and a binary one for the order of two texts.

norm_placement="pre" is the paper's rearranged block, whose residual stream no norm touches, with
one norm after the last; "post" is the first BERT's (Devlin et al. 2019), each norm after a
residual addition, and one after the embedding.

Of a batch: types int32 [B, S]; segments int32 [B, S], 1 for text and 0 for padding; order int32
[B], the binary head's label, below 0 where there is none. The loss of a step is the mean over the
masked tokens and the mean over the rows with an order, added.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig
from mtx.models.ends import VOCAB, add_positions, drop_embedding, local_part, row_at, token_table
from mtx.models.gpt import Block
from mtx.models.layers import LayerNorm, gelu
from mtx.models.model import Model
from mtx.models.place import Place
from mtx.sharding.collectives import reduce_from
from mtx.sharding.linear import matmul
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.vocab import embed_tokens, vocab_logits, vocab_losses, vocab_scores


class PostNormBlock(Block):
    """x = norm(x + attention(x)), then x = norm(x + mlp(x))."""

    def __call__(self, x_BsD, place: Place | None = None):
        h_BsD = self.drop_attention(self.attention(x_BsD, place), place)
        x_BsD = self.attention_norm(x_BsD + h_BsD)
        return self.mlp_norm(x_BsD + self.drop_mlp(self.mlp(x_BsD), place))


class Dense(nnx.Module):
    """x W + b, the same on every device: small beside the blocks."""

    def __init__(self, inputs: int, outputs: int, *, std: float, rngs: nnx.Rngs):
        w = std * jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32)
        self.w = parameter(w, spec=P(None, None), role="matrix")
        self.b = parameter(jnp.zeros(outputs, jnp.float32), spec=P(None), role="bias")

    def __call__(self, x_BSD):
        return matmul(x_BSD, self.w[...]) + self.b[...]


class MaskedHead(Dense):
    """D -> D, GELU and a norm before the table of tokens; a bias for each token after it."""

    def __init__(self, config: ModelConfig, *, vocab_rows: int, rngs: nnx.Rngs):
        super().__init__(config.hidden, config.hidden, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config.hidden, epsilon=config.norm_epsilon)
        self.bias = parameter(jnp.zeros(vocab_rows, jnp.float32), spec=P(VOCAB), role="bias")
        self.gelu = config.gelu

    def __call__(self, x_BsD):
        return self.norm(gelu(super().__call__(x_BsD), self.gelu))


class BertEnds(nnx.Module):
    """Embeddings of tokens, positions and types; the norm; both heads."""

    def __init__(self, config: ModelConfig, *, axes: Axes, vocab_rows: int, rngs: nnx.Rngs):
        def table(rows):
            return config.init_std * jax.random.normal(rngs.params(), (rows, config.hidden))

        self.tokens = parameter(
            token_table(config, vocab_rows, rngs.params()), spec=P(VOCAB, None), role="embedding"
        )
        self.positions = parameter(table(config.sequence), spec=P(None, None), role="embedding")
        self.types = parameter(table(2), spec=P(None, None), role="embedding")
        norm = LayerNorm(config.hidden, epsilon=config.norm_epsilon)
        if config.norm_placement == "post":
            self.embed_norm = norm
        else:
            self.norm = norm
        self.head = MaskedHead(config, vocab_rows=vocab_rows, rngs=rngs)
        self.pooler = Dense(config.hidden, config.hidden, std=config.init_std, rngs=rngs)
        self.binary = Dense(config.hidden, 2, std=config.init_std, rngs=rngs)
        self.config = config
        self.axes = axes

    def embed(self, batch, place: Place | None = None):
        """x_BsD, the same on every stage. Expects the same gradient on every stage."""
        x_BsD = embed_tokens(self.tokens[...], batch["tokens"], self.axes)
        positions_BS = batch.get("positions")
        x_BsD = add_positions(x_BsD, self.positions[...], positions_BS, self.axes, place)
        x_BsD += self.types[...][local_part(batch["types"], self.axes)]
        if self.config.norm_placement == "post":
            x_BsD = self.embed_norm(x_BsD)
        return drop_embedding(x_BsD, self.config, self.axes, place)

    def _final_norm(self, x_BsD):
        return x_BsD if self.config.norm_placement == "post" else self.norm(x_BsD)

    def next_logits(self, x_BsD, positions_B):
        """logits_Bv in float32 of the masked-token head at one position a row."""
        x_B1D = self.head(row_at(self._final_norm(x_BsD), positions_B, self.axes))
        bias_v, vocab = self.head.bias[...], self.config.vocab
        return vocab_logits(x_B1D, self.tokens[...], vocab, self.axes, bias_v)[:, 0]

    def pooled(self, x_BsD):
        """tanh(x W + b) [B, D] of the first position, for heads on whole rows. With sequence
        parallelism only the first device of `tensor` has it; the others have what counts for
        nothing."""
        return jnp.tanh(self.pooler(self._final_norm(x_BsD)[:, :1]))[:, 0]

    def of_first_position(self, value):
        """`value` of the device that holds the first position, on every device of `tensor`."""
        if not self.axes.sequence_parallel:
            return value
        mine = lax.axis_index(self.axes.tensor) == 0
        return reduce_from(jnp.where(mine, value, 0), self.axes.tensor)

    def scores(self, x_BsD, batch):
        """(losses, hits) float32 [B, S] of the masked-token head: see `vocab_scores`."""
        x_BsD, bias_v = self.head(self._final_norm(x_BsD)), self.head.bias[...]
        targets, vocab = batch["targets"], self.config.vocab
        return vocab_scores(x_BsD, self.tokens[...], targets, vocab, self.axes, bias_v)

    def loss(self, x_BsD, batch):
        """The sum of the weighted losses of both heads, float32 []."""
        h_BsD, bias_v = self.head(self._final_norm(x_BsD)), self.head.bias[...]
        targets, vocab = batch["targets"], self.config.vocab
        loss_BS = vocab_losses(h_BsD, self.tokens[...], targets, vocab, self.axes, bias_v)
        masked = (loss_BS * batch["weights"]).sum()
        if "order" not in batch:
            return masked
        logits_B2 = self.binary(self.pooled(x_BsD)[:, None])[:, 0].astype(jnp.float32)
        log_p_B2 = jax.nn.log_softmax(logits_B2)
        label_B = jnp.maximum(batch["order"], 0)
        loss_B = -jnp.take_along_axis(log_p_B2, label_B[:, None], axis=1)[:, 0]
        return masked + self.of_first_position((loss_B * batch["order_weights"]).sum())


class Bert(Model):
    """Megatron-LM's BERT, and the first one."""

    def make_ends(self, rngs: nnx.Rngs) -> BertEnds:
        return BertEnds(self.config, axes=self.axes, vocab_rows=self.vocab_rows, rngs=rngs)

    def make_block(self, rngs: nnx.Rngs) -> Block:
        kind = PostNormBlock if self.config.norm_placement == "post" else Block
        return kind(self.config, axes=self.axes, kernel=self.kernel, rngs=rngs)

    def batch_fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        text = jax.ShapeDtypeStruct((rows, self.config.sequence), jnp.int32)
        order = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return super().batch_fields(rows) | {"types": text, "segments": text, "order": order}

    def weigh(self, batch, total):
        """Each row with an order counts as much as a masked token times their ratio: divided by
        the number of masked tokens, the sum of both losses is the sum of their means."""
        if "order" not in batch:
            return batch
        counts = batch["order"] >= 0
        rows, tokens = total(counts.sum()), total(batch["weights"].sum())
        weight = tokens / jnp.maximum(rows, 1)
        return batch | {"order_weights": counts * weight}
