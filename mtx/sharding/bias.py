"""Biases of linear layers, and the sums over rows that are their gradients.

Legend: B rows · S sequence · N all positions of a device · F a device's outputs
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.mesh import Axes

_ROWS = 128  # summed at once


@custom_vjp(2)
def add_bias(y, b, axes: Axes):
    """y[B, S, *outputs] + b[*outputs]"""
    return apart(y, axes) + b


def apart(y, axes: Axes):
    """A matmul's output, kept apart from its bias: a matmul of XLA:GPU that also takes the bias
    would no longer read its weight in place."""
    return lax.optimization_barrier(y) if axes.in_place else y


add_bias.defvjp(
    lambda y, b, axes: (add_bias(y, b, axes), None), lambda axes, _, dy: (dy, bias_gradient(dy))
)


@custom_vjp(2)
def add_bias_once(y, b, axes: Axes):
    """`add_bias` to the parts of a sum over `tensor`: only on its first device."""
    return add_bias(y, jnp.where(lax.axis_index(axes.tensor) == 0, b, 0), axes)


def _add_bias_once_backward(axes, _, dy):
    db = bias_gradient(dy)
    if axes.sequence_parallel:  # the step sums over `tensor`, and dy is the same on all of it
        db = jnp.where(lax.axis_index(axes.tensor) == 0, db, 0)
    return dy, db


add_bias_once.defvjp(lambda y, b, axes: (add_bias_once(y, b, axes), None), _add_bias_once_backward)


def bias_gradient(dy):
    """dy[B, S, *outputs] summed over rows and positions."""
    return as_matrix(dy).sum(axis=0).reshape(dy.shape[2:])


def as_matrix(dy):
    """dy_NF, in the shape that matmuls take: in a bias's shape XLA would copy dy once more."""
    return dy.reshape(dy.shape[0] * dy.shape[1], -1)


def over_rows(a):
    """The sum over all dims but the last, in two steps: in one sum over some thousand rows XLA:GPU
    would first write the summands to memory, or read them slowly."""
    if math.prod(a.shape[:-1]) % _ROWS == 0 and math.prod(a.shape[:-1]) > _ROWS:
        a = lax.optimization_barrier(a.reshape(-1, _ROWS, a.shape[-1]).sum(axis=1))
    return a.sum(axis=tuple(range(a.ndim - 1)))
