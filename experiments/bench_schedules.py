"""Every schedule's table on one model: measured step and memory beside what was predicted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import bench
import jax
import jax.numpy as jnp
import numpy as np
from bench_pipeline import Training, random_batch
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.config import Layout, RunConfig, to_dict
from mtx.errors import UserError
from mtx.pipeline.makers import MAKERS, make, maker
from mtx.pipeline.schedule import Schedule
from mtx.pipeline.shape import Times
from mtx.pipeline.simulate import simulate
from mtx.pipeline.stage import Kept, Stage
from mtx.pipeline.ticks import Op
from mtx.presets import preset
from mtx.sharding.collectives import broadcast_from
from mtx.train.launch import use_virtual_devices
from mtx.train.step import Trainer

_MIB = 2**20
_REPEATS = 4  # ops of one kind in a row, timed together
_SLOTS = 2  # of the ring that they go through
_IDLE_TICKS = 50  # before each tick of the table that prices an idle tick


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compares measured and predicted time and memory of schedules, on one model."""

    preset: str = "bench-s"  # whose model, microbatch size and optimizer are taken
    schedules: str = ""  # NAME,NAME,...; all that go with the model where empty
    stages: int = 4  # p, a virtual CPU device each
    microbatches: int = 8  # m
    rounds: int = 5  # every schedule and every op once in each, in turn
    steps: int = 1  # of each schedule in a round
    json: str = ""  # FILE for everything that was measured

    def __post_init__(self):
        for name, least in (("stages", 2), ("microbatches", 1), ("rounds", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One table, and the names of the makers that make it."""

    name: str
    also: tuple[str, ...]
    schedule: Schedule

    def trainer(self, run: RunConfig) -> Trainer:
        return trainer_of(self.schedule, run)


def trainer_of(schedule: Schedule, run: RunConfig) -> Trainer:
    layout = Layout(
        pipe=schedule.stages, virtual=schedule.virtual, slices=schedule.slices,
        microbatch=run.layout.microbatch, schedule=schedule.name,
    )  # fmt: skip
    batch = schedule.microbatches * layout.microbatch
    return Trainer(replace(run, layout=layout, global_batch=batch), schedule=schedule)


def rows_of(options: Options, layers: int) -> list[Row]:
    names = list(filter(None, options.schedules.split(","))) or list(MAKERS)
    found: dict[tuple, Row] = {}
    refused = ""
    for name in names:
        known = maker(name)
        for virtual in [known.virtual] if known.virtual else [1, 2]:
            if layers % (options.stages * virtual):
                refused = (
                    f"layers={layers} cannot be divided over stages*virtual="
                    f"{options.stages}*{virtual}"
                )
                continue
            schedule = make(
                name, microbatches=options.microbatches, stages=options.stages, virtual=virtual
            )
            label = name + (f" v={virtual}" if virtual > 1 else "")
            key = _key(schedule)
            if key in found:
                row = found[key]
                found[key] = replace(row, also=(*row.also, label))
            else:
                found[key] = Row(name=label, also=(), schedule=schedule)
    if not found:
        raise UserError(f"no schedule to run: {refused}; use other stages or another preset")
    return list(found.values())


def _key(schedule: Schedule) -> tuple:
    tables = (schedule.pieces, schedule.forward_ticks, schedule.backward_ticks, schedule.weight_ticks)
    return (schedule.slices, *(t if t is None else (t.shape, t.tobytes()) for t in tables))


# --- ops on their own -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, each of all stages at once. Ops are those of one chunk and one item."""

    forward_s: float
    both_s: float
    backward_s: float
    weight_s: float
    ends_s: float
    tick_s: float
    once_s: float


class Held(NamedTuple):
    """What ops of one stage read and write."""

    x_BsD: Any
    ring: Any
    cache: Any
    gradients: Any
    dcache: Any
    early: Any
    deferred: Any
    late: Any


class Ops:
    """F, B and W of one number of chunks and slices, and what the ends cost: each alone."""

    def __init__(self, trainer: Trainer):
        self.trainer, schedule = trainer, trainer.schedule
        self.virtual, self.slices = schedule.virtual, schedule.slices
        specs = trainer.state_specs.params
        self.params = jax.jit(
            trainer._init_params, out_shardings=trainer.shardings(specs)
        )(0)
        stacked = P("pipe")
        self.start = self._map(self._start, (specs,), stacked)
        self.by_name = {
            name: jax.jit(self._map(f, (specs, stacked), stacked), donate_argnums=1)
            for name, f in (
                ("forward_s", self._forward), ("both_s", self._both),
                ("backward_s", self._backward), ("weight_s", self._weight),
            )
        }  # fmt: skip
        self.held = jax.jit(self.start)(self.params)
        ends = specs["ends"]
        self.ends = jax.jit(self._map(self._ends, (specs, ends), ends), donate_argnums=1)
        self.dends = jax.tree.map(jnp.zeros_like, self.params["ends"])

    def _map(self, f, in_specs, out_specs):
        def local(params, *held):
            block = jax.tree.map(lambda a: a[0], params["block"])
            return f({"ends": params["ends"], "block": block}, *held)

        return jax.shard_map(
            local, mesh=self.trainer.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _x(self):
        run = self.trainer.run
        shape = run.layout.microbatch, run.model.sequence // self.slices, run.model.hidden
        return jax.ShapeDtypeStruct(shape, jnp.dtype(run.model.compute_dtype))

    def _place(self, item, layer):
        samples_B = jnp.arange(self.trainer.run.layout.microbatch, dtype=jnp.int32)
        part = item % self.slices if self.slices > 1 else 0
        return self.trainer.model.place(layer, samples_B, jnp.zeros(2, jnp.uint32), part)

    def _stage(self, params, *, split: bool) -> Stage:
        trainer = self.trainer
        index = lax.axis_index("pipe")
        layer = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0, 0], params["block"]))
        return Stage(
            model=trainer.model, layer_params=layer, placement=trainer.placement,
            layer_CN=jnp.asarray(trainer.placement.layer)[index],
            count_C=jnp.asarray(trainer.placement.count)[index],
            place=self._place, x_BsD=self._x(), slices=self.slices, split=split,
        )  # fmt: skip

    def _start(self, params) -> Held:
        whole, split = self._stage(params, split=False), self._stage(params, split=True)
        x = self._x()

        def zeros(wanted):
            return jax.tree.map(
                lambda a, late: jnp.zeros(a.shape, jnp.float32) if late == wanted else None,
                params["block"], split.is_late(),
            )  # fmt: skip

        held = Held(
            x_BsD=jax.random.normal(jax.random.key(0), x.shape, x.dtype), ring=whole.stash(_SLOTS),
            cache=whole.caches(1), dcache=whole.caches(1),
            gradients=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params["block"]),
            early=zeros(False), deferred=split.weight_stash(_SLOTS), late=zeros(True),
        )  # fmt: skip
        return jax.tree.map(lambda a: a[None], held)

    def _repeated(self, held: Held, body: Callable) -> Held:
        """body(op, held) -> held, _REPEATS times."""

        def one(held, i):
            chunk, slot = i % self.virtual, i % _SLOTS
            zero = jnp.zeros((), jnp.int32)
            op = Op(item=i, chunk=chunk, held=chunk, slot=slot, deferred=slot, cache=zero,
                    cache_gradient=zero)  # fmt: skip
            return body(op, held), None

        first = jax.tree.map(lambda a: a[0], held)
        held, _ = lax.scan(one, first, jnp.arange(_REPEATS, dtype=jnp.int32))
        return jax.tree.map(lambda a: a[None], held._replace(x_BsD=first.x_BsD))

    def _forward(self, params, held: Held) -> Held:
        stage = self._stage(params, split=False)

        def forward(op, held):
            x, ring, cache = stage.forward(op, params["block"], held.x_BsD, held.ring, held.cache)
            return held._replace(x_BsD=x, ring=ring, cache=cache)

        return self._repeated(held, forward)

    def _both(self, params, held: Held) -> Held:
        stage = self._stage(params, split=False)

        def both(op, held):
            kept = Kept(held.gradients, (), held.dcache)
            x, kept = stage.backward(op, params["block"], held.x_BsD, held.ring, held.cache, kept)
            return held._replace(x_BsD=x, gradients=kept.gradients, dcache=kept.dcache)

        return self._repeated(held, both)

    def _backward(self, params, held: Held) -> Held:
        stage = self._stage(params, split=True)

        def backward(op, held):
            kept = Kept(held.early, held.deferred, held.dcache)
            x, kept = stage.backward(op, params["block"], held.x_BsD, held.ring, held.cache, kept)
            return held._replace(
                x_BsD=x, early=kept.gradients, deferred=kept.deferred, dcache=kept.dcache
            )

        return self._repeated(held, backward)

    def _weight(self, params, held: Held) -> Held:
        stage = self._stage(params, split=True)
        return self._repeated(
            held, lambda op, held: held._replace(late=stage.weight(op, held.deferred, held.late))
        )

    def _ends(self, params, dends):
        model, ends, pipe = self.trainer.model, params["ends"], self.trainer.axes.pipe
        x = self._x()
        index = lax.axis_index("pipe")
        stage = index
        ids = jnp.arange(x.shape[0] * x.shape[1], dtype=jnp.int32).reshape(x.shape[:2])
        batch = {"tokens": ids % self.trainer.run.model.vocab,
                 "targets": ids % self.trainer.run.model.vocab,
                 "weights": jnp.ones(x.shape[:2], jnp.float32)}
        place = self._place(jnp.int32(0), jnp.int32(-1))

        def one(carry, _):
            dends, dx = carry
            y, embed_vjp = jax.vjp(lambda ends: model.embed(ends, batch, place), ends)
            y = broadcast_from(y + 1e-3 * dx, stage == 0, pipe)
            value, vjp = jax.vjp(lambda ends, y: model.loss(ends, y, batch), ends, y)
            first, dx = vjp(jnp.ones((), value.dtype))
            (second,) = embed_vjp(broadcast_from(dx, stage == 0, pipe))
            dends = jax.tree.map(lambda a, b: a + b, dends, first)
            dends = jax.tree.map(lambda a, b: a + b, dends, second)
            return (dends, dx), None

        (dends, _), _ = lax.scan(one, (dends, jnp.zeros(x.shape, x.dtype)), length=_REPEATS)
        return dends

    def time_ops(self) -> dict[str, float]:
        seconds = {}
        for name, f in self.by_name.items():
            start = time.perf_counter()
            self.held = jax.block_until_ready(f(self.params, self.held))
            seconds[name] = (time.perf_counter() - start) / _REPEATS
        start = time.perf_counter()
        self.dends = jax.block_until_ready(self.ends(self.params, self.dends))
        seconds["ends_s"] = (time.perf_counter() - start) / _REPEATS
        return seconds

    def bytes(self) -> dict[str, int]:
        return {
            name: sum(a.nbytes for a in jax.tree.leaves(getattr(self.held, name))) // n // self.trainer.schedule.stages
            for name, n in (("x_BsD", 1), ("ring", _SLOTS), ("deferred", _SLOTS), ("cache", 1))
        }


