"""One call of a pipeline: a tick on this stage, and what goes from tick to tick.

Legend: M microbatches · B rows · S sequence (s: shard) · D hidden · C chunks · N layers a chunk ·
R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.config import Layout
from mtx.pipeline.model import PipelineModel
from mtx.pipeline.slots import read, read_each, write
from mtx.pipeline.stage import Kept, Stage
from mtx.pipeline.ticks import Op, Receive, Tick, ticks_of
from mtx.pipeline.weights import Weights
from mtx.schedules.partition import Placement
from mtx.schedules.schedule import IDLE, Route, Schedule
from mtx.sharding.collectives import (
    all_gather_sequence,
    broadcast_from,
    shard_of_sequence,
    shift,
)
from mtx.sharding.mesh import Axes

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model, where its layers lie, and the table that says when each runs."""

    model: PipelineModel
    schedule: Schedule
    placement: Placement
    layout: Layout
    axes: Axes
    data_shards: Tree = None  # with zero=3: how a chunk's leaves [N, ...] are sharded over `data`


class Messages(NamedTuple):
    """What goes from stage to stage, and what has come and waits for its tick."""

    x: tuple[jax.Array, ...]  # x_BsD from the stage before, one for each route
    dx_BsD: jax.Array  # is to be sent to the stage before
    receives: tuple[jax.Array, ...]  # [slots, B, s, D], and so the next two
    gradient_receives: tuple[jax.Array, ...]
    outputs: jax.Array  # of the last chunk, for the head


class Stash(NamedTuple):
    """What waits between a microbatch's F, B and W."""

    layers: Tree  # [R, N, ...] residuals or [R, B, s, D] chunk inputs
    deferred: Tree  # [R, N, ...] what waits for W
    cache: jax.Array | None  # [R, N, B, S, ...] keys and values of slices, and their gradients
    dcache: jax.Array | None


class Gradients(NamedTuple):
    """Float32 sums over the microbatches so far."""

    of_b: Tree  # of the layers, those that B adds to, [C, N, ...] or [1, N, ...]
    of_w: Tree  # those that W adds to
    reduced: Tree  # [C, N, ...] sums over `data`, sharded; None where they are made after the scan
    ends: Tree

    @property
    def of_layers(self) -> Tree:
        if self.reduced is not None:
            return self.reduced
        is_none = lambda a: a is None  # noqa: E731
        return jax.tree.map(lambda b, w: w if b is None else b, *self[:2], is_leaf=is_none)


class Carry(NamedTuple):
    """What goes from tick to tick."""

    messages: Messages
    stash: Stash
    weights: Tree  # [1, N, ...], of the chunk of F and of that of B; None where all are gathered
    gradients: Gradients
    loss: jax.Array  # float32 []


