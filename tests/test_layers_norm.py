"""Backward passes written by hand, against JAX's own for the same formula: norms, gates of MLPs,
and activations with a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.layers.attend import Scores, attention
from mtx.layers.mlp import activate_biased, gated
from mtx.layers.norm import layer_norm, rms_norm
from mtx.layers.over_context import attention_biased
from mtx.sharding.mesh import Axes

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


def of_layer(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias


def of_rms(x, scale, bias):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale + 0 * bias


def arrays(*shapes) -> list:
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def check(found, expected, *given) -> None:
    """Compare the gradients of both functions."""
    (weights,) = arrays(expected(*given).shape)
    places = tuple(range(len(given)))
    for one, other in zip(
        jax.jit(jax.grad(lambda *a: (weights * found(*a)).sum(), places))(*given),
        jax.jit(jax.grad(lambda *a: (weights * expected(*a)).sum(), places))(*given),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(abs(other).max()))


@pytest.mark.parametrize("rows", [(3,), (2, 64), (2, 192)])
def test_gradients_of_norms(rows):
    """With rows that are summed in one step, and in two."""
    x, scale, bias = arrays((*rows, 24), 24, 24)
    check(lambda *given: layer_norm(*given, 1e-5), of_layer, x, scale, bias)
    check(lambda x, scale, bias: rms_norm(x, scale, 1e-5) + 0 * bias, of_rms, x, scale, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_a_gated_activation(activation):
    def expected(x):
        return ACTIVATIONS[activation](x[..., 0, :]) * x[..., 1, :]

    check(lambda x: gated(x, activation), expected, *arrays((2, 5, 2, 8)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gates", [False, True])
def test_gradients_of_an_activation_with_its_bias(activation, gates):
    """With rows over which the bias's gradient is summed in two steps."""

    def expected(y, b):
        z, act = y + b, ACTIVATIONS[activation]
        return act(z[..., 0, :]) * z[..., 1, :] if gates else act(z)

    shape = (2, 8) if gates else (8,)
    check(lambda y, b: activate_biased(y, b, activation, gates), expected,
          *arrays((2, 128, *shape), shape))  # fmt: skip


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_of_attention_with_its_bias(window):
    rules = Scores(window=window)

    def expected(y, b):
        return attention((y + b,), rules=rules, kernel="blocked")

    check(lambda y, b: attention_biased(y, b, None, rules, "blocked", Axes()), expected,
          *arrays((2, 8, 3, 2, 4), (3, 2, 4)))  # fmt: skip
