"""What a call of a layer depends on besides its input: which layer, which samples, which part of
the sequence.

Legend: B rows · S sequence (s: shard) · D hidden
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.mesh import Axes
from mtx.sharding.random import dropout_rows, fold
from mtx.sharding.sequence import places


class Context(NamedTuple):
    """Everything that random numbers, masks and positions are computed from."""

    layer: jax.Array  # int32 []
    samples_B: jax.Array | None  # int32 [B]: rows of the global batch
    rng: jax.Array | None  # uint32 [2]: the step's key; None: no dropout
    part: jax.Array  # int32 []: which slice of the sequence; 0 if it is whole
    segments_BS: jax.Array | None  # int32: attention stays within equal ones; None: one per row
    positions_BS: jax.Array | None  # int32 [B, S] or [S]; None: 0 to S - 1
    busy: jax.Array | None = None  # bool []: False if the stage is idle; None: it is not idle
    last_B: jax.Array | None = None  # int32: the place of a text's last token; padding follows
    patches_BS: jax.Array | None = None  # int32: the image patch at each position; -1: a token


def first_position(x_BsD, axes: Axes, context: Context | None):
    """The global position of this shard's first row, if `context` does not cut the sequence."""
    part = 0 if context is None else context.part
    if not axes.sequence_parallel:
        return part * x_BsD.shape[1]
    shards = lax.axis_size(axes.tensor)
    return (part * shards + lax.axis_index(axes.tensor)) * x_BsD.shape[1]


def places_of(x_BsD, axes: Axes, context: Context | None):
    """int32 [s]: the places of this shard's rows in the sequence."""
    first, own = first_position(x_BsD, axes, context), x_BsD.shape[1]
    if axes.context is None:
        return first + jnp.arange(own)
    shards = axes.tensor_shards if axes.sequence_parallel else 1
    return lax.dynamic_slice_in_dim(places(own * shards, axes), first, own)


def positions_of(context: Context | None, size: int):
    """int32 [size] or [B, size]: the positions of the whole sequence, of a slice of that size, or
    of this device's part."""
    if context is None:
        return jnp.arange(size)
    if context.positions_BS is not None:
        return context.positions_BS
    return context.part * size + jnp.arange(size)


def dropout(x_BsD, rate: float, axes: Axes, context: Context | None, *site: int | jax.Array):
    """x with dropout, if the context has random numbers. site: what the mask depends on besides
    sample and position."""
    if context is None or context.rng is None or not rate:
        return x_BsD
    places_s, key = places_of(x_BsD, axes, context), fold(context.rng, *site)
    return dropout_rows(x_BsD, rate, key, context.samples_B, places_s)
