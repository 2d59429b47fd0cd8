"""Attention of projected queries, keys and values: in blocks, fused, in slices, or with dropout.

Heads of keys and values may be fewer than those of queries (Ainslie et al. 2023): each of them
serves a group of neighbours. What a projection gives comes as it is: (qkv_BSnhK,) with n = 3, or
(q_BShK, kv_BSngK) with n = 2. So no copy of it waits for the backward pass beside it.

Legend: B rows · S sequence (T: keys) · H heads of queries (h: shard) · G heads of keys and values
(g: shard) · R = H / G · K head size · b a block of queries
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mtx.models.fused import described_attention
from mtx.plan.attention import cudnn_serves as cudnn_serves  # for who chooses the kernel
from mtx.plan.attention import query_blocks
from mtx.sharding.linear import MATMUL_OUTPUT
from mtx.sharding.random import dropout_heads

AttentionKernel = Literal["blocked", "cudnn", "described"]
Projected = tuple[jax.Array, ...]


def attention(
    projected: Projected, segments_BS=None, *, causal: bool = True, kernel: AttentionKernel
):
    """softmax(q k^T / sqrt(K) + mask) v -> [B, S, h, K].

    The mask hides later positions where causal, and positions of another of `segments_BS`.
    "cudnn": the fused kernel behind `jax.nn.dot_product_attention`, for NVIDIA GPUs, 16 bits and
    heads of at most 128. "blocked": `blocked_attention`, everywhere. "described": the fused one to
    be traced, not run, anywhere.
    """
    if kernel == "blocked":
        return blocked_attention(projected, segments_BS, causal)
    q_BShK, k_BSgK, v_BSgK = separate(projected)
    mask_B1ST = None
    if segments_BS is not None:
        mask_B1ST = (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]
    if kernel == "described":
        return described_attention(q_BShK, k_BSgK, v_BSgK, mask_B1ST, causal)
    return jax.nn.dot_product_attention(
        q_BShK, k_BSgK, v_BSgK, mask=mask_B1ST, is_causal=causal, implementation="cudnn"
    )


def separate(projected: Projected):
    """(q_BShK, k_BSgK, v_BSgK)"""
    if len(projected) == 1:
        return tuple(projected[0][:, :, n] for n in range(3))
    q_BShK, kv_BSngK = projected
    return q_BShK, kv_BSngK[:, :, 0], kv_BSngK[:, :, 1]


def keys_and_values(projected: Projected):
    """kv_BSngK, n = 2"""
    return projected[0][:, :, 1:] if len(projected) == 1 else projected[1]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def blocked_attention(projected: Projected, segments_BS=None, causal: bool = True):
    """Attention in blocks of queries, each, where causal, with the keys up to its last query only.

    That is (n+1)/2n of the square for n blocks. Like FlashAttention (Dao et al. 2022) it keeps
    q, k, v, its output and a number a row, and computes the probabilities again going back.
    """
    return _blocked_forward(projected, segments_BS, causal)[0]


# -- heads first -----------------------------------------------------------------------------------


def _heads_first(projected: Projected):
    """(q_BgRSK, k_BgSK, v_BgSK): one copy here, in place of one for every block and product."""
    if len(projected) == 1:
        q_BgSK, k_BgSK, v_BgSK = jnp.transpose(projected[0], (2, 0, 3, 1, 4))
        return q_BgSK[:, :, None], k_BgSK, v_BgSK
    q_BShK, kv_BSngK = projected
    k_BgSK, v_BgSK = jnp.transpose(kv_BSngK, (2, 0, 3, 1, 4))
    return _in_groups(jnp.swapaxes(q_BShK, 1, 2), k_BgSK.shape[1]), k_BgSK, v_BgSK


def _in_groups(a_Bh, groups: int):
    """[B, h, ...] -> [B, g, R, ...]"""
    return a_Bh.reshape(a_Bh.shape[0], groups, -1, *a_Bh.shape[2:])


def _in_a_row(a_BgR):
    """[B, g, R, ...] -> [B, h, ...]"""
    return a_BgR.reshape(a_BgR.shape[0], -1, *a_BgR.shape[3:])


def _projected_like(projected: Projected, dq_BgRSK, dk_BgKS, dv_BgKS) -> Projected:
    """Gradients in the order and type of what was projected."""
    dtype = projected[0].dtype
    dq_BShK = jnp.swapaxes(_in_a_row(dq_BgRSK), 1, 2).astype(dtype)
    dk_BSgK, dv_BSgK = (jnp.transpose(d, (0, 3, 1, 2)).astype(dtype) for d in (dk_BgKS, dv_BgKS))
    if len(projected) == 1:
        return (jnp.stack([dq_BShK, dk_BSgK, dv_BSgK], axis=2),)
    return dq_BShK, jnp.stack([dk_BSgK, dv_BSgK], axis=2)


# -- a block of queries ----------------------------------------------------------------------------


class _Mask(NamedTuple):
    """What a block of queries may see."""

    first: int | None  # the position of the first query; None: later positions are seen
    queries_Bb: jax.Array | None  # segments; None: all of a row's positions are of one
    keys_BT: jax.Array | None

    def __call__(self, scores_BgRbT):
        seen = None
        if self.first is not None:
            query = self.first + lax.broadcasted_iota(jnp.int32, scores_BgRbT.shape, 3)
            seen = query >= lax.broadcasted_iota(jnp.int32, scores_BgRbT.shape, 4)
        if self.queries_Bb is not None:
            same_BbT = self.queries_Bb[:, :, None] == self.keys_BT[:, None, :]
            same = same_BbT[:, None, None]
            seen = same if seen is None else seen & same
        return scores_BgRbT if seen is None else jnp.where(seen, scores_BgRbT, -jnp.inf)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q_BgRbK, k_BgTK, mask: _Mask):
    """Scaled and masked scores [B, g, R, b, T], float32."""
    return mask(_product("BgRbK,BgTK->BgRbT", q_BgRbK, k_BgTK) / math.sqrt(q_BgRbK.shape[-1]))


def _attend(q_BgRbK, k_BgTK, v_BgTK, mask: _Mask):
    """(o_BgRbK, log of the sum of exponentials [B, g, R, b]) of a block of queries."""
    scores_BgRbT = _scores(q_BgRbK, k_BgTK, mask)
    largest = scores_BgRbT.max(axis=-1, keepdims=True)
    p_BgRbT = jnp.exp(scores_BgRbT - largest)
    total = p_BgRbT.sum(axis=-1, keepdims=True)
    o_BgRbK = _product("BgRbT,BgTK->BgRbK", p_BgRbT.astype(v_BgTK.dtype), v_BgTK) / total
    return o_BgRbK.astype(v_BgTK.dtype), (largest + jnp.log(total))[..., 0]


def _attend_backward(q_BgRbK, k_BgTK, v_BgTK, mask: _Mask, logsumexp_BgRb, along_BgRb, do_BgRbK):
    """Float32 gradients (dq_BgRbK, dk_BgKT, dv_BgKT); `along`: the sum over K of do times o."""
    dtype, scale = q_BgRbK.dtype, 1 / math.sqrt(q_BgRbK.shape[-1])
    scores_BgRbT = _scores(q_BgRbK, k_BgTK, mask) - logsumexp_BgRb[..., None]
    # They are below 0, but in an idle B of slices, which reads two microbatches: no infinity there.
    p_BgRbT = jnp.exp(jnp.minimum(scores_BgRbT, 0))
    dp_BgRbT = _product("BgRbK,BgTK->BgRbT", do_BgRbK, v_BgTK)
    ds_BgRbT = (p_BgRbT * (dp_BgRbT - along_BgRb[..., None]) * scale).astype(dtype)
    dq_BgRbK = _product("BgRbT,BgTK->BgRbK", ds_BgRbT, k_BgTK)
    # Keys last, and a barrier to keep them there: matmuls on CPUs transpose their first operand,
    # which is to be a small one, and not the probabilities.
    dk_BgKT = _product("BgRbK,BgRbT->BgKT", q_BgRbK, ds_BgRbT)
    dv_BgKT = _product("BgRbK,BgRbT->BgKT", do_BgRbK, p_BgRbT.astype(dtype))
    return dq_BgRbK, *lax.optimization_barrier((dk_BgKT, dv_BgKT))


def _going_back(do_BShK, o_BShK, groups: int):
    """(do_BgRSK, its sum over K with o [B, g, R, S] in float32)"""
    along_BSh = (do_BShK.astype(jnp.float32) * o_BShK.astype(jnp.float32)).sum(axis=-1)
    do_BgRSK = _in_groups(jnp.swapaxes(do_BShK, 1, 2), groups)
    return do_BgRSK, _in_groups(jnp.swapaxes(along_BSh, 1, 2), groups)


# -- whole sequences -------------------------------------------------------------------------------


def _blocks(sequence: int, segments_BS, causal: bool) -> list[tuple[slice, slice, _Mask]]:
    """(queries, keys, mask) of each block."""
    size = sequence // query_blocks(sequence)
    blocks = []
    for start in range(0, sequence, size):
        queries, keys = slice(start, start + size), slice(start + size if causal else sequence)
        segments = (None, None)
        if segments_BS is not None:
            segments = segments_BS[:, queries], segments_BS[:, keys]
        blocks.append((queries, keys, _Mask(start if causal else None, *segments)))
    return blocks


def _blocked_forward(projected, segments_BS, causal):
    q_BgRSK, k_BgSK, v_BgSK = _heads_first(projected)
    outputs, logsumexps = [], []
    for queries, keys, mask in _blocks(k_BgSK.shape[2], segments_BS, causal):
        o_BgRbK, logsumexp_BgRb = _attend(
            q_BgRSK[:, :, :, queries], k_BgSK[:, :, keys], v_BgSK[:, :, keys], mask
        )
        outputs.append(o_BgRbK)
        logsumexps.append(logsumexp_BgRb)
    o_BShK = jnp.swapaxes(_in_a_row(jnp.concatenate(outputs, axis=3)), 1, 2)
    o_BShK = checkpoint_name(o_BShK, MATMUL_OUTPUT)
    logsumexp_BgRS = checkpoint_name(jnp.concatenate(logsumexps, axis=3), MATMUL_OUTPUT)
    return o_BShK, (projected, segments_BS, o_BShK, logsumexp_BgRS)


def _blocked_backward(causal, saved, do_BShK):
    projected, segments_BS, o_BShK, logsumexp_BgRS = saved
    q_BgRSK, k_BgSK, v_BgSK = _heads_first(projected)
    sequence = k_BgSK.shape[2]
    do_BgRSK, along_BgRS = _going_back(do_BShK, o_BShK, k_BgSK.shape[1])
    dq, dk_BgKS, dv_BgKS = [], 0.0, 0.0
    for queries, keys, mask in _blocks(sequence, segments_BS, causal):
        dq_BgRbK, dk_BgKT, dv_BgKT = _attend_backward(
            q_BgRSK[:, :, :, queries], k_BgSK[:, :, keys], v_BgSK[:, :, keys], mask,
            logsumexp_BgRS[..., queries], along_BgRS[..., queries], do_BgRSK[:, :, :, queries],
        )  # fmt: skip
        after = ((0, 0), (0, 0), (0, 0), (0, sequence - keys.stop))  # keys that the block hides
        dq.append(dq_BgRbK)
        dk_BgKS += jnp.pad(dk_BgKT, after)
        dv_BgKS += jnp.pad(dv_BgKT, after)
    return _projected_like(projected, jnp.concatenate(dq, axis=3), dk_BgKS, dv_BgKS), None


blocked_attention.defvjp(_blocked_forward, _blocked_backward)


# -- slices of sequences ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def sliced_attention(projected: Projected, cache_BSngK, part, slices: int):
    """Causal attention of one slice of a sequence, the keys and values of earlier ones in a cache.

    projected: of the b = S / slices positions from part * b on; cache (n = 2 for k, v): what stands
    in it from there on counts for nothing; part: int32 []. Attention of slice j takes j + 1 blocks
    of keys, no more. Keeps what `blocked_attention` keeps, of this slice alone.
    """
    return _slice_forward(projected, cache_BSngK, part, slices)[0]


def _slice_keys(projected, cache_BSngK, part: int):
    """q, k, v with the T = (part + 1) b keys up to the end of this slice."""
    q_BgRbK, k_BgbK, v_BgbK = _heads_first(projected)
    k_BgTK, v_BgTK = jnp.transpose(cache_BSngK[:, : part * k_BgbK.shape[2]], (2, 0, 3, 1, 4))
    return (
        q_BgRbK,
        jnp.concatenate([k_BgTK, k_BgbK], axis=2),
        jnp.concatenate([v_BgTK, v_BgbK], axis=2),
        _Mask(part * k_BgbK.shape[2], None, None),
    )


def _slice_forward(projected, cache_BSngK, part, slices):
    def attend(part, projected, cache_BSngK):
        return _attend(*_slice_keys(projected, cache_BSngK, part))

    branches = [partial(attend, part) for part in range(slices)]
    o_BgRbK, logsumexp_BgRb = lax.switch(part, branches, projected, cache_BSngK)
    o_BbhK = checkpoint_name(jnp.swapaxes(_in_a_row(o_BgRbK), 1, 2), MATMUL_OUTPUT)
    logsumexp_BgRb = checkpoint_name(logsumexp_BgRb, MATMUL_OUTPUT)
    return o_BbhK, (projected, cache_BSngK, part, o_BbhK, logsumexp_BgRb)


def _slice_backward(slices, saved, do_BbhK):
    projected, cache_BSngK, part, o_BbhK, logsumexp_BgRb = saved
    do_BgRbK, along_BgRb = _going_back(do_BbhK, o_BbhK, cache_BSngK.shape[3])

    def attend(part, projected, cache_BSngK):
        q, k, v, mask = _slice_keys(projected, cache_BSngK, part)
        dq, dk, dv = _attend_backward(q, k, v, mask, logsumexp_BgRb, along_BgRb, do_BgRbK)
        first = part * q.shape[3]
        own = _projected_like(projected, dq, dk[..., first:], dv[..., first:])
        earlier = jnp.stack([dk[..., :first], dv[..., :first]])
        after = ((0, 0),) * 4 + ((0, cache_BSngK.shape[1] - first),)
        dcache_BSngK = jnp.transpose(jnp.pad(earlier, after), (1, 4, 0, 2, 3))
        return own, dcache_BSngK.astype(cache_BSngK.dtype)

    branches = [partial(attend, part) for part in range(slices)]
    return *lax.switch(part, branches, projected, cache_BSngK), None


sliced_attention.defvjp(_slice_forward, _slice_backward)


# -- dropout ---------------------------------------------------------------------------------------


def attention_with_dropout(
    projected: Projected, segments_BS, *, causal: bool, rate: float, key, samples_B, first_head
):
    """`attention` with dropout on its probabilities -> [B, S, h, K], in the values' type.

    All scores [B, h, S, T] are computed at once, in float32. segments_BS: int32 or None. A mask is
    that of its sample and global head, on every layout: samples_B int32, first_head the global
    number of this device's head 0, key as `mtx.sharding.random.dropout_heads` takes it.
    """
    q_BgRSK, k_BgSK, v_BgSK = _heads_first(projected)
    mask = _Mask(0 if causal else None, segments_BS, segments_BS)
    p_BgRST = jax.nn.softmax(_scores(q_BgRSK, k_BgSK, mask), axis=-1)
    p_BhST = dropout_heads(_in_a_row(p_BgRST), rate, key, samples_B, first_head)
    p_BgRST = _in_groups(p_BhST, k_BgSK.shape[1]).astype(v_BgSK.dtype)
    o_BgRSK = jnp.einsum("BgRST,BgTK->BgRSK", p_BgRST, v_BgSK)
    return jnp.swapaxes(_in_a_row(o_BgRSK), 1, 2)
