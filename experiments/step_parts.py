"""Costs of a step's parts, each timed alone: ops, embedding and head, idle ticks, the optimizer.

All are compiled for the mesh of the whole step and timed on all its devices at once, so that they
have the same cores and load as the step.

Legend: P stages · B rows · s sequence, or a slice of it · D hidden
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from bench_pipeline import Training, random_batch
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.config import Layout, RunConfig
from mtx.pipeline.stage import Kept, Stage, tables_of
from mtx.pipeline.ticks import Op
from mtx.schedules.makers import make
from mtx.schedules.schedule import Schedule
from mtx.sharding.collectives import broadcast_from
from mtx.step.trainer import Trainer

REFERENCE = "1f1b"  # the plainest table
_REPEATS = 2  # runs of one op over whole sequences and stages in a row, timed together
_SLOTS = 2  # of the ring that they cycle through
_APART = 50  # distance of busy ticks in the table that prices an idle tick


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a step's parts on all stages at once, in seconds or core-seconds."""

    forward: float  # F of one item and chunk, as are the next three
    both: float  # B that computes both gradients
    backward: float  # B of the input alone
    weight: float  # W
    ends: float  # embedding and head of one item, forward and backward
    tick: float  # a tick in which all stages are idle: conds and sends
    once: float  # gathering, clipping and the optimizer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on one device of the values that a table has slots for."""

    input: int  # x_BsD
    residuals: int  # of one chunk
    deferred: int  # kept until W, of one chunk
    cache: int  # keys and values of whole sequences, of one chunk


class Seconds(NamedTuple):
    """How long something took, and how many core-seconds it used meanwhile."""

    wall: float
    work: float


def timed(f: Callable, *args):
    """(Seconds, f's value once it is ready)"""
    wall, work = time.perf_counter(), time.process_time()
    value = jax.block_until_ready(f(*args))
    return Seconds(time.perf_counter() - wall, time.process_time() - work), value


class Held(NamedTuple):
    """Arrays that a stage's ops read and write; leaves [P, ...], inside `shard_map` without P."""

    x_BsD: jax.Array
    ring: tuple
    cache: jax.Array | None
    dcache: jax.Array | None
    gradients: dict  # of B with W
    b_gradients: dict  # of B
    deferred: tuple
    w_gradients: dict  # of W
    dshared: dict  # of embedding and head


