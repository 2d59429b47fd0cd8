"""Attention of projected queries, keys and values: in blocks, fused, or in slices.

There may be fewer heads of keys and values than of queries (Ainslie et al. 2023): each then serves
a group of neighbouring query heads. Inputs come as they are projected (`mtx.layers.projected`), so
that no second copy of them is kept for the backward pass.

Legend: B rows · S sequence (T: keys) · H heads of queries (h: shard) ·
G heads of keys and values (g: shard) · R = H / G · K head size (V: of values, if different) ·
b a block of queries
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mtx.layers.fused import described_attention
from mtx.layers.kernels import AttentionKernel, query_blocks
from mtx.layers.projected import (
    Projected,
    heads_first,
    in_a_row,
    in_groups,
    positions_first,
    projected_like_blocks,
    separate,
    sinks_of,
)
from mtx.layers.sinks import with_sinks
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.random import dropout_heads

ATTENTION_OUTPUT = "attention_output"  # and its log-sum-exp: all results that its backward keeps
FUSED_OUTPUT = "fused_attention_output"  # the same for a fused kernel, which is quick to run again


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Which scores there are, and how they are computed from scaled products q k^T."""

    causal: bool = True  # a position sees none after it
    window: int | None = None  # causal: a position sees itself and the window - 1 before it
    scale: float | None = None  # of the products; None: 1 / sqrt(K)
    softcap: float | None = None  # c tanh(score / c), before the mask (Gemma 2)
    dropout: float = 0.0  # on the probabilities, if there are `Drops`

    def scaled_by(self, size: int) -> float:
        return 1 / math.sqrt(size) if self.scale is None else self.scale

    def first_key(self, first_query: int) -> int:
        """The first key that is seen by `first_query` or any query after it."""
        return 0 if self.window is None else max(0, first_query - self.window + 1)


class Drops(NamedTuple):
    """What a dropout mask is computed from, on every layout: see `random.dropout_heads`."""

    key: jax.Array  # uint32 [2]
    samples_B: Any  # int32 [B]
    first_head: Any  # int32 []: the global number of this device's head 0
    queries_S: jax.Array  # int32: the global positions of queries
    keys_T: jax.Array  # and of keys

    def of(self, queries: slice, keys: slice) -> Drops:
        return self._replace(queries_S=self.queries_S[queries], keys_T=self.keys_T[keys])


def attention(
    projected: Projected, segments_BS=None, drops: Drops | None = None, *, rules: Scores,
    kernel: AttentionKernel,
):  # fmt: skip
    """softmax(scores) v -> [B, S, h, V].

    The mask hides positions of other segments (`segments_BS`), and those that `rules` hide.
    "cudnn": the fused kernel behind `jax.nn.dot_product_attention`, for NVIDIA GPUs
    (`kernels.cudnn_takes`). "blocked": `blocked_attention`, which runs everywhere and is the only
    one with dropout. "described": the fused one in a form to be traced, not run, anywhere.
    """
    if kernel == "blocked":
        return blocked_attention(projected, segments_BS, drops, rules)
    assert len(projected) < 3, "see mtx.layers.over_context"
    q_BShK, k_BSgK, v_BSgK = separate(projected)
    mask_B1ST = None
    if segments_BS is not None:
        mask_B1ST = (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]
    if kernel == "described":
        return described_attention(q_BShK, k_BSgK, v_BSgK, mask_B1ST, rules.causal, rules.window)
    return jax.nn.dot_product_attention(
        q_BShK, k_BSgK, v_BSgK, mask=mask_B1ST, is_causal=rules.causal, scale=rules.scale,
        local_window_size=None if rules.window is None else (rules.window - 1, 0),
        implementation="cudnn",
    )  # fmt: skip


@custom_vjp(3)
def blocked_attention(projected: Projected, segments_BS, drops: Drops | None, rules: Scores):
    """Attention in blocks of queries, each with only the keys that some query of the block sees: if
    causal, (n+1)/2n of the square for n blocks.

    Like FlashAttention (Dao et al. 2022) it keeps q, k, v, its output and one number per row, and
    recomputes the probabilities in the backward pass.
    """
    return _blocked_forward(projected, segments_BS, drops, rules)[0]


