"""Backward passes that are written by hand, against JAX's own of the same formula: norms, and what
gates an MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.layers.mlp import gated
from mtx.layers.norm import layer_norm, rms_norm

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
    """The gradients of both."""
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
    """Of rows that are summed in one step, and in two."""
    x, scale, bias = arrays((*rows, 24), 24, 24)
    check(lambda *given: layer_norm(*given, 1e-5), of_layer, x, scale, bias)
    check(lambda x, scale, bias: rms_norm(x, scale, 1e-5) + 0 * bias, of_rms, x, scale, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_a_gated_activation(activation):
    def expected(x):
        return ACTIVATIONS[activation](x[..., 0, :]) * x[..., 1, :]

    check(lambda x: gated(x, activation), expected, *arrays((2, 5, 2, 8)))
