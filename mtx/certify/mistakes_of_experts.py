"""Mistakes with experts, as changes of the step: see `mistakes`."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from mtx.certify.mistakes import Change
from mtx.layers import experts
from mtx.layers.model import Model
from mtx.layers.router import RouterModule
from mtx.sharding.axes import axes_of
from mtx.sharding.experts import Way
from mtx.sharding.optimizer import DataShard
from mtx.step import step

_AXIS = "expert"

# -- sums of the step ------------------------------------------------------------------------------


def gradients_times_shards() -> Change:
    real = step.Step._reduce

    def reduce(self, gradient, spec, shard, summed):
        sum_ = real(self, gradient, spec, shard, summed)
        return sum_ * lax.axis_size(_AXIS) if _AXIS in axes_of(spec) else sum_

    return mock.patch.object(step.Step, "_reduce", reduce)


def gradients_summed_over_shards() -> Change:
    real = step.sum_axes

    def sum_axes(spec, *, sequence_parallel):
        return tuple({*real(spec, sequence_parallel=sequence_parallel), _AXIS})

    return mock.patch.object(step, "sum_axes", sum_axes)


def _norm(*, of_experts: float, over_them: bool) -> Change:
    """of_experts: the factor on the squares of experts' gradients; over_them: whether squares are
    summed over the devices that share experts."""

    def global_norm(gradients, specs, sizes):
        def square(gradient, spec):
            others = [size for axis, size in sizes.items() if axis not in axes_of(spec)]
            share = of_experts if _AXIS in axes_of(spec) else 1.0
            return share * jnp.square(gradient).sum() / math.prod(others)

        squares: Any = sum(jax.tree.leaves(jax.tree.map(square, gradients, specs)))
        return jnp.sqrt(lax.psum(squares, tuple(a for a in sizes if over_them or a != _AXIS)))

    return mock.patch.object(step, "global_norm", global_norm)


def norm_without_experts() -> Change:
    return _norm(of_experts=0.0, over_them=True)


def norm_of_own_experts() -> Change:
    return _norm(of_experts=1.0, over_them=False)


def norm_as_if_replicated() -> Change:
    return _norm(of_experts=0.5, over_them=True)  # divided by the shards, as other parameters are


def balance_by_own_counts() -> Change:
    real = DataShard.reduce_scatter

    def reduce_scatter(self, gradient, *, stacked=True):
        return gradient if self.dim is None else real(self, gradient, stacked=stacked)

    return mock.patch.object(DataShard, "reduce_scatter", reduce_scatter)


# -- losses of routers -----------------------------------------------------------------------------


def auxiliary_loss_times_shards() -> Change:
    real = Model.losses

    def losses(self, shared, stream, batch):
        found = real(self, shared, stream, batch)
        return found | {"aux": found["aux"] * lax.axis_size(_AXIS)}

    return mock.patch.object(Model, "losses", losses)


def shares_of_own_positions() -> Change:
    return mock.patch.object(RouterModule, "_tokens_axis", None)


# -- tokens on their way ---------------------------------------------------------------------------


def no_later_rounds() -> Change:
    return mock.patch.object(Way, "rounds_after_first", lambda self, queues: jnp.int32(0))


def rounds_of_own_queues() -> Change:
    def rounds_after_first(self, queues):
        left = jnp.maximum(queues.counts_E.max() - self._first_room, 0)
        return -(-left // self._later_room)

    return mock.patch.object(Way, "rounds_after_first", rounds_after_first)


def sent_back_in_another_order() -> Change:
    real = Way._send_back

    def send_back(self, y_emD, room):
        size = y_emD.shape[-1]
        swapped = jnp.swapaxes(y_emD.reshape(len(y_emD), room, self.shards, size), 1, 2)
        return real(self, swapped.reshape(y_emD.shape), room)

    return mock.patch.object(Way, "_send_back", send_back)


# -- experts that tensor splits --------------------------------------------------------------------


def bias_on_every_shard() -> Change:
    def weights(self):
        names = "up", "down", "up_bias", "down_bias"
        return {name: getattr(self, name)[...] for name in names}

    return mock.patch.object(experts.ExpertsModule, "_weights", weights)


def gates_gradients_of_own_shard() -> Change:
    return mock.patch.object(experts, "copy_to", lambda x, axis: x)