class NoPipeline:
    def gradients(self, params, batch, samples_MB, key, loss_weight):
        gradients = jax.tree.map(lambda a: a.astype(jnp.float32) * loss_weight, params)
        return jnp.float32(1), gradients


def idle_table(stages, apart):
    one = make("1f1b", microbatches=1, stages=stages)
    return Schedule.from_ticks("1f1b", one.forward_ticks * apart, one.backward_ticks * apart)


def counted(schedule: Schedule, b: dict) -> int:
    waiting = schedule.weight_stash.slots if schedule.split else 0
    caches = (schedule.cache.slots + schedule.gradient_cache.slots) if schedule.cache else 0
    boxes = schedule.mailbox_slots + len(schedule.inboxes) + 1
    return schedule.slots * b["ring"] + waiting * b["deferred"] + boxes * b["x_BsD"] + caches * b["cache"]


def shared_s(schedule, c):
    ops = schedule.items * schedule.virtual
    per = c.forward_s + (c.backward_s + c.weight_s if schedule.split else c.both_s)
    return ops * per + schedule.items * c.ends_s + schedule.ticks * c.tick_s + c.once_s


def own_s(schedule, c):
    parts = schedule.virtual * schedule.slices
    times = Times(forward=c.forward_s * parts, backward=(c.backward_s if schedule.split else c.both_s) * parts,
                  weight=c.weight_s * parts if schedule.split else 0.0)
    span = simulate(schedule, times, model="lockstep").makespan
    return span + schedule.items * c.ends_s + schedule.ticks * c.tick_s + c.once_s


