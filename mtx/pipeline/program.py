"""The pipeline: one scan over the ticks of a schedule's table, on every stage at once.

Runs inside the step's `shard_map`. A tick is: receive, embed, F, send x, head and loss, B, gradient
of the embedding, and W where the table splits it from B; the gradient is sent at the start of the
next tick. So the send of a tick's F may overlap with its B, and the send of its B with W and the
next F. What F, B and W do with a stage's layers is in `stage`. Nothing here grows with the
microbatches.

What it knows of a model stands in `model`. Embedding and head are sharded over `pipe`, so all
stages run them together, in the ticks that the table names; their collectives span `pipe` and must
not stand in a branch that only some stages take.

Legend: M microbatches · B rows · S sequence (s: shard) · D hidden · C chunks · N layers a chunk ·
R ring slots · T ticks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.config import Layout
from mtx.pipeline.model import PipelineModel
from mtx.pipeline.partition import Placement
from mtx.pipeline.schedule import IDLE, Route, Schedule, by_tick
from mtx.pipeline.slots import read, read_each, write
from mtx.pipeline.stage import Kept, Stage
from mtx.pipeline.ticks import Letter, Op, Tick, ticks_of
from mtx.pipeline.weights import Weights
from mtx.sharding.collectives import (
    all_gather_sequence,
    broadcast_from,
    shard_of_sequence,
    shift,
)
from mtx.sharding.mesh import Axes

Tree = Any


class Carry(NamedTuple):
    """What goes from tick to tick."""

    arrived: tuple[jax.Array, ...]  # x_BsD from the stage before, one for each route
    dx_BsD: jax.Array  # is to be sent to the stage before
    stash: Tree  # [R, N, ...] residuals or [R, B, s, D] chunk inputs
    inboxes: tuple[jax.Array, ...]  # [slots, B, s, D], and so the next two
    gradient_inboxes: tuple[jax.Array, ...]
    outbox: jax.Array
    deferred: Tree  # [R, N, ...] what waits for W
    cache: jax.Array | None  # [R, N, B, S, ...] keys and values of slices, and their gradients
    dcache: jax.Array | None
    weights: Tree  # [1, N, ...], of the chunk of F and of that of B; None where all are at hand
    early: Tree  # float32 gradients of the blocks that B adds to, [C, N, ...] or [1, N, ...]
    late: Tree  # those that W adds to
    reduced: Tree  # [C, N, ...] sums over `data`, sharded; None where they are made after the scan
    ends: Tree  # float32 gradients of the ends
    loss: jax.Array  # float32 []


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model, where its layers lie, and the table that says when each runs."""

    model: PipelineModel
    schedule: Schedule
    placement: Placement
    layout: Layout
    axes: Axes
    data_shards: Tree = None  # with zero=3: how a chunk's leaves [N, ...] are sharded over `data`

    def gradients(self, params: Tree, batch: Tree, samples_MB, key, loss_weight):
        """(sum of losses, gradients) over all microbatches of this replica.

        params: {"ends": ..., "block": leaves [C, N, ...]}, the local shards; batch: leaves
        [M, B, S]; samples_MB: int32, rows of the global batch; key: uint32 [2];
        loss_weight: float32 [], the gradient of the scalar that is minimised with respect to the
        sum of losses. Gradients are float32 and still to be summed over `data` (but for those of
        the blocks with zero=3, which are like the parameters) and, where a parameter is replicated,
        with sequence parallelism, over `tensor`.
        """
        run = _Run(self, params, batch, samples_MB, key, loss_weight)
        carry, ticks = run.start(), run.ticks()
        if self.layout.idle == "phases":
            for phase in self.schedule.phases:
                rows = jax.tree.map(lambda a, p=phase: a[p.start : p.stop], ticks)
                step = partial(
                    run.tick, forward=phase.forward, backward=phase.backward, weight=phase.weight
                )
                carry, _ = lax.scan(step, carry, rows)
        else:
            carry, _ = lax.scan(run.tick, carry, ticks)
        if carry.reduced is not None:
            return carry.loss, {"ends": carry.ends, "block": carry.reduced}
        return carry.loss, {"ends": carry.ends, "block": _joined(carry.early, carry.late)}

    def forward(self, params: Tree, batch: Tree, output: Callable, past=None) -> Tree:
        """`output(ends, y_BsD, batch)` of every microbatch, stacked [M, ...]; no gradients, no
        dropout, whole sequences. `output` is called on all stages together. Other arguments as in
        `gradients`.

        past: for texts that go on, see `Stage.extend`; then (outputs, past). batch["positions"]
        int32 [M, B, 1] says where each row's next token stands; without, these are the first ones.
        """
        run = _Run(self, params, batch)
        last_tick = int(self.schedule.forward_ticks.max())
        leaves_in = self.schedule.forward_ticks[:, *self.schedule.ends[1]]
        leaving = jnp.asarray(by_tick(leaves_in, last_tick + 1))
        ticks = jax.tree.map(lambda a: a[: last_tick + 1], run.ticks())
        example = jax.eval_shape(output, params["ends"], run.x_zeros(), run.batch_of(0))
        outputs = jax.tree.map(
            lambda a: jnp.zeros((self.schedule.microbatches, *a.shape), a.dtype), example
        )

        def compute(op, weights, x_BsD, past):
            if past is None:
                return run.stage.forward_only(op, weights, x_BsD)
            positions = run.batch_of(op.item).get("positions")
            positions_B = None if positions is None else positions[:, 0]
            return run.stage.extend(op, weights, x_BsD, past, positions_B)

        def tick(carry, row):
            arrived, inboxes, weights, past, outputs = carry
            op, microbatch = row
            weights = run.weights.fetch(weights, op.fetch, op.forward.chunk)
            inboxes = run.deliver(inboxes, arrived, op.inboxes)
            x_BsD = run.input(op, run.embed(op), inboxes, arrived)
            y_BsD, past = lax.cond(
                op.forward.busy,
                compute,
                lambda op, weights, *kept: kept,
                op.forward,
                run.weights.at_hand(weights),
                x_BsD,
                past,
            )

            def leave(outputs, y_BsD):
                y_BsD = broadcast_from(y_BsD, run.holds_last, self.axes.pipe)
                value = output(params["ends"], y_BsD, run.batch_of(microbatch))
                return jax.tree.map(lambda a, v: write(a, v, microbatch), outputs, value)

            outputs = lax.cond(microbatch != IDLE, leave, lambda a, _: a, outputs, y_BsD)
            arrived = run.send(y_BsD, self.schedule.inboxes)
            return (arrived, inboxes, weights, past, outputs), None

        boxes = run.boxes(self.schedule.inboxes)
        start = run.no_arrivals(), boxes, run.weights.start(), past, outputs
        (*_, past, outputs), _ = lax.scan(tick, start, (ticks, leaving))
        return outputs if past is None else (outputs, past)