# -- a block of queries ----------------------------------------------------------------------------


class Mask(NamedTuple):
    """What a block of queries may see."""

    rules: Scores
    first: int  # the position of the first query
    first_key: int  # and of the first key
    # segments of queries and keys, [B, b] and [B, T]; None: each row is one segment
    segments: tuple[jax.Array, jax.Array] | None = None
    drops: Drops | None = None

    def __call__(self, scores_BgRbT):
        seen = self.seen(scores_BgRbT.shape)
        return scores_BgRbT if seen is None else jnp.where(seen, scores_BgRbT, -jnp.inf)

    def seen(self, shape: tuple[int, ...]):
        """bool, to be broadcast to scores of that shape; None if all keys are seen."""
        seen = None
        if self.rules.causal:
            query = self.first + lax.broadcasted_iota(jnp.int32, shape, 3)
            key = lax.broadcasted_iota(jnp.int32, shape, 4)
            key = key + self.first_key if self.first_key else key
            seen = query >= key
            if self.rules.window is not None:
                seen &= query - key < self.rules.window
        if self.segments is not None:
            queries_Bb, keys_BT = self.segments
            same = (queries_Bb[:, :, None] == keys_BT[:, None, :])[:, None, None]
            seen = same if seen is None else seen & same
        return seen

    def dropped(self, p_BgRbT):
        """Probabilities, or their gradient, with dropout."""
        if self.drops is None:
            return p_BgRbT
        p_BhbT = dropout_heads(in_a_row(p_BgRbT), self.rules.dropout, *self.drops)
        return in_groups(p_BhbT, p_BgRbT.shape[1])


product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def scores_of(q_BgRbK, k_BgTK, rules: Scores):
    """Scores [B, g, R, b, T] before the mask, float32."""
    size = q_BgRbK.shape[-1]
    products = product("BgRbK,BgTK->BgRbT", q_BgRbK, k_BgTK)
    scores = products / math.sqrt(size) if rules.scale is None else products * rules.scale
    return scores if rules.softcap is None else rules.softcap * jnp.tanh(scores / rules.softcap)


def attend(q_BgRbK, k_BgTK, v_BgTK, mask: Mask):
    """(o_BgRbK, log of the sum of exponentials [B, g, R, b]) of a block of queries, float32; 0 and
    about -1e30 for a query that sees none of these keys."""
    scores_BgRbT = mask(scores_of(q_BgRbK, k_BgTK, mask.rules))
    largest = jnp.maximum(scores_BgRbT.max(axis=-1, keepdims=True), -1e30)
    p_BgRbT = jnp.exp(scores_BgRbT - largest)
    total = jnp.maximum(p_BgRbT.sum(axis=-1, keepdims=True), 1e-30)
    p_BgRbT = mask.dropped(p_BgRbT)
    o_BgRbK = product("BgRbT,BgTK->BgRbK", p_BgRbT.astype(v_BgTK.dtype), v_BgTK) / total
    return o_BgRbK, (largest + jnp.log(total))[..., 0]


def attend_backward(q_BgRbK, k_BgTK, v_BgTK, mask: Mask, logsumexp_BgRb, along_BgRb, do_BgRbK):
    """Float32 gradients (dq_BgRbK, dk_BgKT, dv_BgKT); `along`: the sum over K of do times o."""
    dtype, rules = q_BgRbK.dtype, mask.rules
    raw_BgRbT = scores_of(q_BgRbK, k_BgTK, rules)
    scores_BgRbT = mask(raw_BgRbT) - logsumexp_BgRb[..., None]
    # Below 0, except in an idle B of slices, which reads two microbatches: no infinity there.
    p_BgRbT = jnp.exp(jnp.minimum(scores_BgRbT, 0))
    dp_BgRbT = mask.dropped(product("BgRbK,BgTK->BgRbT", do_BgRbK, v_BgTK))
    ds_BgRbT = p_BgRbT * (dp_BgRbT - along_BgRb[..., None]) * rules.scaled_by(q_BgRbK.shape[-1])
    if rules.softcap is not None:
        ds_BgRbT *= 1 - jnp.square(raw_BgRbT / rules.softcap)
    ds_BgRbT = ds_BgRbT.astype(dtype)
    dq_BgRbK = product("BgRbT,BgTK->BgRbK", ds_BgRbT, k_BgTK)
    # Keys last, and a barrier to keep them there: matmuls on CPUs transpose their first operand,
    # which should be a small one, not the probabilities.
    dk_BgKT = product("BgRbK,BgRbT->BgKT", q_BgRbK, ds_BgRbT)
    dv_BgKT = product("BgRbK,BgRbT->BgKT", do_BgRbK, mask.dropped(p_BgRbT).astype(dtype))
    return dq_BgRbK, *lax.optimization_barrier((dk_BgKT, dv_BgKT))


