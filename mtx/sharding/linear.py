"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), with or without sequence
parallelism between them (Korthikanti et al. 2022, section 4.2.2).

A column-parallel layer splits its outputs over `tensor`, and the row-parallel layer after it splits
its inputs: a pair needs one reduction forward and one backward. With sequence parallelism the
reduction is a reduce-scatter after the row layer and an all-gather before the column layer, and the
column layer keeps only its shard of the input for the backward pass and gathers it again.

Several such pairs in parallel need no more, if they have the same input and their outputs are
added: with `axes.joint` linears have no collectives, between `enter_jointly` and `leave_jointly`.

Legend: B rows · S sequence (s: shard) · D hidden · lower-case: local shard. The weight's inputs are
its leading dims, its outputs the trailing ones, so w_DnhK is a matrix of D x (n h K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.sharding import fp8
from mtx.sharding.adapter import Adapter, Adapters
from mtx.sharding.bias import add_bias, add_bias_once, apart
from mtx.sharding.collectives import (
    all_gather_rows,
    all_gather_sequence,
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_rows,
    reduce_scatter_sequence,
    scatter_rows,
    scatter_sequence,
)
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal

MATMUL_OUTPUT = "matmul_output"  # what selective recomputation keeps


def _product(x, w, inputs: int):
    """x[..., inputs] times w[inputs, outputs...], over the `inputs` last dims of x."""
    over = tuple(range(x.ndim - inputs, x.ndim))
    if fp8.is_quantised(w):
        return fp8.dot(x, w.turned(), (over, tuple(range(w.ndim - inputs, w.ndim))))
    return fp8.dot(x, w, (over, tuple(range(inputs))))


def _input_gradient(dy, w, inputs: int):
    """dy[..., outputs] times w[inputs..., outputs]."""
    outputs = w.ndim - inputs
    return fp8.dot(dy, w, (tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(inputs, w.ndim))))


def _weight_gradient(x, dy, axes: Axes):
    """dw[inputs..., outputs...] from x[B, S, inputs...] and dy[B, S, outputs...], in float32, as it
    is accumulated: if it were rounded first, XLA:GPU's matmul could not add it in place."""
    over = (0, 1), (0, 1)
    if axes.in_place and fp8.is_quantised(x):
        # XLA:GPU's float8 matmul would add it to a copy of the sum, and then copy that back.
        return lax.optimization_barrier(fp8.dot(x, dy, over, "float32"))
    if dy.size >= x.size or axes.in_place:
        return fp8.dot(x, dy, over, "float32")
    # Matmuls on CPUs transpose their first operand, so it should be the small one. The barrier
    # keeps XLA from swapping the operands back.
    dw = lax.optimization_barrier(fp8.dot(dy, x, over, "float32"))
    outputs = dy.ndim - 2
    return jnp.transpose(dw, (*range(outputs, dw.ndim), *range(outputs)))


def _gradient_of(w, dw, x, dy, axes: Axes):
    """A weight's gradient dw, with delayed scaling together with what was seen of x, w and dy."""
    if not fp8.is_quantised(w):
        return dw
    if w.scales is None:
        return w.gradient(dw)
    counts = fp8.counts_of(x, w, dy)
    if axes.tensor and not axes.sequence_parallel:  # else the step sums
        counts = lax.psum(counts, axes.tensor)
    return w.gradient(dw, counts)


def _gathered(x, axes: Axes):
    """The whole x, gathered if sequence parallelism shards it."""
    if not axes.sequence_parallel or axes.joint:
        return x
    gather = all_gather_rows if by_rows(x, axes) else all_gather_sequence
    if fp8.is_quantised(x):
        return x.apply(lambda values: gather(values, axes.tensor))
    return gather(x, axes.tensor)


def by_rows(x, axes: Axes) -> bool:
    """Whether linears gather and scatter rows shard after shard, [t B, s]: the order of positions
    does not matter to them, and GPUs need not transpose what they gather. With one row both ways
    are the same."""
    return axes.sequence_parallel and not axes.joint and x.shape[0] > 1