class Run:
    """One call of a pipeline, while it is traced: what does not change, and a tick."""

    def __init__(self, pipeline: Parts, params, batch, samples_MB=None, key=None, loss_weight=None):
        self.model, self.schedule = pipeline.model, pipeline.schedule
        self.layout, self.axes = pipeline.layout, pipeline.axes
        self.params, self.batch = params, batch
        self.weights = Weights(block=params["block"], shards=pipeline.data_shards)
        self.samples_MB, self.key, self.loss_weight = samples_MB, key, loss_weight
        pipe, placement = self.axes.pipe, pipeline.placement
        self.index = lax.axis_index(pipe) if pipe else jnp.zeros((), jnp.int32)
        self.first_chunk, first = self.schedule.first_virtual_stage
        self.last_chunk, last = self.schedule.last_virtual_stage
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

    def ring(self, slots: int):
        return jnp.zeros((slots, *self.x_shape.shape), self.x_shape.dtype)

    def rings(self, routes: tuple[Route, ...]):
        return tuple(self.ring(route.ring.slots) for route in routes)

    def no_arrivals(self):
        return tuple(self.x_zeros() for _ in self.schedule.receives)

    def start(self) -> Carry:
        schedule, stage = self.schedule, self.stage
        by_inputs = self.layout.stash == "inputs"
        made_by_w, held = stage.made_by_w(), self.weights.start()
        waiting = schedule.weight_stash.slots + self.zero_slot if schedule.split else 0

        def zeros(by_w: bool):
            return jax.tree.map(
                lambda a, is_by_w: _float_zeros(a) if is_by_w == by_w else None,
                self.weights.gathered(held),
                made_by_w,
            )

        return Carry(
            messages=Messages(
                x=self.no_arrivals(),
                dx_BsD=self.x_zeros(),
                receives=self.rings(schedule.receives),
                gradient_receives=self.rings(schedule.gradient_receives),
                outputs=self.ring(schedule.outputs.slots),
            ),
            stash=Stash(
                layers=self.ring(schedule.slots) if by_inputs else stage.stash(schedule.slots),
                deferred=stage.weight_stash(waiting),
                cache=stage.caches(schedule.cache.slots) if schedule.cache else None,
                dcache=stage.caches(schedule.gradient_cache.slots) if schedule.cache else None,
            ),
            weights=(held, held),
            gradients=Gradients(
                of_b=zeros(by_w=False),
                of_w=zeros(by_w=True),
                reduced=self.weights.sums(),
                ends=jax.tree.map(_float_zeros, self.params["ends"]),
            ),
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
        y_BsD = carry.messages.dx_BsD
        if forward:
            carry, y_BsD = self.forward_half(carry, op)
        if backward:
            carry = self.backward_half(carry, op, y_BsD)
        if weight and op.weight is not None:
            carry = self.weight_half(carry, op)
        return carry, None

    def forward_half(self, carry: Carry, op: Tick):
        """(carry, y_BsD)"""
        messages, stash = carry.messages, carry.stash
        weights = self.weights.all_gather(carry.weights[0], op.gather, op.forward.chunk)
        with jax.named_scope("F"):
            receives = self.deliver(messages.receives, messages.x, op.receives)
            entered = self.embed(op)

            def compute(forward, weights, layers, cache):
                x_BsD = self.input(op, entered, receives, messages.x)
                if self.layout.stash == "inputs":
                    layers = write(layers, x_BsD, forward.slot)
                    y_BsD, cache = self.stage.forward_only(forward, weights, x_BsD, cache)
                    return y_BsD, layers, cache
                return self.stage.forward(forward, weights, x_BsD, layers, cache)

            y_BsD, layers, cache = self._unless_idle(
                op.forward,
                compute,
                lambda forward, weights, *kept: (self.x_zeros(), *kept),
                op.forward,
                self.weights.gathered(weights),
                stash.layers,
                stash.cache,
            )
        with jax.named_scope("send_x"):
            messages = messages._replace(
                x=self.send(y_BsD, self.schedule.receives), receives=receives
            )
        if self.schedule.outputs.slots:
            messages = messages._replace(outputs=write(messages.outputs, y_BsD, op.output))
        carry = carry._replace(
            messages=messages, stash=stash._replace(layers=layers, cache=cache),
            weights=(weights, carry.weights[1]),
        )  # fmt: skip
        return carry, y_BsD

    def backward_half(self, carry: Carry, op: Tick, y_BsD) -> Carry:
        with jax.named_scope("send_dx"):
            arrived = self.send(carry.messages.dx_BsD, self.schedule.gradient_receives)
        if self.schedule.outputs.slots:
            y_BsD = read(carry.messages.outputs, op.head_input)
        with jax.named_scope("head"):
            carry, dy_BsD = self.head(carry, op, y_BsD)
        with jax.named_scope("B"):
            carry, dx_BsD = self.backward_op(carry, op, arrived, dy_BsD)
        with jax.named_scope("embed_backward"):
            ends = self.embed_backward(carry.gradients.ends, op, dx_BsD)
        return carry._replace(gradients=carry.gradients._replace(ends=ends))

    def weight_half(self, carry: Carry, op: Tick) -> Carry:
        with jax.named_scope("W"):
            of_w = self._unless_idle(
                op.weight,
                self.stage.weight,
                lambda op, deferred, gradients: gradients,
                op.weight,
                carry.stash.deferred,
                carry.gradients.of_w,
            )
        of_w, reduced = self.weights.reduce_scatter(
            of_w, carry.gradients.reduced, op.scatter[1], op.weight.chunk
        )
        return carry._replace(gradients=carry.gradients._replace(of_w=of_w, reduced=reduced))

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

    def deliver(self, rings, arrived, receives: tuple[Receive, ...]):
        """The rings with what has arrived."""
        each = zip(rings, arrived, receives, strict=True)
        return tuple(
            write(ring, x_BsD, receive.arrives) if ring.shape[0] else ring
            for ring, x_BsD, receive in each
        )

    def take(self, rings, arrived, receives: tuple[Receive, ...]):
        """What this tick uses, out of a ring or as it has just arrived."""
        if not arrived:  # one chunk: there is nobody to receive from
            return self.x_zeros()
        each = zip(rings, arrived, receives, strict=True)
        value, *others = (
            read(ring, receive.uses) if ring.shape[0] else x_BsD for ring, x_BsD, receive in each
        )
        for other, receive in zip(others, receives[1:]):
            value = jnp.where(receive.used, other, value)
        return value

    def embed(self, op: Tick):
        """The embedding of the microbatch that enters virtual stage 0 now, on every stage."""

        def embed(item):
            return self.model.embed(
                self.params["ends"], self.batch_of(item), self.place(item, IDLE)
            )

        with jax.named_scope("embed"):
            return lax.cond(op.embed != IDLE, embed, lambda _: self.x_zeros(), op.embed)

    def input(self, op: Tick, entered_BsD, receives, arrived):
        """The input of F: the embedding on virtual stage 0, what has arrived elsewhere."""
        is_input = self.holds_first & (op.forward.chunk == self.first_chunk)
        return jnp.where(is_input, entered_BsD, self.take(receives, arrived, op.receives))

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

        gradients = carry.gradients
        loss, ends, dy_BsD = lax.cond(
            op.head != IDLE, compute, idle, carry.loss, gradients.ends, y_BsD
        )
        return carry._replace(loss=loss, gradients=gradients._replace(ends=ends)), dy_BsD

    def backward_op(self, carry: Carry, tick: Tick, arrived, dy_BsD) -> tuple[Carry, jax.Array]:
        """(carry, dx_BsD). dy_BsD: that of the last chunk, from the head."""
        op, stash, gradients = tick.backward, carry.stash, carry.gradients
        rings = self.deliver(carry.messages.gradient_receives, arrived, tick.gradient_receives)

        def compute(op, weights, layers, cache, kept):
            is_output = self.holds_last & (op.chunk == self.last_chunk)
            dx_BsD = self.take(rings, arrived, tick.gradient_receives)
            dy = jnp.where(is_output, dy_BsD, dx_BsD)
            if self.layout.idle != "skip":  # an idle B computes, with a gradient of zero
                dy *= op.busy.astype(dy.dtype)
            if self.layout.stash == "inputs":
                one = op._replace(slot=jnp.zeros((), jnp.int32))
                x_BsD, ring = read(layers, op.slot), self.stage.stash(1)
                _, layers, _ = self.stage.forward(one, weights, x_BsD, ring, cache, extend=False)
                op = one
            return self.stage.backward(op, weights, dy, layers, cache, kept)

        def idle(op, weights, layers, cache, kept):
            return self.x_zeros(), kept

        weights = self.weights.all_gather(carry.weights[1], tick.gather_back, op.chunk)
        dx_BsD, kept = self._unless_idle(
            op,
            compute,
            idle,
            op,
            self.weights.gathered(weights),
            stash.layers,
            stash.cache,
            Kept(gradients.of_b, stash.deferred, stash.dcache),
        )
        of_b, reduced = self.weights.reduce_scatter(
            kept.gradients, gradients.reduced, tick.scatter[0], op.chunk
        )
        carry = carry._replace(
            messages=carry.messages._replace(dx_BsD=dx_BsD, gradient_receives=rings),
            stash=stash._replace(deferred=kept.deferred, dcache=kept.dcache),
            weights=(carry.weights[0], weights),
            gradients=gradients._replace(of_b=of_b, reduced=reduced),
        )
        return carry, dx_BsD

    def embed_backward(self, ends, op: Tick, dx_BsD):
        """The gradients of the ends with those of virtual stage 0's embedding added."""

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


def _float_zeros(a):
    return jnp.zeros(a.shape, jnp.float32)


def _add(totals, gradients):
    return jax.tree.map(lambda total, g: total + g.astype(total.dtype), totals, gradients)
