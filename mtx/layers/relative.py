"""Attention with a bias for each bucket of distances (T5; Raffel et al. 2020, section 2.1), and
between sequences of two lengths. Scores are not scaled: the initial values account for that.

A head has one number per bucket, which is added to the score of a query and a key that far apart.
Near distances have a bucket each; farther ones share buckets by their logarithm.

Legend: B rows · S queries · T keys · b a block of queries · h heads · K head size · N buckets ·
O = b + T - 1 distances
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mtx.layers.attend import ATTENTION_OUTPUT, product
from mtx.layers.kernels import query_blocks
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.random import dropout_heads

_HIDDEN = -1e30  # the score of a hidden key; finite, for queries that see no key at all


@dataclass(frozen=True, kw_only=True)
class Relative:
    """What queries see, and which bucket a distance is in."""

    causal: bool  # a position sees none after it, and buckets are those of keys before it
    buckets: int | None = None  # N; None: there is no bias
    farthest: int = 128  # distances from this one on share the last bucket

    def bucket_of(self, distance: np.ndarray) -> np.ndarray:
        """int32: the bucket of each distance, a key's position minus its query's, rounded as in
        transformers."""
        assert self.buckets is not None
        buckets, first = self.buckets, np.zeros_like(distance)
        if self.causal:
            distance = -np.minimum(distance, 0)
        else:
            buckets //= 2
            first, distance = np.where(distance > 0, buckets, 0), np.abs(distance)
        near = buckets // 2
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(near))
        far = ratio / np.float32(math.log(self.farthest / near)) * np.float32(buckets - near)
        far = np.minimum(near + far.astype(np.int32), buckets - 1)
        return (first + np.where(distance < near, distance, far)).astype(np.int32)

    def bias_of_places(self, bias_Nh, queries_Bt, size: int):
        """The bias [B, h, t, size] of queries at these places, int32, and keys at 0 to size - 1."""
        reach = self.farthest
        buckets = jnp.asarray(self.bucket_of(np.arange(-reach, reach + 1)))
        distance = jnp.arange(size) - queries_Bt[..., None]
        return jnp.moveaxis(bias_Nh[buckets[jnp.clip(distance, -reach, reach) + reach]], -1, 1)

    def bias_of_block(self, bias_Nh, first: int, queries: int, keys: int):
        """bias_hbT of a block of queries, the first of them at `first`.

        Each row is the previous one, shifted by one distance: laid end to end with one extra number
        each, they are one row repeated. So neither this nor its gradient needs a gather."""
        distances = np.arange(queries + keys - 1) - (queries - 1) - first
        one_hot_ON = jnp.asarray(np.eye(len(bias_Nh), dtype=np.float32)[self.bucket_of(distances)])
        row_hO = jnp.einsum("ON,Nh->hO", one_hot_ON, bias_Nh, precision="highest")
        width = queries + keys - 1
        rows = jnp.tile(jnp.pad(row_hO, ((0, 0), (0, 1))), (1, queries))[:, queries - 1 :][
            :, : queries * width
        ]
        return rows.reshape(-1, queries, width)[..., :keys]


@custom_vjp(5)
def relative_attention(q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, rules: Relative):
    """softmax(q k^T + bias) v -> [B, S, h, K], in blocks of queries.

    bias_Nh float32, or None. seen_BT, bool: the keys that are seen at all; None: all are. Like
    `blocked_attention` it keeps its inputs, its output and one number per row.
    """
    return _forward(q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, rules)[0]


def _blocks(queries: int, keys: int, rules: Relative):
    """(queries, how many of the first keys) of each block."""
    size = queries // query_blocks(queries)
    for start in range(0, queries, size):
        yield slice(start, start + size), start + size if rules.causal else keys


def scores_of_block(q_BhbK, k_BhTK, bias_Nh, seen_BT, rules: Relative, first: int):
    """Scores [B, h, b, T] of a block of queries, the first of them at `first`, float32."""
    scores_BhbT = product("BhbK,BhTK->BhbT", q_BhbK, k_BhTK)
    queries, keys = scores_BhbT.shape[2:]
    if bias_Nh is not None:
        scores_BhbT = scores_BhbT + rules.bias_of_block(bias_Nh, first, queries, keys)
    if rules.causal:
        before = jnp.arange(keys) <= first + jnp.arange(queries)[:, None]
        scores_BhbT = jnp.where(before, scores_BhbT, _HIDDEN)
    if seen_BT is not None:
        scores_BhbT = jnp.where(seen_BT[:, None, None, :keys], scores_BhbT, _HIDDEN)
    return scores_BhbT


def _heads_first(*arrays):
    return (jnp.swapaxes(a, 1, 2) for a in arrays)


def _forward(q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, rules):
    q_BhSK, k_BhTK, v_BhTK = _heads_first(q_BShK, k_BThK, v_BThK)
    outputs, logsumexps = [], []
    for block, keys in _blocks(q_BhSK.shape[2], k_BhTK.shape[2], rules):
        scores_BhbT = scores_of_block(
            q_BhSK[:, :, block], k_BhTK[:, :, :keys], bias_Nh, seen_BT, rules, block.start
        )
        largest = scores_BhbT.max(axis=-1, keepdims=True)
        p_BhbT = jnp.exp(scores_BhbT - largest)
        total = p_BhbT.sum(axis=-1, keepdims=True)
        o = product("BhbT,BhTK->BhbK", p_BhbT.astype(v_BhTK.dtype), v_BhTK[:, :, :keys]) / total
        outputs.append(o.astype(v_BhTK.dtype))
        logsumexps.append((largest + jnp.log(total))[..., 0])
    o_BShK = jnp.swapaxes(jnp.concatenate(outputs, axis=2), 1, 2)
    o_BShK = checkpoint_name(o_BShK, ATTENTION_OUTPUT)
    logsumexp_BhS = checkpoint_name(jnp.concatenate(logsumexps, axis=2), ATTENTION_OUTPUT)
    return o_BShK, (q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, o_BShK, logsumexp_BhS)


def _backward(rules, saved, do_BShK):
    *projected, bias_Nh, seen_BT, o_BShK, logsumexp_BhS = saved
    q_BhSK, k_BhTK, v_BhTK = _heads_first(*projected)
    along_BSh = (do_BShK.astype(jnp.float32) * o_BShK.astype(jnp.float32)).sum(axis=-1)
    do_BhSK, along_BhS = _heads_first(do_BShK, along_BSh)
    dq, dk_BhTK, dv_BhTK, dbias_Nh = [], 0.0, 0.0, 0.0
    for block, keys in _blocks(q_BhSK.shape[2], k_BhTK.shape[2], rules):
        q_BhbK, k, v = q_BhSK[:, :, block], k_BhTK[:, :, :keys], v_BhTK[:, :, :keys]
        scores_BhbT = scores_of_block(q_BhbK, k, bias_Nh, seen_BT, rules, block.start)
        p_BhbT = jnp.exp(jnp.minimum(scores_BhbT - logsumexp_BhS[:, :, block, None], 0))
        do_BhbK = do_BhSK[:, :, block]
        dp_BhbT = product("BhbK,BhTK->BhbT", do_BhbK, v)
        ds_BhbT = p_BhbT * (dp_BhbT - along_BhS[:, :, block, None])
        if bias_Nh is not None:
            sizes = block.start, *ds_BhbT.shape[2:]
            _, of_bias = jax.vjp(lambda bias, s=sizes: rules.bias_of_block(bias, *s), bias_Nh)
            dbias_Nh += of_bias(ds_BhbT.sum(axis=0))[0]
        ds_BhbT = ds_BhbT.astype(q_BhbK.dtype)
        dq.append(product("BhbT,BhTK->BhbK", ds_BhbT, k))
        hidden = ((0, 0), (0, 0), (0, k_BhTK.shape[2] - keys), (0, 0))  # from the block
        dk_BhTK += jnp.pad(product("BhbT,BhbK->BhTK", ds_BhbT, q_BhbK), hidden)
        dv = product("BhbT,BhbK->BhTK", p_BhbT.astype(q_BhbK.dtype), do_BhbK)
        dv_BhTK += jnp.pad(dv, hidden)
    gradients = _heads_first(jnp.concatenate(dq, axis=2), dk_BhTK, dv_BhTK)
    dq_dk_dv = (d.astype(a.dtype) for d, a in zip(gradients, projected))
    return *dq_dk_dv, None if bias_Nh is None else dbias_Nh, None


relative_attention.defvjp(_forward, _backward)


def with_dropout(
    q_BShK, k_BThK, v_BThK, bias_Nh, seen_BT, rules: Relative, *, rate: float, key, samples_B,
    first_head,
):  # fmt: skip
    """`relative_attention` with dropout on its probabilities, all of which are in memory at once:
    see `mtx.layers.attend.Drops`."""
    q_BhSK, k_BhTK, v_BhTK = _heads_first(q_BShK, k_BThK, v_BThK)
    p_BhST = jax.nn.softmax(scores_of_block(q_BhSK, k_BhTK, bias_Nh, seen_BT, rules, 0), axis=-1)
    at_S, at_T = map(jnp.arange, p_BhST.shape[2:])
    p_BhST = dropout_heads(p_BhST, rate, key, samples_B, first_head, at_S, at_T)
    o_BhSK = product("BhST,BhTK->BhSK", p_BhST.astype(v_BhTK.dtype), v_BhTK)
    return jnp.swapaxes(o_BhSK, 1, 2).astype(v_BThK.dtype)


def attention_of_text(q_BthK, held_nBhTK, bias_BhtT, seen_B1tT):
    """softmax(q k^T + bias) v -> [B, t, h, K] of the next positions; seen: bool, or None: all."""
    k_BhTK, v_BhTK = held_nBhTK
    scores_BhtT = product("BthK,BhTK->BhtT", q_BthK, k_BhTK)
    scores_BhtT = scores_BhtT if bias_BhtT is None else scores_BhtT + bias_BhtT
    if seen_B1tT is not None:
        scores_BhtT = jnp.where(seen_B1tT, scores_BhtT, _HIDDEN)
    p_BhtT = jax.nn.softmax(scores_BhtT, axis=-1).astype(v_BhTK.dtype)
    return product("BhtT,BhTK->BthK", p_BhtT, v_BhTK).astype(v_BhTK.dtype)
