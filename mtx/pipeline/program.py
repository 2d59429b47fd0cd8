"""The pipeline: one scan over the ticks of a schedule's table, on every stage at once.

Runs inside the step's `shard_map`. A tick is: receive, embed, F, send x, head and loss, B, gradient
of the embedding; the gradient is sent at the start of the next tick. So the send of a tick's F may
overlap with its B, and the send of its B with the next F. F and B go a layer at a time: F writes
what a layer's VJP needs into the layer's place of a ring slot, B reads it back in reverse order and
adds each weight gradient to its accumulator at once. Nothing here grows with the microbatches.

Three model functions are all it knows (see `mtx.models.gpt.GPT`): `embed(ends, batch, place)`,
`block(params, x, place)` and `loss(ends, x, batch)`. Embedding and head are sharded over `pipe`, so
all stages run them together, in the ticks that the table names; their collectives span `pipe` and
must not stand in a branch that only some stages take.

Legend: M microbatches · B rows · S sequence (s: shard) · D hidden · C chunks · N layers a chunk ·
R ring slots · T ticks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.config import Layout
from mtx.pipeline.partition import Placement
from mtx.pipeline.schedule import IDLE, Schedule, by_tick
from mtx.pipeline.vjp import LayerVJP
from mtx.sharding.collectives import (
    all_gather_sequence,
    broadcast_from,
    shard_of_sequence,
    shift,
)
from mtx.sharding.mesh import Axes

Tree = Any


class Op(NamedTuple):
    """One half tick of this stage; int32 [] (the whole table: [T])."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    arrives: jax.Array  # mailbox slot of what arrives
    uses: jax.Array  # mailbox slot of the input


class Tick(NamedTuple):
    """One row of the table, as this stage sees it; int32 [] (the whole table: [T])."""

    forward: Op
    backward: Op
    output: jax.Array  # outbox slot that takes the last piece's output
    head_input: jax.Array  # outbox slot that the head reads
    embed: jax.Array  # microbatches, or IDLE, the same on every stage
    head: jax.Array
    embed_backward: jax.Array