class Ops:
    """F, B and W for one number of chunks and slices, and embedding with head: compiled functions,
    each of which runs its op a few times in a scan, as the step does."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.schedule = trainer, trainer.schedule
        layout, model = trainer.run.layout, trainer.run.model
        self._repeats = _REPEATS * self.schedule.virtual * self.schedule.slices
        shape = layout.microbatch, model.sequence // self.schedule.slices, model.hidden
        self.x_BsD = jax.ShapeDtypeStruct(shape, jnp.dtype(model.compute_dtype))
        self.params = trainer.init().params
        self.held = jax.jit(self._on_stages(self._start))(self.params)
        ops = self._forward, self._both, self._backward, self._weight, self._ends
        self._runs = {
            op.__name__[1:]: jax.jit(self._on_stages(self._repeated(op)), donate_argnums=1)
            for op in ops
        }

    def time(self) -> dict[str, Seconds]:
        """Seconds of one op of each kind, on all stages at once."""
        seconds = {}
        for name, run in self._runs.items():
            taken, self.held = timed(run, self.params, self.held)
            seconds[name] = Seconds(*(value / self._repeats for value in taken))
        return seconds

    @property
    def sizes(self) -> Sizes:
        def of_one(part, slots=1):
            total = sum(a.nbytes for a in jax.tree.leaves(part))
            return total // (slots * self.schedule.stages)

        held = self.held
        return Sizes(
            input=of_one(held.x_BsD), residuals=of_one(held.ring, _SLOTS),
            deferred=of_one(held.deferred, _SLOTS), cache=of_one(held.cache),
        )  # fmt: skip

    def _on_stages(self, f: Callable) -> Callable:
        """f(params, *held) with the local parameters in the compute type, in a `shard_map`."""
        dtype = self.x_BsD.dtype

        def local(params, *held):
            params = jax.tree.map(lambda a: a.astype(dtype), params)
            layers = jax.tree.map(lambda a: a[0], params["layers"])
            held = jax.tree.map(lambda a: a[0], held)
            held = f(params | {"layers": layers}, *held)
            return jax.tree.map(lambda a: a[None], held)

        specs = self.trainer.states.specs.params
        mapped = {
            count: jax.shard_map(
                local, mesh=self.trainer.mesh, in_specs=(specs, P("pipe"))[:count],
                out_specs=P("pipe"), check_vma=False,
            )
            for count in (1, 2)
        }  # fmt: skip
        return lambda *args: mapped[len(args)](*args)

    def _stage(self, params, *, split: bool) -> Stage:
        placement, index = self.trainer.placement, lax.axis_index("pipe")
        return Stage(
            model=self.trainer.model, placement=placement, context=self._context,
            stream={"x": self.x_BsD}, tables=tables_of(placement, index),
            layer_params=jax.tree.map(lambda a: a[0, 0], params["layers"]),
            slices=self.schedule.slices, split=split,
        )  # fmt: skip

    def _context(self, item, layer):
        samples_B = jnp.arange(self.x_BsD.shape[0], dtype=jnp.int32)
        part = item % self.schedule.slices
        return self.trainer.model.context(layer, {}, samples_B, jnp.zeros(2, jnp.uint32), part)

    def _start(self, params) -> Held:
        stage = self._stage(params, split=True)

        def zeros(keep, tree):
            return jax.tree.map(
                lambda a, by_w: jnp.zeros(a.shape, jnp.float32) if keep(by_w) else None,
                tree, stage.made_by_w(),
            )  # fmt: skip

        layers, shared = params["layers"], _shared(params)
        return Held(
            x_BsD=jax.random.normal(jax.random.key(0), self.x_BsD.shape, self.x_BsD.dtype),
            ring=stage.stash(_SLOTS), cache=stage.caches(1), dcache=stage.caches(1),
            gradients=zeros(lambda by_w: True, layers), deferred=stage.weight_stash(_SLOTS),
            b_gradients=zeros(lambda by_w: not by_w, layers),
            w_gradients=zeros(lambda by_w: by_w, layers),
            dshared=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shared),
        )  # fmt: skip

    def _repeated(self, run: Callable) -> Callable:
        """(params, held) -> held after a few ops, each applied to the previous one's output."""

        def repeat(params, held):
            def one(held, i):
                chunk, slot, zero = i % self.schedule.virtual, i % _SLOTS, jnp.zeros_like(i)
                op = Op(i, chunk, chunk, slot, deferred=slot, cache=zero, cache_gradient=zero)
                return run(params, op, held), None

            after, _ = lax.scan(one, held, jnp.arange(self._repeats, dtype=jnp.int32))
            return after._replace(x_BsD=held.x_BsD)

        return repeat

    def _forward(self, params, op: Op, held: Held) -> Held:
        stream, ring, cache, _ = self._stage(params, split=False).forward(
            op, params["layers"], {"x": held.x_BsD}, held.ring, held.cache
        )
        return held._replace(x_BsD=stream["x"], ring=ring, cache=cache)

    def _both(self, params, op: Op, held: Held) -> Held:
        stream, kept = self._stage(params, split=False).backward(
            op, params["layers"], {"x": held.x_BsD}, held.ring, held.cache,
            Kept(held.gradients, None, held.dcache, None),
        )  # fmt: skip
        return held._replace(x_BsD=stream["x"], gradients=kept.gradients, dcache=kept.dcaches)

    def _backward(self, params, op: Op, held: Held) -> Held:
        stream, kept = self._stage(params, split=True).backward(
            op, params["layers"], {"x": held.x_BsD}, held.ring, held.cache,
            Kept(held.b_gradients, held.deferred, held.dcache, None),
        )  # fmt: skip
        gradients, deferred, dcache, _ = kept
        return held._replace(
            x_BsD=stream["x"], b_gradients=gradients, deferred=deferred, dcache=dcache
        )

    def _weight(self, params, op: Op, held: Held) -> Held:
        gradients = self._stage(params, split=True).weight(op, held.deferred, held.w_gradients)
        return held._replace(w_gradients=gradients)

    def _ends(self, params, op: Op, held: Held) -> Held:
        """Embedding and head as all stages run them together, forward and backward."""
        model, pipe = self.trainer.model, self.trainer.axes.pipe
        rows, sequence, _ = self.x_BsD.shape
        ids = jnp.arange(rows * sequence, dtype=jnp.int32).reshape(rows, sequence)
        ids %= self.trainer.run.model.vocab
        batch = {"tokens": ids, "targets": ids, "weights": jnp.ones(ids.shape, jnp.float32)}
        context, is_here = self._context(op.item, -1), lax.axis_index("pipe") == 0
        shared = _shared(params)
        x_BsD, embed_vjp = jax.vjp(lambda s: model.embed(s, batch, context)["x"], shared)
        # The previous op's output is added, so that no two ops are equal and all have to run.
        y_BsD = broadcast_from(x_BsD + 1e-3 * held.x_BsD, is_here, pipe)
        loss, vjp = jax.vjp(lambda s, y: model.loss(s, {"x": y}, batch), shared, y_BsD)
        of_head, dy_BsD = vjp(jnp.ones_like(loss))
        (of_embedding,) = embed_vjp(broadcast_from(dy_BsD, is_here, pipe))
        dshared = jax.tree.map(lambda d, a, b: d + a + b, held.dshared, of_head, of_embedding)
        return held._replace(x_BsD=dy_BsD, dshared=dshared)


