"""Checksums of local arrays, and tables of one number per device. In `shard_map`.

Legend: P stages · D replicas · E expert shards · C context shards · T tensor shards
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.axes import AXES

Tree = Any
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


def checksum(tree: Tree):
    """uint32 []: the checksum of a tree's local arrays. One flipped bit always changes it; any
    other change leaves it as it was once in 2^32.

    Every element's bits are multiplied by an odd number that depends on its position, mixed, and
    summed. Multiplying and mixing lose no bit; without the mixing, flips of high bits, such as
    signs, would cancel in the sum. Elements have at most four bytes.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = total * jnp.uint32(0x9E3779B1) + _weighed_sum(leaf)
    return total


@jax.jit  # traced once for all arrays of a shape
def _weighed_sum(a):
    words = lax.bitcast_convert_type(a, _WORDS[a.dtype.itemsize]).astype(jnp.uint32)
    factor = jnp.uint32(1)
    for dim in range(words.ndim):
        place = lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.uint32(dim << 24)
        mixed = place * jnp.uint32(0x85EBCA6B)
        factor = factor * ((mixed ^ (mixed >> 15)) | jnp.uint32(1))
    return _mix(words * factor).sum(dtype=jnp.uint32)


def _mix(words):
    """The finalizer of MurmurHash3 (Appleby, public domain): one to one, and each bit of a word
    changes about half of the others."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def on_each_device(value, sizes: Sequence[int]):
    """[*value, P, D, E, C, T] on every device: the value of each device. An all-reduce of this
    table over the mesh, whose axes have these `sizes`."""
    place = tuple(lax.axis_index(axis) for axis in AXES)
    table = jnp.zeros((*value.shape, *sizes), value.dtype)
    return lax.psum(table.at[(..., *place)].set(value), AXES)