def in_rows(x, axes: Axes):
    """x[B, S, ...] in the order in which linears gather; with `axes.by_rows` it has it already."""
    if axes.by_rows or not by_rows(x, axes):
        return x
    if fp8.is_quantised(x):
        return x.apply(lambda values: in_rows(values, axes))
    split = x.reshape(x.shape[0], axes.tensor_shards, -1, *x.shape[2:]).swapaxes(0, 1)
    return split.reshape(-1, *split.shape[2:])


def in_order(y, axes: Axes):
    """y[B, S, ...] in the order of positions, from what linears return; with `axes.by_rows` as it
    is."""
    if axes.by_rows or not by_rows(y, axes):
        return y
    split = y.reshape(axes.tensor_shards, -1, *y.shape[1:]).swapaxes(0, 1)
    return split.reshape(split.shape[0], -1, *split.shape[3:])


def _summed(partial, axes: Axes):
    """The sum over `tensor`, with sequence parallelism a shard of it; with `axes.joint` no sum."""
    if axes.joint:
        return partial
    if axes.sequence_parallel:
        scatter = reduce_scatter_rows if by_rows(partial, axes) else reduce_scatter_sequence
        return scatter(partial, axes.tensor)
    return lax.psum(partial, axes.tensor) if axes.tensor else partial


@custom_vjp(2, 3)
def matmul(x, w, inputs: int = 1, axes: Axes = Axes()):  # noqa: B008 (frozen)
    """x[B, S, *inputs] @ w[*inputs, *outputs], with `inputs` input dims: a row-parallel layer,
    whose inputs `tensor` shards. Returns the sum over `tensor`, y_BSD, or with sequence parallelism
    a shard of it.

    Forward: a reduce-scatter with sequence parallelism, otherwise an all-reduce. Backward: an
    all-gather of dy, otherwise nothing. Keeps x and w as they are given (transposed ones would be
    kept in addition to what others keep of them), and returns the weight's gradient in the weight's
    own order: autodiff's is transposed, and slow on CPUs.
    """
    return _matmul_forward(x, w, inputs, axes)[0]


def _matmul_forward(x, w, inputs, axes):
    if fp8.is_quantised(w):
        x = fp8.activation(x, w, axes.tensor)
    return _summed(_product(in_rows(x, axes), w, inputs), axes), (x, w)


def _matmul_backward(inputs, axes, saved, dy):
    x, w = saved
    if fp8.is_quantised(w):
        dy = fp8.output_gradient(dy, w, axes.tensor if axes.sequence_parallel else None)
    dy = _gathered(dy, axes)
    dx = in_order(_input_gradient(dy, w, inputs), axes)
    dw = _weight_gradient(in_rows(x, axes), dy, axes)
    return dx, _gradient_of(w, dw, x, dy, axes)


matmul.defvjp(_matmul_forward, _matmul_backward)


def column_products(x, weights: tuple, repeats: tuple[int | None, ...], axes: Axes) -> tuple:
    """x w for each of `weights`; x is given to all devices of `tensor` once for all of them.

    x: x_BsD with sequence parallelism, otherwise x_BSD. repeats: None for a weight that `tensor`
    shards; for a whole weight, which has fewer heads than there are devices, the dim in which each
    device takes its part. Forward: all-gather of x with sequence parallelism, otherwise nothing.
    Backward: all-gather of x again and reduce-scatter of dx; otherwise all-reduce of dx, and of
    the gradients of whole weights, of which each device computes a part.
    """
    return tuple(in_order(y, axes) for y in products_by_rows(x, weights, repeats, axes))


@custom_vjp(2, 3)
def products_by_rows(x, weights: tuple, repeats: tuple[int | None, ...], axes: Axes):
    """`column_products` in the order in which they are computed (`by_rows`). The caller puts them
    `in_order`, after adding to them, so that XLA does both at once."""
    return _products_forward(x, weights, repeats, axes)[0]


def _own(w, dim: int | None, axes: Axes):
    """This device's part of a whole weight: one of the heads along `dim`."""
    return w if dim is None else lax.dynamic_slice_in_dim(w, _head(w, dim, axes), 1, dim)


