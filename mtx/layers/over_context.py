"""Attention over `context`: every device has two chunks of each sequence, and its queries meet the
keys and values of all devices.

"gather": all keys and values on every device, at once. "ring" (Liu et al. 2023; DistFlashAttn, Li
et al. 2023; two chunks per device, as in Megatron-LM): keys and values go round the devices, each
send overlapped with the matmuls of those that arrived before. "ulysses" (DeepSpeed-Ulysses, Jacobs
et al. 2023): all-to-alls give each device whole sequences of a part of the heads. "usp" (Fang and
Zhao 2024): both, Ulysses among as many neighbours as heads of keys and values allow, and a ring of
such groups.

For attention with a window, a device is sent only what its queries see.

The backward pass sends everything again. It keeps q, k and v of a device's own positions, and the
merged output with its sums.

Legend: B rows · S sequence (s: a device's part; n = s / 2: a chunk) · h heads of queries · g of
keys and values · K head size · c devices of a ring
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mtx.layers.attend import ATTENTION_OUTPUT, FUSED_OUTPUT, Drops, Scores, attention
from mtx.layers.joined import joined
from mtx.layers.kernels import AttentionKernel
from mtx.layers.pairs import Part
from mtx.layers.projected import Projected, projected_like, separate, sinks_of
from mtx.layers.sinks import with_sinks
from mtx.layers.ways import Keys, Output, Queries, way_of
from mtx.sharding.bias import bias_gradient
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.linear import in_order as whole_order
from mtx.sharding.linear import in_rows
from mtx.sharding.mesh import Axes
from mtx.sharding.ring import Ring
from mtx.sharding.sequence import as_devices_have, in_order


def attention_over_context(
    projected: Projected, segments_Bs, drops: Drops | None = None, *, rules: Scores,
    kernel: AttentionKernel, axes: Axes,
):  # fmt: skip
    """softmax(scores) v -> [B, s, h, V] of this device's positions; see `attend.attention`."""
    if axes.context is None:
        return _of_whole(projected, segments_Bs, drops, rules, kernel)
    group, ring = Ring.of(axes).split(_by_heads(axes, separate(projected)[1].shape[2]))
    if group.size == 1:
        gathers = axes.attention == "gather"
        return ring_attention(projected, segments_Bs, drops, rules, kernel, ring, gathers)

    def whole(x_Bs):
        return in_order(x_Bs, 1, group.size)

    def of_heads(a):
        if a.ndim > 1:
            return whole(group.all_to_all(a, split=a.ndim - 2, join=1))
        own = a.shape[0] // group.size  # sinks
        return lax.dynamic_slice_in_dim(a, group.index * own, own)

    ours = tuple(map(of_heads, projected))
    segments = None if segments_Bs is None else whole(group.all_gather(segments_Bs, axis=1))
    if drops is not None:
        at_S = whole(group.all_gather(drops.queries_S[None], axis=1))[0]
        first_head = drops.first_head + group.index * ours[0].shape[-2]
        drops = drops._replace(first_head=first_head, queries_S=at_S, keys_T=at_S)
    if ring.size == 1:
        o_BShK = _of_whole(ours, segments, drops, rules, kernel)
    else:
        o_BShK = ring_attention(ours, segments, drops, rules, kernel, ring, False)
    return group.all_to_all(as_devices_have(o_BShK, 1, group.size), split=1, join=2)


def _of_whole(
    projected: Projected, segments_BS, drops: Drops | None, rules: Scores, kernel: AttentionKernel
):
    """Attention to whole sequences. JAX's function of the fused kernel supports neither values of
    another size nor sinks; the functions that it consists of support both."""
    if len(projected) < 3 or kernel == "blocked":
        return attention(projected, segments_BS, drops, rules=rules, kernel=kernel)
    return ring_attention(projected, segments_BS, drops, rules, kernel, None, False)


def in_parts(axes: Axes, heads: int) -> bool:
    """Whether queries meet their keys in parts, given how many heads of keys and values a device
    has."""
    return axes.context is not None and _by_heads(axes, heads) < axes.context_shards


def _by_heads(axes: Axes, heads: int) -> int:
    """How many devices, neighbours on `context`, share whole sequences by their heads."""
    shared = axes.attention in ("ulysses", "usp")
    return math.gcd(heads, axes.context_shards) if shared else 1


