"""Layer norm and RMS norm, computed in float32 whatever the type of their input.

For its backward pass each keeps only what Megatron keeps: its input and one or two numbers per row.

Legend: D the size that is normed, the last dim; ... all others
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.sharding.bias import over_rows
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.parameter import parameter


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The config of a norm."""

    kind: Literal["layer", "rms"]
    epsilon: float
    offset: float = 0.0  # rms: added to the scale, which then begins at 1 - offset (Gemma: 1)

    def module(self, size: int, dim: str = "hidden") -> LayerNorm | RMSNorm:
        """A norm over the last dim, which has that size and name."""
        if self.kind == "layer":
            return LayerNorm(size, epsilon=self.epsilon, dim=dim)
        return self.rms(size, dim)

    def rms(self, size: int, dim: str = "hidden") -> RMSNorm:
        return RMSNorm(size, epsilon=self.epsilon, offset=self.offset, dim=dim)


def scaled(x, scale: float):
    """x times a constant that is not rounded to its dtype."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


@custom_vjp(3)
def layer_norm(x, scale_D, bias_D, epsilon: float):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over D, in float32; x's dtype out."""
    return _layer_norm_forward(x, scale_D, bias_D, epsilon)[0]


def _layer_norm_forward(x, scale_D, bias_D, epsilon):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True)
    rstd = lax.rsqrt(jnp.square(x32 - mean).mean(axis=-1, keepdims=True) + epsilon)
    y = (x32 - mean) * rstd * scale_D.astype(jnp.float32) + bias_D.astype(jnp.float32)
    return y.astype(x.dtype), (x, mean, rstd, scale_D)


def _layer_norm_backward(epsilon, saved, dy):
    x, mean, rstd, scale_D = saved
    mean, rstd = _once((mean, rstd))
    normed = (x.astype(jnp.float32) - mean) * rstd
    dy32 = dy.astype(jnp.float32)
    dnormed = dy32 * scale_D.astype(jnp.float32)
    along = dnormed.mean(axis=-1, keepdims=True)
    across = (dnormed * normed).mean(axis=-1, keepdims=True)
    dx = (dnormed - along - normed * across) * rstd
    dscale, dbias = over_rows(dy32 * normed), over_rows(dy32)
    return dx.astype(x.dtype), dscale.astype(scale_D.dtype), dbias.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@custom_vjp(2, 3)
def rms_norm(x, scale_D, epsilon: float, offset: float = 0.0):
    """x / sqrt(mean of x^2 + epsilon) * (scale + offset) over D, in float32; x's dtype out (Zhang
    and Sennrich 2019)."""
    return _rms_norm_forward(x, scale_D, epsilon, offset)[0]


def _rms_norm_forward(x, scale_D, epsilon, offset):
    x32 = x.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + epsilon)
    y = x32 * rstd * _scale(scale_D, offset)
    return y.astype(x.dtype), (x, rstd, scale_D)


def _rms_norm_backward(epsilon, offset, saved, dy):
    x, rstd, scale_D = saved
    rstd = _once(rstd)
    normed = x.astype(jnp.float32) * rstd
    dy32 = dy.astype(jnp.float32)
    dnormed = dy32 * _scale(scale_D, offset)
    dx = (dnormed - normed * (dnormed * normed).mean(axis=-1, keepdims=True)) * rstd
    return dx.astype(x.dtype), over_rows(dy32 * normed).astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _scale(scale_D, offset: float):
    scale_D = scale_D.astype(jnp.float32)
    return scale_D + offset if offset else scale_D


def _once(statistics):
    """A barrier for statistics, one number per row. If they are recomputed, XLA:GPU would otherwise
    do so within every pass that needs them, and first write what is summed over rows to memory, in
    float32."""
    return lax.optimization_barrier(statistics)


class LayerNorm(nnx.Module):
    """Layer norm over the last dim, replicated over `tensor`."""

    def __init__(self, size: int, *, epsilon: float, dim: str = "hidden"):
        scale, bias = jnp.ones(size, jnp.float32), jnp.zeros(size, jnp.float32)
        self.scale = parameter(scale, spec=P(None), role="norm", dims=(dim,))
        self.bias = parameter(bias, spec=P(None), role="bias", dims=(dim,))
        self.epsilon = epsilon

    def __call__(self, x):
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """RMS norm over the last dim, replicated over `tensor`."""

    def __init__(self, size: int, *, epsilon: float, offset: float = 0.0, dim: str = "hidden"):
        scale = jnp.full(size, 1.0 - offset, jnp.float32)
        self.scale = parameter(scale, spec=P(None), role="norm", dims=(dim,))
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x):
        return rms_norm(x, self.scale[...], self.epsilon, self.offset)