def _head(w, dim: int, axes: Axes):
    return lax.axis_index(axes.tensor) * w.shape[dim] // axes.tensor_shards


def _products_forward(x, weights, repeats, axes):
    if fp8.is_quantised(weights[0]):
        x = fp8.activation(x, weights[0], axes.tensor if axes.sequence_parallel else None)
    whole = _gathered(x, axes)
    ys = tuple(_product(whole, _own(w, dim, axes), 1) for w, dim in zip(weights, repeats))
    return ys, (x, weights)


def _products_backward(repeats, axes, saved, dys):
    x, weights = saved
    if fp8.is_quantised(x):
        dys = [fp8.output_gradient(dy, w, axes.tensor) for dy, w in zip(dys, weights)]
    own = [_own(w, dim, axes) for w, dim in zip(weights, repeats)]
    first, *others = (_input_gradient(dy, w, 1) for dy, w in zip(dys, own))
    dx = _summed(sum(others, first), axes)
    x = _gathered(x, axes)

    def gradient(w, dim, dy):
        dw = _weight_gradient(x, dy, axes)
        if dim is None:
            return _gradient_of(w, dw, x, dy, axes)
        dw = lax.dynamic_update_slice_in_dim(
            jnp.zeros(w.shape, dw.dtype), dw, _head(w, dim, axes), dim
        )
        # With sequence parallelism the step sums over `tensor` what `tensor` does not shard.
        return dw if axes.sequence_parallel else lax.psum(dw, axes.tensor)

    return dx, tuple(gradient(*each) for each in zip(weights, repeats, dys))


products_by_rows.defvjp(_products_forward, _products_backward)


def enter_jointly(x_BsD, axes: Axes):
    """x_BSD for linears with `axes.joint`. Forward: an all-gather with sequence parallelism,
    otherwise nothing. Backward: a reduce-scatter, otherwise an all-reduce."""
    if axes.sequence_parallel:
        return gather_sequence(x_BsD, axes.tensor)
    return copy_to(x_BsD, axes.tensor)


def leave_jointly(partial_BSD, axes: Axes):
    """The sum over `tensor` of the outputs of joint linears. Forward: a reduce-scatter with
    sequence parallelism, otherwise an all-reduce. Backward: an all-gather, otherwise nothing."""
    if axes.sequence_parallel:
        return scatter_sequence(partial_BSD, axes.tensor)
    return reduce_from(partial_BSD, axes.tensor)


def used_by_heads(w, axes: Axes):
    """A parameter that each device of `tensor` has whole and uses for its own heads. Backward: the
    sum over `tensor` of its gradients; with sequence parallelism the step sums them."""
    return w if axes.sequence_parallel else copy_to(w, axes.tensor)


def adapter_product(h_BSr, b, adapter: Adapter, repeat: int | None = None):
    """scale * h B with h = x A. b: the local shard of B; repeat: as in `column_products`."""
    h_BSr = adapter.scale * checkpoint_name(h_BSr, MATMUL_OUTPUT)
    return column_products(h_BSr, (b,), (repeat,), adapter.axes)[0]


class ColumnLinear(nnx.Module):
    """y = x W + b with W [inputs, *outputs], split over `tensor` along the output dim `split`."""

    def __init__(
        self, inputs, outputs, *, split, std, axes: Axes, rngs: nnx.Rngs, bias=True,
        adapters: Adapters | None = None, dims: Sequence[str] = (),
    ):  # fmt: skip
        """dims: names of W's dims."""
        names = ["tensor" if dim == split else None for dim in range(len(outputs))]
        w = std * normal(rngs.params, (inputs, *outputs))
        self.w = parameter(w, spec=P(None, *names), role="matrix", dims=dims)
        self.adapted = adapters is not None
        if adapters is not None:
            self.w_lora = Adapter(
                w.shape, P(None, *names), adapters, axes=axes, rngs=rngs, dims=dims
            )
        if bias:
            b = jnp.zeros(outputs, jnp.float32)
            self.b = parameter(b, spec=P(*names), role="bias", dims=dims[1:])
        self.bias = bias
        self.axes = axes

    def __call__(self, x):
        """x_BsD (x_BSD without sequence parallelism) -> y[B, S, *local outputs], by rows with
        `axes.by_rows`"""
        y = self._product(x)
        if self.bias:
            y = add_bias(y, self.b[...], self.axes)
        return checkpoint_name(in_order(y, self.axes), MATMUL_OUTPUT)

    def without_bias(self, x):
        """x W as it is computed, by rows. Adding the bias (Megatron's skip_bias_add) and putting it
        in order are left to the caller."""
        y = self._product(x)
        return checkpoint_name(apart(y, self.axes) if self.bias else y, MATMUL_OUTPUT)

    def _product(self, x):
        weights = (self.w.get_value(),)
        if self.adapted:
            weights += (used_by_heads(self.w_lora.a[...], self.axes),)
        y, *h = products_by_rows(x, weights, (None,) * len(weights), self.axes)
        if self.adapted:
            y += adapter_product(h[0], self.w_lora.b.get_value(), self.w_lora)
        return y