class _Run:
    """One call of a pipeline, while it is traced: the static parts and the arrays at hand."""

    def __init__(
        self, pipeline: Pipeline, params, batch, samples_MB=None, key=None, loss_weight=None
    ):
        self.model, self.schedule = pipeline.model, pipeline.schedule
        self.layout, self.axes = pipeline.layout, pipeline.axes
        self.params, self.batch = params, batch
        self.weights = Weights(block=params["block"], shards=pipeline.data_shards)
        self.samples_MB, self.key, self.loss_weight = samples_MB, key, loss_weight
        pipe, placement = self.axes.pipe, pipeline.placement
        self.index = lax.axis_index(pipe) if pipe else jnp.zeros((), jnp.int32)
        (self.first_chunk, first), (self.last_chunk, last) = self.schedule.ends
        self.holds_first, self.holds_last = self.index == first, self.index == last
        self.x_shape = jax.eval_shape(
            self.model.embed, params["ends"], self.batch_of(0), self.place(0, 0)
        )
        self.stage = Stage(
            model=self.model, layer_params=self.weights.layer, placement=placement,
            layer_CN=read(jnp.asarray(placement.layer), self.index),
            count_C=read(jnp.asarray(placement.count), self.index), place=self.place,
            x_BsD=self.x_shape, slices=self.schedule.slices, split=self.schedule.split,
        )  # fmt: skip

    # -- what stands where ------------------------------------------------------------------------

    def batch_of(self, item):
        """Leaves [B, S], or a slice of S."""
        slices = self.schedule.slices
        rows = read_each(self.batch, self._microbatch(item))
        if slices == 1:
            return rows

        def cut(a_BS):
            size = a_BS.shape[1] // slices
            return lax.dynamic_slice_in_dim(a_BS, item % slices * size, size, 1)

        return jax.tree.map(cut, rows)

    def _microbatch(self, item):
        return item if self.schedule.slices == 1 else item // self.schedule.slices

    def place(self, item, layer):
        """The model's third argument: where its input stands; None where it does not matter."""
        slices, samples_MB = self.schedule.slices, self.samples_MB
        part = item % slices if slices > 1 else 0
        samples_B = None if samples_MB is None else read(samples_MB, self._microbatch(item))
        return self.model.place(layer, self.batch_of(item), samples_B, self.key, part)

    def x_zeros(self):
        return jnp.zeros(self.x_shape.shape, self.x_shape.dtype)

    def box(self, slots: int):
        return jnp.zeros((slots, *self.x_shape.shape), self.x_shape.dtype)

    def boxes(self, routes: tuple[Route, ...]):
        return tuple(self.box(route.mailbox.slots) for route in routes)

    def no_arrivals(self):
        return tuple(self.x_zeros() for _ in self.schedule.inboxes)

    def start(self) -> Carry:
        schedule, stage = self.schedule, self.stage
        by_inputs = self.layout.stash == "inputs"
        late, held = stage.is_late(), self.weights.start()
        waiting = schedule.weight_stash.slots + self.zero_slot if schedule.split else 0

        def zeros(wanted):
            return jax.tree.map(
                lambda a, is_late: _float_zeros(a) if is_late == wanted else None,
                self.weights.at_hand(held),
                late,
            )

        return Carry(
            arrived=self.no_arrivals(),
            dx_BsD=self.x_zeros(),
            stash=self.box(schedule.slots) if by_inputs else stage.stash(schedule.slots),
            inboxes=self.boxes(schedule.inboxes),
            gradient_inboxes=self.boxes(schedule.gradient_inboxes),
            outbox=self.box(schedule.outbox.slots),
            deferred=stage.weight_stash(waiting),
            cache=stage.caches(schedule.cache.slots) if schedule.cache else None,
            dcache=stage.caches(schedule.gradient_cache.slots) if schedule.cache else None,
            weights=(held, held),
            early=zeros(False),
            late=zeros(True),
            reduced=self.weights.sums(),
            ends=jax.tree.map(_float_zeros, self.params["ends"]),
            loss=jnp.zeros((), jnp.float32),
        )

    @property
    def zero_slot(self) -> bool:
        """An idle W that is not skipped reads a slot of zeros, which nothing is written to."""
        return self.layout.idle != "skip"

    def ticks(self) -> Tick:
        one_chunk = self.weights.shards is not None
        return ticks_of(self.schedule, self.index, zero_slot=self.zero_slot, one_chunk=one_chunk)

    # -- one tick ---------------------------------------------------------------------------------

    def tick(
        self, carry: Carry, op: Tick, *, forward: bool = True, backward: bool = True,
        weight: bool = True,
    ):  # fmt: skip
        y_BsD = carry.dx_BsD
        if forward:
            carry, y_BsD = self.forward_half(carry, op)
        if backward:
            carry = self.backward_half(carry, op, y_BsD)
        if weight and op.weight is not None:
            with jax.named_scope("W"):
                late = self._unless_idle(
                    op.weight,
                    self.stage.weight,
                    lambda op, deferred, late: late,
                    op.weight,
                    carry.deferred,
                    carry.late,
                )
            late, reduced = self.weights.spend(late, carry.reduced, op.spend[1], op.weight.chunk)
            carry = carry._replace(late=late, reduced=reduced)
        return carry, None

    def forward_half(self, carry: Carry, op: Tick):
        """(carry, y_BsD)"""
        weights = self.weights.fetch(carry.weights[0], op.fetch, op.forward.chunk)
        with jax.named_scope("F"):
            inboxes = self.deliver(carry.inboxes, carry.arrived, op.inboxes)
            entered = self.embed(op)

            def compute(forward, weights, stash, cache):
                x_BsD = self.input(op, entered, inboxes, carry.arrived)
                if self.layout.stash == "inputs":
                    stash = write(stash, x_BsD, forward.slot)
                    y_BsD, cache = self.stage.forward_only(forward, weights, x_BsD, cache)
                    return y_BsD, stash, cache
                return self.stage.forward(forward, weights, x_BsD, stash, cache)

            y_BsD, stash, cache = self._unless_idle(
                op.forward,
                compute,
                lambda forward, weights, *kept: (self.x_zeros(), *kept),
                op.forward,
                self.weights.at_hand(weights),
                carry.stash,
                carry.cache,
            )
        with jax.named_scope("send_x"):
            arrived = self.send(y_BsD, self.schedule.inboxes)
        carry = carry._replace(
            arrived=arrived, inboxes=inboxes, stash=stash, cache=cache,
            weights=(weights, carry.weights[1]),
        )  # fmt: skip
        if self.schedule.outbox.slots:
            carry = carry._replace(outbox=write(carry.outbox, y_BsD, op.output))
        return carry, y_BsD

    def backward_half(self, carry: Carry, op: Tick, y_BsD) -> Carry:
        with jax.named_scope("send_dx"):
            arrived = self.send(carry.dx_BsD, self.schedule.gradient_inboxes)
        if self.schedule.outbox.slots:
            y_BsD = read(carry.outbox, op.head_input)
        with jax.named_scope("head"):
            carry, dy_BsD = self.head(carry, op, y_BsD)
        with jax.named_scope("B"):
            inboxes = self.deliver(carry.gradient_inboxes, arrived, op.gradient_inboxes)
            carry = carry._replace(gradient_inboxes=inboxes)
            carry, dx_BsD = self.backward_op(carry, op, arrived, dy_BsD)
        with jax.named_scope("embed_backward"):
            return carry._replace(dx_BsD=dx_BsD, ends=self.embed_backward(carry.ends, op, dx_BsD))

    def send(self, x_BsD, routes: tuple[Route, ...]):
        """What arrives on each route. Where all tensor ranks hold the same x, each sends its part
        of the sequence (SC'21's scatter/gather optimisation, section 4.1)."""
        whole = self.axes.tensor and not self.axes.sequence_parallel
        split = self.axes.tensor if whole and x_BsD.shape[1] % self.layout.tensor == 0 else None
        part = shard_of_sequence(x_BsD, split)
        return tuple(
            all_gather_sequence(shift(part, self.axes.pipe, by=route.by), split)
            if route.by
            else x_BsD
            for route in routes
        )

    def deliver(self, boxes, arrived, letters: tuple[Letter, ...]):
        """The mailboxes with what has arrived."""
        mail = zip(boxes, arrived, letters, strict=True)
        return tuple(
            write(box, x_BsD, letter.arrives) if box.shape[0] else box
            for box, x_BsD, letter in mail
        )

    def take(self, boxes, arrived, letters: tuple[Letter, ...]):
        """What this tick uses, out of a mailbox or as it has just arrived."""
        if not arrived:  # one piece: there is nobody to receive from
            return self.x_zeros()
        mail = zip(boxes, arrived, letters, strict=True)
        value, *others = (
            read(box, letter.uses) if box.shape[0] else x_BsD for box, x_BsD, letter in mail
        )
        for other, letter in zip(others, letters[1:]):
            value = jnp.where(letter.used, other, value)
        return value

    def embed(self, op: Tick):
        """The embedding of the microbatch that enters piece 0 in this tick, on every stage."""

        def embed(item):
            return self.model.embed(
                self.params["ends"], self.batch_of(item), self.place(item, IDLE)
            )

        with jax.named_scope("embed"):
            return lax.cond(op.embed != IDLE, embed, lambda _: self.x_zeros(), op.embed)

    def input(self, op: Tick, entered_BsD, inboxes, arrived):
        """The input of F: the embedding on piece 0, what has arrived elsewhere."""
        is_input = self.holds_first & (op.forward.chunk == self.first_chunk)
        return jnp.where(is_input, entered_BsD, self.take(inboxes, arrived, op.inboxes))

    def head(self, carry: Carry, op: Tick, y_BsD):
        """(carry with the loss and the gradients of the ends added, dy_BsD)"""

        def compute(loss, ends, y_BsD):
            y_BsD = broadcast_from(y_BsD, self.holds_last, self.axes.pipe)
            batch = self.batch_of(op.head)
            value, vjp = jax.vjp(
                lambda ends, y: self.model.loss(ends, y, batch), self.params["ends"], y_BsD
            )
            dends, dy_BsD = vjp(self.loss_weight.astype(value.dtype))
            return loss + value, _add(ends, dends), dy_BsD

        def idle(loss, ends, y_BsD):
            return loss, ends, jnp.zeros_like(y_BsD)

        loss, ends, dy_BsD = lax.cond(op.head != IDLE, compute, idle, carry.loss, carry.ends, y_BsD)
        return carry._replace(loss=loss, ends=ends), dy_BsD

    def backward_op(self, carry: Carry, tick: Tick, arrived, dy_BsD) -> tuple[Carry, jax.Array]:
        """(carry, dx_BsD). dy_BsD: that of the last piece, from the head."""

        def compute(op, weights, stash, cache, kept):
            is_output = self.holds_last & (op.chunk == self.last_chunk)
            dx_BsD = self.take(carry.gradient_inboxes, arrived, tick.gradient_inboxes)
            dy = jnp.where(is_output, dy_BsD, dx_BsD)
            if self.layout.idle != "skip":  # an idle B computes, with a gradient of zero
                dy *= op.busy.astype(dy.dtype)
            if self.layout.stash == "inputs":
                one = op._replace(slot=jnp.zeros((), jnp.int32))
                x_BsD, ring = read(stash, op.slot), self.stage.stash(1)
                _, stash, _ = self.stage.forward(one, weights, x_BsD, ring, cache, extend=False)
                op = one
            return self.stage.backward(op, weights, dy, stash, cache, kept)

        def idle(op, weights, stash, cache, kept):
            return self.x_zeros(), kept

        op = tick.backward
        weights = self.weights.fetch(carry.weights[1], tick.fetch_back, op.chunk)
        kept = Kept(carry.early, carry.deferred, carry.dcache)
        dx_BsD, kept = self._unless_idle(
            op,
            compute,
            idle,
            op,
            self.weights.at_hand(weights),
            carry.stash,
            carry.cache,
            kept,
        )
        early, reduced = self.weights.spend(kept.gradients, carry.reduced, tick.spend[0], op.chunk)
        carry = carry._replace(
            early=early, reduced=reduced, deferred=kept.deferred, dcache=kept.dcache,
            weights=(carry.weights[0], weights),
        )  # fmt: skip
        return carry, dx_BsD

    def embed_backward(self, ends, op: Tick, dx_BsD):
        """The gradients of the ends with those of piece 0's embedding added."""

        def compute(ends, dx_BsD):
            dx_BsD = broadcast_from(dx_BsD, self.holds_first, self.axes.pipe)
            item = op.embed_backward
            batch, place = self.batch_of(item), self.place(item, IDLE)
            _, vjp = jax.vjp(lambda ends: self.model.embed(ends, batch, place), self.params["ends"])
            return _add(ends, vjp(dx_BsD)[0])

        return lax.cond(op.embed_backward != IDLE, compute, lambda ends, _: ends, ends, dx_BsD)

    def _unless_idle(self, op: Op, compute: Callable, idle: Callable, *args):
        if self.layout.idle == "skip":
            return lax.cond(op.busy, compute, idle, *args)
        return compute(*args)


def _joined(early, late):
    return jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=_is_none)


def _float_zeros(a):
    return jnp.zeros(a.shape, jnp.float32)


def _is_none(a) -> bool:
    return a is None


def _add(totals, gradients):
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), totals, gradients)
