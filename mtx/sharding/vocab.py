"""Embedding and cross-entropy with the vocabulary sharded over `pipe` x `tensor` together.

Every stage then holds the same share of the table and does the same share of the head's work:
no stage takes longer than the others, and tied weights cost nothing. Logits are never gathered:
the loss needs their maximum, the sum of their exponentials and the target's logit, [B, S] each,
which every device gathers from all shards in one collective, not one after the other.
The padded part of the vocabulary is masked.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax

from mtx.sharding.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.mesh import Axes

VOCAB = ("pipe", "tensor")  # the axes of a vocabulary-sharded dim


def _first(rows: int, axes: Axes):
    """The vocabulary id of the first of this device's rows."""
    return lax.axis_index(axes.vocab) * rows if axes.vocab else 0


def _ids(rows: int, axes: Axes):
    """int32 [v]: the vocabulary ids of this device's rows."""
    return _first(rows, axes) + jnp.arange(rows, dtype=jnp.int32)


def _rows(ids_BS, rows: int, axes: Axes):
    """(the indices of these ids among this device's rows, whether they are there at all)"""
    local_BS = ids_BS - _first(rows, axes)
    return jnp.clip(local_BS, 0, rows - 1), (local_BS >= 0) & (local_BS < rows)


def embed_tokens(table_vD, tokens_BS, axes: Axes):
    """x_BsD, the rows of the tokens, on every stage. Each device looks up the rows that it holds.

    Forward: all-reduce over `pipe`, reduce-scatter (all-reduce without sequence parallelism) over
    `tensor`. Backward: all-gather over `tensor`; expects the same gradient on every stage.
    """
    rows_BS, mine_BS = _rows(tokens_BS, table_vD.shape[0], axes)
    x_BSD = table_vD[rows_BS] * mine_BS[..., None].astype(table_vD.dtype)
    if axes.sequence_parallel:
        return reduce_from(scatter_sequence(x_BSD, axes.tensor), axes.pipe)
    return reduce_from(x_BSD, axes.vocab)


def _enter_head(x_BsD, axes: Axes):
    """The whole x_BSD on each device. Backward: the sum over the vocabulary's shards."""
    if axes.sequence_parallel:
        return gather_sequence(copy_to(x_BsD, axes.pipe), axes.tensor)
    return copy_to(x_BsD, axes.vocab)


def vocab_logits(x_BSD, table_vD, vocab: int, axes: Axes, bias_v=None, softcap=None):
    """logits_BSv in float32, this device's part of the vocabulary; -inf for ids from `vocab` on.
    softcap: c in c tanh(logit / c)."""
    contract = ((2,), (1,))
    logits_BSv = lax.dot_general(
        x_BSD, table_vD, (contract, ((), ())), preferred_element_type=jnp.float32
    )
    if bias_v is not None:
        logits_BSv += bias_v.astype(jnp.float32)
    if softcap is not None:
        logits_BSv = softcap * jnp.tanh(logits_BSv / softcap)
    rows = table_vD.shape[0]
    if rows * (lax.axis_size(axes.vocab) if axes.vocab else 1) == vocab:  # none is padded
        return logits_BSv
    return jnp.where(_ids(rows, axes) < vocab, logits_BSv, -jnp.inf)


def vocab_losses(x_BsD, table_vD, targets_BS, vocab: int, axes: Axes, bias_v=None, softcap=None):
    """loss_BS in float32: -log softmax(x table^T + bias) at the target; ids from `vocab` on are
    masked.

    Expects the same x on every stage, and gives each the same input gradient. Forward: all-gather
    over `tensor` with sequence parallelism, and an all-gather of [3, B, S] over the vocabulary's
    shards. Backward: the sum of the input gradient over those shards.
    """
    x_BSD = _enter_head(x_BsD, axes)
    return _losses(x_BSD, table_vD, bias_v, targets_BS, vocab, axes, softcap)


def vocab_scores(x_BsD, table_vD, targets_BS, vocab: int, axes: Axes, bias_v=None, softcap=None):
    """(loss_BS, hit_BS) in float32: `vocab_losses`, and 1 if the target is the likeliest token of
    the vocabulary (the first among equals). Not to be differentiated."""
    x_BSD = _enter_head(x_BsD, axes)
    logits_BSv = vocab_logits(x_BSD, table_vD, vocab, axes, bias_v, softcap)
    loss_BS, largest_BS, _ = _from_logits(logits_BSv, targets_BS, axes)
    is_largest_BSv = logits_BSv == largest_BS[..., None]
    first_BS = jnp.where(is_largest_BSv, _ids(table_vD.shape[0], axes), vocab).min(axis=-1)
    if axes.vocab:
        first_BS = lax.pmin(first_BS, axes.vocab)
    return loss_BS, (first_BS == targets_BS).astype(jnp.float32)