class Carry(NamedTuple):
    """What goes from tick to tick."""

    x_BsD: jax.Array  # has arrived from the stage before
    dx_BsD: jax.Array  # is to be sent to the stage before
    stash: Tree  # [R, N, ...] residuals or [R, B, s, D] chunk inputs
    inbox: jax.Array  # [slots, B, s, D], and so the next two
    gradient_inbox: jax.Array
    outbox: jax.Array
    gradients: Tree  # float32, like the parameters
    loss: jax.Array  # float32 []


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model, where its layers lie, and the table that says when each runs."""

    model: Any  # embed, block, loss
    schedule: Schedule
    placement: Placement
    layout: Layout
    axes: Axes

    def gradients(self, params: Tree, batch: Tree, samples_MB, key, loss_weight):
        """(sum of losses, gradients) over all microbatches of this replica.

        params: {"ends": ..., "block": leaves [C, N, ...]}, the local shards; batch: leaves
        [M, B, ...]; samples_MB: int32, rows of the global batch; key: uint32 [2];
        loss_weight: float32 [], the gradient of the scalar that is minimised with respect to the
        sum of losses. Gradients are float32 and still to be summed over `data` and, where a
        parameter is replicated, with sequence parallelism, over `tensor`.
        """
        run = _Run(self, params, batch, samples_MB, key, loss_weight)
        carry, ticks = run.start(), _table(self.schedule, run.stage)
        if self.layout.idle == "phases":
            for phase in self.schedule.phases:
                rows = jax.tree.map(lambda a, p=phase: a[p.start : p.stop], ticks)
                step = partial(run.tick, forward=phase.forward, backward=phase.backward)
                carry, _ = lax.scan(step, carry, rows)
        else:
            carry, _ = lax.scan(run.tick, carry, ticks)
        return carry.loss, carry.gradients

    def forward(self, params: Tree, batch: Tree, output: Callable) -> Tree:
        """`output(ends, y_BsD, batch)` of every microbatch, stacked [M, ...]; no gradients, no
        dropout. `output` is called on all stages together. Other arguments as in `gradients`."""
        run = _Run(self, params, batch)
        last_tick = int(self.schedule.forward_ticks.max())
        leaving = jnp.asarray(by_tick(self.schedule.forward_ticks[:, -1, -1], last_tick + 1))
        ticks = jax.tree.map(lambda a: a[: last_tick + 1], _table(self.schedule, run.stage))
        example = jax.eval_shape(output, params["ends"], run.x_zeros(), run.batch_of(0))
        outputs = jax.tree.map(
            lambda a: jnp.zeros((self.schedule.microbatches, *a.shape), a.dtype), example
        )

        def tick(carry, row):
            x_BsD, inbox, outputs = carry
            op, microbatch = row
            inbox, x_BsD = _through(inbox, x_BsD, op.forward)
            x_BsD = run.enter(x_BsD, op)
            y_BsD = lax.cond(
                op.forward.microbatch != IDLE, run.forward_only, lambda op, x: x, op.forward, x_BsD
            )

            def leave(outputs, y_BsD):
                y_BsD = broadcast_from(y_BsD, run.stage == run.stages - 1, self.axes.pipe)
                value = output(params["ends"], y_BsD, run.batch_of(microbatch))
                return jax.tree.map(lambda a, v: _write(a, v, microbatch), outputs, value)

            outputs = lax.cond(microbatch != IDLE, leave, lambda a, _: a, outputs, y_BsD)
            return (run.send(y_BsD, by=1), inbox, outputs), None

        start = run.x_zeros(), run.box(self.schedule.inbox.slots), outputs
        (_, _, outputs), _ = lax.scan(tick, start, (ticks, leaving))
        return outputs


class _Run:
    """One call of a pipeline, while it is traced: the static parts and the arrays at hand."""

    def __init__(
        self, pipeline: Pipeline, params, batch, samples_MB=None, key=None, loss_weight=None
    ):
        self.model, self.schedule = pipeline.model, pipeline.schedule
        self.layout, self.axes, self.placement = pipeline.layout, pipeline.axes, pipeline.placement
        self.params, self.batch = params, batch
        self.samples_MB, self.key, self.loss_weight = samples_MB, key, loss_weight
        self.stages = self.schedule.stages
        self.stage = lax.axis_index(self.axes.pipe) if self.axes.pipe else jnp.zeros((), jnp.int32)
        self.layer_CN = jnp.asarray(self.placement.layer)[self.stage]
        self.count_C = jnp.asarray(self.placement.count)[self.stage]
        self.x_shape = jax.eval_shape(
            self.model.embed, params["ends"], self.batch_of(0), self.place(0, 0)
        )

    @cached_property
    def layer_vjp(self) -> LayerVJP:
        params = jax.tree.map(lambda a: a[0, 0], self.params["block"])
        return LayerVJP(self.model.block, params, self.x_shape, self.place(0, 0))

    # -- what stands where ------------------------------------------------------------------------

    def batch_of(self, microbatch):
        return jax.tree.map(lambda a: a[microbatch], self.batch)

    def place(self, microbatch, layer):
        """The model's third argument: what its random numbers follow from; None without them."""
        if self.key is None:
            return None
        return self.model.place(layer, self.samples_MB[microbatch], self.key)

    def x_zeros(self):
        return jnp.zeros(self.x_shape.shape, self.x_shape.dtype)

    def box(self, slots: int):
        return jnp.zeros((slots, *self.x_shape.shape), self.x_shape.dtype)

    def start(self) -> Carry:
        slots, places = self.schedule.slots, self.placement.layer.shape[-1]
        if self.layout.stash == "inputs":
            stash = self.box(slots)
        else:
            stash = _ring(self.layer_vjp.residuals, slots, places)
        return Carry(
            x_BsD=self.x_zeros(),
            dx_BsD=self.x_zeros(),
            stash=stash,
            inbox=self.box(self.schedule.inbox.slots),
            gradient_inbox=self.box(self.schedule.gradient_inbox.slots),
            outbox=self.box(self.schedule.outbox.slots),
            gradients=jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.params),
            loss=jnp.zeros((), jnp.float32),
        )

    # -- one tick ---------------------------------------------------------------------------------

    def tick(self, carry: Carry, op: Tick, *, forward: bool = True, backward: bool = True):
        y_BsD = carry.x_BsD
        if forward:
            with jax.named_scope("F"):
                inbox, x_BsD = _through(carry.inbox, carry.x_BsD, op.forward)
                x_BsD = self.enter(x_BsD, op)
                y_BsD, stash = self.forward_half(carry.stash, op.forward, x_BsD)
            with jax.named_scope("send_x"):
                arrived_BsD = self.send(y_BsD, by=1)
            carry = carry._replace(x_BsD=arrived_BsD, inbox=inbox, stash=stash)
            if self.schedule.outbox.slots:
                carry = carry._replace(outbox=_write(carry.outbox, y_BsD, op.output))
        if backward:
            with jax.named_scope("send_dx"):
                dx_BsD = self.send(carry.dx_BsD, by=-1)
            if self.schedule.outbox.slots:
                y_BsD = carry.outbox[op.head_input]
            with jax.named_scope("head"):
                carry, dy_BsD = self.head(carry, op, y_BsD)
            with jax.named_scope("B"):
                gradient_inbox, dx_BsD = _through(carry.gradient_inbox, dx_BsD, op.backward)
                is_output = self._is_last(op.backward)
                dy_BsD = jnp.where(is_output, dy_BsD, dx_BsD)
                dx_BsD, blocks = self.backward_half(carry, op.backward, dy_BsD)
            gradients = carry.gradients | {"block": blocks}
            with jax.named_scope("embed_backward"):
                gradients = self.embed_backward(gradients, op, dx_BsD)
            carry = carry._replace(
                dx_BsD=dx_BsD, gradient_inbox=gradient_inbox, gradients=gradients
            )
        return carry, None

    def _is_last(self, op: Op):
        return (self.stage == self.stages - 1) & (op.chunk == self.schedule.virtual - 1)

    def send(self, x_BsD, *, by: int):
        """x of the stage `by` places before this one. Where all tensor ranks hold the same x, each
        sends its part of the sequence (SC'21's scatter/gather optimisation, section 4.1)."""
        whole = self.axes.tensor and not self.axes.sequence_parallel
        split = self.axes.tensor if whole and x_BsD.shape[1] % self.layout.tensor == 0 else None
        sent = shift(shard_of_sequence(x_BsD, split), self.axes.pipe, by=by)
        return all_gather_sequence(sent, split)

    def enter(self, x_BsD, op: Tick):
        """The F half's input: the embedding on piece 0, what has arrived elsewhere."""

        def embed(microbatch):
            place = self.place(microbatch, IDLE)
            return self.model.embed(self.params["ends"], self.batch_of(microbatch), place)

        with jax.named_scope("embed"):
            entered = lax.cond(op.embed != IDLE, embed, lambda _: self.x_zeros(), op.embed)
        is_first = (self.stage == 0) & (op.forward.chunk == 0)
        return jnp.where(is_first, entered, x_BsD)

    def forward_half(self, stash, op: Op, x_BsD):
        """(y_BsD, stash)"""
        if self.layout.stash == "inputs":
            stash = _write(stash, x_BsD, op.slot)
            return self._unless_idle(op, self.forward_only, lambda op, x: x, op, x_BsD), stash
        return self._unless_idle(
            op, self._forward_chunk, lambda op, x, stash: (x, stash), op, x_BsD, stash
        )

    def head(self, carry: Carry, op: Tick, y_BsD):
        """(carry with the loss and the gradients of the ends added, dy_BsD)"""
        is_source = self.stage == self.stages - 1

        def compute(loss, gradients, y_BsD):
            y_BsD = broadcast_from(y_BsD, is_source, self.axes.pipe)
            batch = self.batch_of(op.head)
            value, vjp = jax.vjp(
                lambda ends, y: self.model.loss(ends, y, batch), self.params["ends"], y_BsD
            )
            dends, dy_BsD = vjp(self.loss_weight.astype(value.dtype))
            return loss + value, _add(gradients, dends), dy_BsD

        def idle(loss, gradients, y_BsD):
            return loss, gradients, jnp.zeros_like(y_BsD)

        loss, ends, dy_BsD = lax.cond(
            op.head != IDLE, compute, idle, carry.loss, carry.gradients["ends"], y_BsD
        )
        return carry._replace(loss=loss, gradients=carry.gradients | {"ends": ends}), dy_BsD

    def backward_half(self, carry: Carry, op: Op, dy_BsD):
        """(dx_BsD, gradients of the blocks)"""

        def compute(op, dy_BsD, stash, gradients):
            if self.layout.stash == "inputs":
                ring = _ring(self.layer_vjp.residuals, 1, self.placement.layer.shape[-1])
                at = op._replace(slot=jnp.zeros((), jnp.int32))
                _, ring = self._forward_chunk(at, stash[op.slot], ring)
                return self._backward_chunk(at, dy_BsD, ring, gradients)
            return self._backward_chunk(op, dy_BsD, stash, gradients)

        def idle(op, dy_BsD, stash, gradients):
            return jnp.zeros_like(dy_BsD), gradients

        if self.layout.idle != "skip":  # an idle half computes, with a gradient of zero
            dy_BsD *= (op.microbatch != IDLE).astype(dy_BsD.dtype)
        return self._unless_idle(
            op, compute, idle, op, dy_BsD, carry.stash, carry.gradients["block"]
        )

    def embed_backward(self, gradients, op: Tick, dx_BsD):
        """The gradients with those of piece 0's embedding added."""

        def compute(ends, dx_BsD):
            dx_BsD = broadcast_from(dx_BsD, self.stage == 0, self.axes.pipe)
            batch = self.batch_of(op.embed_backward)
            place = self.place(op.embed_backward, IDLE)
            _, vjp = jax.vjp(lambda ends: self.model.embed(ends, batch, place), self.params["ends"])
            return _add(ends, vjp(dx_BsD)[0])

        ends = lax.cond(
            op.embed_backward != IDLE, compute, lambda ends, _: ends, gradients["ends"], dx_BsD
        )
        return gradients | {"ends": ends}

    def _unless_idle(self, op: Op, compute: Callable, idle: Callable, *args):
        if self.layout.idle == "skip":
            return lax.cond(op.microbatch != IDLE, compute, idle, *args)
        return compute(*args)

    # -- one chunk, a layer at a time -------------------------------------------------------------

    def _layers(self, op: Op, body: Callable, start):
        """body(n, carry) over the layers of the op's chunk; a plain call where there is one."""
        places = self.placement.layer.shape[-1]
        if not self.placement.even:
            return lax.fori_loop(0, self.count_C[op.chunk], body, start)
        return body(0, start) if places == 1 else lax.fori_loop(0, places, body, start)

    def _layer(self, op: Op, n):
        """(parameters, place) of layer n of the op's chunk"""
        params = jax.tree.map(lambda a: a[op.chunk, n], self.params["block"])
        return params, self.place(op.microbatch, self.layer_CN[op.chunk, n])

    def forward_only(self, op: Op, x_BsD):
        """y_BsD; keeps nothing."""

        def layer(n, x_BsD):
            params, place = self._layer(op, n)
            return self.model.block(params, x_BsD, place)

        return self._layers(op, layer, x_BsD)

    def _forward_chunk(self, op: Op, x_BsD, ring):
        """(y_BsD, ring with the residuals of each layer at [slot, n])"""

        def layer(n, carry):
            x_BsD, ring = carry
            params, place = self._layer(op, n)
            y_BsD, residuals = self.layer_vjp.forward(params, x_BsD, place)
            ring = tuple(_write(r, a, op.slot, n) for r, a in zip(ring, residuals, strict=True))
            return y_BsD, ring

        return self._layers(op, layer, (x_BsD, ring))

    def _backward_chunk(self, op: Op, dy_BsD, ring, gradients):
        """(dx_BsD, gradients with those of each layer added at [chunk, n])"""
        last = self.count_C[op.chunk] - 1

        def layer(i, carry):
            dy_BsD, gradients = carry
            n = last - i
            params, place = self._layer(op, n)
            residuals = tuple(r[op.slot, n] for r in ring)
            dparams, dx_BsD = self.layer_vjp.backward(residuals, params, place, dy_BsD)

            def add(total, g):
                return _write(total, total[op.chunk, n] + g.astype(total.dtype), op.chunk, n)

            return dx_BsD, jax.tree.map(add, gradients, dparams)

        return self._layers(op, layer, (dy_BsD, gradients))


