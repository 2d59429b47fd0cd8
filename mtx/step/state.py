"""A run's state: its arrays, how each is sharded, and the first state.

Legend: P stages · C chunks · N layers of a kind in a chunk
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.pipeline.model import PipelineModel
from mtx.schedules.partition import EMPTY, Placement
from mtx.sharding.axes import AXES, axes_of
from mtx.sharding.optimizer import WHOLE, namespace, shard_over_replicas
from mtx.sharding.parameter import FLOAT32, chosen
from mtx.step.optimizer import LossScale, make_optimizer, state_specs

Tree = Any


class TrainState(NamedTuple):
    """Everything that a step changes, and the frozen parameters. Masters and moments are float32,
    sharded over the replicas as well; frozen parameters have the type they are computed with."""

    step: jax.Array  # int32 []
    params: Tree  # the masters: {"embed", "head", "layers": {kind: leaves [P, C, N, ...]}}
    moments: optax.OptState
    loss_scale: LossScale
    skipped: jax.Array  # int32 [], steps whose gradients were not finite
    checksums: jax.Array | None = (
        None  # uint32, one per device, of its masters and moments; if wanted
    )


class Metrics(NamedTuple):
    """What a step reports; float32 []."""

    loss: jax.Array  # mean over the tokens of the global batch; the head's loss only
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    loss_scale: jax.Array
    finite: jax.Array  # 1, or 0 if the update was skipped
    corrupt: jax.Array  # one per device: 1 if memory has changed by itself; [] without checksums
    # losses that layers add, mean over the tokens; None if layers have no such losses
    aux_loss: jax.Array | None = None
    # {kind: {path: [P, C, N, ...]}}: counted for states in this step, such as experts' load
    counted: Tree = None
    # the loss of the tokens after the next, times its weight, as it is minimised with `loss`
    second_loss: jax.Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """The states of a run on its layout: their shapes and specs, and the first state."""

    run: RunConfig
    model: PipelineModel
    placement: Placement

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.run.optimizer, self.run.steps, self.of_trained(self.model.roles))

    def of_trained(self, tree: Tree) -> Tree:
        """The part of a tree like the parameters that is trained: it has gradients and moments."""
        return chosen(tree, self.model.trained)

    @cached_property
    def param_specs(self) -> Tree:
        """The PartitionSpec of every parameter, layers stacked."""
        specs, sizes = self.model.specs, self.run.layout.sizes
        jax.tree.map_with_path(partial(_check_divided, sizes), self.model.shapes, specs)
        stack = jax.tree.map(lambda spec: P("pipe", None, None, *spec), specs["layers"])
        return specs | {"layers": stack}

    @cached_property
    def param_shapes(self) -> Tree:
        """The global shape of every parameter, layers stacked; float32, or the type from `kept`."""

        def of_kind(kind: str) -> Tree:
            slots = self.placement.slots_of(kind).shape
            return jax.tree.map(lambda a: a.update(shape=slots + a.shape), shapes["layers"][kind])

        shapes = self.model.shapes
        layers = {kind: of_kind(kind) for kind in self.placement.kinds}
        return jax.eval_shape(self.kept, shapes | {"layers": layers})

    def kept(self, params: Tree) -> Tree:
        """Parameters as a state holds them: float32 masters, and frozen parameters only in the type
        they are computed with, in which no update can be lost."""
        dtype = self.run.model.compute_dtype

        def cast(a, trained, role):
            return a if trained or role in FLOAT32 else a.astype(dtype)

        return jax.tree.map(cast, params, self.model.trained, self.model.roles)

    @cached_property
    def by_pipeline(self) -> Tree:
        """Whether the pipeline gathers a parameter and reduce-scatters its gradient, bool: with
        zero=3 it does so for the parameters of layers; if it gathers one layer at a time, for their
        matrices only. The step does so for all others."""
        layout = self.run.layout

        def is_by_pipeline(path, role) -> bool:
            late = layout.zero == 3 and is_of_layers(path) and role != "state"
            return late and (layout.zero_unit == "chunk" or role == "matrix")

        return jax.tree.map_with_path(is_by_pipeline, self.model.roles)

    @cached_property
    def shards(self) -> Tree:
        """How every master is sharded over the replicas: in the own dims of a chunk or of a layer,
        if the pipeline gathers one of them at a time."""
        windows, sizes = self.run.layout.by_windows(self.run.model), self.run.layout.sizes

        def shard(path, a, spec, by_pipeline, role, trained):
            stacked = 3 if by_pipeline else 2 if windows and is_of_layers(path) else 0
            # A rule reads a whole state. Frozen parameters are whole too, except with zero=3.
            whole = role == "state" or (not trained and self.run.layout.zero == 1)
            return shard_over_replicas(a.shape, spec, sizes=sizes, stacked=stacked, whole=whole)

        return jax.tree.map_with_path(
            shard, self.param_shapes, self.param_specs, self.by_pipeline, self.model.roles,
            self.model.trained,
        )  # fmt: skip

    @cached_property
    def pipeline_shards(self) -> Tree:
        """How the leaves of a chunk, [N, ...], or of a layer are sharded until the pipeline gathers
        them; {kind: ...}. None if it gathers nothing."""
        layout = self.run.layout
        if layout.zero != 3:
            return None
        stacked = 2 if layout.zero_unit == "chunk" else 3
        return jax.tree.map(
            lambda shard, by_pipeline: shard.below(stacked) if by_pipeline else WHOLE,
            self.shards["layers"], self.by_pipeline["layers"],
        )  # fmt: skip

    @cached_property
    def chunk_shards(self) -> Tree:
        """How a chunk's leaves [N, ...] are sharded, {kind: ...}, if the pipeline gathers and
        scatters them beside its ticks; otherwise None."""
        if not self.run.layout.by_windows(self.run.model):
            return None
        return jax.tree.map(lambda shard: shard.below(2), self.shards["layers"])

    @cached_property
    def specs(self) -> TrainState:
        """The PartitionSpec of every array of the state, with ZeRO's shards of the masters."""
        params = jax.tree.map(lambda shard: shard.spec, self.shards)
        moments = state_specs(self.shapes.moments, params)
        checksums = P(*AXES) if self.run.guard.checksums else None
        others = jax.tree.map(lambda _: P(), self.shapes)
        return others._replace(params=params, moments=moments, checksums=checksums)

    @cached_property
    def shapes(self) -> TrainState:
        """Global shapes and dtypes of the state."""
        return jax.eval_shape(self._padded, self.param_shapes)

    def first(self, seed) -> TrainState:
        """The state that training starts from; its checksums are not computed yet."""
        return self._padded(self._params(seed))

    def _padded(self, params: Tree) -> TrainState:
        """The first state with these parameters."""
        return self.of(self.kept(jax.tree.map(lambda a, shard: shard.pad(a), params, self.shards)))

    def of(self, masters: Tree) -> TrainState:
        """The first state with these masters."""
        start = LossScale.start(self.run.optimizer, self.run.model.compute_dtype)
        checksums = None
        if self.run.guard.checksums:
            checksums = jnp.zeros(tuple(self.run.layout.sizes.values()), jnp.uint32)
        moments = self.optimizer.init(self.of_trained(masters))
        return TrainState(jnp.int32(0), masters, moments, start, jnp.int32(0), checksums)

    def _params(self, seed) -> Tree:
        def of_kind(kind: str) -> Tree:
            slots = self.placement.slots_of(kind)
            numbers = np.append(self.placement.layers_of(kind), EMPTY)
            layers = jnp.asarray(numbers[slots.ravel()])  # EMPTY is -1: the last
            params = jax.vmap(partial(self.model.init_layer, kind, seed))(layers)
            return jax.tree.map(partial(stacked, slots=slots), params)

        layers = {kind: of_kind(kind) for kind in self.placement.kinds}
        return self.model.init_shared(seed) | {"layers": layers}


def _check_divided(sizes: dict[str, int], path, a, spec: P) -> None:
    for dim, entry in enumerate(spec):
        axes = axes_of([entry])
        if a.shape[dim] % math.prod(sizes[axis] for axis in axes):
            name = keystr(path, simple=True, separator=".")
            raise UserError(
                f"{' * '.join(f'{axis}={sizes[axis]}' for axis in axes)} must divide dim {dim} of "
                f"{name}, {a.shape[dim]}; use one that does, or another size"
            )


def stacked(a, *, slots: np.ndarray):
    """A leaf [P*C*N, ...] of the layers in these slots as [P, C, N, ...], zero in empty slots."""
    if (slots == EMPTY).any():
        used = (slots.ravel() != EMPTY).reshape(-1, *(1,) * (a.ndim - 1))
        a = namespace(a).where(used, a, 0)
    return a.reshape(*slots.shape, *a.shape[1:])


def is_of_layers(path: tuple) -> bool:
    """Whether a parameter belongs to a layer, not to the embedding or head."""
    return path[0].key == "layers"