def output_gradient(do_BShK, o_BShK, groups: int):
    """(do_BgRSK, its sum over K with o [B, g, R, S] in float32)"""
    along_BSh = (do_BShK.astype(jnp.float32) * o_BShK.astype(jnp.float32)).sum(axis=-1)
    do_BgRSK = in_groups(jnp.swapaxes(do_BShK, 1, 2), groups)
    return do_BgRSK, in_groups(jnp.swapaxes(along_BSh, 1, 2), groups)


# -- whole sequences -------------------------------------------------------------------------------


def _blocks(
    sequence: int, segments_BS, drops: Drops | None, rules: Scores
) -> list[tuple[slice, slice, Mask]]:
    """(queries, keys, mask) of each block."""
    size = sequence // query_blocks(sequence)
    blocks = []
    for start in range(0, sequence, size):
        queries = slice(start, start + size)
        keys = slice(rules.first_key(start), start + size if rules.causal else sequence)
        segments = None
        if segments_BS is not None:
            segments = segments_BS[:, queries], segments_BS[:, keys]
        of_block = drops and drops.of(queries, keys)
        blocks.append((queries, keys, Mask(rules, start, keys.start, segments, of_block)))
    return blocks


def _blocked_forward(projected, segments_BS, drops, rules):
    q_BgRSK, k_BgSK, v_BgSK = heads_first(projected)
    outputs, logsumexps, sinks_h = [], [], sinks_of(projected)
    for queries, keys, mask in _blocks(k_BgSK.shape[2], segments_BS, drops, rules):
        part = attend(q_BgRSK[:, :, :, queries], k_BgSK[:, :, keys], v_BgSK[:, :, keys], mask)
        o_BgRbK, logsumexp_BgRb = with_sinks(*part, sinks_h)
        outputs.append(o_BgRbK.astype(v_BgSK.dtype))
        logsumexps.append(logsumexp_BgRb)
    o_BShK = positions_first(jnp.concatenate(outputs, axis=3))
    o_BShK = checkpoint_name(o_BShK, ATTENTION_OUTPUT)
    logsumexp_BgRS = checkpoint_name(jnp.concatenate(logsumexps, axis=3), ATTENTION_OUTPUT)
    return o_BShK, (projected, segments_BS, drops, o_BShK, logsumexp_BgRS)


def _blocked_backward(rules, saved, do_BShK):
    projected, segments_BS, drops, o_BShK, logsumexp_BgRS = saved
    q_BgRSK, k_BgSK, v_BgSK = heads_first(projected)
    sequence = k_BgSK.shape[2]
    do_BgRSK, along_BgRS = output_gradient(do_BShK, o_BShK, k_BgSK.shape[1])
    dq, dk_BgKS, dv_BgKS = [], 0.0, 0.0
    for queries, keys, mask in _blocks(sequence, segments_BS, drops, rules):
        dq_BgRbK, dk_BgKT, dv_BgKT = attend_backward(
            q_BgRSK[:, :, :, queries], k_BgSK[:, :, keys], v_BgSK[:, :, keys], mask,
            logsumexp_BgRS[..., queries], along_BgRS[..., queries], do_BgRSK[:, :, :, queries],
        )  # fmt: skip
        hidden = ((0, 0), (0, 0), (0, 0), (keys.start, sequence - keys.stop))  # from the block
        dq.append(dq_BgRbK)
        dk_BgKS += jnp.pad(dk_BgKT, hidden)
        dv_BgKS += jnp.pad(dv_BgKT, hidden)
    dq_BgRSK, sums = jnp.concatenate(dq, axis=3), (logsumexp_BgRS, along_BgRS)
    return projected_like_blocks(projected, dq_BgRSK, dk_BgKS, dv_BgKS, *sums), None, None


