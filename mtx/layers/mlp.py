"""The feed-forward sublayer: D -> F, an activation, F -> D, with F split over `tensor`. Gated ones
(Shazeer 2020) have a second matrix into F, whose output multiplies the activation's.

Activations keep only their input for the backward pass.

Legend: B rows · S sequence (s: shard) · D hidden · F feed-forward (f: shard) · n = 2 for gate, up
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import erf

from mtx.layers.context import Context
from mtx.layers.joined import joined
from mtx.layers.kernels import CLAMP_LIMIT, CLAMP_SLOPE
from mtx.layers.sublayer import Build
from mtx.sharding.bias import as_matrix, over_rows
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.linear import ColumnLinear, RowLinear

# gelu_tanh: GELU's approximation as in GPT-2 and Megatron-LM; gelu: exact. relu2: the square of
# ReLU (So et al. 2021). quick_gelu: CLIP's x sigmoid(1.702 x). clamped: gpt-oss's, gated only:
# gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up between -7 and 7
Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "silu", "relu", "relu2", "clamped"]
_OF_SIGMOIDS = "silu", "quick_gelu", "clamped"
_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The config of an MLP."""

    ffn: int  # F
    activation: Activation = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    looks_around = False
    adapts = True
    joins = True

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return MLPModule(self, build, rngs)


class MLPModule(nnx.Module):
    """up: w [D, F], or [D, 2, F] of gate and up; down: w [F, D]."""

    def __init__(self, config: MLP, build: Build, rngs: nnx.Rngs):
        outputs = (2, config.ffn) if config.gated else (config.ffn,)
        wide = ("gate and up", "columns") if config.gated else ("columns",)
        axes = replace(build.axes, by_rows=True)
        self.up = ColumnLinear(
            build.hidden, outputs, split=len(outputs) - 1, std=build.init_std, axes=axes,
            rngs=rngs, bias=config.bias, adapters=build.adapters, dims=("hidden", *wide),
        )  # fmt: skip
        self.down = RowLinear(
            (config.ffn,), build.hidden, std=build.output_std, axes=axes, rngs=rngs,
            bias=config.bias, adapters=build.adapters, dims=("rows", "hidden"),
        )  # fmt: skip
        self.config = config

    def __call__(self, x_BsD, context: Context | None = None):
        config, y = self.config, self.up.without_bias(x_BsD)
        if config.bias:
            b = self.up.b[...]
            return self.down(activate_biased(y, b, config.activation, config.gated))
        return self.down((gated if config.gated else activate)(y, config.activation))


def _value(x, activation: Activation):
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    if activation == "quick_gelu":
        return x * jax.nn.sigmoid(CLAMP_SLOPE * x)
    if activation == "clamped":
        x = jnp.minimum(x, CLAMP_LIMIT)
        return x * jax.nn.sigmoid(CLAMP_SLOPE * x)
    if activation == "gelu":
        return jax.nn.gelu(x, approximate=False)
    x32 = x.astype(jnp.float32)  # (1 + tanh(z)) / 2 is sigmoid(2z), cheaper on XLA:GPU
    return (x32 * jax.nn.sigmoid(2 * _of_tanh(x32))).astype(x.dtype)


def _of_tanh(x):
    """The argument of tanh in GELU's approximation."""
    return _GELU_SLOPE * (x + _GELU_CUBE * x * x * x)


def _slope(x, activation: Activation):
    """The derivative in x's type, or in float32 for GELU's approximation."""
    if activation == "relu":
        return (x > 0).astype(x.dtype)
    if activation == "relu2":
        return 2 * jax.nn.relu(x)
    if activation == "silu":
        sigmoid = jax.nn.sigmoid(x)
        return sigmoid * (1 + x * (1 - sigmoid))
    if activation in ("quick_gelu", "clamped"):
        sigmoid = jax.nn.sigmoid(CLAMP_SLOPE * x)
        slope = sigmoid * (1 + CLAMP_SLOPE * x * (1 - sigmoid))
        return slope if activation == "quick_gelu" else jnp.where(x <= CLAMP_LIMIT, slope, 0)
    if activation == "gelu":
        density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return (0.5 * (1 + erf(x / math.sqrt(2))) + x * density).astype(x.dtype)
    x = x.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(2 * _of_tanh(x))
    return sigmoid + x * sigmoid * (1 - sigmoid) * 2 * _GELU_SLOPE * (1 + 3 * _GELU_CUBE * x * x)


@custom_vjp(1)
def activate(x, activation: Activation):
    """The activation of each element."""
    return _value(x, activation)


def _activate_backward(activation, x, dy):
    return ((dy * _slope(x, activation)).astype(x.dtype),)


activate.defvjp(lambda x, activation: (activate(x, activation), x), _activate_backward)


@custom_vjp(1)
def gated(x_BSnf, activation: Activation):
    """activation(gate) * up of [gate, up] (n = 2); "clamped": * (up + 1)."""
    return _value(x_BSnf[..., 0, :], activation) * _factor(x_BSnf[..., 1, :], activation)


def _factor(up, activation: Activation):
    return jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1 if activation == "clamped" else up


def _gated_backward(activation, x_BSnf, dy_BSf):
    gate, up = x_BSnf[..., 0, :], x_BSnf[..., 1, :]
    dgate = (dy_BSf * _factor(up, activation) * _slope(gate, activation)).astype(gate.dtype)
    dup = dy_BSf * _value(gate, activation)
    if activation == "clamped":
        dup = jnp.where(jnp.abs(up) <= CLAMP_LIMIT, dup, 0)
    if activation in _OF_SIGMOIDS:
        return (joined((dgate, dup), dgate.ndim - 1),)
    return (jnp.stack([dgate, dup], axis=-2),)


gated.defvjp(lambda x_BSnf, activation: (gated(x_BSnf, activation), x_BSnf), _gated_backward)


@custom_vjp(2, 3)
def activate_biased(y, b, activation: Activation, gates: bool):
    """The activation of y[B, S, *outputs] + b[*outputs], gated or not. Keeps y, which a matmul can
    write directly to where it is kept."""
    return (gated if gates else activate)(y + b, activation)


def _activate_biased_backward(activation, gates, saved, dh):
    y, b = saved
    (dz,) = (_gated_backward if gates else _activate_backward)(activation, y + b, dh)
    db = over_rows(as_matrix(dz).astype(jnp.float32))
    return dz, db.astype(dz.dtype).reshape(b.shape)


activate_biased.defvjp(
    lambda y, b, *rest: (activate_biased(y, b, *rest), (y, b)), _activate_biased_backward
)
