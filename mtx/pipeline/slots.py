"""Parts of arrays, or of all arrays of a tree, by indices that a table or a loop gives: read,
written, added to.

Indices count from the front, and none is asked whether it is negative: JAX would ask each, of each
array, and more than half of what is traced for a step was that. As in any dynamic slice, what lies
outside counts as the nearest part: an index below 0 for the first, one beyond the end for the
last.

One caller relies on it: with idle="phases" a stage computes what it sits out as well, with item
IDLE, -1. `Run.batch_of` and `Run.context` then read the first microbatch's tokens, and what comes
of them is never used. Nothing is written at an index below 0.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

Tree = Any
_FIRST = np.zeros((), np.int32)  # of a number, JAX would trace a conversion each time


def read(tree: Tree, *index) -> Tree:
    """array[index]"""

    def of(array):
        shape = array.shape[len(index) :]
        return lax.reshape(_part(array, index, (1,) * len(index) + shape), shape)

    return jax.tree.map(of, tree)


def write(tree: Tree, values: Tree, *index) -> Tree:
    """array with array[index] replaced, in place where XLA owns the array (a scan's carry)."""
    return jax.tree.map(lambda a, v: _replaced(a, _as_part(v, a), index), tree, values)


def add(totals: Tree, values: Tree, *index) -> Tree:
    """total with a value added to total[index], or to the part of it that begins there, in the type
    of total; total itself where either is None."""

    def of(total, value):
        if total is None or value is None:
            return total
        # Read in the shape in which it is written: XLA adds in place then, and copies total[index].
        value = _as_part(value, total).astype(total.dtype)
        return _replaced(total, _part(total, index, value.shape) + value, index)

    return jax.tree.map(of, totals, values, is_leaf=lambda a: a is None)


def _as_part(value, array):
    """With as many dims as the array."""
    return value[(None,) * (array.ndim - value.ndim)]


def _part(array, index, sizes):
    return lax.dynamic_slice(array, _origin(array, index), sizes, allow_negative_indices=False)


def _replaced(array, part, index):
    return lax.dynamic_update_slice(
        array, part, _origin(array, index), allow_negative_indices=False
    )


def _origin(array, index):
    return (*index, *(_FIRST for _ in range(array.ndim - len(index))))
