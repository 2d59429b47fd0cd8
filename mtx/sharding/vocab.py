"""Embedding and cross-entropy with the vocabulary sharded over `pipe` x `tensor` together.

Every stage then holds the same share of the table and does the same share of the head's work:
no stage is longer than the others, and tied weights cost nothing. Logits are never gathered:
the loss needs their maximum, the sum of their exponentials and the target's logit, [B, S] each.
The padded part of the vocabulary is masked.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence
from mtx.sharding.mesh import Axes


def _first_row(shard_rows: int, axes: Axes):
    """The vocabulary id of this device's first row."""
    return lax.axis_index(axes.vocab) * shard_rows if axes.vocab else 0


def embed_tokens(table_vD, tokens_BS, axes: Axes):
    """x_BsD, the rows of the tokens, on every stage. Each device looks up those that it holds.

    Forward: all-reduce over `pipe`, reduce-scatter (all-reduce without sequence parallelism) over
    `tensor`. Backward: all-gather over `tensor`; expects the same gradient on every stage.
    """
    rows = table_vD.shape[0]
    local_BS = tokens_BS - _first_row(rows, axes)
    mine_BS = (local_BS >= 0) & (local_BS < rows)
    x_BSD = table_vD[jnp.clip(local_BS, 0, rows - 1)] * mine_BS[..., None].astype(table_vD.dtype)
    if axes.sequence_parallel:
        return reduce_from(scatter_sequence(x_BSD, axes.tensor), axes.pipe)
    return reduce_from(x_BSD, axes.vocab)


def vocab_logits(x_BsD, table_vD, axes: Axes):
    """logits_BSv in float32, this device's part of the vocabulary.

    Expects the same x on every stage, and gives each the same input gradient. Forward: all-gather
    over `tensor` with sequence parallelism. Backward: the sum over the vocabulary's shards.
    """
    if axes.sequence_parallel:
        x_BSD = gather_sequence(copy_to(x_BsD, axes.pipe), axes.tensor)
    else:
        x_BSD = copy_to(x_BsD, axes.vocab)
    contract = ((2,), (1,))
    return lax.dot_general(x_BSD, table_vD, (contract, ((), ())), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def vocab_cross_entropy(logits_BSv, targets_BS, vocab: int, axes: Axes):
    """loss_BS in float32: -log softmax(logits) at the target. Ids of `vocab` and above are masked.

    Forward: three all-reduces of [B, S] over the vocabulary's shards. Backward: none.
    """
    return _cross_entropy_forward(logits_BSv, targets_BS, vocab, axes)[0]


def _cross_entropy_forward(logits_BSv, targets_BS, vocab, axes):
    rows = logits_BSv.shape[-1]
    first = _first_row(rows, axes)
    ids_v = first + jnp.arange(rows)
    logits_BSv = jnp.where(ids_v < vocab, logits_BSv, -jnp.inf)
    largest_BS = logits_BSv.max(axis=-1)
    if axes.vocab:
        largest_BS = lax.pmax(largest_BS, axes.vocab)
    shifted_BSv = logits_BSv - largest_BS[..., None]
    is_target_BSv = ids_v == targets_BS[..., None]
    target_BS = jnp.where(is_target_BSv, shifted_BSv, 0.0).sum(axis=-1)
    exp_BSv = jnp.exp(shifted_BSv)
    total_BS = exp_BSv.sum(axis=-1)
    if axes.vocab:
        target_BS, total_BS = lax.psum((target_BS, total_BS), axes.vocab)
    probability_BSv = exp_BSv / total_BS[..., None]
    return jnp.log(total_BS) - target_BS, (probability_BSv, targets_BS)


def _cross_entropy_backward(vocab, axes, saved, dloss_BS):
    probability_BSv, targets_BS = saved
    rows = probability_BSv.shape[-1]
    ids_v = _first_row(rows, axes) + jnp.arange(rows)
    is_target_BSv = (ids_v == targets_BS[..., None]).astype(jnp.float32)
    return (probability_BSv - is_target_BSv) * dloss_BS[..., None], None


vocab_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