def _shared(params):
    """Parameters of embedding and head."""
    return {part: params[part] for part in ("embed", "head")}


def trainer_of(schedule: Schedule, run: RunConfig) -> Trainer:
    """The trainer of `run`'s model with this table."""
    layout = Layout(
        pipe=schedule.stages, virtual=schedule.virtual, slices=schedule.slices,
        microbatch=run.layout.microbatch, schedule=schedule.name,
    )  # fmt: skip
    batch = schedule.microbatches * layout.microbatch
    return Trainer(replace(run, layout=layout, global_batch=batch), schedule=schedule)


class NoPipeline:
    """Replacement of a pipeline, to time only the rest of a step."""

    chunk_shards = None

    def gradients(self, params, batch, samples_MB, key, loss_weight):
        """A loss and gradients that cost nothing."""
        gradients = jax.tree.map(lambda a: a.astype(jnp.float32) * loss_weight, params)
        return {"loss": jnp.float32(1)}, gradients


def compile_training(schedule: Schedule, run: RunConfig, pipeline=None) -> tuple[Training, float]:
    """(a step by this table, seconds to compile it); pipeline: replaces the table's own"""
    trainer = trainer_of(schedule, run)
    if pipeline is not None:
        trainer.pipeline = pipeline
    start = time.perf_counter()
    step = trainer.compile_step()
    seconds = time.perf_counter() - start
    batch = trainer.place(random_batch(run.model, trainer.run.global_batch))
    return Training(step=step, state=trainer.init(), batch=batch), seconds


class Beside:
    """Costs of a step besides its ops, from three steps: two of one microbatch, whose tables differ
    only in idle ticks, and one without a pipeline."""

    def __init__(self, reference: Schedule, run: RunConfig):
        one = make(REFERENCE, microbatches=1, stages=reference.stages)
        apart = one.forward_ticks * _APART, one.backward_ticks * _APART
        tables = one, Schedule.from_ticks(REFERENCE, *apart)
        self._few, self._many = (compile_training(table, run)[0] for table in tables)
        self._idle_ticks = tables[1].ticks - tables[0].ticks
        self._without = compile_training(reference, run, NoPipeline())[0]

    def time(self) -> dict[str, Seconds]:
        """Costs of an idle tick, and of everything that is done once."""
        few, many, once = (
            timed(training.advance)[0] for training in (self._few, self._many, self._without)
        )
        tick = (max(0.0, (b - a) / self._idle_ticks) for a, b in zip(few, many, strict=True))
        return {"tick": Seconds(*tick), "once": once}


def costs_of(*parts: dict[str, Seconds]) -> tuple[Costs, Costs]:
    """(seconds, core-seconds)"""
    seconds = {name: value for part in parts for name, value in part.items()}
    return tuple(Costs(**{name: value[unit] for name, value in seconds.items()}) for unit in (0, 1))
