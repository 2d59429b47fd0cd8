"""The self-attention sublayer: projections, heads split over `tensor`, and the output layer.

If `tensor` has more devices than there are heads of keys and values, each device has the whole
weight of these heads and uses the head that its queries belong to.

Legend: B rows · S sequence (s: shard; t: the next positions) · D hidden · H heads of queries
(h: shard) · G heads of keys and values (g: shard) · K head size · n: q, k, v, or the latter two
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.layers.attend import Drops, Scores, sliced_attention
from mtx.layers.cached import cached_attention, kept_of
from mtx.layers.context import Context, positions_of
from mtx.layers.kernels import AttentionKernel
from mtx.layers.norm import Norm, RMSNorm, rms_norm
from mtx.layers.over_context import attention_biased, attention_over_context
from mtx.layers.projected import Projected, keys_and_values, separate, sinks_of
from mtx.layers.rotary import Rotary, rotate
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.adapter import Adapter
from mtx.sharding.bias import add_bias
from mtx.sharding.linear import (
    MATMUL_OUTPUT,
    ColumnLinear,
    RowLinear,
    adapter_product,
    in_order,
    products_by_rows,
    used_by_heads,
)
from mtx.sharding.parameter import parameter
from mtx.sharding.random import fold, normal
from mtx.sharding.sequence import places


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The config of self-attention."""

    heads: int  # H
    size: int  # K
    groups: int | None = None  # G; None: q, k and v are one projection, of H heads each
    bias: bool = False  # of q, k and v
    output_bias: bool = False
    norm: Norm | None = None  # RMS, of each head's queries and keys, before they are rotated
    rotary: Rotary | None = None
    scores: Scores = Scores()
    sinks: bool = False  # one number per head in the sum of its softmax: `mtx.layers.sinks`
    dropout: float = 0.0  # on the probabilities
    looks_around = True
    over_context = True
    adapts = True
    joins = True

    @property
    def in_parts(self) -> bool:
        """Whether its output is merged from parts, as it is over `context`, even on one device."""
        return self.sinks

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return AttentionModule(self, build, rngs)

    def empty_cache(self, build: Build, rows: int, sequence: int):
        """[B, S, n, g, K], n = 2: keys and values."""
        return jnp.zeros((rows, sequence, 2, self._local_groups(build), self.size), build.dtype)

    def empty_past(self, build: Build, rows: int, length: int):
        """[n, B, g, S, K], n = 2: keys and values; S: the positions of this device."""
        return jnp.zeros((2, rows, self._local_groups(build), length, self.size), build.dtype)

    def _local_groups(self, build: Build) -> int:
        return max(1, (self.groups or self.heads) // build.axes.tensor_shards)


class GroupedProjection(nnx.Module):
    """Weights q [D, H, K] of queries and kv [D, 2, G, K] of keys and values; biases have no D."""

    def __init__(self, config: Attention, groups: int, build: Build, rngs: nnx.Rngs):
        def weight(*shape):
            return build.init_std * normal(rngs.params, (build.hidden, *shape))

        self.groups, self.axes = groups, build.axes
        shard = None if self._repeated else "tensor"
        q_spec, kv_spec = ("tensor", None), (None, shard, None)
        q = weight(config.heads, config.size)
        q_dims = "hidden", "heads", "head size"
        self.q = parameter(q, spec=P(None, *q_spec), role="matrix", dims=q_dims)
        kv = weight(2, groups, config.size)
        kv_dims = "hidden", "k v", "kv heads", "head size"
        self.kv = parameter(kv, spec=P(None, *kv_spec), role="matrix", dims=kv_dims)
        self.adapted = build.adapters is not None
        if build.adapters is not None:
            common: Any = {"adapters": build.adapters, "axes": build.axes, "rngs": rngs}
            self.q_lora = Adapter(q.shape, P(None, *q_spec), dims=q_dims, **common)
            self.kv_lora = Adapter(kv.shape, P(None, *kv_spec), dims=kv_dims, **common)
        self.bias = config.bias
        if config.bias:
            q, kv = jnp.zeros(q.shape[1:]), jnp.zeros(kv.shape[1:])
            self.q_bias = parameter(q, spec=P(*q_spec), role="bias", dims=q_dims[1:])
            self.kv_bias = parameter(kv, spec=P(*kv_spec), role="bias", dims=kv_dims[1:])

    @property
    def _repeated(self) -> bool:
        return self.axes.tensor is not None and self.groups % self.axes.tensor_shards != 0

    def __call__(self, x_BsD):
        """(q_BShK, kv_BSngK)"""
        repeats = None, 2 if self._repeated else None
        weights = self.q.get_value(), self.kv.get_value()
        if self.adapted:
            projected = self._with_adapters(x_BsD, weights, repeats)
        else:
            projected = products_by_rows(x_BsD, weights, repeats, self.axes)
        if self.bias:
            projected = (
                add_bias(projected[0], self.q_bias[...], self.axes),
                self._with_bias(projected[1]),
            )
        return tuple(checkpoint_name(in_order(y, self.axes), MATMUL_OUTPUT) for y in projected)

    def _with_adapters(self, x_BsD, weights: tuple, repeats: tuple):
        adapters = self.q_lora, self.kv_lora
        read = tuple(used_by_heads(each.a[...], self.axes) for each in adapters)
        q_BShK, kv_BSngK, *parts = products_by_rows(
            x_BsD, (*weights, *read), (*repeats, None, None), self.axes
        )
        more = (
            adapter_product(h_BSr, each.b.get_value(), each, repeat)
            for h_BSr, each, repeat in zip(parts, adapters, repeats)
        )
        return tuple(map(jnp.add, (q_BShK, kv_BSngK), more))

    def _with_bias(self, kv_BSngK):
        bias_ngK = self.kv_bias[...]
        if self._repeated:
            head = lax.axis_index(self.axes.tensor) * self.groups // self.axes.tensor_shards
            whole_nGK = used_by_heads(bias_ngK, self.axes)
            bias_ngK = lax.dynamic_slice_in_dim(whole_nGK, head, 1, axis=1)
        return add_bias(kv_BSngK, bias_ngK, self.axes)


class AttentionModule(nnx.Module):
    """qkv and out; if configured, q_norm and k_norm of heads, and sinks [H]."""

    def __init__(self, config: Attention, build: Build, rngs: nnx.Rngs):
        self.config, self.build = config, build
        heads, size = config.heads, config.size
        if config.groups is None:
            self.qkv = ColumnLinear(
                build.hidden, (3, heads, size), split=1, std=build.init_std, axes=build.axes,
                rngs=rngs, bias=config.bias, adapters=build.adapters,
                dims=("hidden", "q k v", "heads", "head size"),
            )  # fmt: skip
        else:
            self.qkv = GroupedProjection(config, config.groups, build, rngs)
        self.out = RowLinear(
            (heads, size), build.hidden, std=build.output_std, axes=build.axes, rngs=rngs,
            bias=config.output_bias, adapters=build.adapters, dims=("heads", "head size", "hidden"),
        )  # fmt: skip
        if config.norm is not None:
            self.q_norm, self.k_norm = (config.norm.rms(size, "head size") for _ in range(2))
        if config.sinks:
            self.sinks = parameter(jnp.zeros(heads), spec=P("tensor"), role="bias", dims=("heads",))

    def project(self, x_BsD, context: Context | None) -> Projected:
        """Queries, keys and values, as `mtx.layers.attend` takes them."""
        projected = self._projected(x_BsD, context)
        return (*separate(projected), self.sinks[...]) if self.config.sinks else projected

    def _projected(self, x_BsD, context: Context | None) -> Projected:
        if isinstance(self.qkv, ColumnLinear):
            return (self.qkv(x_BsD),)
        q_BShK, kv_BSngK = self.qkv(x_BsD)
        if self.config.norm is None and self.config.rotary is None:
            return q_BShK, kv_BSngK
        k_BSgK = kv_BSngK[:, :, 0]
        if self.config.norm is not None:
            q_BShK = self.normalize(self.q_norm, q_BShK)
            k_BSgK = self.normalize(self.k_norm, k_BSgK)
        if self.config.rotary is not None:
            positions = positions_of(context, q_BShK.shape[1])
            q_BShK = rotate(q_BShK, positions, self.config.rotary)
            k_BSgK = rotate(k_BSgK, positions, self.config.rotary)
        return q_BShK, jnp.stack([k_BSgK, kv_BSngK[:, :, 1]], axis=2)

    @property
    def _kernel(self) -> AttentionKernel:
        """The build's kernel; "blocked" with a soft cap, which cuDNN's does not support."""
        return self.build.kernel if self.config.scores.softcap is None else "blocked"

    def normalize(self, norm: RMSNorm, a_BShK):
        """Queries or keys, before the rotary embedding."""
        scale_K = used_by_heads(norm.scale[...], self.build.axes)
        return rms_norm(a_BShK, scale_K, norm.epsilon, norm.offset)

    def __call__(self, x_BsD, context: Context | None = None):
        segments_BS = None if context is None else context.segments_BS
        whole = segments_BS is None or self.config.scores.causal  # else a conditional skips parts
        if self._adds_bias and whole and self._rng(context) is None:
            return self.project_out(self._attend_biased(x_BsD, segments_BS), x_BsD)
        projected = self.project(x_BsD, context)
        drops = self._drops(context, projected)
        return self.project_out(self._attend(projected, segments_BS, drops), x_BsD)

    def project_out(self, o_BShK, x_BsD):
        """The output, from that of the heads; x_BsD: the input, for variants that gate by it."""
        return self.out(o_BShK)

    def _rng(self, context: Context | None):
        """The random key for dropout; None if there is no dropout."""
        return context.rng if context is not None and self.config.dropout else None

    def _drops(self, context: Context | None, projected: Projected) -> Drops | None:
        if context is None or (rng := self._rng(context)) is None:
            return None
        axes, (_, size, *_, heads, _) = self.build.axes, projected[0].shape
        first_head = lax.axis_index(axes.tensor) * heads if axes.tensor else 0
        key, at_S = fold(rng, context.layer, self.build.site), places(size, axes)
        return Drops(key, context.samples_B, first_head, at_S, at_S)

    @property
    def _adds_bias(self) -> bool:
        """Whether fused attention adds the bias of q, k and v itself. (With the "described" kernel
        a matmul adds it.)"""
        qkv = getattr(self, "qkv", None)
        if not isinstance(qkv, ColumnLinear) or not qkv.bias or self.config.sinks:
            return False
        return self._kernel == "cudnn" and self.build.axes.context is None

    def _attend_biased(self, x_BsD, segments_BS):
        assert isinstance(self.qkv, ColumnLinear)
        y_BSnhK, axes = self.qkv.without_bias(x_BsD), self.build.axes
        rules = self.config.scores
        return attention_biased(y_BSnhK, self.qkv.b[...], segments_BS, rules, self._kernel, axes)

    def _attend(self, projected: Projected, segments_BS=None, drops: Drops | None = None):
        rules = self.config.scores
        return attention_over_context(
            projected, segments_BS, drops,
            rules=replace(rules, dropout=self.config.dropout) if drops else rules,
            kernel="blocked" if drops else self._kernel, axes=self.build.axes,
        )  # fmt: skip

    # -- slices of sequences, and generated text ---------------------------------------------------

    def of_slice(self, x_BsD, context: Context, cache_BSngK):
        """(output, this slice's keys and values), n = 2; the cache has those of earlier slices."""
        projected = self.project(x_BsD, context)
        own_BbngK = keys_and_values(projected)
        slices = cache_BSngK.shape[1] // own_BbngK.shape[1]
        o_BbhK = sliced_attention(projected, cache_BSngK, context.part, slices, self.config.scores)
        return self.project_out(o_BbhK, x_BsD), own_BbngK

    def of_text(self, x_BtD, context: Context | None, keep: Keep):
        """The output; `keep` holds the keys and values of earlier positions."""
        projected, rules = self.project(x_BtD, context), self.config.scores
        axes = self.build.axes
        held_nBgSK = keep(kept_of(projected, axes))
        if held_nBgSK is None:
            return self.project_out(self._attend(projected), x_BtD)
        q_BthK, _, _ = separate(projected)
        positions_Bt = positions_of(context, q_BthK.shape[1])
        o_BthK = cached_attention(
            q_BthK, held_nBgSK, positions_Bt, rules, axes, sinks_of(projected)
        )
        return self.project_out(o_BthK, x_BtD)
