"""cuDNN's fused attention as two opaque equations, for reading a layer's cost off its trace.

The kernel itself can only be traced on a machine with such a GPU. These equations have the same
inputs, outputs and residuals as the kernel; they cannot be run.

Legend: B rows · S sequence (T: keys) · h heads of queries · g of keys and values · K head size
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from mtx.sharding.custom_vjp import custom_vjp

FORWARD, BACKWARD = Primitive("fused_attention"), Primitive("fused_attention_backward")
for _primitive in (FORWARD, BACKWARD):
    _primitive.multiple_results = True


@FORWARD.def_abstract_eval
def _of_forward(q_BShK, _, v_BTgK, *__, causal, window):
    """(the output, one number per query and head), from (q, k, v, mask as a bias)."""
    rows, sequence, heads, _ = q_BShK.shape
    output = ShapedArray((*q_BShK.shape[:3], v_BTgK.shape[-1]), q_BShK.dtype)
    return output, ShapedArray((rows, heads, sequence), jnp.float32)


@BACKWARD.def_abstract_eval
def _of_backward(q_BShK, k_BTgK, v_BTgK, *_, causal, window):
    return q_BShK, k_BTgK, v_BTgK


@custom_vjp(4, 5)
def described_attention(q_BShK, k_BTgK, v_BTgK, mask_B1ST, causal: bool, window: int | None):
    """o_BShK of `jax.nn.dot_product_attention`, which turns a mask into a bias and keeps it."""
    return _forward(q_BShK, k_BTgK, v_BTgK, mask_B1ST, causal, window)[0]


def _forward(q_BShK, k_BTgK, v_BTgK, mask_B1ST, causal, window):
    bias = () if mask_B1ST is None else (jnp.where(mask_B1ST, 0, -1e9).astype(q_BShK.dtype),)
    inputs = q_BShK, k_BTgK, v_BTgK, *bias
    o_BShK, statistics_BhS = FORWARD.bind(*inputs, causal=causal, window=window)
    return o_BShK, (inputs, o_BShK, statistics_BhS)


def _backward(causal, window, saved, do_BShK):
    inputs, o_BShK, statistics_BhS = saved
    return *BACKWARD.bind(
        *inputs, o_BShK, statistics_BhS, do_BShK, causal=causal, window=window
    ), None


described_attention.defvjp(_forward, _backward)
