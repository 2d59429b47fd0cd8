"""Parts that models share: layer norm, GELU, and causal attention.

Each keeps for its backward pass what Megatron keeps and no more: the norm its input and two numbers
a row, GELU its input. Norms and softmax are computed in float32.

Legend: B rows · S sequence (s: shard; T: keys) · D hidden · H heads (h: shard) ·
K head size · b a block of queries · n = 3 for q, k, v
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig
from mtx.sharding.linear import MATMUL_OUTPUT
from mtx.sharding.random import dropout_heads


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


AttentionKernel = Literal["blocked", "cudnn"]


def causal_attention(qkv_BSnhK, kernel: AttentionKernel):
    """softmax(q k^T / sqrt(K) + causal mask) v -> [B, S, h, K].

    "cudnn": the fused kernel behind `jax.nn.dot_product_attention`, for NVIDIA GPUs, 16 bits and
    heads of at most 128. "blocked": `blocked_attention`, everywhere.
    """
    if kernel == "blocked":
        return blocked_attention(qkv_BSnhK)
    q_BShK, k_BShK, v_BShK = (qkv_BSnhK[:, :, n] for n in range(3))
    return jax.nn.dot_product_attention(
        q_BShK, k_BShK, v_BShK, is_causal=True, implementation="cudnn"
    )


def cudnn_serves(config: ModelConfig) -> bool:
    """Whether cuDNN's fused attention takes this model's heads and compute type."""
    return config.compute_dtype != "float32" and config.head_size <= 128


def query_blocks(sequence: int) -> int:
    """The number of blocks into which `blocked_attention` cuts that many queries."""
    return 4 if sequence % 4 == 0 and sequence >= 64 else 1


@jax.custom_vjp
def blocked_attention(qkv_BSnhK):
    """Causal attention in blocks of queries, each with the keys up to its last query only.

    That is (n+1)/2n of the square for n blocks. Like FlashAttention (Dao et al. 2022) it keeps
    q, k, v, its output and a number a row, and computes the probabilities again going back.
    """
    return _attention_forward(qkv_BSnhK)[0]


def _blocks(sequence: int) -> list[slice]:
    size = sequence // query_blocks(sequence)
    return [slice(start, start + size) for start in range(0, sequence, size)]


def _heads_first(qkv_BSnhK):
    """Each of n as [B, h, S, K]: one copy here, in place of one for every block and product."""
    return jnp.transpose(qkv_BSnhK, (2, 0, 3, 1, 4))


def _scores(q_BhbK, k_BhTK, first: int):
    """Scaled and masked scores [B, h, b, T], float32; `first`: the position of the first query."""
    scores = _product("BhbK,BhTK->BhbT", q_BhbK, k_BhTK)
    query = first + lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    return jnp.where(query >= key, scores / math.sqrt(q_BhbK.shape[-1]), -jnp.inf)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _attend(q_BhbK, k_BhTK, v_BhTK, first: int):
    """(o_BhbK, log of the sum of exponentials [B, h, b]) of a block of queries."""
    scores_BhbT = _scores(q_BhbK, k_BhTK, first)
    largest = scores_BhbT.max(axis=-1, keepdims=True)
    p_BhbT = jnp.exp(scores_BhbT - largest)
    total = p_BhbT.sum(axis=-1, keepdims=True)
    o_BhbK = _product("BhbT,BhTK->BhbK", p_BhbT.astype(v_BhTK.dtype), v_BhTK) / total
    return o_BhbK.astype(v_BhTK.dtype), (largest + jnp.log(total))[..., 0]


def _attend_backward(q_BhbK, k_BhTK, v_BhTK, first: int, logsumexp_Bhb, along_Bhb, do_BhbK):
    """Float32 gradients (dq_BhbK, dk_BhTK, dv_BhTK); `along`: the sum over K of do times o."""
    dtype, scale = q_BhbK.dtype, 1 / math.sqrt(q_BhbK.shape[-1])
    scores_BhbT = _scores(q_BhbK, k_BhTK, first) - logsumexp_Bhb[..., None]
    # They are below 0, but in an idle B of slices, which reads two microbatches: no infinity there.
    p_BhbT = jnp.exp(jnp.minimum(scores_BhbT, 0))
    dp_BhbT = _product("BhbK,BhTK->BhbT", do_BhbK, v_BhTK)
    ds_BhbT = (p_BhbT * (dp_BhbT - along_Bhb[..., None]) * scale).astype(dtype)
    dq_BhbK = _product("BhbT,BhTK->BhbK", ds_BhbT, k_BhTK)
    dk_BhTK = _product("BhbT,BhbK->BhTK", ds_BhbT, q_BhbK)
    dv_BhTK = _product("BhbT,BhbK->BhTK", p_BhbT.astype(dtype), do_BhbK)
    return dq_BhbK, dk_BhTK, dv_BhTK


def _along(do_BShK, o_BShK):
    """[B, h, S] float32: do times o, summed over K."""
    along_BSh = (do_BShK.astype(jnp.float32) * o_BShK.astype(jnp.float32)).sum(axis=-1)
    return jnp.swapaxes(along_BSh, 1, 2)


def _attention_forward(qkv_BSnhK):
    q_BhSK, k_BhSK, v_BhSK = _heads_first(qkv_BSnhK)
    outputs, logsumexps = [], []
    for block in _blocks(qkv_BSnhK.shape[1]):
        keys = slice(block.stop)
        o_BhbK, logsumexp_Bhb = _attend(
            q_BhSK[:, :, block], k_BhSK[:, :, keys], v_BhSK[:, :, keys], block.start
        )
        outputs.append(o_BhbK)
        logsumexps.append(logsumexp_Bhb)
    o_BShK = jnp.swapaxes(jnp.concatenate(outputs, axis=2), 1, 2)
    o_BShK = checkpoint_name(o_BShK, MATMUL_OUTPUT)
    logsumexp_BhS = checkpoint_name(jnp.concatenate(logsumexps, axis=2), MATMUL_OUTPUT)
    return o_BShK, (qkv_BSnhK, o_BShK, logsumexp_BhS)


def _attention_backward(saved, do_BShK):
    qkv_BSnhK, o_BShK, logsumexp_BhS = saved
    sequence = qkv_BSnhK.shape[1]
    q_BhSK, k_BhSK, v_BhSK = _heads_first(qkv_BSnhK)
    do_BhSK, along_BhS = jnp.swapaxes(do_BShK, 1, 2), _along(do_BShK, o_BShK)
    dq, dk_BhSK, dv_BhSK = [], 0.0, 0.0
    for block in _blocks(sequence):
        keys = slice(block.stop)
        dq_BhbK, dk_BhTK, dv_BhTK = _attend_backward(
            q_BhSK[:, :, block], k_BhSK[:, :, keys], v_BhSK[:, :, keys], block.start,
            logsumexp_BhS[:, :, block], along_BhS[:, :, block], do_BhSK[:, :, block],
        )  # fmt: skip
        after = ((0, 0), (0, 0), (0, sequence - block.stop), (0, 0))  # keys that the block hides
        dq.append(dq_BhbK)
        dk_BhSK += jnp.pad(dk_BhTK, after)
        dv_BhSK += jnp.pad(dv_BhTK, after)
    dqkv_nBhSK = jnp.stack([jnp.concatenate(dq, axis=2), dk_BhSK, dv_BhSK])
    return (jnp.transpose(dqkv_nBhSK.astype(qkv_BSnhK.dtype), (1, 3, 0, 2, 4)),)


blocked_attention.defvjp(_attention_forward, _attention_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def sliced_attention(qkv_BbnhK, cache_BSnhK, part, slices: int):
    """Causal attention of one slice of a sequence, the keys and values of earlier ones in a cache.

    qkv: of the b = S / slices positions from part * b on; cache (n = 2 for k, v): what stands in it
    from there on counts for nothing; part: int32 []. Attention of slice j takes j + 1 blocks of
    keys, no more. Keeps what `blocked_attention` keeps, of this slice alone.
    """
    return _slice_forward(qkv_BbnhK, cache_BSnhK, part, slices)[0]


def _slice_keys(qkv_BbnhK, cache_BSnhK, part: int):
    """q, k, v [B, h, b or T, K] with the T = (part + 1) b keys up to the end of this slice."""
    q_BhbK, k_BhbK, v_BhbK = _heads_first(qkv_BbnhK)
    k_BhTK, v_BhTK = _heads_first(cache_BSnhK[:, : part * qkv_BbnhK.shape[1]])
    return (
        q_BhbK,
        jnp.concatenate([k_BhTK, k_BhbK], axis=2),
        jnp.concatenate([v_BhTK, v_BhbK], axis=2),
    )


def _slice_forward(qkv_BbnhK, cache_BSnhK, part, slices):
    def attend(part, qkv_BbnhK, cache_BSnhK):
        q, k, v = _slice_keys(qkv_BbnhK, cache_BSnhK, part)
        return _attend(q, k, v, part * qkv_BbnhK.shape[1])

    branches = [partial(attend, part) for part in range(slices)]
    o_BhbK, logsumexp_Bhb = lax.switch(part, branches, qkv_BbnhK, cache_BSnhK)
    o_BbhK = checkpoint_name(jnp.swapaxes(o_BhbK, 1, 2), MATMUL_OUTPUT)
    logsumexp_Bhb = checkpoint_name(logsumexp_Bhb, MATMUL_OUTPUT)
    return o_BbhK, (qkv_BbnhK, cache_BSnhK, part, o_BbhK, logsumexp_Bhb)


def _slice_backward(slices, saved, do_BbhK):
    qkv_BbnhK, cache_BSnhK, part, o_BbhK, logsumexp_Bhb = saved
    do_BhbK, along_Bhb = jnp.swapaxes(do_BbhK, 1, 2), _along(do_BbhK, o_BbhK)

    def attend(part, qkv_BbnhK, cache_BSnhK):
        size, sequence = qkv_BbnhK.shape[1], cache_BSnhK.shape[1]
        q, k, v = _slice_keys(qkv_BbnhK, cache_BSnhK, part)
        dq, *dkv = _attend_backward(q, k, v, part * size, logsumexp_Bhb, along_Bhb, do_BhbK)
        own = jnp.stack([dq, *(d_BhTK[:, :, part * size :] for d_BhTK in dkv)])
        earlier = jnp.stack([d_BhTK[:, :, : part * size] for d_BhTK in dkv])
        after = ((0, 0),) * 3 + ((0, sequence - part * size), (0, 0))
        dqkv_BbnhK = jnp.transpose(own, (1, 3, 0, 2, 4))
        dcache_BSnhK = jnp.transpose(jnp.pad(earlier, after), (1, 3, 0, 2, 4))
        return dqkv_BbnhK.astype(qkv_BbnhK.dtype), dcache_BSnhK.astype(cache_BSnhK.dtype)

    branches = [partial(attend, part) for part in range(slices)]
    return *lax.switch(part, branches, qkv_BbnhK, cache_BSnhK), None


sliced_attention.defvjp(_slice_forward, _slice_backward)


def attention_with_dropout(qkv_BSnhK, *, rate: float, key, samples_B, first_head):
    """Causal attention with dropout on its probabilities, whose masks no layout changes."""
    q_BShK, k_BShK, v_BShK = (qkv_BSnhK[:, :, n] for n in range(3))
    scores_BhST = jnp.einsum(
        "BShK,BThK->BhST", q_BShK, k_BShK, preferred_element_type=jnp.float32
    ) / math.sqrt(q_BShK.shape[-1])
    sequence = q_BShK.shape[1]
    causal_ST = jnp.tril(jnp.ones((sequence, sequence), bool))
    p_BhST = jax.nn.softmax(jnp.where(causal_ST, scores_BhST, -jnp.inf), axis=-1)
    p_BhST = dropout_heads(p_BhST, rate, key, samples_B, first_head)
    return jnp.einsum("BhST,BThK->BShK", p_BhST.astype(v_BShK.dtype), v_BShK)
