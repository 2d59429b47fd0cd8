"""Float8 tensors with one scale each, and their matmuls (Micikevicius et al. 2022).

Each of a linear layer's three matmuls takes two such tensors: activations and weights are in e4m3,
output gradients in e5m2 (format "hybrid", as Transformer Engine calls it) or in e4m3 as well.
Scales are powers of two, so that a change of the largest magnitude rounds all elements the same,
except those below the least normal number, 2^-15 of the largest magnitude (e4m3) or 2^-30 (e5m2).
By recipe:

- "tensorwise": each tensor is scaled by its own largest magnitude. What "a tensor" is depends on
  the layout: a microbatch's activations, over all shards of `tensor`. Values do not depend on it,
  except for rounding.
- "delayed": tensors are scaled by the largest magnitudes of earlier steps, over all microbatches
  (Transformer Engine's DelayedScaling). A linear layer's weight has a history beside it, a state
  [3, 256] with a row each for its input, itself and its output gradient. An entry is for a power of
  two (times 1.75): for how many more steps it counts that the largest magnitude needed that power.
  Each step counts the powers it needed: a device has a one per microbatch, as the cotangent of the
  history, so that a maximum over all devices and microbatches is a sum like any gradient's.

Parameters are quantised once per step, from the float32 masters, by role (`mtx.step.step`): a
linear layer whose weight is `Quantised` computes in float8. Other layers refuse such a weight.
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
SCALED_DOT = "scaled_dot"  # the name of `scaled_dot` in JAX's equations
AMAX = "amax"  # among a layer's parameters: the tree of histories of those that are quantised
_BINS = 256  # the exponents of float32
_INPUT, _WEIGHT, _GRADIENT = range(3)  # the rows of a history
HISTORY = 3, _BINS  # the shape of a history


@struct.dataclass
class Quantised:
    """values * unit, or a stack of such tensors."""

    values: jax.Array  # float8
    unit: jax.Array  # float32 [], a power of two; one per tensor of a stack
    # A weight as [*outputs, *inputs]: Hopper's matmuls want the dims that are summed over last.
    transposed: jax.Array | None
    dtype: str = struct.field(pytree_node=False)  # of products
    gradients: str = struct.field(pytree_node=False)  # the float8 type of output gradients
    # With delayed scaling. seen, of any tensor: the largest magnitude in this device's part of it,
    # float32 like unit. Of a weight, scales: (scale, unit) of its linear layer's input, itself and
    # its output gradient, float32 [3, 2]; history: the one that counts go to.
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
        """The tensor with f(values); f may only move elements."""
        return replace(self, values=f(self.values))

    def gradient(self, dvalues, counts=None) -> Quantised:
        """The gradients of a weight and of its history, as a custom VJP returns them."""
        none = dict.fromkeys(("unit", "transposed", "seen", "scales"))
        return replace(self, values=dvalues, history=counts, **none)

    def turned(self) -> Quantised:
        """The weight as [*outputs, *inputs]."""
        return replace(self, values=self.transposed, transposed=None)

    def with_transposed(self, inputs: int, stacked: int) -> Quantised:
        """The weight with `transposed`. inputs: how many dims after the stack's are its inputs."""
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
    """(values, unit) of x, whose largest magnitude is `amax`, in a float8 type.

    The scale is the largest power of two that keeps `amax` within the type's range; values beyond
    the range saturate. If amax is not finite, no value is.
    """
    scale, unit = _powers(amax, dtype)
    return saturate(x.astype(jnp.float32) * scale, dtype), unit


def saturate(x, dtype: str):
    """x in a float8 type, rounded to nearest even. Values beyond the type's range become its
    largest number; NaN stays."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def _powers(amax, dtype: str):
    """(scale, 1 / scale) for a largest magnitude."""
    finite, powers = jnp.isfinite(amax), _powers_of(_bin(amax), _exponent(dtype))
    return tuple(jnp.where(finite, power, jnp.nan) for power in powers)


def _bin(amax):
    """127 + n for the least 1.75 * 2^n that is not below amax."""
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    return (bits + 0x1FFFFF) >> 23


def _powers_of(bin, exponent):
    """(scale, 1 / scale) for magnitudes in a bin, as float32 with only an exponent."""
    bin = jnp.clip(bin, exponent + 1, 254)
    biased = 254 + exponent - bin, bin - exponent
    return tuple(lax.bitcast_convert_type(each << 23, jnp.float32) for each in biased)


def _exponent(dtype: str) -> int:
    """The exponent of the type's largest number, which in both types is 1.75 * 2^exponent."""
    return int(np.log2(float(jnp.finfo(dtype).max) / 1.75))


