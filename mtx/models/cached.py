"""Attention of new positions of texts, with the keys and values of earlier ones kept.

They are kept with the heads before the positions: both products then read them as they lie. (With
the positions first, XLA transposes all of them for every token: five times the time on a CPU.)

Legend: B rows · t new positions · S positions kept · h heads of queries · g heads of keys and
values · R = h / g · K head size · n = 2 for k, v
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from mtx.models.attention import Projected, keys_and_values

# Keeps own_nBgtK. (All that are kept, held_nBgSK, these among them; what the caller makes of it.)
# held: None where these are all that there are.
Keep = Callable[[Any], tuple[Any, Any]]


def kept_of(projected: Projected):
    """own_nBgtK: keys and values as they are kept."""
    return jnp.transpose(keys_and_values(projected), (2, 0, 3, 1, 4))


def cached_attention(q_BthK, held_nBgSK, positions_Bt):
    """softmax(q k^T / sqrt(K) + causal mask) v -> o_BthK, softmax in float32.

    A query at a position (int32) sees the keys and values held from 0 up to there; what stands
    behind them counts for nothing.
    """
    rows, new, heads, size = q_BthK.shape
    k_BgSK, v_BgSK = held_nBgSK
    q_BtgRK = q_BthK.reshape(rows, new, k_BgSK.shape[1], -1, size)
    scores_BgRtS = jnp.einsum(
        "BtgRK,BgSK->BgRtS", q_BtgRK, k_BgSK, preferred_element_type=jnp.float32
    ) / math.sqrt(size)
    key = lax.broadcasted_iota(jnp.int32, scores_BgRtS.shape, 4)
    seen = key <= positions_Bt[:, None, None, :, None]
    scores_BgRtS = jnp.where(seen, scores_BgRtS, -jnp.inf)
    p_BgRtS = jnp.exp(scores_BgRtS - scores_BgRtS.max(axis=-1, keepdims=True))
    o_BgRtK = jnp.einsum(
        "BgRtS,BgSK->BgRtK", p_BgRtS.astype(v_BgSK.dtype), v_BgSK,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    o_BgRtK = (o_BgRtK / p_BgRtS.sum(axis=-1, keepdims=True)).astype(v_BgSK.dtype)
    return jnp.transpose(o_BgRtK, (0, 3, 1, 2, 4)).reshape(rows, new, heads, size)
