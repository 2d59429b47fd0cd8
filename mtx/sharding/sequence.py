"""Sequences sharded over the axis `context`: which device has which tokens.

A sequence is cut into 2c equal chunks. Device r of c has chunk r and chunk 2c - 1 - r, in this
order ("zigzag"): if positions see none after them, all devices then have the same work. Tokens,
targets, weights and everything else that belongs to a position are put in that order before they
are given to devices, so that nothing has to be moved there.

When a text is continued, device r keeps the positions r, r + c, r + 2c ... instead: the place of a
next position then does not depend on how long the first part was.

Legend: S sequence · s a device's part of it · c devices along `context` · n = S / 2c, a chunk
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.sharding.collectives import all_gather_sequence, gather_sequence
from mtx.sharding.mesh import Axes


def zigzag(sequence: int, parts: int) -> np.ndarray:
    """int [S]: the positions in the order of the devices, those of the first device first."""
    chunks = np.arange(sequence).reshape(2 * parts, -1)
    return np.concatenate([chunks[[part, -1 - part]].ravel() for part in range(parts)])


def in_order(gathered, axis: int, parts: int):
    """An array in whose dim `axis` the parts of `parts` devices follow one another, with that dim
    put in the order of positions."""
    shape = gathered.shape
    chunks = gathered.reshape(*shape[:axis], parts, 2, -1, *shape[axis + 1 :])
    first, second = (lax.index_in_dim(chunks, n, axis + 1, keepdims=False) for n in (0, 1))
    chunks = jnp.concatenate([first, jnp.flip(second, axis)], axis=axis)
    return chunks.reshape(shape)


def as_devices_have(array, axis: int, parts: int):
    """The inverse of `in_order`."""
    shape = array.shape
    chunks = array.reshape(*shape[:axis], 2, parts, -1, *shape[axis + 1 :])
    first, second = (lax.index_in_dim(chunks, n, axis, keepdims=False) for n in (0, 1))
    return jnp.stack([first, jnp.flip(second, axis)], axis=axis + 1).reshape(shape)


def places(size: int, axes: Axes):
    """int32 [s]: the positions of this device's part of the sequence, which has `size` of them."""
    if axes.context is None:
        return jnp.arange(size, dtype=jnp.int32)
    part, chunk = lax.axis_index(axes.context), size // 2
    first = jnp.stack([part, 2 * axes.context_shards - 1 - part]) * chunk
    return (first[:, None] + jnp.arange(chunk, dtype=jnp.int32)).reshape(size)


def whole_sequence(x_Bs, axes: Axes):
    """x_BS in the order of positions, gathered from all devices. Backward: a reduce-scatter."""
    if axes.context is None:
        return x_Bs
    whole = gather_sequence if jnp.issubdtype(x_Bs.dtype, jnp.floating) else all_gather_sequence
    return in_order(whole(x_Bs, axes.context), 1, axes.context_shards)


# -- continued texts -------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The part of what a continued text keeps that does not grow with it: each pass replaces it.
    Arrays that are kept outside a `State` have one entry per position."""

    arrays: Any  # a tree of [n, B, h, ...], h as in keys and values


def is_state(entry: Any) -> bool:
    return isinstance(entry, State)


def kept_of_parts(part, axis: int, axes: Axes):
    """What this device keeps of the positions from 0 on, of which each device has its part in dim
    `axis`: by an all-to-all, or if c does not divide n, by a gather. Unchanged if unsharded."""
    if axes.context is None:
        return part
    devices, split = axes.context_shards, axis + 1

    def by_device(a):
        return a.reshape(*a.shape[:axis], -1, devices, *a.shape[split:])

    if part.shape[axis] % (2 * devices):
        whole = in_order(lax.all_gather(part, axes.context, axis=axis, tiled=True), axis, devices)
        index = lax.axis_index(axes.context)
        return lax.dynamic_index_in_dim(by_device(whole), index, split, keepdims=False)
    mine = lax.all_to_all(by_device(part), axes.context, split, axis, tiled=True)
    return in_order(lax.squeeze(mine, (split,)), axis, devices)


def kept_places(size: int, axes: Axes):
    """int32 [size]: the positions that this device keeps."""
    slots = jnp.arange(size, dtype=jnp.int32)
    if axes.past is None:
        return slots
    return slots * lax.axis_size(axes.past) + lax.axis_index(axes.past)


def kept_slots(positions_B, size: int, axes: Axes):
    """int32 [B]: the slots in which this device keeps these positions; `size`, which is beyond the
    last one, for positions that other devices keep."""
    if axes.past is None:
        return positions_B
    devices = lax.axis_size(axes.past)
    mine = positions_B % devices == lax.axis_index(axes.past)
    return jnp.where(mine, positions_B // devices, size)
