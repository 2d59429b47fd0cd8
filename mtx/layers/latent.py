"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all
heads are computed from one short vector per position, its latent, and from a part of the keys that
all heads share, the only part that is rotated by position. For generated text only these two are
kept.

Every device of `tensor` has the whole down-projections and applies them to the rows that it has;
heads are split. So with sequence parallelism the latents are gathered, not the stream.

For generated text, queries are projected to the latents, instead of all latents to keys: kv_up is
absorbed into queries and output (section 2.1.2).

Legend: B rows · S sequence (s: shard; t: the next positions) · D hidden · H heads (h: shard) ·
L size of a latent · N of the part of a head that is not rotated · R of the part that is ·
K = N + R · V head size of values · n = 1
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from mtx.layers.attend import Scores, sliced_attention
from mtx.layers.attention import AttentionModule
from mtx.layers.cached import cached_attention
from mtx.layers.context import Context, positions_of
from mtx.layers.norm import Norm
from mtx.layers.projected import Projected, keys_and_values
from mtx.layers.rotary import Rotary, rotate
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.collectives import copy_to, gather_sequence
from mtx.sharding.linear import ColumnLinear, RowLinear, WholeLinear
from mtx.sharding.sequence import kept_of_parts


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The config of multi-head latent attention."""

    heads: int  # H
    latent: int  # L, of keys and values
    query_latent: int | None  # of queries; None: they are projected directly
    size: int  # N
    turned: int  # R
    value_size: int  # V
    norm: Norm  # RMS, of latents
    rotary: Rotary
    scores: Scores  # with a scale: heads have K numbers, or L + R
    dropout: float = 0.0  # on the probabilities
    looks_around = True
    over_context = True
    in_parts = True  # see `mtx.layers.attention.Attention`

    @property
    def head_size(self) -> int:
        """K"""
        return self.size + self.turned

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return LatentModule(self, build, rngs)

    def empty_cache(self, build: Build, rows: int, sequence: int):
        """[B, S, n, h, .], n = 2: keys and values, the shorter of the two padded with zeros."""
        heads, size = self.heads // build.axes.tensor_shards, max(self.head_size, self.value_size)
        return jnp.zeros((rows, sequence, 2, heads, size), build.dtype)

    def empty_past(self, build: Build, rows: int, length: int):
        """[n, B, 1, S, L + R], n = 1: latents and rotated parts of keys, the same on all devices of
        `tensor`."""
        return jnp.zeros((1, rows, 1, length, self.latent + self.turned), build.dtype)


class LatentModule(AttentionModule):
    """q [D, H, K], or q_down [D, .], q_norm and q_up [., H, K]; kv_down [D, L + R], kv_norm and
    kv_up [L, H, N + V]; out [H, V, D]."""

    config: Latent

    def __init__(self, config: Latent, build: Build, rngs: nnx.Rngs):
        self.config, self.build = config, build
        common = {"std": build.init_std, "axes": build.axes, "rngs": rngs}

        def down(size: int) -> WholeLinear:
            return WholeLinear(build.hidden, size, dims=("hidden", "latent"), **common)

        def up(of: str, inputs: int, size: int) -> ColumnLinear:
            return ColumnLinear(
                inputs, (config.heads, size), split=0, bias=False, dims=(of, "heads", "head size"),
                **common,
            )  # fmt: skip

        if config.query_latent is None:
            self.q = up("hidden", build.hidden, config.head_size)
        else:
            self.q_down = down(config.query_latent)
            self.q_norm = config.norm.rms(config.query_latent, "latent")
            self.q_up = up("latent", config.query_latent, config.head_size)
        self.kv_down = down(config.latent + config.turned)
        self.kv_norm = config.norm.rms(config.latent, "latent")
        self.kv_up = up("latent", config.latent, config.size + config.value_size)
        self.out = RowLinear(
            (config.heads, config.value_size), build.hidden, std=build.output_std, axes=build.axes,
            rngs=rngs, bias=False, dims=("heads", "head size", "hidden"),
        )  # fmt: skip

    # -- projections ------------------------------------------------------------------------------

    def _queries(self, x_BsD, context: Context | None):
        """q_BShK, rotated"""
        whole = self.config.query_latent is None
        q_BShK = self.q(x_BsD) if whole else self.q_up(self.q_norm(self.q_down(x_BsD)))
        q_BShN, q_BShR = jnp.split(q_BShK, [self.config.size], axis=-1)
        return jnp.concatenate([q_BShN, self._turned(q_BShR, context)], axis=-1)

    def _latents(self, x_BsD, context: Context | None):
        """(normed latents c_BsL, rotated parts of keys k_BSR)"""
        c_BsL, k_BsR = jnp.split(self.kv_down(x_BsD), [self.config.latent], axis=-1)
        axes = self.build.axes
        gather = gather_sequence if axes.sequence_parallel else copy_to
        k_BS1R = gather(k_BsR, axes.tensor)[:, :, None]
        return self.kv_norm(c_BsL), self._turned(k_BS1R, context)[:, :, 0]

    def _turned(self, a_BShR, context: Context | None):
        return rotate(a_BShR, positions_of(context, a_BShR.shape[1]), self.config.rotary)

    def _expanded(self, q_BShK, c_BsL, k_BSR) -> Projected:
        """Queries, and keys and values of all heads."""
        kv_BShK = self.kv_up(c_BsL)
        k_BShN, v_BShV = jnp.split(kv_BShK, [self.config.size], axis=-1)
        shape = *k_BShN.shape[:3], k_BSR.shape[-1]
        k_BShR = jnp.broadcast_to(k_BSR[:, :, None], shape)
        return q_BShK, jnp.concatenate([k_BShN, k_BShR], axis=-1), v_BShV

    def project(self, x_BsD, context: Context | None) -> Projected:
        return self._expanded(self._queries(x_BsD, context), *self._latents(x_BsD, context))

    # -- slices of sequences, and generated text ---------------------------------------------------

    def of_slice(self, x_BsD, context: Context, cache_BSnhK):
        q_BbhK, k_BbhK, v_BbhV = self.project(x_BsD, context)
        values = v_BbhV.shape[-1]
        most = max(values, k_BbhK.shape[-1])
        projected = tuple(
            jnp.pad(a, ((0, 0),) * 3 + ((0, most - a.shape[-1]),)) for a in (q_BbhK, k_BbhK, v_BbhV)
        )
        own_BbnhK = keys_and_values(projected)
        slices = cache_BSnhK.shape[1] // own_BbnhK.shape[1]
        o_BbhK = sliced_attention(projected, cache_BSnhK, context.part, slices, self.config.scores)
        return self.out(o_BbhK[..., :values]), own_BbnhK

    def of_text(self, x_BtD, context: Context | None, keep: Keep):
        config, axes = self.config, self.build.axes
        q_BthK = self._queries(x_BtD, context)
        c_BtL, k_BtR = self._latents(x_BtD, context)
        own_nB1tK = jnp.concatenate([c_BtL, k_BtR], axis=-1)[None, :, None]
        held = keep(kept_of_parts(own_nB1tK, 3, axes))
        if held is None:
            return self.out(self._attend(self._expanded(q_BthK, c_BtL, k_BtR)))
        q_BthN, q_BthR = jnp.split(q_BthK, [config.size], axis=-1)
        key_LhN, value_LhV = jnp.split(self.kv_up.w.get_value(), [config.size], axis=-1)
        q_BthL = jnp.einsum("BthN,LhN->BthL", q_BthN, key_LhN)
        q_BthK = jnp.concatenate([q_BthL, q_BthR], axis=-1)
        held_B1SK = held[0]  # keys, and values up to L: slicing would copy all of them
        positions_Bt = positions_of(context, q_BthK.shape[1])
        o_BthK = cached_attention(q_BthK, (held_B1SK, held_B1SK), positions_Bt, config.scores, axes)
        o_BthL = o_BthK[..., : config.latent]
        return self.out(jnp.einsum("BthL,LhV->BthV", o_BthL, value_LhV))
