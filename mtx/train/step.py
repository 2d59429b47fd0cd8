"""One training step, and everything it needs: the file to read first.

`Trainer` puts a model, a layout and a schedule together. Its step is one `shard_map` over the whole
mesh, a pure function of (state, batch):

1. gather the parameters in the compute type from the masters that are sharded over `data`;
2. run the pipeline: losses, and gradients in float32;
3. sum partial gradients over `tensor`, reduce-scatter over `data`;
4. clip by the norm over all axes; skip the update where it is not finite;
5. the optimizer of each role (`mtx.optimizers`), on each device's shard of the masters.

It is written for an abstract mesh, runs on whatever mesh its state lies on, and compiles for
devices that are not there. Which ones are there is asked at one place only, where the layout leaves
the kernel of attention open.

Legend: G global batch · S sequence · M microbatches · B rows of one · P stages · C chunks ·
N layers a chunk · L layers
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.models.attention import AttentionKernel, cudnn_serves
from mtx.models.families import FAMILIES
from mtx.models.model import Model
from mtx.pipeline.choose import check_shape, schedule_for, settle
from mtx.pipeline.makers import forward_table
from mtx.pipeline.partition import EMPTY, place_layers
from mtx.pipeline.program import Pipeline
from mtx.pipeline.schedule import Schedule
from mtx.sharding.axes import AXES, BATCH, axes_of, sum_axes
from mtx.sharding.checksum import checksum, on_each_device
from mtx.sharding.mesh import Axes, make_mesh
from mtx.sharding.optimizer import global_norm, shard_over_replicas
from mtx.sharding.random import fold, key_data
from mtx.train.optimizer import LossScale, learning_rate, make_optimizer, state_specs

Tree = Any
_BATCH_SPEC = P(BATCH)  # every array of a batch is [G, S], replicas along G
_DROPOUT_STREAM = 2**31 - 1  # of the seed's key; initial values take those of layer + 1


class TrainState(NamedTuple):
    """All that a step changes. Masters and moments are float32, sharded over `data` as well."""

    step: jax.Array  # int32 []
    params: Tree  # {"ends": ..., "block": leaves [P, C, N, ...]}
    moments: optax.OptState
    loss_scale: LossScale
    skipped: jax.Array  # int32 [], steps whose gradients were not finite
    seals: jax.Array | None = None  # uint32 [P, D, T]: checksums of masters and moments, if wanted


class Metrics(NamedTuple):
    """What a step reports; float32 []."""

    loss: jax.Array  # mean over the tokens of the global batch
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    loss_scale: jax.Array
    finite: jax.Array  # 1, or 0 where the update was skipped
    corrupt: jax.Array  # [P, D, T] as float32: 1 where the seal was broken; [] without seals


class Trainer:
    """A run's model, layout and schedule as functions of (state, batch).

    Nothing touches a device until `init`, `train_step` or another of its functions is called, and
    `mesh` is then the one of the real devices unless another is given.
    """

    def __init__(
        self, run: RunConfig, *, mesh: Mesh | None = None, schedule: Schedule | None = None
    ):
        model = run.model
        layout, self.reason = settle(run.layout, model, run.global_batch)
        self.run = run = replace(run, layout=layout)
        self.axes = Axes.of(layout)
        self.schedule = schedule or schedule_for(layout, run.microbatches)
        check_shape(self.schedule, layout, run.microbatches)
        self.placement = place_layers(
            model.layers, pipe=layout.pipe, virtual=layout.virtual,
            stage_layers=layout.stage_layers, pieces=self.schedule.pieces,
        )  # fmt: skip
        self._mesh = mesh

    @cached_property
    def model(self) -> Model:
        layout = self.run.layout
        return FAMILIES[self.run.model.family](
            self.run.model, axes=self.axes, recompute=layout.recompute, kernel=self._kernel(),
            vocab_shards=layout.vocab_shards, slices=self.schedule.slices,
        )  # fmt: skip

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            model=self.model, schedule=self.schedule, placement=self.placement,
            layout=self.run.layout, axes=self.axes, data_shards=self._chunk_shards,
        )  # fmt: skip

    @property
    def _chunk_shards(self) -> Tree:
        """How a chunk's leaves [N, ...] are sharded over `data`; None where they are not."""
        if self.run.layout.zero != 3:
            return None
        return jax.tree.map(lambda shard: shard.below(2), self.shards["block"])

    @cached_property
    def _forward_pipeline(self) -> Pipeline:
        """The same for F alone, without slices of sequences."""
        table = forward_table(self.schedule.pieces, self.run.microbatches)
        return replace(self.pipeline, schedule=table)

    def _kernel(self) -> AttentionKernel:
        """ "auto" looks at a device, of the mesh that was given or of this machine; cuDNN cannot be
        compiled for devices that are not there."""
        wanted = self.run.layout.attention
        if wanted == "blocked":
            return wanted
        devices = self._mesh.devices.flat if self._mesh else jax.devices()
        nvidia = "nvidia" in devices[0].device_kind.lower()
        if wanted == "cudnn":
            if not nvidia:
                raise UserError(
                    f"attention='cudnn' is for NVIDIA GPUs, not {devices[0].device_kind}; use auto"
                )
            return wanted
        there = nvidia and jax.default_backend() == "gpu"
        return "cudnn" if there and cudnn_serves(self.run.model) else "blocked"

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.run.optimizer, self.run.steps, self.model.roles)

    # -- where everything lies --------------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        return self._mesh or make_mesh(self.run.layout)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, in the mesh's order."""
        return self.run.layout.sizes

    @cached_property
    def specs(self) -> Tree:
        """The PartitionSpec of every parameter, layers stacked."""
        stack = jax.tree.map(lambda spec: P("pipe", None, None, *spec), self.model.specs["block"])
        return {"ends": self.model.specs["ends"], "block": stack}

    @cached_property
    def param_shapes(self) -> Tree:
        """The global shape of every parameter, layers stacked; float32."""
        return jax.eval_shape(self._init_params, 0)

    @cached_property
    def shards(self) -> Tree:
        """How every master is sharded over `data`; a layer's own dims, where a chunk is gathered
        at a time."""
        replicas, stacked = self.run.layout.replicas, 3 if self.run.layout.zero == 3 else 0

        def shard(tree, specs, stacked):
            return jax.tree.map(
                lambda a, spec: shard_over_replicas(
                    a.shape, spec, replicas=replicas, stacked=stacked
                ),
                tree,
                specs,
            )

        return {
            "ends": shard(self.param_shapes["ends"], self.specs["ends"], 0),
            "block": shard(self.param_shapes["block"], self.specs["block"], stacked),
        }

    @cached_property
    def state_specs(self) -> TrainState:
        """The PartitionSpec of every array of the state; of the masters, with ZeRO's shards."""
        params = jax.tree.map(lambda shard: shard.spec, self.shards)
        moments = state_specs(self.state_shapes.moments, params)
        seals = P(*AXES) if self.run.guard.checksums else None
        return TrainState(P(), params, moments, LossScale(P(), P()), P(), seals)

    @cached_property
    def state_shapes(self) -> TrainState:
        """Global shapes and dtypes of the state."""
        return jax.eval_shape(self._init, 0)

    def shardings(self, specs: Tree, mesh: Mesh | None = None) -> Tree:
        """NamedShardings of a tree of specs on this trainer's mesh, or on another."""
        mesh = mesh or self.mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def shard_map(self, f, in_specs, out_specs):
        """f of local shards, as a function of arrays on this trainer's mesh."""
        # check_vma=False: the collectives' gradients are our own (sharding.collectives), and a cond
        # on a stage-dependent predicate gives wrong gradients under it (jax issue 40823).
        mesh = AbstractMesh(
            tuple(self.sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES)
        )
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # -- the beginning ----------------------------------------------------------------------------

    def init(self, seed: int | None = None) -> TrainState:
        """The first state, made shard by shard where it lies; the same values on every layout."""
        seed = self.run.seed if seed is None else seed
        init = jax.jit(self._init, out_shardings=self.shardings(self.state_specs))
        return self.sealed(init(seed))

    def _init(self, seed) -> TrainState:
        params = self._init_params(seed)
        return self._state_of(jax.tree.map(lambda a, shard: shard.pad(a), params, self.shards))

    def state_from(self, params: Tree) -> TrainState:
        """The first state with these parameters, float32 in canonical form."""

        def start(params):
            return self._state_of(self.from_canonical(params))

        start = jax.jit(start, out_shardings=self.shardings(self.state_specs))
        return self.sealed(start(params))

    def _state_of(self, masters) -> TrainState:
        start = LossScale.start(self.run.optimizer, self.run.model.compute_dtype)
        moments = self.optimizer.init(masters)
        seals = None
        if self.run.guard.checksums:
            seals = jnp.zeros(tuple(self.sizes.values()), jnp.uint32)  # see `sealed`
        return TrainState(jnp.int32(0), masters, moments, start, jnp.int32(0), seals)

    def _init_params(self, seed) -> Tree:
        layers = jnp.asarray(self.placement.layer)
        flat = layers.reshape(-1)
        blocks = jax.vmap(partial(self.model.init_block, seed))(flat)

        def stack(a):
            used = (flat != EMPTY).reshape(-1, *(1,) * (a.ndim - 1))
            return jnp.where(used, a, 0).reshape(*layers.shape, *a.shape[1:])

        return {"ends": self.model.init_ends(seed), "block": jax.tree.map(stack, blocks)}

    # -- the step ---------------------------------------------------------------------------------

    @cached_property
    def train_step(self):
        """(state, batch) -> (state, metrics), compiled at the first call; the state is donated."""
        specs = self.state_specs
        metrics = Metrics(*(P() for _ in Metrics._fields))
        step = self.shard_map(self._train_step, (specs, _BATCH_SPEC), (specs, metrics))
        return jax.jit(step, donate_argnums=0)

    def compile_step(self, mesh: Mesh | None = None):
        """The step, compiled for this trainer's mesh or another, from shapes alone: nothing is
        allocated, and the devices of `mesh` need not be there. Those of another kind need a layout
        that names the kernel of attention."""
        shardings = self.shardings(self.state_specs, mesh)
        state = jax.tree.map(_abstract, self.state_shapes, shardings)
        rows = NamedSharding(mesh or self.mesh, _BATCH_SPEC)
        fields = self.model.batch_fields(self.run.global_batch)
        batch = {name: _abstract(shape, rows) for name, shape in fields.items()}
        return self.train_step.lower(state, batch).compile()

    def _train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        config, dtype = self.run.optimizer, self.run.model.compute_dtype
        scale = state.loss_scale.scale
        loss, gradients = self._loss_and_gradients(state.params, batch, state.step, scale)

        with jax.named_scope("clip"):
            specs = self.state_specs.params
            gradients = jax.tree.map(lambda g: g / scale, gradients)
            norm = global_norm(gradients, specs, self.sizes)
            finite = jnp.isfinite(norm)
            factor = jnp.minimum(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
            gradients = jax.tree.map(lambda g: g * factor, gradients)

        with jax.named_scope("update"):
            updates, moments = self.optimizer.update(gradients, state.moments, state.params)
            params = optax.apply_updates(state.params, updates)
            params, moments = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, moments),
                (state.params, state.moments),
            )
        loss_scale = state.loss_scale.after(finite, config, dtype)
        rate = learning_rate(config, self.run.steps)(state.step - state.skipped)
        finite = finite.astype(jnp.float32)
        metrics = Metrics(loss, norm, jnp.float32(rate), scale, finite, self._broken(state))
        skipped = state.skipped + (1 - finite).astype(jnp.int32)
        new = TrainState(state.step + 1, params, moments, loss_scale, skipped)
        return self._seal(new), metrics

    # -- whether memory has kept what was in it ---------------------------------------------------

    @cached_property
    def sealed(self):
        """state -> the state with the checksums of what each device holds, where they are wanted.
        Every step seals what it returns and looks at the seals of what it is given."""
        specs = self.state_specs
        seal = jax.jit(self.shard_map(self._seal, (specs,), specs))
        return seal if self.run.guard.checksums else lambda state: state

    def _seal(self, state: TrainState) -> TrainState:
        if not self.run.guard.checksums:
            return state
        seal = checksum((state.params, state.moments))
        return state._replace(seals=seal.reshape((1,) * len(AXES)))

    def _broken(self, state: TrainState):
        """Metrics.corrupt"""
        if state.seals is None:
            return jnp.float32(0)
        broken = self._seal(state).seals != state.seals
        return on_each_device(broken.astype(jnp.float32).reshape(()), tuple(self.sizes.values()))

    def _loss_and_gradients(self, masters, batch, step, scale):
        """(mean loss, gradients of scale * mean loss), shards like the masters, summed."""
        with jax.named_scope("gather_params"):
            params = self.gather(masters)
        with jax.named_scope("pipeline"):
            batch = self._split(batch)
            tokens = _sum_over_replicas(batch["weights"].sum())
            key = fold(key_data(self.run.seed), _DROPOUT_STREAM, step)
            loss, gradients = self.pipeline.gradients(
                params, batch, self._samples(batch), key, scale / tokens
            )
            gradients["block"] = jax.tree.map(lambda a: a[None], gradients["block"])
        with jax.named_scope("reduce"):
            gradients = {
                part: jax.tree.map(
                    partial(self._reduce, summed=part == "block" and self.run.layout.zero == 3),
                    gradients[part], self.specs[part], self.shards[part],
                )
                for part in gradients
            }  # fmt: skip
        return _sum_over_replicas(loss) / tokens, gradients

    def gather(self, masters):
        """This stage's parameters in the compute type: the ends, and the block's [C, N, ...], of
        which zero=3 leaves each device its shard."""
        dtype = jnp.dtype(self.run.model.compute_dtype)

        def gather(master, shard):
            return shard.gather(master, dtype)

        ends = jax.tree.map(gather, masters["ends"], self.shards["ends"])
        block = jax.tree.map(lambda a: a[0], masters["block"])
        if self.run.layout.zero == 3:
            return {"ends": ends, "block": jax.tree.map(lambda a: a.astype(dtype), block)}
        shards = jax.tree.map(lambda shard: shard.below(1), self.shards["block"])
        return {"ends": ends, "block": jax.tree.map(gather, block, shards)}

    def _reduce(self, gradient, spec, shard, *, summed: bool):
        """A gradient's shard of its sum over `sum_axes`; over the replicas it may be `summed`
        already."""
        over = sum_axes(spec, sequence_parallel=self.axes.sequence_parallel)
        beside_replicas = tuple(axis for axis in over if axis not in BATCH)
        if beside_replicas:
            gradient = lax.psum(gradient, beside_replicas)
        return gradient if summed else shard.reduce_scatter(gradient)

    def _split(self, batch):
        """This replica's rows [G/d, S] as microbatches [M, B, S], weighed. Raises UserError where
        they are not those of a global batch."""
        size = self.run.layout.microbatch
        rows = self.run.layout.replicas * len(batch["tokens"])
        if rows != self.run.global_batch:
            raise UserError(
                f"a batch of {rows} rows for a schedule of global_batch={self.run.global_batch}; "
                "give it as many, or make a trainer with another global_batch"
            )
        if "weights" in batch:
            batch = self.model.weigh(batch, _sum_over_replicas)
        return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), batch)

    def _samples(self, batch):
        """int32 [M, B]: the places of this replica's rows in the global batch."""
        shape = batch["tokens"].shape[:2]
        first = lax.axis_index(BATCH) * shape[0] * shape[1]
        return first + jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)

    # -- other things one can ask of a model ------------------------------------------------------

    @cached_property
    def evaluate(self):
        """(state, batch) -> (sum of losses, sum of weights) without dropout; float32 []."""

        def evaluate(params, batch):
            losses_M = self._forward_pipeline.forward(params, batch, self.model.loss)
            return _sum_over_replicas((losses_M.sum(), batch["weights"].sum()))

        return self._forward(evaluate, (P(), P()))

    @cached_property
    def predict(self):
        """(state, {"tokens": [G, S], "last": [G]}) -> logits [G, V] float32, of the token that
        follows each row's last one, at that place. V is padded, the padding -inf."""

        def output(ends, y_BsD, batch):
            return self.model.next_logits(ends, y_BsD, batch["last"])

        def predict(params, batch):
            logits_MBv = self._forward_pipeline.forward(params, batch, output)
            return logits_MBv.reshape(-1, logits_MBv.shape[-1])

        return self._forward(predict, P(BATCH, self.axes.vocab or None))

    @cached_property
    def score(self):
        """(state, batch) -> (losses, hits) [G, S] float32 of batch["targets"], unweighted and
        without dropout: a hit is 1 where the target is the likeliest token."""

        def score(params, batch):
            scores_MBS = self._forward_pipeline.forward(params, batch, self.model.scores)
            return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), scores_MBS)

        return self._forward(score, (_BATCH_SPEC, _BATCH_SPEC))

    def _forward(self, f, out_specs):
        """(state, batch) -> f(local parameters in the compute type, local batch [M, B, ...])"""

        def forward(masters, batch):
            params = self.gather(masters)
            return f(params, self._split(batch))

        mapped = self.shard_map(forward, (self.state_specs.params, _BATCH_SPEC), out_specs)
        return jax.jit(lambda state, batch: mapped(state.params, batch))

    def loss_and_gradients(self, state: TrainState, batch: Tree):
        """(mean loss, gradients in canonical form) of a batch of arrays [G, S], as host arrays."""
        return jax.device_get(self._loss_and_gradients_jitted(state, self.place(batch)))

    @cached_property
    def _loss_and_gradients_jitted(self):
        specs = self.state_specs.params

        def compute(masters, step, batch):
            return self._loss_and_gradients(masters, batch, step, jnp.float32(1))

        mapped = self.shard_map(compute, (specs, P(), _BATCH_SPEC), (P(), specs))

        def run(state, batch):
            loss, gradients = mapped(state.params, state.step, batch)
            return loss, self.to_canonical(gradients)

        replicated = NamedSharding(self.mesh, P())
        return jax.jit(run, out_shardings=replicated)

    def place(self, batch: dict[str, np.ndarray]) -> Tree:
        """A batch of host arrays [G, S], each device given its rows."""
        sharding = NamedSharding(self.mesh, _BATCH_SPEC)
        return jax.tree.map(
            lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch
        )

    # -- model order ------------------------------------------------------------------------------

    def to_canonical(self, tree: Tree) -> Tree:
        """A tree like the masters (gradients, moments) -> layers [L, ...], no padding."""
        tree = jax.tree.map(lambda a, shard: shard.unpad(a), tree, self.shards)
        places = self.placement.place_of_layer
        blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[places], tree["block"])
        vocab = self.run.model.vocab
        ends = jax.tree.map(
            lambda a, spec: a[:vocab] if _is_vocab(spec) else a, tree["ends"], self.specs["ends"]
        )
        return {"ends": ends, "block": blocks}

    def from_canonical(self, tree: Tree) -> Tree:
        """The inverse of `to_canonical`."""
        flat = self.placement.layer.ravel()

        def stack(a):
            used = jnp.asarray(flat != EMPTY).reshape(-1, *(1,) * (a.ndim - 1))
            return jnp.where(used, a[flat], 0).reshape(*self.placement.layer.shape, *a.shape[1:])

        def pad_vocab(a, spec):
            rows = self.model.vocab_rows - len(a) if _is_vocab(spec) else 0
            return jnp.pad(a, ((0, rows), *((0, 0),) * (a.ndim - 1))) if rows else a

        ends = jax.tree.map(pad_vocab, tree["ends"], self.specs["ends"])
        stacked = {"ends": ends, "block": jax.tree.map(stack, tree["block"])}
        return jax.tree.map(lambda a, shard: shard.pad(a), stacked, self.shards)


def _is_vocab(spec: P) -> bool:
    return "pipe" in axes_of(spec)


def _sum_over_replicas(values):
    return lax.psum(values, BATCH)


def _abstract(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
