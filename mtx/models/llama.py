"""Llama (Touvron et al. 2023; Llama 3, 2024): RMSNorm, rotary positions, SwiGLU, fewer heads of
keys and values than of queries, no biases.

Where `tensor` has more devices than there are heads of keys and values, each device has the whole
of their weight and uses the head that its queries go with.

Legend: B rows · S sequence (s: shard) · D hidden · H heads (h: shard) · G heads of keys and values
(g: shard) · K head size · F feed-forward (f: shard) · n = 2 for k, v, or for gate, up
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig
from mtx.models.attention import Projected
from mtx.models.ends import Ends
from mtx.models.gpt import Attention, Block
from mtx.models.layers import RMSNorm, swiglu
from mtx.models.model import Model
from mtx.models.place import Place, positions_of
from mtx.models.rotary import rotate
from mtx.sharding.linear import (
    MATMUL_OUTPUT,
    ColumnLinear,
    RowLinear,
    column_products,
    output_std,
)
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter


class GroupedProjection(nnx.Module):
    """Queries q [D, H, K], and keys and values kv [D, 2, G, K]."""

    def __init__(self, config: ModelConfig, *, axes: Axes, rngs: nnx.Rngs):
        def weight(*shape):
            return config.init_std * jax.random.normal(rngs.params(), (config.hidden, *shape))

        self.groups = config.groups
        self.q = parameter(
            weight(config.heads, config.head_size), spec=P(None, "tensor", None), role="matrix"
        )
        spec = P(None, None, None if self._repeated(axes) else "tensor", None)
        self.kv = parameter(weight(2, config.groups, config.head_size), spec=spec, role="matrix")
        self.axes = axes

    def _repeated(self, axes: Axes) -> bool:
        return axes.tensor is not None and self.groups % axes.tensor_shards != 0

    def __call__(self, x_BsD):
        """(q_BShK, kv_BSngK)"""
        repeats = None, 2 if self._repeated(self.axes) else None
        projected = column_products(x_BsD, (self.q[...], self.kv[...]), repeats, self.axes)
        return tuple(checkpoint_name(y, MATMUL_OUTPUT) for y in projected)


class LlamaAttention(Attention):
    """Grouped-query attention with rotary positions."""

    def make_projections(self, rngs: nnx.Rngs) -> None:
        config = self.config
        self.qkv = GroupedProjection(config, axes=self.axes, rngs=rngs)
        self.out = RowLinear(
            (config.heads, config.head_size), config.hidden,
            std=output_std(config.init_std, config.layers), axes=self.axes, rngs=rngs, bias=False,
        )  # fmt: skip

    def project(self, x_BsD, place: Place | None) -> Projected:
        q_BShK, kv_BSngK = self.qkv(x_BsD)
        positions = positions_of(place, q_BShK.shape[1])
        k_BSgK = rotate(kv_BSngK[:, :, 0], positions, self.config)
        kv_BSngK = jnp.stack([k_BSgK, kv_BSngK[:, :, 1]], axis=2)
        return rotate(q_BShK, positions, self.config), kv_BSngK


class SwiGLU(nnx.Module):
    """D -> 2 F, silu(gate) up, F -> D, with F split over `tensor`."""

    def __init__(self, config: ModelConfig, *, axes: Axes, rngs: nnx.Rngs):
        wide = config.ffn_hidden
        self.up = ColumnLinear(
            config.hidden, (2, wide), split=1, std=config.init_std, axes=axes, rngs=rngs, bias=False
        )
        self.down = RowLinear(
            (wide,), config.hidden, std=output_std(config.init_std, config.layers), axes=axes,
            rngs=rngs, bias=False,
        )  # fmt: skip

    def __call__(self, x_BsD):
        return self.down(swiglu(self.up(x_BsD)))


class Llama(Model):
    """Llama 2 and 3, and what is built like them."""

    def make_ends(self, rngs: nnx.Rngs) -> Ends:
        return Ends(
            self.config, norm=RMSNorm, learned_positions=False, axes=self.axes,
            vocab_rows=self.vocab_rows, rngs=rngs,
        )  # fmt: skip

    def make_block(self, rngs: nnx.Rngs) -> Block:
        return Block(
            self.config, norm=RMSNorm, attention=LlamaAttention, mlp=SwiGLU, axes=self.axes,
            kernel=self.kernel, rngs=rngs,
        )  # fmt: skip