@custom_vjp(3, 4, 5, 6)
def ring_attention(
    projected: Projected, segments_Bs, drops: Drops | None, rules: Scores, kernel: AttentionKernel,
    ring: Ring | None, gathers: bool,
):  # fmt: skip
    """o_BshV: attention of this device's two chunks of queries to all keys of the ring. ring: None
    if it has whole sequences. gathers: every device has all keys at once."""
    return _forward(projected, segments_Bs, drops, rules, kernel, ring, gathers)[0]


def _met(projected: Projected, segments_Bs, drops: Drops | None) -> tuple[Queries, Keys]:
    q_BshK, k_BsgK, v_BsgK = separate(projected)
    queries, keys = Queries(q_BshK, segments_Bs), Keys(k_BsgK, v_BsgK, segments_Bs)
    if drops is None:
        return queries, keys
    return queries._replace(places=drops.queries_S[None]), keys._replace(places=drops.keys_T[None])


def _forward(projected, segments_Bs, drops, rules, kernel, ring, gathers):
    part = _output(projected, segments_Bs, drops, rules, kernel, ring, gathers)
    o_BshK, logsumexp_Bhs = (checkpoint_name(a, ATTENTION_OUTPUT) for a in part)
    return o_BshK, (projected, segments_Bs, drops, o_BshK, logsumexp_Bhs)


def _output(projected, segments_Bs, drops, rules, kernel, ring, gathers) -> Part:
    """The merged part, with its output in the type of the queries."""
    queries, keys = _met(projected, segments_Bs, drops)
    q_BshK = queries.q
    way = way_of(rules, kernel, ring, gathers, q_BshK.shape[1], drops)
    part = way.forward(queries, keys)
    if (sinks_h := sinks_of(projected)) is not None:
        o_BhsK, logsumexp = with_sinks(jnp.swapaxes(part.output, 1, 2), part.logsumexp, sinks_h)
        part = Part(jnp.swapaxes(o_BhsK, 1, 2), logsumexp)
    return part._replace(output=part.output.astype(q_BshK.dtype))


def _backward(rules, kernel, ring, gathers, saved, do_BshK):
    if ring is not None and not gathers:
        # Else keys would be sent, and parts of queries computed, during the MLP's backward pass.
        saved, do_BshK = lax.optimization_barrier((saved, do_BshK))
    projected, segments_Bs, drops, o_BshK, logsumexp_Bhs = saved
    queries, keys = _met(projected, segments_Bs, drops)
    output = Output(Part(o_BshK, logsumexp_Bhs), do_BshK)
    way = way_of(rules, kernel, ring, gathers, o_BshK.shape[1], drops)
    gradients = way.backward(queries, keys, output)
    along_Bsh = (do_BshK.astype(jnp.float32) * o_BshK.astype(jnp.float32)).sum(axis=-1)
    sums = logsumexp_Bhs, jnp.swapaxes(along_Bsh, 1, 2)
    return projected_like(projected, *gradients, *sums), None, None


ring_attention.defvjp(_forward, _backward)


@custom_vjp(3, 4, 5)
def attention_biased(
    y_BSnhK, b_nhK, segments_BS, rules: Scores, kernel: AttentionKernel, axes: Axes
):  # fmt: skip
    """Fused attention of q, k and v as one matmul gives them, by rows and without their bias.
    Keeps y, which the matmul can write directly to where it is kept."""
    return _biased_forward(y_BSnhK, b_nhK, segments_BS, rules, kernel, axes)[0]


def _biased_forward(y, b, segments, rules, kernel, axes):
    projected = (whole_order(y + b, axes),)
    part = _output(projected, segments, None, rules, kernel, None, False)
    o, logsumexp = (checkpoint_name(a, FUSED_OUTPUT) for a in part)
    return o, (y, b, segments, o, logsumexp)


def _biased_backward(rules, kernel, axes, saved, do):
    y, b, segments, o, logsumexp = saved
    queries, keys = _met((whole_order(y + b, axes),), segments, None)
    way = way_of(rules, kernel, None, False, o.shape[1], None)
    gradients = way.backward(queries, keys, Output(Part(o, logsumexp), do))
    dqkv = joined([d.astype(y.dtype) for d in gradients], 2)
    return in_rows(dqkv, axes), bias_gradient(dqkv), None


attention_biased.defvjp(_biased_forward, _biased_backward)
