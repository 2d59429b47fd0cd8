"""One call of a pipeline: a tick on this stage.

Legend: M microbatches · B rows · S sequence (s: shard) · C chunks · N layers of a kind in a chunk ·
R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.carry import Carry, Gradients, Messages, Stash
from mtx.pipeline.head import add_gradients
from mtx.pipeline.model import Stream
from mtx.pipeline.own import Kept
from mtx.pipeline.parts import Parts
from mtx.pipeline.slots import read, write
from mtx.pipeline.stage import Stage, tables_of
from mtx.pipeline.ticks import Op, Receive, Tick, ticks_of
from mtx.pipeline.trees import add_up, float_zeros, where
from mtx.pipeline.weights import LayerShards, Weights
from mtx.schedules.schedule import IDLE, Phase, Route
from mtx.sharding.collectives import (
    all_gather_sequence,
    broadcast_from,
    shard_of_sequence,
    shift,
)
from mtx.sharding.fp8 import arrays_of
from mtx.sharding.parameter import chosen, with_chosen

Tree = Any


class Run:
    """One call of a pipeline, while it is traced: what does not change, and a tick."""

    def __init__(self, pipeline: Parts, params, batch, samples_MB=None, rng=None, loss_weight=1.0):
        self.model, self.schedule = pipeline.model, pipeline.schedule
        self.layout, self.axes = pipeline.layout, pipeline.axes
        self.shared, self.batch = {part: params[part] for part in ("embed", "head")}, batch
        shards, unit = pipeline.data_shards, self.layout.zero_unit
        chunks, layers = (shards if unit == wanted else None for wanted in ("chunk", "layer"))
        inputs = self.model.inputs["layers"]
        self.trained = self.model.trained
        of_layers = self.trained["layers"]
        self.weights = Weights(
            layers=params["layers"], inputs=inputs, shards=chunks, trained=of_layers
        )
        self.samples_MB, self.rng, self.loss_weight = samples_MB, rng, loss_weight
        pipe, placement = self.axes.pipe, pipeline.placement
        self.placement = placement
        self.index = lax.axis_index(pipe) if pipe else jnp.zeros((), jnp.int32)
        self.first_chunk, first = self.schedule.first_virtual_stage
        self.last_chunk, last = self.schedule.last_virtual_stage
        self.holds_first, self.holds_last = self.index == first, self.index == last
        self.stream = jax.eval_shape(
            self.model.embed, self.shared, self.batch_of(0), self.context(0, 0)
        )
        self.stage = Stage(
            model=self.model, layer_params=self.weights.layer, placement=placement,
            tables=tables_of(placement, self.index),
            context=self.context, stream=self.stream, slices=self.schedule.slices,
            split=self.schedule.split, offload_fraction=self.layout.offload_fraction,
            shards=layers and {
                kind: LayerShards(own, inputs[kind], of_layers[kind])
                for kind, own in layers.items()
            },
        )  # fmt: skip

    # -- what lies where ------------------------------------------------------------------------

    def batch_of(self, item):
        """Leaves [B, S], or a slice of S."""
        slices = self.schedule.slices
        rows = read(self.batch, self._microbatch(item))
        if slices == 1:
            return rows

        def cut(a_BS):
            size = a_BS.shape[1] // slices
            return lax.dynamic_slice_in_dim(a_BS, item % slices * size, size, 1)

        return jax.tree.map(cut, rows)

    def _microbatch(self, item):
        return item if self.schedule.slices == 1 else item // self.schedule.slices

    def context(self, item, layer):
        """What the model says of a layer's call; layer IDLE: of the embedding's."""
        slices, samples_MB = self.schedule.slices, self.samples_MB
        part = item % slices if slices > 1 else 0
        samples_B = None if samples_MB is None else read(samples_MB, self._microbatch(item))
        busy = None if self.layout.idle == "skip" else item != IDLE
        return self.model.context(layer, self.batch_of(item), samples_B, self.rng, part, busy)

    def zeros(self) -> Stream:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stream)

    def ring(self, slots: int) -> Tree:
        return jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), self.stream)

    def rings(self, routes: tuple[Route, ...]) -> tuple[Tree, ...]:
        """None where everything is used in the tick of its arrival."""
        return tuple(self.ring(r.ring.slots) if r.ring.slots else None for r in routes)

    def no_arrivals(self) -> tuple[Stream, ...]:
        return tuple(self.zeros() for _ in self.schedule.receives)

    def start(self) -> Carry:
        schedule, stage = self.schedule, self.stage
        by_inputs = self.layout.stash == "inputs"
        made_by_w, held = stage.made_by_w(), self.weights.start()
        left = stage.offload.nothing_left() if stage.offload else None
        waits, cache, dcache = schedule.weight_stash, schedule.cache, schedule.gradient_cache

        def zeros(by_w: bool):
            return jax.tree.map(
                lambda a, is_by_w: float_zeros(a) if is_by_w == by_w else None,
                chosen(arrays_of(self.weights.gathered(held)), self.trained["layers"]),
                made_by_w,
            )

        return Carry(
            messages=Messages(
                x=self.no_arrivals(),
                dx=self.zeros(),
                receives=self.rings(schedule.receives),
                gradient_receives=self.rings(schedule.gradient_receives),
                outputs=self.ring(schedule.outputs.slots),
            ),
            stash=Stash(
                layers=self.ring(schedule.slots) if by_inputs else stage.stash(schedule.slots),
                deferred=stage.weight_stash(waits.slots + self.zero_slot if waits else 0),
                caches=stage.caches(cache.slots) if cache else None,
                dcaches=stage.caches(dcache.slots) if dcache else None,
                left=left,
                ahead=left and left.parts,
            ),
            weights=(held, held),
            gradients=Gradients(
                of_b=zeros(by_w=False),
                of_w=zeros(by_w=True),
                reduced=self.weights.sums(),
                shared=jax.tree.map(float_zeros, self.of_trained(self.shared)),
            ),
            losses=self.no_losses(),
        )

    def of_trained(self, shared: Tree) -> Tree:
        """Of embedding and head, those that are trained."""
        return chosen(shared, {part: self.trained[part] for part in shared})

    def no_losses(self) -> dict[str, jax.Array]:
        """Zeros, float32 [] each."""
        losses = jax.eval_shape(self.model.losses, self.shared, self.stream, self.batch_of(0))
        return {name: jnp.zeros((), jnp.float32) for name in losses}

    @property
    def zero_slot(self) -> bool:
        """An idle W that is not skipped reads a slot of zeros, which nothing is written to."""
        return self.layout.idle != "skip"

    def ticks(self) -> Tick:
        one_chunk = self.weights.shards is not None
        return ticks_of(
            self.schedule, self.index, zero_slot=self.zero_slot, one_chunk=one_chunk,
            ahead=self.stage.offload is not None,
        )  # fmt: skip

    def scan(self, carry: Carry, rows: Tick, phase: Phase) -> Carry:
        """The ticks of a phase."""
        return lax.scan(partial(self.tick, phase=phase), carry, rows)[0]

    def of_layers(self, carry: Carry) -> Tree:
        """The gradients of the layers' parameters, after the last tick."""
        return carry.gradients.of_layers

    # -- one tick ---------------------------------------------------------------------------------

    def tick(self, carry: Carry, op: Tick, *, phase: Phase):
        y = carry.messages.dx
        if phase.forward:
            carry, y = self.forward_half(carry, op)
        if phase.backward:
            carry = self.backward_half(carry, op, y)
        elif self.stage.offload and op.coming is not None:
            stash = carry.stash
            ahead = self.stage.offload.fetch(op.coming, stash.layers, stash.left)
            carry = carry._replace(stash=stash._replace(ahead=ahead))
        if phase.weight and op.weight is not None:
            carry = self.weight_half(carry, op.weight, op.scatter[1])
        return carry, None

    def forward_half(self, carry: Carry, op: Tick):
        """(carry, the stream after F)"""
        messages, stash = carry.messages, carry.stash
        weights = self.weights.all_gather(carry.weights[0], op.gather, op.forward.chunk)
        with jax.named_scope("F"):
            receives = self.deliver(messages.receives, messages.x, op.receives)
            entered = self.embed(op)

            def compute(forward, weights, layers, caches, left):
                x = self.input(op, entered, receives, messages.x)
                if self.layout.stash == "inputs":
                    layers = write(layers, x, forward.slot)
                    y, caches = self.stage.forward_only(forward, weights, x, caches)
                    return y, layers, caches, None
                return self.stage.forward(forward, weights, x, layers, caches, left)

            y, layers, caches, left = self.unless_idle(
                "forward",
                op.forward,
                compute,
                lambda forward, weights, *kept: (self.zeros(), *kept),
                op.forward,
                self.weights.gathered(weights),
                stash.layers,
                stash.caches,
                stash.left,
            )
        with jax.named_scope("send_x"):
            messages = messages._replace(x=self.send(y, self.schedule.receives), receives=receives)
        if self.schedule.outputs.slots:
            messages = messages._replace(outputs=write(messages.outputs, y, op.output))
        carry = carry._replace(
            messages=messages, stash=stash._replace(layers=layers, caches=caches, left=left),
            weights=(weights, carry.weights[1]),
        )  # fmt: skip
        return carry, y

    def backward_half(self, carry: Carry, op: Tick, y: Stream) -> Carry:
        with jax.named_scope("send_dx"):
            arrived = self.send(carry.messages.dx, self.schedule.gradient_receives)
        if self.schedule.outputs.slots:
            y = read(carry.messages.outputs, op.head_input)
        with jax.named_scope("head"):
            carry, dy = self.head(carry, op, y)
        with jax.named_scope("B"):
            carry, dx = self.backward_op(carry, op, arrived, dy)
        with jax.named_scope("embed_backward"):
            shared = self.embed_backward(carry.gradients.shared, op, dx)
        return carry._replace(gradients=carry.gradients._replace(shared=shared))

    def weight_half(self, carry: Carry, op: Op, scatter: jax.Array) -> Carry:
        with jax.named_scope("W"):
            of_w = self.unless_idle(
                "weight",
                op,
                self.stage.weight,
                lambda op, deferred, gradients: gradients,
                op,
                carry.stash.deferred,
                carry.gradients.of_w,
            )
        of_w, reduced = self.weights.reduce_scatter(
            of_w, carry.gradients.reduced, scatter, op.chunk
        )
        return carry._replace(gradients=carry.gradients._replace(of_w=of_w, reduced=reduced))

    def send(self, stream: Stream, routes: tuple[Route, ...]) -> tuple[Stream, ...]:
        """What arrives on each route. Where all tensor ranks hold the same, each sends its part of
        the sequence (SC'21's scatter/gather optimisation, section 4.1)."""
        whole = self.axes.tensor and not self.axes.sequence_parallel

        def send(x_BsD, by: int):
            split = self.axes.tensor if whole and x_BsD.shape[1] % self.layout.tensor == 0 else None
            part = shard_of_sequence(x_BsD, split)
            return all_gather_sequence(shift(part, self.axes.pipe, by=by), split)

        return tuple(
            jax.tree.map(lambda a, by=route.by: send(a, by), stream) if route.by else stream
            for route in routes
        )

    def deliver(self, rings, arrived, receives: tuple[Receive, ...]):
        """The rings with what has arrived."""
        each = zip(rings, arrived, receives, strict=True)
        return tuple(
            None if ring is None else write(ring, stream, receive.arrives)
            for ring, stream, receive in each
        )

    def take(self, rings, arrived, receives: tuple[Receive, ...]) -> Stream:
        """What this tick uses, out of a ring or as it has just arrived."""
        if not arrived:  # one chunk: there is nobody to receive from
            return self.zeros()
        each = zip(rings, arrived, receives, strict=True)
        value, *others = (
            stream if ring is None else read(ring, receive.uses) for ring, stream, receive in each
        )
        for other, receive in zip(others, receives[1:]):
            value = where(receive.used, other, value)
        return value

    def embed(self, op: Tick) -> Stream:
        """The embedding of the microbatch that enters the pipeline in this tick, on every stage."""

        def embed(item):
            return self.model.embed(self.shared, self.batch_of(item), self.context(item, IDLE))

        with jax.named_scope("embed"):
            return lax.cond(op.embed != IDLE, embed, lambda _: self.zeros(), op.embed)

    def input(self, op: Tick, entered: Stream, receives, arrived) -> Stream:
        """The input of F: the embedding on virtual stage 0, what has arrived elsewhere."""
        is_input = self.holds_first & (op.forward.chunk == self.first_chunk)
        return where(is_input, entered, self.take(receives, arrived, op.receives))

    def last_output(self, y: Stream) -> Stream:
        """The last virtual stage's, on every stage."""
        return jax.tree.map(lambda a: broadcast_from(a, self.holds_last, self.axes.pipe), y)

    def head(self, carry: Carry, op: Tick, y: Stream, *, sent=False) -> tuple[Carry, Stream]:
        """(carry with the loss and its gradients of embedding and head added, dy). sent: y is the
        last virtual stage's already."""

        def compute(sums, y):
            y = y if sent else self.last_output(y)
            batch = self.batch_of(op.head)
            return add_gradients(self.model, self.shared, y, batch, self.loss_weight, sums)

        def idle(sums, y):
            return sums, jax.tree.map(jnp.zeros_like, y)

        gradients = carry.gradients
        sums = carry.losses, gradients.shared
        (losses, shared), dy = lax.cond(op.head != IDLE, compute, idle, sums, y)
        return carry._replace(losses=losses, gradients=gradients._replace(shared=shared)), dy

    def backward_op(self, carry: Carry, tick: Tick, arrived, dy: Stream) -> tuple[Carry, Stream]:
        """(carry, dx). dy: that of the last virtual stage, from the head."""
        op, stash, gradients = tick.backward, carry.stash, carry.gradients
        rings = self.deliver(carry.messages.gradient_receives, arrived, tick.gradient_receives)

        def compute(op, weights, layers, caches, kept, left):
            is_output = self.holds_last & (op.chunk == self.last_chunk)
            d = where(is_output, dy, self.take(rings, arrived, tick.gradient_receives))
            d = self.nothing_where_idle(op, d)
            if self.layout.stash == "inputs":
                one = op._replace(slot=jnp.zeros((), jnp.int32))
                x, ring = read(layers, op.slot), self.stage.stash(1)
                _, layers, *_ = self.stage.forward(one, weights, x, ring, caches, extend=False)
                op = one
            return self.stage.backward(op, weights, d, layers, caches, kept, left, tick.coming)

        def idle(op, weights, layers, caches, kept, left):
            if (offload := self.stage.offload) and tick.coming is not None:
                kept = kept._replace(ahead=offload.fetch(tick.coming, layers, left))
            return self.zeros(), kept

        weights = self.weights.all_gather(carry.weights[1], tick.gather_back, op.chunk)
        ahead = stash.ahead
        if self.stage.offload:
            ahead = self.stage.offload.just_left(op, stash.left, ahead)
        dx, kept = self.unless_idle(
            "backward",
            op,
            compute,
            idle,
            op,
            self.weights.gathered(weights),
            stash.layers,
            stash.caches,
            Kept(gradients.of_b, stash.deferred, stash.dcaches, ahead),
            stash.left,
        )
        of_b, reduced = self.weights.reduce_scatter(
            kept.gradients, gradients.reduced, tick.scatter[0], op.chunk
        )
        carry = carry._replace(
            messages=carry.messages._replace(dx=dx, gradient_receives=rings),
            stash=stash._replace(deferred=kept.deferred, dcaches=kept.dcaches, ahead=kept.ahead),
            weights=(carry.weights[0], weights),
            gradients=gradients._replace(of_b=of_b, reduced=reduced),
        )
        return carry, dx

    def nothing_where_idle(self, op: Op, d: Stream) -> Stream:
        """An idle B that is not skipped computes, with a gradient of zero."""
        if self.layout.idle == "skip":
            return d
        return jax.tree.map(lambda a: a * op.busy.astype(a.dtype), d)

    def dx_of_first(self, dx: Stream) -> Stream:
        """The first virtual stage's, on every stage."""
        return jax.tree.map(lambda a: broadcast_from(a, self.holds_first, self.axes.pipe), dx)

    def embed_backward(self, total: Tree, op: Tick, dx: Stream, *, sent=False) -> Tree:
        """`total` with the gradients of virtual stage 0's embedding added. sent: dx is that of
        virtual stage 0 already."""

        def compute(total, dx):
            dx = dx if sent else self.dx_of_first(dx)
            item = op.embed_backward
            batch, context = self.batch_of(item), self.context(item, IDLE)

            def embed(trained):
                return self.model.embed(with_chosen(self.shared, trained), batch, context)

            _, vjp = jax.vjp(embed, self.of_trained(self.shared))
            return add_up(total, vjp(dx)[0])

        if not jax.tree.leaves(self.trained["embed"]).count(True):
            return total
        return lax.cond(op.embed_backward != IDLE, compute, lambda kept, _: kept, total, dx)

    def unless_idle(self, half: str, op: Op, compute: Callable, idle: Callable, *args):
        """Without a conditional where none is idle: XLA may copy what that changes."""
        run = self.by_chunk(compute)
        if self.layout.idle == "skip" and not getattr(self.schedule, half).busy.all():
            return lax.cond(op.busy, run, idle, *args)
        return run(*args)

    @property
    def in_branches(self) -> bool:
        """Whether each chunk has a branch, whose offsets into weights and gradients then are
        constants: XLA:GPU adds gradients in place at no others."""
        whole = self.layout.zero == 1
        return self.axes.in_place and whole and self.schedule.virtual > 1

    def by_chunk(self, compute: Callable) -> Callable:
        if not self.in_branches:
            return compute

        def run(op, *args):
            chunks = range(self.schedule.virtual)
            branches = [partial(compute, op._replace(held=chunk)) for chunk in chunks]
            with jax.named_scope("chunk"):
                return lax.switch(op.held, branches, *args)

        return run
