"""A run's model, layout and schedule, as compiled functions of (state, batch)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtx.config import Layout, RunConfig
from mtx.costs.place import placement_of
from mtx.errors import UserError, require_kind
from mtx.layers.kernels import AttentionKernel, cudnn_takes
from mtx.layers.model import Model
from mtx.pipeline.model import PipelineModel
from mtx.pipeline.program import Pipeline
from mtx.plan.calibration import calibration_of
from mtx.plan.choose import check_shape, resolve, schedule_for
from mtx.plan.hardware import find_hardware
from mtx.plan.priced import memory_share
from mtx.plan.woven import choose_weave
from mtx.schedules.partition import Placement
from mtx.schedules.schedule import Schedule
from mtx.sharding.axes import AXES, BATCH, axes_of
from mtx.sharding.mesh import Axes, make_mesh
from mtx.sharding.sequence import zigzag
from mtx.step import xla
from mtx.step.batch import check_tokens
from mtx.step.forward import Forward
from mtx.step.order import from_canonical, to_canonical
from mtx.step.state import States, TrainState
from mtx.step.step import Step, batch_spec

Tree = Any


class Trainer:
    """A run's model, layout and schedule as functions of (state, batch).

    Nothing touches a device until `init`, `train_step` or another of its functions is called;
    `mesh` is then that of the real devices, unless one was given. The step is written for an
    abstract mesh: it runs on whatever mesh its state lies on, and compiles for devices that are
    absent. A trainer asks which devices there are only if the layout leaves open the attention
    kernel, or whether ticks are woven.
    """

    def __init__(
        self, run: RunConfig, *, mesh: Mesh | None = None, schedule: Schedule | None = None
    ):
        require_kind("run", run, RunConfig, "a RunConfig, such as mtx.preset('miniature')")
        model = run.model
        self._mesh = mesh
        layout, why = resolve(run.layout, model, run.global_batch)
        layout, whether = self._choose_weave(replace(run, layout=layout))
        self.reasons = tuple(filter(None, (why, whether)))
        self.run = run = replace(run, layout=layout)
        self.schedule = schedule_for(layout, run.microbatches, schedule)
        check_shape(self.schedule, layout, run.microbatches)

    def _choose_weave(self, run: RunConfig) -> tuple[Layout, str]:
        """(the layout of `run` with a choice for weave="auto", why). It is made on GPUs that
        `mtx.plan.hardware` knows, if matmuls read weights in place there."""
        is_open = run.layout.weave == "auto" and run.layout.weaves and xla.version() >= xla.IN_PLACE
        known = is_open and self.platform == "gpu"
        device = find_hardware(self.devices[0].device_kind) if known else None
        if device is None:
            return run.layout, ""
        calibration = calibration_of(device, "mtx", family=run.model.family)
        return choose_weave(run, device, calibration=calibration, share=memory_share())

    @cached_property
    def devices(self) -> list:
        """The devices of the mesh that was given, or of this machine."""
        return list(self._mesh.devices.flat) if self._mesh else jax.devices()

    @cached_property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        platform = self.devices[0].platform
        return "gpu" if platform in ("gpu", "cuda", "rocm") else platform

    @cached_property
    def axes(self) -> Axes:
        """The axes that local shards are written for."""
        in_place = self.platform == "gpu" and xla.version() >= xla.IN_PLACE
        layout = self.run.layout
        permutes = self.platform != "cpu" or layout.pipe == 1
        return replace(Axes.of(layout), in_place=in_place, permutes=permutes)

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.run.model, self.run.layout, self.schedule.virtual_stages)

    @cached_property
    def model(self) -> PipelineModel:
        layout = self.run.layout
        return Model(
            self.run.model, axes=self.axes, recompute=layout.recompute, kernel=self._kernel(),
            vocab_shards=layout.vocab_shards, slices=self.schedule.slices, head=self.head(),
        )  # fmt: skip

    def head(self) -> Any:
        """The config of a head that replaces the family's; None: the family's."""
        return None

    def _kernel(self) -> AttentionKernel:
        """The layout's attention kernel. "auto" looks at a device of the mesh that was given, or of
        this machine, since cuDNN cannot be compiled for absent devices."""
        wanted = self.run.layout.attention
        if wanted == "blocked":
            return wanted
        device = self.devices[0]
        nvidia = "nvidia" in device.device_kind.lower()
        if wanted == "cudnn":
            if not nvidia:
                raise UserError(
                    f"attention='cudnn' is for NVIDIA GPUs, not {device.device_kind}; use auto"
                )
            return wanted
        there = nvidia and jax.default_backend() == "gpu"
        model = self.run.model
        takes = cudnn_takes(
            head_size=model.head_size, value_size=model.value_size, sequence=model.sequence,
            dtype=model.compute_dtype,
        )  # fmt: skip
        if model.value_size != model.head_size:  # see `cudnn_takes`
            there = there and float(device.compute_capability) >= 9
        return "cudnn" if there and takes else "blocked"

    @cached_property
    def states(self) -> States:
        return States(run=self.run, model=self.model, placement=self.placement)

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            model=self.model, schedule=self.schedule, placement=self.placement,
            layout=self.run.layout, axes=self.axes, data_shards=self.states.pipeline_shards,
            chunk_shards=self.states.chunk_shards,
        )  # fmt: skip

    @cached_property
    def step(self) -> Step:
        return Step(run=self.run, axes=self.axes, states=self.states, pipeline=self.pipeline)

    # -- how everything is sharded ----------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        return self._mesh or make_mesh(self.run.layout)

    def shardings(self, specs: Tree, mesh: Mesh | None = None) -> Tree:
        """NamedShardings of a tree of specs on this trainer's mesh, or on another."""
        mesh = mesh or self.mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def shard_map(self, f, in_specs, out_specs):
        """f, a function of local shards, as one of arrays on this trainer's mesh."""
        # check_vma=False: the collectives' gradients are our own (sharding.collectives), and a cond
        # on a stage-dependent predicate gives wrong gradients under it (jax issue 40823).
        sizes = tuple(self.run.layout.sizes.values())
        mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def place(self, batch: dict[str, np.ndarray]) -> Tree:
        """A batch of host arrays, [G, S] or [G], placed so that each device has its part. Positions
        [S] are first put in the order of the devices (`mtx.sharding.sequence`). UserError for
        tokens that the model does not take."""
        check_tokens(batch, self.run.model)

        def place(a):
            sharding = NamedSharding(self.mesh, self._batch_spec(a))
            order = self._order(a) if self._cut(a) else None

            def part(index):
                return a[index] if order is None else a[index[0]][:, order[index[1]]]

            return jax.make_array_from_callback(a.shape, sharding, part)

        return jax.tree.map(place, batch)

    def _batch_spec(self, array) -> P:
        return batch_spec(array, self.axes)

    def _cut(self, array) -> bool:
        """Whether the positions of a batch's array are sharded."""
        return axes_of(self._batch_spec(array)) != BATCH

    def _order(self, array) -> np.ndarray:
        return zigzag(array.shape[1], self.axes.context_shards)

    # -- the first state --------------------------------------------------------------------------

    def init(self, seed: int | None = None) -> TrainState:
        """The first state, each shard made on its device; the same values on every layout."""
        return self.with_checksums(self._first(self.run.seed if seed is None else seed))

    @cached_property
    def _first(self):
        return jax.jit(self.states.first, out_shardings=self.shardings(self.states.specs))

    def state_from(self, params: Tree) -> TrainState:
        """The first state with these parameters, float32 in canonical form."""
        return self.with_checksums(self._start(self.masters_from(params)))

    @cached_property
    def _start(self):
        shardings = self.shardings(self.states.specs)
        return jax.jit(self.states.of, out_shardings=shardings, donate_argnums=0)

    def masters_from(self, params: Tree) -> Tree:
        """The first state's `params` with these values, given as float32 in canonical form. The
        host puts them in the layout's order and gives each device its part."""
        masters = self.states.kept(self.from_canonical(jax.device_get(params)))

        def place(a, sharding):
            return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index].copy())

        return jax.tree.map(place, masters, self.shardings(self.states.specs.params))

    @cached_property
    def with_checksums(self):
        """state -> the state with the checksums of what each device holds, if they are wanted.
        Every step computes those of the state it returns and checks those of the state it gets."""
        if not self.run.guard.checksums:
            return lambda state: state
        specs = self.states.specs
        return jax.jit(self.shard_map(self.step.with_checksums, (specs,), specs))

    # -- functions of (state, batch) --------------------------------------------------------------

    @cached_property
    def train_step(self):
        """(state, batch) -> (state, metrics), compiled at the first call; the state is donated."""
        specs = self.states.specs
        step = self.of_batch(self.step, specs, (specs, P()))
        options = xla.options(self.platform, offload=self.run.layout.offload_fraction > 0) or None
        return jax.jit(step, donate_argnums=0, compiler_options=options)

    def of_batch(self, f, specs, out_specs):
        """`shard_map` of f, a function of (values that have `specs`, the local part of a batch)."""

        def mapped(state, batch):
            of_batch = jax.tree.map(self._batch_spec, batch)
            return self.shard_map(f, (specs, of_batch), out_specs)(state, batch)

        return mapped

    def compile_step(self, mesh: Mesh | None = None):
        """The step, compiled for this trainer's mesh or another, from shapes alone: nothing is
        allocated, and the devices of `mesh` may be absent. If they are of another kind, the layout
        has to name the attention kernel."""
        shardings = self.shardings(self.states.specs, mesh)
        state = jax.tree.map(_abstract, self.states.shapes, shardings)
        fields = self.model.batch_fields(self.run.global_batch)
        shardings = self.shardings(jax.tree.map(self._batch_spec, fields), mesh)
        batch = jax.tree.map(_abstract, fields, shardings)
        return self.train_step.lower(state, batch).compile()

    @cached_property
    def evaluate(self):
        """(state, batch) -> (sum of losses, sum of weights) without dropout; float32 []."""
        return self._forward(Forward(step=self.step).evaluate, (P(), P()))

    @cached_property
    def predict(self):
        """(state, {"tokens": [G, S], "last": [G]}) -> logits [G, V] float32 of the token that
        follows each row's last one, which is at position `last`. V is padded, with -inf."""
        return self._forward(Forward(step=self.step).predict, P(BATCH, self.axes.vocab or None))

    @cached_property
    def score(self):
        """(state, batch) -> (losses, hits) [G, S] float32 of batch["targets"], unweighted and
        without dropout: a hit is 1 if the target is the likeliest token."""
        score = self.of_batch(
            Forward(step=self.step).score, self.states.specs.params, P(BATCH, self.axes.context)
        )

        def in_order(scores_GS):
            return (
                scores_GS[:, np.argsort(self._order(scores_GS))]
                if self._cut(scores_GS)
                else scores_GS
            )

        return jax.jit(lambda state, batch: jax.tree.map(in_order, score(state.params, batch)))

    def _forward(self, f, out_specs):
        mapped = self.of_batch(f, self.states.specs.params, out_specs)
        return jax.jit(lambda state, batch: mapped(state.params, batch))

    def loss_and_gradients(self, state: TrainState, batch: Tree):
        """(mean loss, gradients in canonical form) of a batch of arrays [G, S], as host arrays.
        Gradients are those of the sum of all losses with respect to the trained parameters; for
        states they are what was counted."""
        return self.loss_and_gradients_of(state.params, batch, step=state.step)

    def loss_and_gradients_of(self, masters: Tree, batch: Tree, *, step: Any = 0):
        """`loss_and_gradients` from a state's `params` alone and its step number."""
        found = self._loss_and_gradients(masters, step, self.place(batch))
        loss, gradients = jax.device_get(found)
        return loss, self.to_canonical(gradients)

    @cached_property
    def _loss_and_gradients(self):
        specs = self.states.specs.params

        def compute(state, batch):
            masters, step = state
            losses, gradients = self.step.losses_and_gradients(masters, batch, step, jnp.float32(1))
            return losses["loss"], gradients

        mapped = self.of_batch(compute, (specs, P()), (P(), self.states.of_trained(specs)))

        def run(masters, step, batch):
            return mapped((masters, jnp.int32(step)), batch)

        return jax.jit(run, out_shardings=NamedSharding(self.mesh, P()))

    # -- canonical form ---------------------------------------------------------------------------

    def to_canonical(self, tree: Tree) -> Tree:
        """A tree like the masters (gradients, moments) -> layers [L, ...], no padding. Host arrays
        give host arrays, without compiling a program; likewise in `from_canonical`."""
        return to_canonical(tree, self.states)

    def from_canonical(self, tree: Tree) -> Tree:
        """The inverse of `to_canonical`."""
        return from_canonical(tree, self.states)


def _abstract(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
