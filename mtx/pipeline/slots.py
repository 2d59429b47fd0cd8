"""Read, write and add to parts of arrays, or of all arrays of a tree, at indices that a table or a
loop gives.

Indices count from the front, and are not checked for being negative: JAX would check each index of
each array, and these checks were more than half of what was traced for a step. As in any dynamic
slice, an index outside counts as the nearest part: the first for one below 0, the last for one
beyond the end.

One caller relies on it: with idle="phases" a stage also computes what it sits out, with item IDLE,
-1. `Run.batch_of` and `Run.context` then read the first microbatch's tokens, and what is computed
from them is never used. Nothing is written at an index below 0.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

Tree = Any
_FIRST = np.zeros((), np.int32)  # JAX would trace a conversion of a Python number each time


def read(tree: Tree, *index) -> Tree:
    """array[index]"""

    def of(array):
        shape = array.shape[len(index) :]
        return lax.reshape(_part(array, index, (1,) * len(index) + shape), shape)

    return jax.tree.map(of, tree)


def write(tree: Tree, values: Tree, *index) -> Tree:
    """array with array[index] replaced, in place if XLA owns the array (a scan's carry)."""
    return jax.tree.map(lambda a, v: _replaced(a, _as_part(v, a), index), tree, values)


def add(totals: Tree, values: Tree, *index) -> Tree:
    """total with a value added to total[index], or to the part of it that begins there, in the type
    of total; total itself if either is None."""

    def of(total, value):
        if total is None or value is None:
            return total
        # Read in the shape it is written in: XLA then adds in place, and would copy total[index].
        value = _as_part(value, total).astype(total.dtype)
        return _replaced(total, _part(total, index, value.shape) + value, index)

    return jax.tree.map(of, totals, values, is_leaf=lambda a: a is None)


def _as_part(value, array):
    """The value with as many dims as the array."""
    return value[(None,) * (array.ndim - value.ndim)]


def _part(array, index, sizes):
    return lax.dynamic_slice(array, _origin(array, index), sizes, allow_negative_indices=False)


def _replaced(array, part, index):
    return lax.dynamic_update_slice(
        array, part, _origin(array, index), allow_negative_indices=False
    )


def _origin(array, index):
    return (*index, *(_FIRST for _ in range(array.ndim - len(index))))
