"""Tensors in float8 with one scale each, and their matmuls (Micikevicius et al. 2022).

A linear layer's three matmuls take two such tensors: of activations and weights in e4m3, of output
gradients in e5m2 (format "hybrid", as Transformer Engine calls it) or in e4m3 as well. Scales are
powers of two, so that another largest magnitude rounds all elements the same, except those below
the least normal number, 2^-15 of the largest magnitude (e4m3) or 2^-30 (e5m2). By recipe:

- "tensorwise": each tensor is scaled by its own largest magnitude. What "a tensor" is depends on
  the layout: a microbatch's activations, over all shards of `tensor`. Values do not, but for
  rounding.
- "delayed": by those of earlier steps, of all microbatches (Transformer Engine's DelayedScaling). A
  linear layer's weight has a history beside it, a state [3, 256]: of its input, itself and its
  output gradient, for each power of two (of 1.75), in how many more steps it counts that the
  largest magnitude needed it. Which ones a step has needed is counted: a device has a one for each
  microbatch, as the cotangent of the history, and so a maximum over all devices and microbatches
  is a sum like any gradient's.

Parameters are quantised once a step, from the float32 masters, by role (`mtx.step.step`): a linear
layer whose weight comes as `Quantised` computes in float8. What is no such layer refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from mtx.errors import UserError
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.parameter import QUANTISED

Tree = Any
# The types of output gradients, by format; activations and weights are e4m3 in both.
GRADIENTS = {"hybrid": "float8_e5m2", "e4m3": "float8_e4m3fn"}
_FORWARD = "float8_e4m3fn"
SCALED_DOT = "scaled_dot"  # how JAX's equations call `scaled_dot`
AMAX = "amax"  # among a layer's parameters: a tree of the histories of those that are quantised
_BINS = 256  # the exponents of float32
_INPUT, _WEIGHT, _GRADIENT = range(3)  # the rows of a history
HISTORY = 3, _BINS  # its shape


@struct.dataclass
class Quantised:
    """values * unit, or a stack of such tensors."""

    values: jax.Array  # float8
    unit: jax.Array  # float32 [], a power of two; of a stack one each
    # Of a weight, [*outputs, *inputs]: Hopper's matmuls want what is summed over to come last.
    transposed: jax.Array | None
    dtype: str = struct.field(pytree_node=False)  # of products
    gradients: str = struct.field(pytree_node=False)  # of output gradients, a name of float8
    # With delayed scaling. Of any tensor: the largest magnitude of what this device has of it,
    # float32 like unit. Of a weight: (scale, unit) of its linear layer's input, itself, and its
    # output gradient, float32 [3, 2]; and the history that counts go to.
    seen: Any = None
    scales: Any = None
    history: Any = None

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

    def gradient(self, dvalues, counts=None) -> Quantised:
        """The gradient of a weight, as a custom VJP gives it, and that of its history."""
        none = dict.fromkeys(("unit", "transposed", "seen", "scales"))
        return replace(self, values=dvalues, history=counts, **none)

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
    """(scale, 1 / scale) for a largest magnitude."""
    finite, powers = jnp.isfinite(amax), _powers_of(_bin(amax), _exponent(dtype))
    return tuple(jnp.where(finite, power, jnp.nan) for power in powers)


def _bin(amax):
    """127 + n of the least 1.75 * 2^n that is not below amax."""
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    return (bits + 0x1FFFFF) >> 23


def _powers_of(bin, exponent):
    """(scale, 1 / scale) for what lies in a bin, as float32 with only an exponent."""
    bin = jnp.clip(bin, exponent + 1, 254)
    biased = 254 + exponent - bin, bin - exponent
    return tuple(lax.bitcast_convert_type(each << 23, jnp.float32) for each in biased)


def _exponent(dtype: str) -> int:
    """Both types' largest number is 1.75 times a power of two, this one."""
    return int(np.log2(float(jnp.finfo(dtype).max) / 1.75))


def largest(x, axes=None, *, stacked: int = 0):
    """The largest magnitude of x over all its shards on these axes, float32; of a stack one each,
    with dims of 1."""
    dims = tuple(range(stacked, x.ndim))
    amax = jnp.abs(x).max(axis=dims, keepdims=bool(stacked)).astype(jnp.float32)
    return lax.pmax(amax, axes) if axes else amax


def activation(x, w: Quantised, axes=None) -> Quantised:
    """x, shards on `axes` of one tensor, as the matmuls with w take it."""
    return _beside(x, w, _FORWARD, _INPUT, axes)


def output_gradient(dy, w: Quantised, axes=None) -> Quantised:
    """dy, shards on `axes` of one tensor, as the matmuls of w's backward pass take it."""
    return _beside(dy, w, w.gradients, _GRADIENT, axes)