class WholeLinear(nnx.Module):
    """y = x W with W [inputs, outputs], which every device of `tensor` has whole and applies to the
    rows that it has."""

    def __init__(
        self, inputs, outputs, *, std, axes: Axes, rngs: nnx.Rngs, dims: Sequence[str] = ()
    ):
        """dims: names of W's dims."""
        w = std * normal(rngs.params, (inputs, outputs))
        self.w = parameter(w, spec=P(None, None), role="matrix", dims=dims)
        self.axes = replace(axes, tensor=None, tensor_shards=1, sequence_parallel=False)

    def __call__(self, x):
        """x_BsD (x_BSD without sequence parallelism) -> y of the same rows"""
        (y,) = column_products(x, (self.w.get_value(),), (None,), self.axes)
        return checkpoint_name(y, MATMUL_OUTPUT)


class RowLinear(nnx.Module):
    """y = x W + b with W [*inputs, outputs], split over `tensor` along the first input dim."""

    def __init__(
        self, inputs, outputs, *, std, axes: Axes, rngs: nnx.Rngs, bias=True,
        adapters: Adapters | None = None, dims: Sequence[str] = (),
    ):  # fmt: skip
        """dims: names of W's dims."""
        shape, spec = (*inputs, outputs), P("tensor", *(None for _ in inputs))
        w = std * normal(rngs.params, shape)
        self.w = parameter(w, spec=spec, role="matrix", dims=dims, inputs=len(inputs))
        self.adapted = adapters is not None
        if adapters is not None:
            self.w_lora = Adapter(
                shape, spec, adapters, inputs=len(inputs), axes=axes, rngs=rngs, dims=dims
            )
        if bias:
            b = jnp.zeros(outputs, jnp.float32)
            self.b = parameter(b, spec=P(None), role="bias", dims=dims[len(inputs) :])
        self.bias = bias
        self.axes = axes

    def __call__(self, x):
        """x[B, S, *local inputs], by rows with `axes.by_rows` -> y_BsD (y_BSD without sequence
        parallelism)"""
        w = self.w.get_value()
        y = self._with_adapter(x) if self.adapted else matmul(x, w, w.ndim - 1, self.axes)
        if self.bias:
            once = self.axes.joint and self.axes.tensor
            y = (add_bias_once if once else add_bias)(y, self.b[...], self.axes)
        return checkpoint_name(y, MATMUL_OUTPUT)

    def _with_adapter(self, x):
        """x W + scale * x A B; both terms are parts of one sum over `tensor`."""
        w, adapter = self.w.get_value(), self.w_lora
        h = matmul(x, adapter.a.get_value(), w.ndim - 1, adapter.axes)
        b = used_by_heads(adapter.b[...], self.axes)  # whole, while x A is in parts
        partial = matmul(x, w, w.ndim - 1, adapter.axes) + adapter_product(h, b, adapter)
        if self.axes.by_rows and by_rows(partial, self.axes):
            return scatter_rows(partial, self.axes.tensor)
        return partial if self.axes.joint else leave_jointly(partial, self.axes)


def output_std(init_std: float, layers: int) -> float:
    """Megatron's scale for weights before a residual addition."""
    return init_std / math.sqrt(2 * layers)
