"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), with or without sequence
parallelism between them (Korthikanti et al. 2022, section 4.2.2).

A column-parallel layer splits its outputs over `tensor`, the row-parallel layer after it its
inputs: one pair needs one reduction forward and one backward. With sequence parallelism the
reduction is a reduce-scatter after the row layer and an all-gather before the column layer, and the
column layer keeps only its shard of the input for the backward pass and gathers it again.

Legend: B rows · S sequence (s: shard) · D hidden · lower-case: local shard. The weight's inputs are
its leading dims, its outputs the trailing ones, so w_DnhK is a matrix of D x (n h K).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.sharding.collectives import (
    all_gather_sequence,
    copy_to,
    reduce_from,
    reduce_scatter_sequence,
    scatter_sequence,
)
from mtx.sharding.mesh import Axes

MATMUL_OUTPUT = "matmul_output"  # what selective recomputation keeps


def _product(x, w, inputs: int):
    """x[..., inputs] times w[inputs, outputs...], over the `inputs` last dims of x."""
    first = x.ndim - inputs
    contract = tuple(range(first, x.ndim)), tuple(range(inputs))
    return lax.dot_general(x, w, (contract, ((), ())))


def _input_gradient(dy, w, inputs: int):
    """dy[..., outputs] times w[inputs..., outputs]."""
    outputs = w.ndim - inputs
    contract = tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(inputs, w.ndim))
    return lax.dot_general(dy, w, (contract, ((), ())))


def _weight_gradient(x_BSD, dy):
    return lax.dot_general(x_BSD, dy, (((0, 1), (0, 1)), ((), ())))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x, w, inputs: int = 1):
    """x[B, S, *inputs] @ w[*inputs, *outputs], with `inputs` input dims.

    Keeps x and w as they are (a reshaped weight would be kept beside the weight), and gives the
    weight's gradient in the weight's own order: autodiff's is transposed, and slow on CPUs.
    """
    return _product(x, w, inputs)


def _matmul_forward(x, w, inputs):
    return _product(x, w, inputs), (x, w)


def _matmul_backward(inputs, saved, dy):
    x, w = saved
    return _input_gradient(dy, w, inputs), _weight_gradient(x, dy)


matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_matmul(x_BsD, w, axis: str):
    """all_gather(x) @ w. Forward: all-gather. Backward: all-gather of x again, reduce-scatter."""
    return _product(all_gather_sequence(x_BsD, axis), w, 1)


def _gather_matmul_forward(x_BsD, w, axis):
    return gather_matmul(x_BsD, w, axis), (x_BsD, w)


def _gather_matmul_backward(axis, saved, dy):
    x_BsD, w = saved
    dx_BsD = reduce_scatter_sequence(_input_gradient(dy, w, 1), axis)
    return dx_BsD, _weight_gradient(all_gather_sequence(x_BsD, axis), dy)


gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


class ColumnLinear(nnx.Module):
    """y = x W + b with W [inputs, *outputs], split over `tensor` along the output dim `split`."""

    def __init__(self, inputs, outputs, *, split, std, axes: Axes, rngs: nnx.Rngs):
        names = ["tensor" if dim == split else None for dim in range(len(outputs))]
        w = std * jax.random.normal(rngs.params(), (inputs, *outputs), jnp.float32)
        self.w = nnx.Param(w, spec=P(None, *names))
        self.b = nnx.Param(jnp.zeros(outputs, jnp.float32), spec=P(*names))
        self.axes = axes

    def __call__(self, x):
        """x_BsD (x_BSD without sequence parallelism) -> y[B, S, *local outputs]"""
        if self.axes.sequence_parallel:
            y = gather_matmul(x, self.w[...], self.axes.tensor)
        else:
            y = matmul(copy_to(x, self.axes.tensor), self.w[...])
        return checkpoint_name(y + self.b[...], MATMUL_OUTPUT)


class RowLinear(nnx.Module):
    """y = x W + b with W [*inputs, outputs], split over `tensor` along the first input dim."""

    def __init__(self, inputs, outputs, *, std, axes: Axes, rngs: nnx.Rngs):
        shape = (*inputs, outputs)
        w = std * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.w = nnx.Param(w, spec=P("tensor", *(None for _ in shape[1:])))
        self.b = nnx.Param(jnp.zeros(outputs, jnp.float32), spec=P(None))
        self.axes = axes

    def __call__(self, x):
        """x[B, S, *local inputs] -> y_BsD (y_BSD without sequence parallelism)"""
        partial_BSD = matmul(x, self.w[...], self.w.ndim - 1)
        if self.axes.sequence_parallel:
            y = scatter_sequence(partial_BSD, self.axes.tensor)
        else:
            y = reduce_from(partial_BSD, self.axes.tensor)
        return checkpoint_name(y + self.b[...], MATMUL_OUTPUT)


def output_std(init_std: float, layers: int) -> float:
    """Megatron's scale for weights before a residual addition."""
    return init_std / math.sqrt(2 * layers)
