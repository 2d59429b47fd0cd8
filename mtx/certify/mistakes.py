"""Mistakes as changes of the step: each is a context in which traced steps have one mistake."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.layers import attention, bert, context, vision
from mtx.layers.encoder_decoder import ENCODER
from mtx.pipeline.program import Pipeline
from mtx.pipeline.run import Run
from mtx.schedules.schedule import IDLE
from mtx.sharding import linear, optimizer, vocab
from mtx.sharding.axes import BATCH, TOKENS, axes_of
from mtx.sharding.collectives import all_gather_sequence, shard_of_sequence
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.optimizer import DataShard
from mtx.sharding.ring import Ring
from mtx.step import step, trainer

Change = contextlib.AbstractContextManager

# -- sums of the step ------------------------------------------------------------------------------


def loss_times_replicas() -> Change:
    real = Pipeline.gradients

    def gradients(self, params, batch, samples_MB, rng, loss_weight):
        return real(self, params, batch, samples_MB, rng, loss_weight * lax.axis_size(TOKENS))

    return mock.patch.object(Pipeline, "gradients", gradients)


def _sums_in_turn(*mistaken: Callable) -> Change:
    """The step's own sums over replicas, of the tokens and then of the loss, made another way."""
    real_sum, real = step.sum_over_tokens, step.Step.losses_and_gradients

    def losses_and_gradients(self, *arguments):
        sums = iter(mistaken)
        with mock.patch.object(step, "sum_over_tokens", lambda v: next(sums, real_sum)(v)):
            return real(self, *arguments)

    return mock.patch.object(step.Step, "losses_and_gradients", losses_and_gradients)


def tokens_of_own_replica() -> Change:
    return _sums_in_turn(lambda tokens: tokens * lax.axis_size(TOKENS))


def tokens_over_other_axes() -> Change:
    return _sums_in_turn(lambda tokens: lax.psum(tokens, "tensor"))


def tokens_over_replicas_alone() -> Change:
    return _sums_in_turn(lambda tokens: lax.psum(tokens, BATCH))


def loss_of_own_replica() -> Change:
    return _sums_in_turn(step.sum_over_tokens, lambda loss: loss)


def _sums(mistaken: Callable) -> Change:
    return mock.patch.object(step, "sum_axes", mistaken)


def no_sum_of_replicated() -> Change:
    return _sums(lambda spec, *, sequence_parallel: TOKENS)


def sum_of_whole_gradients() -> Change:
    real = step.sum_axes
    return _sums(lambda spec, *, sequence_parallel: real(spec, sequence_parallel=True))


def sum_of_shards() -> Change:
    return _sums(lambda spec, *, sequence_parallel: (*TOKENS, "tensor"))


# -- norm ------------------------------------------------------------------------------------------


def _norm(axes: Callable, *, shares: bool) -> Change:
    def global_norm(gradients, specs, sizes):
        def square(gradient, spec):
            others = [size for axis, size in sizes.items() if axis not in axes_of(spec)]
            return jnp.square(gradient).sum() / (math.prod(others) if shares else 1)

        squares = jax.tree.leaves(jax.tree.map(square, gradients, specs))
        return jnp.sqrt(lax.psum(sum(squares), axes(sizes)))

    return mock.patch.object(step, "global_norm", global_norm)


def norm_counts_replicas() -> Change:
    return _norm(tuple, shares=False)


def norm_of_own_shards() -> Change:
    return _norm(lambda sizes: TOKENS, shares=True)


# -- ZeRO ------------------------------------------------------------------------------------------


def gathered_over_tensor() -> Change:
    return mock.patch.object(optimizer, "lax", _With(
        all_gather=lambda x, axes, **how: lax.all_gather(x, ("tensor",), **how)
    ))  # fmt: skip


def gathered_backwards() -> Change:
    def all_gather(x, axes, *, axis, tiled):
        parts = lax.all_gather(x, axes, axis=axis)
        parts = jnp.flip(parts, axis)
        return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return mock.patch.object(optimizer, "lax", _With(all_gather=all_gather))


def own_part_of_own_gradient() -> Change:
    def reduce_scatter(self, gradient, *, stacked=True):
        if self.dim is None:
            return lax.psum(gradient, TOKENS) if self.axes else gradient
        gradient = self.pad(gradient)
        size = gradient.shape[self.dim] // lax.axis_size(TOKENS)
        return lax.dynamic_slice_in_dim(gradient, lax.axis_index(TOKENS) * size, size, self.dim)

    return mock.patch.object(DataShard, "reduce_scatter", reduce_scatter)


def mean_over_replicas() -> Change:
    real = DataShard.reduce_scatter

    def reduce_scatter(self, gradient, *, stacked=True):
        return real(self, gradient, stacked=stacked) / lax.axis_size(TOKENS)

    return mock.patch.object(DataShard, "reduce_scatter", reduce_scatter)


# -- layers ----------------------------------------------------------------------------------------


class _With:
    """jax.lax with some functions replaced."""

    def __init__(self, **replaced: Callable):
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(lax, name)