def main(arguments):
    options = parse(list(arguments), Options(), prog="bench_schedules.py")
    run = preset(options.preset)
    use_virtual_devices(options.stages)
    rows = rows_of(options, run.model.layers)
    trainings = []
    def training(trainer):
        t0 = time.perf_counter()
        step = trainer.compile_step()
        tr = Training(step=step, state=trainer.init(), batch=trainer.place(random_batch(run.model, trainer.run.global_batch)))
        print("compiled", trainer.schedule.name, trainer.schedule.virtual, f"{time.perf_counter()-t0:.1f}", file=sys.stderr)
        return tr
    ops, aux = {}, {}
    for row in rows:
        trainings.append(training(row.trainer(run)))
        key = row.schedule.virtual, row.schedule.slices
        if key not in ops:
            ops[key] = Ops(row.trainer(run))
            ops[key].time_ops()
    for name, apart in (("short", 1), ("long", _IDLE_TICKS)):
        t = trainer_of(idle_table(options.stages, apart), run)
        aux[name] = (training(t), t.schedule.ticks)
    t = trainer_of(make("1f1b", microbatches=options.microbatches, stages=options.stages), run)
    t.pipeline = NoPipeline()
    aux["once"] = (training(t), 0)
    import json
    out = []
    for r in range(options.rounds + 1):
        costs = {}
        ts = {k: o.time_ops() for k, o in ops.items()}
        a = {k: v[0].advance()[0] for k, v in aux.items()}
        tick_s = (a["long"] - a["short"]) / (aux["long"][1] - aux["short"][1])
        once = a["once"]
        print(f"round {r} tick {tick_s*1e3:.3f} ms once {once:.3f} short {a['short']:.3f}", {k: {n: round(v*1e3,1) for n, v in t.items()} for k, t in ts.items()})
        for row, tr in zip(rows, trainings):
            s, loss = tr.advance()
            c = Costs(**ts[row.schedule.virtual, row.schedule.slices], tick_s=tick_s, once_s=once)
            out.append((r, row.name, s, shared_s(row.schedule, c), own_s(row.schedule, c), loss))
    const = None
    for row, tr in zip(rows, trainings):
        b = ops[row.schedule.virtual, row.schedule.slices].bytes()
        temp = tr.step.memory_analysis().temp_size_in_bytes
        cnt = counted(row.schedule, b)
        if row.name == "1f1b": const = temp - cnt
        mine = [o for o in out if o[1] == row.name and o[0]]
        med = statistics.median
        print(f"{row.name:14} {row.schedule.ticks:3} meas {med(o[2] for o in mine):.3f} shared {med(o[3] for o in mine):.3f} own {med(o[4] for o in mine):.3f} ratio {med(o[2]/o[3] for o in mine):.3f} own {med(o[2]/o[4] for o in mine):.3f} | temp {temp/_MIB:.1f} counted {cnt/_MIB:.1f} diff {(temp-cnt)/_MIB:.1f} {mine[-1][5]:.6f}", row.also)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
