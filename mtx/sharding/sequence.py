"""Sequences cut over the axis `context`: which device has which tokens.

Of 2c equal chunks device r of c has chunk r and chunk 2c - 1 - r, in this order ("zigzag"): where a
position sees none after it, all devices then have the same work. Tokens, targets, weights and all
else that stands at a position are put in that order before they are given to devices, so that
nothing has to be moved there.

Of texts that go on, device r keeps the positions r, r + c, r + 2c ... instead: a next one is then
at the same place however long the first ones were.

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
    """An array whose dim `axis` has the parts of `parts` devices after one another, with that dim
    in the order of positions."""
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
    """int32 [s]: where this device's part of the sequence, of that size, stands in it."""
    if axes.context is None:
        return jnp.arange(size, dtype=jnp.int32)
    part, chunk = lax.axis_index(axes.context), size // 2
    first = jnp.stack([part, 2 * axes.context_shards - 1 - part]) * chunk
    return (first[:, None] + jnp.arange(chunk, dtype=jnp.int32)).reshape(size)


def whole_sequence(x_Bs, axes: Axes):
    """x_BS in the order of positions, of what each device has of it. Backward: a reduce-scatter."""
    if axes.context is None:
        return x_Bs
    whole = gather_sequence if jnp.issubdtype(x_Bs.dtype, jnp.floating) else all_gather_sequence
    return in_order(whole(x_Bs, axes.context), 1, axes.context_shards)


# -- texts that go on ------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Of what texts keep that go on, what does not grow with them: each pass replaces it. What is
    kept without this name is an entry a position."""

    arrays: Any  # a tree of [n, B, h, ...], h as in keys and values


def is_state(entry: Any) -> bool:
    return isinstance(entry, State)


def kept_of_parts(part, axis: int, axes: Axes):
    """What this device keeps of positions, from 0 on, of which each has its part in dim `axis`: by
    an all-to-all, or where c does not divide n, by a gather. As it is where nothing is cut."""
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
    """int32 [B]: where this device keeps positions; at `size`, beyond the last, those of others."""
    if axes.past is None:
        return positions_B
    devices = lax.axis_size(axes.past)
    mine = positions_B % devices == lax.axis_index(axes.past)
    return jnp.where(mine, positions_B // devices, size)