def no_sum_of_head_norms() -> Change:
    return mock.patch.object(attention, "used_by_heads", lambda w, axes: w)


def no_sum_after_row_layers() -> Change:
    def summed(partial_BSD, axes):
        if not axes.sequence_parallel:
            return partial_BSD
        dim = 0 if linear.by_rows(partial_BSD, axes) else 1
        size = partial_BSD.shape[dim] // axes.tensor_shards
        first = lax.axis_index(axes.tensor) * size
        return lax.dynamic_slice_in_dim(partial_BSD, first, size, dim)

    return mock.patch.object(linear, "_summed", summed)


def no_sum_of_repeated_heads() -> Change:
    def psum(x, axes):
        return x if x.ndim == 4 else lax.psum(x, axes)  # a weight's gradient has four dims

    return mock.patch.object(linear, "lax", _With(psum=psum))


def largest_of_own_vocabulary() -> Change:
    def all_gather(x, axes):  # the largest come first in what is gathered
        every = lax.all_gather(x, axes)
        return every.at[:, 0].set(x[0])

    return mock.patch.object(vocab, "lax", _With(all_gather=all_gather))


def no_sum_over_vocabulary() -> Change:
    return mock.patch.object(vocab, "lax", _With(all_gather=lambda x, axes: x[None]))


def second_loss_by_own_count() -> Change:
    real = bert.Pretraining.weigh

    def weigh(self, batch, total):
        def own(values):
            return values.sum() if values.dtype == jnp.bool_ else total(values)

        return real(self, batch, own)

    return mock.patch.object(bert.Pretraining, "weigh", weigh)


def second_loss_times_replicas() -> Change:
    real = bert.Pretraining.weigh

    def weigh(self, batch, total):
        batch = real(self, batch, total)
        return batch | {"order_weights": batch["order_weights"] * lax.axis_size(TOKENS)}

    return mock.patch.object(bert.Pretraining, "weigh", weigh)


def labels_shifted_after_cutting() -> Change:
    real = Run.batch_of

    def batch_of(self, item):
        rows = real(self, item)
        last = rows["tokens"][:, :1] * 0  # the row's end has no next token here
        shifted = jnp.concatenate([rows["tokens"][:, 1:], last], axis=1)
        return rows | {"targets": shifted}

    return mock.patch.object(Run, "batch_of", batch_of)


def gradients_of_own_keys() -> Change:
    def reduce_scatter(self, x):
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, self.index, 0, False), x)

    return mock.patch.object(Ring, "reduce_scatter", reduce_scatter)


def sequences_in_plain_order() -> Change:
    return mock.patch.object(trainer, "zigzag", lambda sequence, parts: np.arange(sequence))


def projector_of_own_images() -> Change:
    return mock.patch.object(vision, "gather_sequence", _own_backward)


@custom_vjp(1)
def _own_backward(x_GpD, axis):
    """A gather whose backward pass takes a device's part of its own gradient, and sums nothing."""
    return all_gather_sequence(x_GpD, axis)


_own_backward.defvjp(
    lambda x_GpD, axis: (all_gather_sequence(x_GpD, axis), None),
    lambda axis, _, dy_GPD: (shard_of_sequence(dy_GPD, axis),),
)


# -- random numbers --------------------------------------------------------------------------------


def masks_by_local_position() -> Change:
    def first_position(x_BsD, axes, place):
        return 0 if place is None else place.part * x_BsD.shape[1]

    return mock.patch.object(context, "first_position", first_position)


def masks_by_place_in_part() -> Change:
    def places(size, axes):
        return jnp.arange(size, dtype=jnp.int32)

    return mock.patch.object(context, "places", places)


def masks_by_device() -> Change:
    def first_position(x_BsD, axes, place):
        return lax.axis_index("tensor") * x_BsD.shape[1]

    return mock.patch.object(context, "first_position", first_position)


def masks_by_local_sample() -> Change:
    def samples(batch):
        shape = batch["tokens"].shape[:2]
        return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)

    return mock.patch.object(step, "_samples", samples)


# -- stages ----------------------------------------------------------------------------------------


def head_of_own_stage() -> Change:
    return mock.patch.object(Run, "last_output", lambda self, y: y)


def embedding_of_own_stage() -> Change:
    return mock.patch.object(Run, "dx_of_first", lambda self, dx: dx)


def encoder_of_own_stage() -> Change:
    real = Run.send

    def send(self, stream, routes):
        if routes is self.schedule.gradient_receives:
            stream = stream | {ENCODER: jnp.zeros_like(stream[ENCODER])}
        return real(self, stream, routes)

    return mock.patch.object(Run, "send", send)


def head_of_another_stage() -> Change:
    real = Run.last_output

    def last_output(self, y):
        holds, self.holds_last = self.holds_last, self.holds_first
        y = real(self, y)
        self.holds_last = holds
        return y

    return mock.patch.object(Run, "last_output", last_output)


def head_where_it_is_held() -> Change:
    real = Run.head

    def head(self, carry, op, y):
        op = op._replace(head=jnp.where(self.holds_last, op.head, IDLE))
        return real(self, carry, op, y)

    return mock.patch.object(Run, "head", head)
