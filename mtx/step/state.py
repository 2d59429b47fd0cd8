"""A run's state: what is in it, where each array lies, and the first one.

Legend: P stages · C chunks · N layers of a kind in a chunk
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from mtx.config import RunConfig
from mtx.pipeline.model import PipelineModel
from mtx.schedules.partition import EMPTY, Placement
from mtx.sharding.axes import AXES
from mtx.sharding.optimizer import shard_over_replicas
from mtx.step.optimizer import LossScale, make_optimizer, state_specs

Tree = Any


class TrainState(NamedTuple):
    """All that a step changes. Masters and moments are float32, sharded over replicas as well."""

    step: jax.Array  # int32 []
    params: Tree  # the masters: {"embed", "head", "layers": {kind: leaves [P, C, N, ...]}}
    moments: optax.OptState
    loss_scale: LossScale
    skipped: jax.Array  # int32 [], steps whose gradients were not finite
    checksums: jax.Array | None = (
        None  # uint32, one a device: of its masters and moments; if wanted
    )


class Metrics(NamedTuple):
    """What a step reports; float32 []."""

    loss: jax.Array  # mean over the tokens of the global batch
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    loss_scale: jax.Array
    finite: jax.Array  # 1, or 0 where the update was skipped
    corrupt: jax.Array  # one a device: 1 where memory has changed by itself; [] without checksums


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """The states of a run on its layout: shapes, specs, and the first."""

    run: RunConfig
    model: PipelineModel
    placement: Placement

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.run.optimizer, self.run.steps, self.model.roles)

    @cached_property
    def param_specs(self) -> Tree:
        """The PartitionSpec of every parameter, layers stacked."""
        specs = self.model.specs
        stack = jax.tree.map(lambda spec: P("pipe", None, None, *spec), specs["layers"])
        return specs | {"layers": stack}

    @cached_property
    def param_shapes(self) -> Tree:
        """The global shape of every parameter, layers stacked; float32."""
        return jax.eval_shape(self._params, 0)

    @cached_property
    def shards(self) -> Tree:
        """How every master is sharded over the replicas; a layer's own dims, where a chunk is
        gathered at a time."""
        layout = self.run.layout

        def shard(a, spec, stacked: int = 0):
            return shard_over_replicas(a.shape, spec, replicas=layout.replicas, stacked=stacked)

        of_layer = partial(shard, stacked=3 if layout.zero == 3 else 0)
        return {
            part: jax.tree.map(of_layer if part == "layers" else shard, shapes, specs)
            for (part, shapes), specs in zip(self.param_shapes.items(), self.param_specs.values())
        }

    @cached_property
    def specs(self) -> TrainState:
        """The PartitionSpec of every array of the state; of the masters, with ZeRO's shards."""
        params = jax.tree.map(lambda shard: shard.spec, self.shards)
        moments = state_specs(self.shapes.moments, params)
        checksums = P(*AXES) if self.run.guard.checksums else None
        return TrainState(P(), params, moments, LossScale(P(), P()), P(), checksums)

    @cached_property
    def shapes(self) -> TrainState:
        """Global shapes and dtypes of the state."""
        return jax.eval_shape(self.first, 0)

    def first(self, seed) -> TrainState:
        """The state that training starts from; checksums are still to be taken."""
        params = self._params(seed)
        return self.of(jax.tree.map(lambda a, shard: shard.pad(a), params, self.shards))

    def of(self, masters: Tree) -> TrainState:
        """The first state with these masters."""
        start = LossScale.start(self.run.optimizer, self.run.model.compute_dtype)
        checksums = None
        if self.run.guard.checksums:
            checksums = jnp.zeros(tuple(self.run.layout.sizes.values()), jnp.uint32)
        moments = self.optimizer.init(masters)
        return TrainState(jnp.int32(0), masters, moments, start, jnp.int32(0), checksums)

    def _params(self, seed) -> Tree:
        def of_kind(kind: str) -> Tree:
            slots = self.placement.slots_of(kind)
            used = slots.ravel() != EMPTY
            layers = np.where(used, self.placement.layers_of(kind)[slots.ravel()], EMPTY)
            params = jax.vmap(partial(self.model.init_layer, kind, seed))(jnp.asarray(layers))

            def stack(a):
                padded = jnp.where(used.reshape(-1, *(1,) * (a.ndim - 1)), a, 0)
                return padded.reshape(*slots.shape, *a.shape[1:])

            return jax.tree.map(stack, params)

        layers = {kind: of_kind(kind) for kind in self.placement.kinds}
        return self.model.init_shared(seed) | {"layers": layers}
