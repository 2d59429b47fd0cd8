"""Collectives with the gradients that Megatron gives them; each is the identity if axis is None.

Inside the step's `shard_map` (check_vma=False) the transpose of a bare `psum` is wrong by a factor
of the axis size, so each of these pairs defines its own backward. Bytes are what a device sends for
an array of n bytes (the whole one, before or after) on an axis of size t, by ring algorithms.

Legend: x_BSD is whole, x_BsD its shard of the sequence over `tensor`.
"""

from __future__ import annotations

import jax
from jax import lax

from mtx.sharding.custom_vjp import custom_vjp

AxisName = str | tuple[str, ...] | None
_SEQUENCE = 1  # the dim of activations that sequence parallelism shards


@custom_vjp(1)
def copy_to(x, axis: AxisName):
    """Megatron's f. Forward: nothing. Backward: all-reduce, 2n(t-1)/t bytes."""
    return x


copy_to.defvjp(lambda x, axis: (x, None), lambda axis, _, dy: (lax.psum(dy, axis) if axis else dy,))


@custom_vjp(1)
def reduce_from(x, axis: AxisName):
    """Megatron's g. Forward: all-reduce, 2n(t-1)/t bytes. Backward: nothing."""
    return lax.psum(x, axis) if axis else x


reduce_from.defvjp(lambda x, axis: (reduce_from(x, axis), None), lambda axis, _, dy: (dy,))


def all_gather_sequence(x_BsD, axis: str | None):
    """x_BsD -> x_BSD. n(t-1)/t bytes. Not to be differentiated: see `gather_sequence`."""
    return lax.all_gather(x_BsD, axis, axis=_SEQUENCE, tiled=True) if axis else x_BsD


def reduce_scatter_sequence(x_BSD, axis: str | None):
    """Partial x_BSD -> summed x_BsD. n(t-1)/t bytes. Not to be differentiated, as above."""
    return lax.psum_scatter(x_BSD, axis, scatter_dimension=_SEQUENCE, tiled=True) if axis else x_BSD


def all_gather_rows(x_BsD, axis: str | None):
    """x_BsD -> [t B, s, D], shard after shard. n(t-1)/t bytes. Not to be differentiated."""
    return lax.all_gather(x_BsD, axis).reshape(-1, *x_BsD.shape[1:]) if axis else x_BsD


def reduce_scatter_rows(x_RsD, axis: str | None):
    """Partial [t B, s, D] -> summed x_BsD. n(t-1)/t bytes. Not to be differentiated."""
    if axis is None:
        return x_RsD
    shards = x_RsD.reshape(lax.axis_size(axis), -1, *x_RsD.shape[1:])
    return lax.psum_scatter(shards, axis)


@custom_vjp(1)
def gather_sequence(x_BsD, axis: str | None):
    """Forward: all-gather. Backward: reduce-scatter. n(t-1)/t bytes each."""
    return all_gather_sequence(x_BsD, axis)


gather_sequence.defvjp(
    lambda x_BsD, axis: (all_gather_sequence(x_BsD, axis), None),
    lambda axis, _, dy_BSD: (reduce_scatter_sequence(dy_BSD, axis),),
)


@custom_vjp(1)
def scatter_sequence(x_BSD, axis: str | None):
    """Forward: reduce-scatter. Backward: all-gather. n(t-1)/t bytes each."""
    return reduce_scatter_sequence(x_BSD, axis)


scatter_sequence.defvjp(
    lambda x_BSD, axis: (reduce_scatter_sequence(x_BSD, axis), None),
    lambda axis, _, dy_BsD: (all_gather_sequence(dy_BsD, axis),),
)


@custom_vjp(1)
def scatter_rows(x_RsD, axis: str | None):
    """Forward: `reduce_scatter_rows`. Backward: `all_gather_rows`."""
    return reduce_scatter_rows(x_RsD, axis)


scatter_rows.defvjp(
    lambda x_RsD, axis: (reduce_scatter_rows(x_RsD, axis), None),
    lambda axis, _, dy_BsD: (all_gather_rows(dy_BsD, axis),),
)


def broadcast_from(x, is_source, axis: str | None):
    """x of the one device on `axis` where `is_source` holds, on all of them. 2n(p-1)/p bytes."""
    return lax.psum(x * is_source.astype(x.dtype), axis) if axis else x


def shift(x, axis: str | None, *, by: int):
    """x of the device `by` places before this one on the ring `axis`. n bytes."""
    if not axis:
        return x
    size = lax.axis_size(axis)
    ring = [(source, (source + by) % size) for source in range(size)]
    return jax.tree.map(lambda a: lax.ppermute(a, axis, ring), x)


def shard_of_sequence(x_BSD, axis: str | None):
    """This device's x_BsD of a replicated x_BSD; no communication."""
    if not axis:
        return x_BSD
    size = x_BSD.shape[_SEQUENCE] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x_BSD, lax.axis_index(axis) * size, size, _SEQUENCE)
