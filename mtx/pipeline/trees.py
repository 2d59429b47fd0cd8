"""Trees of arrays, leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def float_zeros(a):
    """Float32 zeros of an array's shape."""
    return jnp.zeros(a.shape, jnp.float32)


def add_up(totals: Tree, gradients: Tree) -> Tree:
    """total + gradient, in the type of total."""
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), totals, gradients)


def where(condition, a: Tree, b: Tree) -> Tree:
    """a's leaves where the condition holds, b's elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)
