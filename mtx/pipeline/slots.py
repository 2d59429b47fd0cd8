"""Parts of arrays, by indices that a table or a loop gives: read, written, added to.

No index may be negative. JAX would ask each whether it is, of each array: more than half of what is
traced for a step was that. An index beyond the end gives the last part, as for any dynamic slice.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

Tree = Any


def read(array, *index):
    """array[index]"""
    shape = array.shape[len(index) :]
    return _part(array, index, (1,) * len(index) + shape).reshape(shape)


def read_each(tree: Tree, *index) -> Tree:
    return jax.tree.map(lambda a: read(a, *index), tree)


def write(array, value, *index):
    """array with array[index] replaced, in place where XLA owns the array (a scan's carry)."""
    return _replaced(array, value[(None,) * len(index)], index)


def write_each(arrays, values, *index):
    return tuple(write(a, v, *index) for a, v in zip(arrays, values, strict=True))


def add(total, value, *index):
    """total with `value` added to total[index], in the type of total."""
    # Read in the shape in which it is written: XLA adds in place then, and copies total[index].
    value = value[(None,) * len(index)].astype(total.dtype)
    return _replaced(total, _part(total, index, value.shape) + value, index)


def _part(array, index, sizes):
    return lax.dynamic_slice(array, _origin(array, index), sizes, allow_negative_indices=False)


def _replaced(array, part, index):
    return lax.dynamic_update_slice(
        array, part, _origin(array, index), allow_negative_indices=False
    )


def _origin(array, index):
    return (*index, *(0 for _ in range(array.ndim - len(index))))
