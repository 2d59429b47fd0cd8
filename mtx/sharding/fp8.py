"""Tensors in float8 with one scale each, and their matmuls (Micikevicius et al. 2022).

A linear layer's three matmuls take two such tensors: of activations and weights in e4m3, of output
gradients in e5m2 (format "hybrid", as Transformer Engine calls it) or in e4m3 as well. Each is
scaled by its own largest magnitude (tensorwise, current scaling). What "a tensor" is depends on the
layout: a microbatch's activations, over all shards of `tensor`. Values do not, but for rounding:
scales are powers of two, so that another largest magnitude rounds all elements the same, except
those below the least normal number, 2^-15 of the largest magnitude (e4m3) or 2^-30 (e5m2).

Parameters are quantised once a step, from the float32 masters, by role (`mtx.step.step`): a linear
layer whose weight comes as `Quantised` computes in float8. What is no such layer refuses it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from mtx.errors import UserError

Tree = Any
# The types of output gradients, by format; activations and weights are e4m3 in both.
GRADIENTS = {"hybrid": "float8_e5m2", "e4m3": "float8_e4m3fn"}
_FORWARD = "float8_e4m3fn"
SCALED_DOT = "scaled_dot"  # how JAX's equations call `scaled_dot`


@struct.dataclass
class Quantised:
    """values * unit, or a stack of such tensors."""

    values: jax.Array  # float8
    unit: jax.Array  # float32 [], a power of two; of a stack one each
    # Of a weight, [*outputs, *inputs]: Hopper's matmuls want what is summed over to come last.
    transposed: jax.Array | None
    dtype: str = struct.field(pytree_node=False)  # of products
    gradients: str = struct.field(pytree_node=False)  # of output gradients, a name of float8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    def apply(self, f) -> Quantised:
        """With f(values), the same elements elsewhere."""
        return replace(self, values=f(self.values))

    def gradient(self, dvalues) -> Quantised:
        """The gradient of these, as a custom VJP gives it."""
        return replace(self, values=dvalues, unit=None, transposed=None)

    def turned(self) -> Quantised:
        """A weight, [*outputs, *inputs]."""
        return replace(self, values=self.transposed, transposed=None)

    def with_transposed(self, inputs: int, stacked: int) -> Quantised:
        """inputs: how many dims those of a weight are, behind the stack's."""
        dims = range(self.ndim)
        first, last = stacked, stacked + inputs
        order = *dims[:first], *dims[last:], *dims[first:last]
        return replace(self, transposed=jnp.transpose(self.values, order))

    def __jax_array__(self):
        raise UserError(
            "fp8 quantises the weights of role 'matrix', which only the linear layers of "
            "mtx.sharding.linear take; use them in this sublayer, another role, or fp8='off'"
        )


def quantise(x, dtype: str, amax):
    """(values, unit) of x, whose largest magnitude is `amax`, in a type of float8.

    The scale is the largest power of two with which that stays within the type's range, and what
    lies beyond saturates. Where amax is not finite, nothing is.
    """
    scale, unit = _powers(amax, dtype)
    return saturate(x.astype(jnp.float32) * scale, dtype), unit


def saturate(x, dtype: str):
    """x in a type of float8, to nearest even; beyond its range its largest number, NaN stays."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def _powers(amax, dtype: str):
    """(scale, 1 / scale) as float32 with only an exponent. Both types' largest number is 1.75 times
    a power of two."""
    exponent = int(np.log2(float(jnp.finfo(dtype).max) / 1.75))
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    above = (bits + 0x1FFFFF) >> 23  # of the least 1.75 * 2^n that is not below amax, 127 + n
    above = jnp.clip(above, exponent + 1, 254)

    def power(biased):
        value = lax.bitcast_convert_type(biased << 23, jnp.float32)
        return jnp.where(jnp.isfinite(amax), value, jnp.nan)

    return power(254 + exponent - above), power(above - exponent)


def largest(x, axes=None, *, stacked: int = 0):
    """The largest magnitude of x over all its shards on these axes, float32; of a stack one each,
    with dims of 1."""
    dims = tuple(range(stacked, x.ndim))
    amax = jnp.abs(x).max(axis=dims, keepdims=bool(stacked)).astype(jnp.float32)
    return lax.pmax(amax, axes) if axes else amax


def activation(x, w: Quantised, axes=None) -> Quantised:
    """x, shards on `axes` of one tensor, as the matmuls with w take it."""
    values, unit = quantise(x, _FORWARD, largest(x, axes))
    return replace(w, values=values, unit=unit, transposed=None)


def output_gradient(dy, w: Quantised, axes=None) -> Quantised:
    """dy, shards on `axes` of one tensor, as the matmuls of w's backward pass take it."""
    values, unit = quantise(dy, w.gradients, largest(dy, axes))
    return replace(w, values=values, unit=unit, transposed=None)


def weight(master, *, fp8: str, dtype: str, axes=(), stacked: int = 0) -> Quantised:
    """A float32 parameter, or a stack of such with `stacked` dims, shards on `axes` of the whole.
    fp8: a format; dtype: of products. Not yet transposed; units have the stack's dims, then 1."""
    values, unit = quantise(master, _FORWARD, largest(master, axes, stacked=stacked))
    return Quantised(values, unit, None, dtype, GRADIENTS[fp8])


def dot(a, b, contract, dtype=None):
    """a and b multiplied, summed over the dims `contract`; dtype: of the result, by default that of
    the operands, or of their products."""
    if not isinstance(a, Quantised):
        return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)
    return scaled_dot(a.values, b.values, a.unit * b.unit, contract, dtype or a.dtype)


@partial(jax.jit, static_argnums=(3, 4), inline=False)
def scaled_dot(a, b, unit, contract, dtype):
    """A product of float8 tensors, in units of `unit`, accumulated in float32. One equation, which
    nothing comes into: cuBLAS multiplies by the scale itself."""
    product = lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)
    return product * unit.astype(dtype)


def is_quantised(x) -> bool:
    return isinstance(x, Quantised)


def arrays_of(params: Tree) -> Tree:
    """A tree with one array for each parameter: gradients, or shapes of them."""
    return jax.tree.map(lambda a: a.values if is_quantised(a) else a, params, is_leaf=is_quantised)
