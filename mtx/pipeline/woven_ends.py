"""The ends of a woven tick: embedding, its gradient and head, and when each of their parts is sent.

Of the microbatch whose F is in tick n the embedding is looked up in tick n - 2 and summed over
`tensor`; over `pipe` in tick n - 1. The gradient that leaves the first stage in tick n goes to all
stages and into the embedding's in tick n + 1. Sums over `pipe` lie beside all layers of a tick;
what goes over `tensor` beside the weight gradients behind them.
"""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.pipeline.carry import Carry, Messages
from mtx.pipeline.ends import Entering, Gathering
from mtx.pipeline.head import added, gradients, is_whole
from mtx.pipeline.model import Stream
from mtx.pipeline.run import Run
from mtx.pipeline.ticks import Tick
from mtx.schedules.schedule import IDLE, Phase
from mtx.vjp import Arrays


class WovenEnds(Run):
    """What woven ticks do beside their layers."""

    @cached_property
    def entering(self) -> Entering:
        def embed(item):
            return self.model.embed(self.shared, self.batch_of(item), self.context(item, IDLE))

        return Entering.of(embed)

    @cached_property
    def leaving(self) -> Gathering:
        """The gradients of an item's embedding, of dx."""
        return Gathering.of(self.embedding_gradients, self.stream)

    @cached_property
    def at_head(self) -> Gathering | None:
        """The losses and gradients of an item, of y; None where some positions are taken at a
        time."""

        def compute(y, item):
            return gradients(self.model, self.shared, y, self.batch_of(item), self.loss_weight)

        whole = is_whole(self.model, self.shared, self.stream)
        return Gathering.of(compute, self.stream) if whole else None

    def stream_of(self, leaves: list) -> Stream:
        return jax.tree.unflatten(jax.tree.structure(self.stream), leaves)

    def beside_layers(self, messages: Messages, op: Tick, phase: Phase):
        """(what is summed of the embedding in the next tick, this device's rows of that in the one
        after, the dx of the last tick on every stage): sums over `pipe`; None where there is
        nothing to be summed."""
        entered, own, left, schedule = None, None, None, self.schedule
        with jax.named_scope("embed"):
            if self.some(schedule.enters(1), phase):
                entered = self.entering.over_pipe(messages.begun, op.embed[0])
            if self.some(schedule.enters(2), phase):
                own = self.entering.of_device(op.embed[1])
        if self.trains_embedding and self.some(schedule.left(1), phase):
            with jax.named_scope("embed_backward"):
                left = self.dx_of_first(messages.left)
        return entered, own, left

    def beside_weights(self, begun: Arrays, own: Arrays | None, left: Stream | None, op: Tick):
        """(what the embedding has begun with, what its gradient begins with), of those rows and of
        that dx: what both send over `tensor`."""
        gathered = None
        if own is not None:
            with jax.named_scope("embed"):
                begun = self.entering.over_tensor(own, op.embed[1])
        if left is not None:
            with jax.named_scope("embed_backward"):
                gathered = self.leaving.begin(left, op.embed_backward)
        return begun, gathered

    def entered(self, summed: Arrays | None, item) -> Stream:
        """What enters, of its sums."""
        if summed is None:
            return self.zeros()
        return self.stream_of(self.entering.whole(summed, item))

    def with_embedding(self, carry: Carry, item, left: Stream, gathered: Arrays) -> Carry:
        """With the gradients of an item's embedding."""

        def compute(total, left, gathered):
            return self.leaving.add_up(total, gathered, left, item)

        shared = carry.gradients.shared
        with jax.named_scope("embed_backward"):
            shared = lax.cond(
                item != IDLE, compute, lambda kept, *_: kept, shared, left, gathered
            )  # fmt: skip
        return carry._replace(gradients=carry.gradients._replace(shared=shared))

    def finish(self, carry: Carry) -> Carry:
        """With the gradients of the embedding that has left in the last tick."""
        last = self.schedule.embed_backward[-1]
        if last == IDLE or not self.trains_embedding:
            return carry
        item = jnp.asarray(last)
        with jax.named_scope("embed_backward"):
            left = self.dx_of_first(carry.messages.left)
            gathered = self.leaving.begin(left, item)
        return self.with_embedding(carry, item, left, gathered)

    def compute_head(self, item, sums: tuple, y: Stream, begun: Arrays):
        if self.at_head is None:
            return self.add_gradients(sums, y, item)
        *made, dy = self.at_head.end(begun, y, item)
        return added(sums, *made), dy

    @staticmethod
    def some(table: np.ndarray, phase: Phase) -> bool:
        """Whether a table of items, int32 [T], has any in a phase."""
        return bool((table[phase.start : phase.stop] != IDLE).any())
