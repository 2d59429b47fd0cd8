"""Where a block's input stands: which layer, which samples, which part of the sequence.

Legend: B rows · S sequence (s: shard) · D hidden
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.mesh import Axes


class Place(NamedTuple):
    """Random numbers, masks and positions follow from this and nothing else."""

    layer: jax.Array  # int32 []
    samples_B: jax.Array | None  # int32 [B]: rows of the global batch
    key: jax.Array | None  # uint32 [2]: the step's key; None: no dropout
    part: jax.Array  # int32 []: which slice of the sequence; 0 where it is whole
    segments_BS: jax.Array | None  # int32: attention stays among equal ones; None: one a row
    positions_BS: jax.Array | None  # int32: None: 0 to S - 1


def first_position(x_BsD, axes: Axes, place: Place | None):
    """The global position of this shard's first row."""
    part = 0 if place is None else place.part
    if not axes.sequence_parallel:
        return part * x_BsD.shape[1]
    shards = lax.axis_size(axes.tensor)
    return (part * shards + lax.axis_index(axes.tensor)) * x_BsD.shape[1]


def positions_of(place: Place | None, size: int):
    """int32 [size] or [B, size]: positions of the whole sequence, or of a slice of that size."""
    if place is None:
        return jnp.arange(size)
    if place.positions_BS is not None:
        return place.positions_BS
    return place.part * size + jnp.arange(size)