def largest(x, axes=None, *, stacked: int = 0):
    """The largest magnitude of x over all its shards on these axes, float32; for a stack, one per
    tensor, with dims of 1."""
    dims = tuple(range(stacked, x.ndim))
    amax = jnp.abs(x).max(axis=dims, keepdims=bool(stacked)).astype(jnp.float32)
    return lax.pmax(amax, axes) if axes else amax


def activation(x, w: Quantised, axes=None) -> Quantised:
    """x, a shard over `axes` of one tensor, quantised as the matmuls with w take it."""
    return _beside(x, w, _FORWARD, _INPUT, axes)


def output_gradient(dy, w: Quantised, axes=None) -> Quantised:
    """dy, a shard over `axes` of one tensor, quantised as the matmuls of w's backward take it."""
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
    """A float32 parameter, or a stack of them along the first `stacked` dims, quantised; `master`
    is a shard over `axes`. fp8: a format; dtype: of products; history: with delayed scaling, one
    per parameter, [..., 3, 256]. `transposed` is not set yet; `unit` and `seen` have the stack's
    dims, then dims of 1."""
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
    """float32 [..., 3, 2]: (scale, 1 / scale) of input, weight and output gradient, from the
    history of what earlier steps have seen, [..., 3, 256]; 1 if they have seen nothing."""
    exponents = np.array([_exponent(dtype) for dtype in (_FORWARD, _FORWARD, gradients)])
    bins = jnp.where(history > 0, jnp.arange(_BINS), 0).max(axis=-1)
    bins = jnp.where(bins > 0, bins + margin, exponents + 127)
    return jnp.stack(_powers_of(bins, exponents), axis=-1)


def quantise_delayed(x, dtype: str, scale):
    """x * scale in a float8 type. Values beyond its range saturate; infinite ones become NaN."""
    x = x.astype(jnp.float32)
    return saturate(jnp.where(jnp.isinf(x), jnp.nan, x * scale), dtype)


def counts_of(x: Quantised, w: Quantised, dy: Quantised):
    """float32 [3, 256]: for each of the three, a one in the bin of the magnitude that was seen;
    none if that is zero or not finite."""
    seen = jnp.stack([x.seen, w.seen, dy.seen])
    bins = jnp.maximum(_bin(seen), 1)[:, None] == jnp.arange(_BINS)
    counts = bins & ((seen > 0) & jnp.isfinite(seen))[:, None]
    return counts.astype(w.history.dtype)


@dataclass(frozen=True)
class Delayed:
    """The rule of a history: what a step has seen counts in the next `steps` steps. If nothing
    would be left, as for gradients that were zero in all of them, the history stays as it was."""

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
    """The history of a layer's parameter, by its path among all parameters; None if layers have
    none."""
    part, kind, *names = (key.key for key in path)
    if AMAX not in params[part][kind]:
        return None
    return reduce(getitem, names, params[part][kind][AMAX])


def is_history(name: str) -> bool:
    """Whether an array of a checkpoint, such as params.layers.block.amax..., is a history or a
    moment of one."""
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
    """The history, unchanged. Backward: its counts, or zeros if not `busy`."""
    return history


_counted_where.defvjp(
    lambda history, busy: (history, busy),
    lambda busy, counts: (jnp.where(busy, counts, 0), None),
)


# -- products --------------------------------------------------------------------------------------


def dot(a, b, contract, dtype=None):
    """The product of a and b, summed over the dims `contract`. dtype: of the result; by default
    that of the operands, or for `Quantised` ones that of their products."""
    if not isinstance(a, Quantised):
        return lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)
    return scaled_dot(a.values, b.values, a.unit * b.unit, contract, dtype or a.dtype)


@partial(jax.jit, static_argnums=(3, 4), inline=False)
def scaled_dot(a, b, unit, contract, dtype):
    """A product of float8 tensors, in units of `unit`, accumulated in float32. It is one equation,
    so that nothing gets in between: cuBLAS multiplies by the scale itself."""
    product = lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)
    return product * unit.astype(dtype)


def is_quantised(x) -> bool:
    return isinstance(x, Quantised)


def arrays_of(params: Tree) -> Tree:
    """A tree with one array for each parameter: gradients, or their shapes."""
    return jax.tree.map(lambda a: a.values if is_quantised(a) else a, params, is_leaf=is_quantised)
