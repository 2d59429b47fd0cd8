"""Attention of the next positions of texts to the keys and values kept of earlier positions.

Legend: B rows · t the next positions · S kept ones · h heads of queries · g of keys and values ·
R = h / g · K head size
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from mtx.layers.attend import Scores, product, scores_of
from mtx.layers.projected import Projected, keys_and_values
from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import kept_of_parts, kept_places


def kept_of(projected: Projected, axes: Axes):
    """own_nBgtK: keys and values in the layout in which they are kept, heads before positions, so
    that both products read them without a transpose. (With positions first, XLA transposes all of
    them for every token: five times the time on a CPU.) If positions are kept by several devices,
    those of this device."""
    own_nBgtK = jnp.transpose(keys_and_values(projected), (2, 0, 3, 1, 4))
    return kept_of_parts(own_nBgtK, 3, axes)


def cached_attention(
    q_BthK, held_nBgSK, positions_Bt, rules: Scores, axes: Axes, sinks_h=None
):  # fmt: skip
    """softmax(scores) v -> o_BthK, softmax in float32. sinks: see `mtx.layers.sinks`.

    A query sees the keys and values held from position 0 up to its own (int32), or those in its
    window; later entries are ignored. Keys and values may be sharded by position over several
    devices (`mtx.sharding.sequence.kept_places`), all of which have the queries.
    """
    rows, new, heads, size = q_BthK.shape
    k_BgSK, v_BgSK = held_nBgSK
    q_BgRtK = jnp.transpose(q_BthK.reshape(rows, new, k_BgSK.shape[1], -1, size), (0, 2, 3, 1, 4))
    scores_BgRtS = scores_of(q_BgRtK, k_BgSK, rules)
    key = kept_places(k_BgSK.shape[2], axes)
    query = positions_Bt[:, None, None, :, None]
    seen = key <= query
    if rules.window is not None:
        seen &= query - key < rules.window
    scores_BgRtS = jnp.where(seen, scores_BgRtS, -jnp.inf)
    largest = scores_BgRtS.max(axis=-1, keepdims=True)
    largest = lax.pmax(largest, axes.past) if axes.past else largest
    if sinks_h is not None:
        sinks_gR11 = sinks_h.astype(jnp.float32).reshape(*scores_BgRtS.shape[1:3], 1, 1)
        largest = jnp.maximum(largest, sinks_gR11)
    p_BgRtS = jnp.exp(scores_BgRtS - largest)
    o_BgRtK = product("BgRtS,BgSK->BgRtK", p_BgRtS.astype(v_BgSK.dtype), v_BgSK)
    total = p_BgRtS.sum(axis=-1, keepdims=True)
    o_BgRtK, total = lax.psum((o_BgRtK, total), axes.past) if axes.past else (o_BgRtK, total)
    total = total if sinks_h is None else total + jnp.exp(sinks_gR11 - largest)
    o_BgRtK = (o_BgRtK / total).astype(v_BgSK.dtype)
    return jnp.transpose(o_BgRtK, (0, 3, 1, 2, 4)).reshape(rows, new, heads, size)