def _from_logits(logits_BSv, targets_BS, axes: Axes):
    """(loss_BS, largest_BS, the gradient of each loss with respect to logits_BSv)"""
    shard = logits_BSv.shape[-1]
    largest_BS = logits_BSv.max(axis=-1)
    # It is -inf if all of a device's rows are padding.
    from_BS = jnp.where(jnp.isfinite(largest_BS), largest_BS, 0.0)
    total_BS = jnp.exp(logits_BSv - from_BS[..., None]).sum(axis=-1)
    rows_BS, mine_BS = _rows(targets_BS, shard, axes)
    target_BS = jnp.take_along_axis(logits_BSv, rows_BS[..., None], axis=-1)[..., 0]
    target_BS = jnp.where(mine_BS, target_BS, 0.0)
    if axes.vocab:
        of_each = lax.all_gather(jnp.stack([largest_BS, total_BS, target_BS]), axes.vocab)
        each_BS, totals_BS, picked_BS = jnp.moveaxis(of_each, 1, 0)
        largest_BS = each_BS.max(axis=0)
        total_BS = (totals_BS * jnp.exp(each_BS - largest_BS)).sum(axis=0)
        target_BS = picked_BS.sum(axis=0)
    is_target_BSv = _ids(shard, axes) == targets_BS[..., None]
    error_BSv = jnp.exp(logits_BSv - largest_BS[..., None]) / total_BS[..., None] - is_target_BSv
    return jnp.log(total_BS) - (target_BS - largest_BS), largest_BS, error_BSv


@custom_vjp(4, 5, 6)
def _losses(x_BSD, table_vD, bias_v, targets_BS, vocab: int, axes: Axes, softcap):
    return _losses_forward(x_BSD, table_vD, bias_v, targets_BS, vocab, axes, softcap)[0]


def _losses_forward(x_BSD, table_vD, bias_v, targets_BS, vocab, axes, softcap):
    logits_BSv = vocab_logits(x_BSD, table_vD, vocab, axes, bias_v, softcap)
    loss_BS, _, error_BSv = _from_logits(logits_BSv, targets_BS, axes)
    if softcap is not None:  # padding has no error
        slope_BSv = 1 - jnp.square(logits_BSv / softcap)
        error_BSv = jnp.where(jnp.isfinite(logits_BSv), error_BSv * slope_BSv, 0)
    # The row's factor is applied in the backward pass, to what is smaller: the error, or x and dx.
    if not _weighs_error(x_BSD, table_vD):
        error_BSv = error_BSv.astype(x_BSD.dtype)
    return loss_BS, (x_BSD, table_vD, bias_v, error_BSv)


def _weighs_error(x_BSD, table_vD) -> bool:
    """Whether that is the error: if a device has few rows of the table, but not in float16, where
    the error might vanish."""
    rows, hidden = table_vD.shape
    return rows < hidden and x_BSD.dtype != jnp.float16


def _losses_backward(vocab, axes, softcap, saved, dloss_BS):
    x_BSD, table_vD, bias_v, error_BSv = saved
    # In float32: all rows share one factor, 1 / tokens, and in bfloat16 a factor of 1/3 would be
    # 0.2 % too large for all of them alike.
    factor_BS1, weighed_BSD, dtype = dloss_BS[..., None], x_BSD, x_BSD.dtype
    weighed_BSv, contract = factor_BS1 * error_BSv, (((2,), (0,)), ((), ()))
    if _weighs_error(x_BSD, table_vD):
        error_BSv = weighed_BSv.astype(dtype)
        dx_BSD = lax.dot_general(error_BSv, table_vD, contract)
    else:
        weighed_BSD = (factor_BS1 * x_BSD).astype(dtype)
        dx_BSD = factor_BS1 * lax.dot_general(
            error_BSv, table_vD, contract, preferred_element_type=jnp.float32
        )
    product = partial(
        lax.dot_general, dimension_numbers=(((0, 1), (0, 1)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    if axes.in_place:
        dtable_vD = product(error_BSv, weighed_BSD)
    else:  # x is the small operand; the barrier keeps XLA from swapping them back
        dtable_vD = lax.optimization_barrier(product(weighed_BSD, error_BSv)).T
    dbias_v = None
    if bias_v is not None:
        dbias_v = weighed_BSv.sum(axis=(0, 1), dtype=jnp.float32).astype(bias_v.dtype)
    return dx_BSD.astype(dtype), dtable_vD, dbias_v, None


_losses.defvjp(_losses_forward, _losses_backward)