def _ring(residuals, slots: int, places: int):
    return tuple(jnp.zeros((slots, places, *r.shape), r.dtype) for r in residuals)


def _through(mailbox, arrived, op: Op):
    """(mailbox, the value that this tick uses); without slots, what has just arrived."""
    if mailbox.shape[0] == 0:
        return mailbox, arrived
    mailbox = _write(mailbox, arrived, op.arrives)
    return mailbox, mailbox[op.uses]


def _write(array, value, *index):
    """array with array[index] replaced, in place where XLA owns the array (a scan's carry)."""
    value = value[(None,) * len(index)]
    start = (*index, *(0 for _ in range(array.ndim - len(index))))
    return lax.dynamic_update_slice(array, value, start)


def _add(totals, gradients):
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), totals, gradients)


def _table(schedule: Schedule, stage) -> Tick:
    """The schedule as this stage sees it."""

    def column(table):
        return jnp.asarray(table)[:, stage]

    def half(half, mailbox):
        return Op(
            microbatch=column(half.microbatch),
            chunk=column(half.chunk),
            slot=column(half.slot),
            arrives=column(mailbox.write),
            uses=column(mailbox.read),
        )

    return Tick(
        forward=half(schedule.forward, schedule.inbox),
        backward=half(schedule.backward, schedule.gradient_inbox),
        output=column(schedule.outbox.write),
        head_input=column(schedule.outbox.read),
        embed=jnp.asarray(schedule.embed),
        head=jnp.asarray(schedule.head),
        embed_backward=jnp.asarray(schedule.embed_backward),
    )
