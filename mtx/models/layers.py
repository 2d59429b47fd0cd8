"""Parts that models share: norms and activations.

Each keeps for its backward pass what Megatron keeps and no more: a norm its input and a number or
two a row, an activation its input. Norms are computed in float32.

Legend: B rows · S sequence · D hidden · F feed-forward (f: shard)
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.scipy.special import erf
from jax.sharding import PartitionSpec as P

from mtx.config import Gelu
from mtx.sharding.parameter import parameter


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x_BSD, scale_D, bias_D, epsilon: float):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over D, in float32; x's dtype out."""
    return _layer_norm_forward(x_BSD, scale_D, bias_D, epsilon)[0]


def _layer_norm_forward(x_BSD, scale_D, bias_D, epsilon):
    x32 = x_BSD.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True)
    rstd = lax.rsqrt(jnp.square(x32 - mean).mean(axis=-1, keepdims=True) + epsilon)
    y = (x32 - mean) * rstd * scale_D.astype(jnp.float32) + bias_D.astype(jnp.float32)
    return y.astype(x_BSD.dtype), (x_BSD, mean, rstd, scale_D)


def _layer_norm_backward(epsilon, saved, dy_BSD):
    x_BSD, mean, rstd, scale_D = saved
    normed = (x_BSD.astype(jnp.float32) - mean) * rstd
    dy32 = dy_BSD.astype(jnp.float32)
    dnormed = dy32 * scale_D.astype(jnp.float32)
    along = dnormed.mean(axis=-1, keepdims=True)
    across = (dnormed * normed).mean(axis=-1, keepdims=True)
    dx = (dnormed - along - normed * across) * rstd
    dscale, dbias = (dy32 * normed).sum(axis=(0, 1)), dy32.sum(axis=(0, 1))
    return dx.astype(x_BSD.dtype), dscale.astype(scale_D.dtype), dbias.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class LayerNorm(nnx.Module):
    """Layer norm over the last dim, replicated over `tensor`."""

    def __init__(self, size: int, *, epsilon: float):
        self.scale = parameter(jnp.ones(size, jnp.float32), spec=P(None), role="norm")
        self.bias = parameter(jnp.zeros(size, jnp.float32), spec=P(None), role="bias")
        self.epsilon = epsilon

    def __call__(self, x_BSD):
        return layer_norm(x_BSD, self.scale[...], self.bias[...], self.epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x_BSD, scale_D, epsilon: float):
    """x / sqrt(mean of x^2 + epsilon) * scale over D, in float32; x's dtype out (Zhang and
    Sennrich 2019)."""
    return _rms_norm_forward(x_BSD, scale_D, epsilon)[0]


def _rms_norm_forward(x_BSD, scale_D, epsilon):
    x32 = x_BSD.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + epsilon)
    y = x32 * rstd * scale_D.astype(jnp.float32)
    return y.astype(x_BSD.dtype), (x_BSD, rstd, scale_D)


def _rms_norm_backward(epsilon, saved, dy_BSD):
    x_BSD, rstd, scale_D = saved
    normed = x_BSD.astype(jnp.float32) * rstd
    dy32 = dy_BSD.astype(jnp.float32)
    dnormed = dy32 * scale_D.astype(jnp.float32)
    dx = (dnormed - normed * (dnormed * normed).mean(axis=-1, keepdims=True)) * rstd
    dscale = (dy32 * normed).sum(axis=(0, 1))
    return dx.astype(x_BSD.dtype), dscale.astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class RMSNorm(nnx.Module):
    """RMS norm over the last dim, replicated over `tensor`."""

    def __init__(self, size: int, *, epsilon: float):
        self.scale = parameter(jnp.ones(size, jnp.float32), spec=P(None), role="norm")
        self.epsilon = epsilon

    def __call__(self, x_BSD):
        return rms_norm(x_BSD, self.scale[...], self.epsilon)


_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x, form: Gelu = "tanh"):
    """GELU: "tanh" as in GPT-2 and Megatron, or exactly, by "erf". Keeps only x."""
    return jax.nn.gelu(x, approximate=form == "tanh")


def _gelu_forward(x, form):
    return gelu(x, form), x


def _gelu_backward(form, x, dy):
    if form == "erf":
        density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return (dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * density).astype(x.dtype),)
    tanh = jnp.tanh(_GELU_SLOPE * (x + _GELU_CUBE * x * x * x))
    slope = _GELU_SLOPE * (1 + 3 * _GELU_CUBE * x * x)
    return (dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def swiglu(x_BSnf):
    """silu(gate) * up of [gate, up] (n = 2), as in Shazeer 2020. Keeps only x."""
    return jax.nn.silu(x_BSnf[..., 0, :]) * x_BSnf[..., 1, :]


def _swiglu_forward(x_BSnf):
    return swiglu(x_BSnf), x_BSnf


def _swiglu_backward(x_BSnf, dy_BSf):
    gate, up = x_BSnf[..., 0, :], x_BSnf[..., 1, :]
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dy_BSf * up * sigmoid * (1 + gate * (1 - sigmoid))
    return (jnp.stack([dgate, dy_BSf * gate * sigmoid], axis=-2),)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