def _beside(x, w: Quantised, dtype: str, row: int, axes) -> Quantised:
    if w.scales is None:
        seen = None
        values, unit = quantise(x, dtype, largest(x, axes))
    else:
        (scale, unit), seen = w.scales[row], largest(x)
        values = quantise_delayed(x, dtype, scale)
    none = {"transposed": None, "scales": None, "history": None}
    return replace(w, values=values, unit=unit, seen=seen, **none)


def weight(
    master, *, fp8: str, dtype: str, axes=(), stacked: int = 0, history=None, margin: int = 0
) -> Quantised:  # fmt: skip
    """A float32 parameter, or a stack of such with `stacked` dims, shards on `axes` of the whole.
    fp8: a format; dtype: of products; history: with delayed scaling that of each, [..., 3, 256].
    Not yet transposed; units, and what was seen, have the stack's dims, then 1."""
    gradients = GRADIENTS[fp8]
    if history is None:
        values, unit = quantise(master, _FORWARD, largest(master, axes, stacked=stacked))
        return Quantised(values, unit, None, dtype, gradients)
    scales, seen = scales_of(history, gradients, margin), largest(master, stacked=stacked)
    scale, unit = (scales[..., _WEIGHT, n].reshape(seen.shape) for n in range(2))
    values = quantise_delayed(master, _FORWARD, scale)
    return Quantised(values, unit, None, dtype, gradients, seen, scales)


# -- delayed scaling -------------------------------------------------------------------------------


def scales_of(history, gradients: str, margin: int = 0):
    """float32 [..., 3, 2]: (scale, 1 / scale) of input, weight and output gradient, from what
    earlier steps have seen of them, [..., 3, 256]; 1 where that is nothing."""
    exponents = np.array([_exponent(dtype) for dtype in (_FORWARD, _FORWARD, gradients)])
    bins = jnp.where(history > 0, jnp.arange(_BINS), 0).max(axis=-1)
    bins = jnp.where(bins > 0, bins + margin, exponents + 127)
    return jnp.stack(_powers_of(bins, exponents), axis=-1)


def quantise_delayed(x, dtype: str, scale):
    """x * scale in a type of float8. What lies beyond saturates; what is infinite becomes NaN."""
    x = x.astype(jnp.float32)
    return saturate(jnp.where(jnp.isinf(x), jnp.nan, x * scale), dtype)


def counts_of(x: Quantised, w: Quantised, dy: Quantised):
    """float32 [3, 256]: one in the bin of what was seen of each; of zeros, and of what is not
    finite, none."""
    seen = jnp.stack([x.seen, w.seen, dy.seen])
    bins = jnp.maximum(_bin(seen), 1)[:, None] == jnp.arange(_BINS)
    counts = bins & ((seen > 0) & jnp.isfinite(seen))[:, None]
    return counts.astype(w.history.dtype)


@dataclass(frozen=True)
class Delayed:
    """The rule of a history: what a step has seen counts in the next `steps`. Where nothing would
    be left, as of gradients that were zero in all of them, what there was stays."""

    steps: int

    def __call__(self, history, counts):
        most = jnp.where(counts > 0, jnp.arange(_BINS), 0).max(axis=-1, keepdims=True)
        largest = (counts > 0) & (jnp.arange(_BINS) == most)
        left = jnp.where(largest, self.steps, jnp.maximum(history - 1, 0))
        return jnp.where((left > 0).any(axis=-1, keepdims=True), left, history)


def histories(roles: Tree, value: Any) -> Tree:
    """A tree with `value` for each of a layer's parameters that is quantised."""
    found = {path: value for path, role in flatten_dict(roles).items() if role in QUANTISED}
    return unflatten_dict(found)


def history_of(params: Tree, path: tuple) -> Any:
    """That of a parameter of a layer, by its path in all parameters; None without."""
    part, kind, *names = (key.key for key in path)
    if AMAX not in params[part][kind]:
        return None
    return reduce(getitem, names, params[part][kind][AMAX])


def is_history(name: str) -> bool:
    """Whether an array of a checkpoint, params.layers.block.amax..., is one, or of its moments."""
    return name.split(".")[1:4:2] == ["layers", AMAX]


def with_histories(params: Tree, busy=None) -> Tree:
    """A layer's parameters as its linear layers take them, each with its history. busy: whether
    what they see counts, bool []; None: it does."""

    def joined(tree: Tree, histories: Tree) -> Tree:
        return tree | {name: one(tree[name], history) for name, history in histories.items()}

    def one(w, history):
        if isinstance(w, dict):
            return joined(w, history)
        history = history if busy is None else _counted_where(history, busy)
        return replace(w, history=history) if is_quantised(w) else w

    params = dict(params)
    return joined(params, params.pop(AMAX, {}))


@custom_vjp()
def _counted_where(history, busy):
    """The history as it is. Backward: its counts, zeros where `busy` does not hold."""
    return history


_counted_where.defvjp(
    lambda history, busy: (history, busy),
    lambda busy, counts: (jnp.where(busy, counts, 0), None),
)


# -- products --------------------------------------------------------------------------------------


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