blocked_attention.defvjp(_blocked_forward, _blocked_backward)


# -- slices of sequences ---------------------------------------------------------------------------


@custom_vjp(3, 4)
def sliced_attention(projected: Projected, cache_BSngK, part, slices: int, rules: Scores):
    """Causal attention of one slice of a sequence, given the keys and values of earlier slices.

    projected: of the b = S / slices positions from part * b on. cache (n = 2 for k, v): holds the
    earlier ones; entries from part * b on are ignored. part: int32 []. Slice j computes only with
    the blocks of keys that it sees. Keeps what `blocked_attention` keeps, for this slice only.
    """
    return _slice_forward(projected, cache_BSngK, part, slices, rules)[0]


def _slice_keys(projected, cache_BSngK, part: int, rules: Scores):
    """(q, k, v, mask), with the keys that this slice sees, up to its own end."""
    q_BgRbK, k_BgbK, v_BgbK = heads_first(projected)
    start = part * k_BgbK.shape[2]
    first_key = rules.first_key(start)
    k_BgTK, v_BgTK = jnp.transpose(cache_BSngK[:, first_key:start], (2, 0, 3, 1, 4))
    return (
        q_BgRbK,
        jnp.concatenate([k_BgTK, k_BgbK], axis=2),
        jnp.concatenate([v_BgTK, v_BgbK], axis=2),
        Mask(rules, start, first_key),
    )


def _slice_forward(projected, cache_BSngK, part, slices, rules):
    def of_part(part, projected, cache_BSngK):
        return attend(*_slice_keys(projected, cache_BSngK, part, rules))

    branches = [partial(of_part, part) for part in range(slices)]
    own = lax.switch(part, branches, projected, cache_BSngK)
    o_BgRbK, logsumexp_BgRb = with_sinks(*own, sinks_of(projected))
    o_BbhK = positions_first(o_BgRbK.astype(projected[0].dtype))
    o_BbhK = checkpoint_name(o_BbhK, ATTENTION_OUTPUT)
    logsumexp_BgRb = checkpoint_name(logsumexp_BgRb, ATTENTION_OUTPUT)
    return o_BbhK, (projected, cache_BSngK, part, o_BbhK, logsumexp_BgRb)


def _slice_backward(slices, rules, saved, do_BbhK):
    projected, cache_BSngK, part, o_BbhK, logsumexp_BgRb = saved
    do_BgRbK, along_BgRb = output_gradient(do_BbhK, o_BbhK, cache_BSngK.shape[3])

    def attend(part, projected, cache_BSngK):
        q, k, v, mask = _slice_keys(projected, cache_BSngK, part, rules)
        dq, dk, dv = attend_backward(q, k, v, mask, logsumexp_BgRb, along_BgRb, do_BgRbK)
        earlier = mask.first - mask.first_key
        sums = logsumexp_BgRb, along_BgRb
        own = projected_like_blocks(projected, dq, dk[..., earlier:], dv[..., earlier:], *sums)
        dcache = jnp.stack([dk[..., :earlier], dv[..., :earlier]])
        unseen = mask.first_key, cache_BSngK.shape[1] - mask.first
        dcache_BSngK = jnp.transpose(jnp.pad(dcache, (((0, 0),) * 4 + (unseen,))), (1, 4, 0, 2, 3))
        return own, dcache_BSngK.astype(cache_BSngK.dtype)

    branches = [partial(attend, part) for part in range(slices)]
    return *lax.switch(part, branches, projected, cache_BSngK), None


sliced_attention.defvjp(_slice_forward, _slice_backward)
