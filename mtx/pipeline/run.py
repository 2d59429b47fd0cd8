"""A tick of a pipeline on this stage.

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

from mtx.pipeline.call import Call
from mtx.pipeline.carry import Carry
from mtx.pipeline.head import add_gradients
from mtx.pipeline.model import Stream
from mtx.pipeline.own import Kept
from mtx.pipeline.slots import read, write
from mtx.pipeline.ticks import Op, Receive, Tick
from mtx.pipeline.trees import add_up, where
from mtx.schedules.schedule import IDLE, Phase, Route
from mtx.sharding.collectives import (
    all_gather_sequence,
    broadcast_from,
    shard_of_sequence,
    shift,
)
from mtx.sharding.parameter import with_chosen

Tree = Any


class Run(Call):
    """One call of a pipeline and its tick, while they are traced."""

    def scan(self, carry: Carry, rows: Tick, phase: Phase) -> Carry:
        """The ticks of a phase."""
        return lax.scan(partial(self.tick, phase=phase), carry, rows)[0]

    def of_layers(self, carry: Carry) -> Tree:
        """The gradients of the layers' parameters, after the last tick."""
        return carry.gradients.of_layers

    def finish(self, carry: Carry) -> Carry:
        """What is left to do after the last tick."""
        return carry

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
                x = self.input(op.forward, entered, receives, messages.x, op.receives)
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
            shared = self.embed_backward(carry.gradients.shared, op.embed_backward, dx)
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
        """Send a stream on each route; returns what arrives. If all tensor ranks hold the same,
        each sends its part of the sequence (SC'21's scatter/gather optimisation, section 4.1)."""
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
        """The rings with what has arrived written to them."""
        each = zip(rings, arrived, receives, strict=True)
        return tuple(
            None if ring is None else write(ring, stream, receive.arrives)
            for ring, stream, receive in each
        )

    def take(self, rings, arrived, receives: tuple[Receive, ...]) -> Stream:
        """The input that this tick uses, out of a ring or as it has just arrived."""
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

    def input(self, op: Op, entered: Stream, rings, arrived, receives) -> Stream:
        """The input of an F: the embedding on virtual stage 0, what has arrived on all others."""
        is_input = self.holds_first & (op.chunk == self.first_chunk)
        return where(is_input, entered, self.take(rings, arrived, receives))

    def last_output(self, y: Stream) -> Stream:
        """The last virtual stage's output, on every stage."""
        return jax.tree.map(lambda a: broadcast_from(a, self.holds_last, self.axes.pipe), y)

    def head(self, carry: Carry, op: Tick, y: Stream) -> tuple[Carry, Stream]:
        """(carry with the loss and its gradients of embedding and head added, dy)"""

        def compute(sums, y):
            return self.add_gradients(sums, self.last_output(y), op.head)

        def idle(sums, y):
            return sums, jax.tree.map(jnp.zeros_like, y)

        gradients = carry.gradients
        sums = carry.losses, gradients.shared
        (losses, shared), dy = lax.cond(op.head != IDLE, compute, idle, sums, y)
        return carry._replace(losses=losses, gradients=gradients._replace(shared=shared)), dy

    def add_gradients(self, sums: tuple, y: Stream, item):
        batch = self.batch_of(item)
        return add_gradients(self.model, self.shared, y, batch, self.loss_weight, sums)

    def backward_op(self, carry: Carry, tick: Tick, arrived, dy: Stream) -> tuple[Carry, Stream]:
        """(carry, dx). dy: the gradient of the last virtual stage's output, from the head."""
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
        """`d`, but zero for an idle B that is computed instead of skipped."""
        if self.layout.idle == "skip":
            return d
        return jax.tree.map(lambda a: a * op.busy.astype(a.dtype), d)

    def dx_of_first(self, dx: Stream) -> Stream:
        """The first virtual stage's dx, on every stage."""
        return jax.tree.map(lambda a: broadcast_from(a, self.holds_first, self.axes.pipe), dx)

    def embed_backward(self, total: Tree, item, dx: Stream) -> Tree:
        """`total` plus the gradients of an item's embedding, from dx of virtual stage 0; unchanged
        for IDLE."""

        def compute(total, dx):
            return add_up(total, self.embedding_gradients(self.dx_of_first(dx), item))

        if not self.trains_embedding:
            return total
        return lax.cond(item != IDLE, compute, lambda kept, _: kept, total, dx)

    @property
    def trains_embedding(self) -> bool:
        return any(jax.tree.leaves(self.trained["embed"]))

    def embedding_gradients(self, dx: Stream, item) -> Tree:
        """The gradients of an item's embedding for the trained parameters of embedding and head."""
        batch, context = self.batch_of(item), self.context(item, IDLE)

        def embed(trained):
            return self.model.embed(with_chosen(self.shared, trained), batch, context)

        _, vjp = jax.vjp(embed, self.of_trained(self.shared))
        return vjp(dx)[0]

    def unless_idle(self, half: str, op: Op, compute: Callable, idle: Callable, *args):
        """Run `compute`, or `idle` if the stage sits this half out. If no stage ever does, there is
        no conditional, because XLA may copy what one changes."""
        run = self.by_chunk(compute)
        if self.layout.idle == "skip" and not getattr(self.schedule, half).busy.all():
            return lax.cond(op.busy, run, idle, *args)
        return run(*args)

    @property
    def in_branches(self) -> bool:
        """Whether each chunk has a branch of its own, so that its offsets into weights and
        gradients are constants: XLA:GPU adds gradients in place at no other offsets."""
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
