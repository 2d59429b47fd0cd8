"""Checksums of local arrays, and tables of one number a device. In `shard_map`.

Legend: P stages · D replicas · T tensor shards
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.mesh import AXES

Tree = Any
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


def checksum(tree: Tree):
    """uint32 [] of the local arrays of a tree; a bit that flips changes it.

    Every element's bits are multiplied by an odd number that follows from its place, and summed:
    an odd factor loses no bit. Elements have at most four bytes.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = total * jnp.uint32(0x9E3779B1) + _weighed_sum(leaf)
    return total


def _weighed_sum(a):
    words = lax.bitcast_convert_type(a, _WORDS[a.dtype.itemsize]).astype(jnp.uint32)
    factor = jnp.uint32(1)
    for dim in range(words.ndim):
        place = lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.uint32(dim << 24)
        mixed = place * jnp.uint32(0x85EBCA6B)
        factor = factor * ((mixed ^ (mixed >> 15)) | jnp.uint32(1))
    return (words * factor).sum(dtype=jnp.uint32)


def on_each_device(value, sizes: Sequence[int]):
    """[*value, P, D, T] on every device: what each of them has. All-reduce of the table over the
    mesh of those `sizes`."""
    place = tuple(lax.axis_index(axis) for axis in AXES)
    table = jnp.zeros((*value.shape, *sizes), value.dtype)
    return lax.psum(table.at[(..., *place)].set(value), AXES)
