"""Residuals that wait between F and B in two parts: one on the device, one in the host's memory.

Of each array a fraction of its tokens, the first ones, goes (Zhao et al. 2024, MEMO): F copies them
out beside what it computes, B copies a layer's back beside the layer that it runs before. Copies
are written as `device_put` to another memory space of the same device, so that compilers know them:
XLA:GPU makes the rings of pinned memory and the copies asynchronous, XLA:CPU has one memory and
leaves them out.

Legend: N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.vjp import Arrays, offloaded

Tree = Any
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Parts(NamedTuple):
    """Arrays, each cut in two; None for a part without elements."""

    device: tuple
    host: tuple


def cut(arrays: Arrays, fraction: float) -> Parts:
    """In two, both still on the device."""
    device, host = [], []
    for array in arrays:
        dim, first = offloaded(array.shape, fraction)
        whole = array.shape[dim] if array.ndim else 1
        host.append(lax.slice_in_dim(array, 0, first, axis=dim) if first else None)
        rest = lax.slice_in_dim(array, first, whole, axis=dim) if first else array
        device.append(rest if first < whole else None)
    return Parts(tuple(device), tuple(host))


def join(parts: Parts, fraction: float, like: Arrays) -> Arrays:
    """What was cut, of arrays like these."""
    joined = []
    for device, host, array in zip(*parts, like, strict=True):
        both = [part for part in (host, device) if part is not None]
        dim, _ = offloaded(array.shape, fraction)
        joined.append(both[0] if len(both) == 1 else jnp.concatenate(both, dim))
    return tuple(joined)


def to_host(tree: Tree) -> Tree:
    return jax.device_put(tree, HOST)


def to_device(tree: Tree) -> Tree:
    return jax.device_put(tree, DEVICE)
