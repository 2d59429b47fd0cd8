"""The likeliest tokens when the vocabulary is sharded.

Legend: B rows · v this device's part of the vocabulary · k candidates
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from mtx.sharding.mesh import Axes


def candidates(logits_Bv, count: int, limit, axes: Axes):
    """(ids int32, logits) [B, k] of the k = `count` largest logits with ids below `limit`, on every
    device: the largest first, among equals the lower id. Fewer if the vocabulary has fewer.

    Two all-gathers of [B, k] over the vocabulary's shards. A NaN counts as the largest of all.
    """
    size = logits_Bv.shape[-1]
    first = lax.axis_index(axes.vocab) * size if axes.vocab else 0
    ids_v = first + jnp.arange(size, dtype=jnp.int32)
    logits_Bk, local_Bk = _largest(jnp.where(ids_v < limit, logits_Bv, -jnp.inf), count)
    ids_Bk = ids_v[local_Bk]
    if not axes.vocab:
        return ids_Bk, logits_Bk
    ids_B, logits_B = (
        lax.all_gather(a, axes.vocab, axis=1, tiled=True) for a in (ids_Bk, logits_Bk)
    )
    logits_Bk, places_Bk = _largest(logits_B, count)
    return jnp.take_along_axis(ids_B, places_Bk, axis=1), logits_Bk


def _largest(values_Bn, count: int):
    """(values, indices) [B, k]; `lax.top_k` sorts, which k = 1 does not need."""
    if count == 1:
        places_B = jnp.argmax(values_Bn, axis=1)
        return values_Bn.max(axis=1)[:, None], places_B[:, None]
    return lax.top_k(values_Bn, min(count, values_Bn.shape[1]))
