"""Parts that models share: layer norm, GELU, and causal attention.

Each keeps for its backward pass what Megatron keeps and no more: the norm its input and two numbers
a row, GELU its input. Norms and softmax are computed in float32.

Legend: B rows · S sequence (s: shard; T: keys) · D hidden · H heads (h: shard) · K head size
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtx.sharding.random import dropout_heads


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x_BSD, scale_D, bias_D, epsilon: float):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over D, in float32; x's dtype out."""
    return _layer_norm_forward(x_BSD, scale_D, bias_D, epsilon)[0]


def _layer_norm_forward(x_BSD, scale_D, bias_D, epsilon):
    x32 = x_BSD.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.square(x32 - mean).mean(axis=-1, keepdims=True) + epsilon)
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
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), spec=P(None))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), spec=P(None))
        self.epsilon = epsilon

    def __call__(self, x_BSD):
        return layer_norm(x_BSD, self.scale[...], self.bias[...], self.epsilon)


_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x):
    """GELU, tanh form as in GPT-2 and Megatron. Keeps only x."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, dy):
    tanh = jnp.tanh(_GELU_SLOPE * (x + _GELU_CUBE * x * x * x))
    slope = _GELU_SLOPE * (1 + 3 * _GELU_CUBE * x * x)
    return (dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def causal_attention(q_BShK, k_BShK, v_BShK, *, dropout: float, key, samples_B, first_head):
    """softmax(q k^T / sqrt(K) + causal mask) v -> [B, S, h, K].

    cuDNN's fused kernel where it serves: on GPUs, in 16 bits, heads of at most 128, without dropout
    (its masks would depend on the layout).
    """
    if dropout:
        return _attention_with_dropout(q_BShK, k_BShK, v_BShK, dropout, key, samples_B, first_head)
    fused = q_BShK.dtype in (jnp.bfloat16, jnp.float16) and q_BShK.shape[-1] <= 128
    if not fused:
        return jax.nn.dot_product_attention(q_BShK, k_BShK, v_BShK, is_causal=True)
    return jax.lax.platform_dependent(
        q_BShK,
        k_BShK,
        v_BShK,
        cuda=partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
        default=partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    )


def _attention_with_dropout(q_BShK, k_BShK, v_BShK, rate, key, samples_B, first_head):
    scale = 1 / math.sqrt(q_BShK.shape[-1])
    scores_BhST = scale * jnp.einsum(
        "BShK,BThK->BhST", q_BShK, k_BShK, preferred_element_type=jnp.float32
    )
    sequence = q_BShK.shape[1]
    causal_ST = jnp.tril(jnp.ones((sequence, sequence), bool))
    p_BhST = jax.nn.softmax(jnp.where(causal_ST, scores_BhST, -jnp.inf), axis=-1)
    p_BhST = dropout_heads(p_BhST, rate, key, samples_B, first_head)
    return jnp.einsum("BhST,BThK->BShK", p_BhST.astype(v_BShK.dtype), v_BShK)
