"""Embedding, its gradient and the head in a woven tick, and when each of their parts is sent.

The embedding of the microbatch whose F is in tick n is looked up and summed over `tensor` in tick
n - 2, and summed over `pipe` in tick n - 1. The dx that leaves the first stage in tick n goes to
all stages and into the embedding's gradient in tick n + 1. Sums over `pipe` lie beside all layers
of a tick, what goes over `tensor` beside the weight gradients after them. The head comes between
these: what it gathers and its gradient's sum over `pipe` lie beside them, the sum over `tensor`
beside the head's own weight gradients. The embedding's gradient lies beside what the losses gather,
unless the send of dx needs it.
"""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.pipeline.carry import Carry, Messages
from mtx.pipeline.costs import matmuls_s, send_s
from mtx.pipeline.ends import Entering, Gathering, Leaving
from mtx.pipeline.head import gradients, is_whole
from mtx.pipeline.model import Stream
from mtx.pipeline.run import Run
from mtx.pipeline.shares import Sends, seconds_of
from mtx.pipeline.ticks import Tick
from mtx.schedules.schedule import IDLE, Phase
from mtx.vjp import Arrays


class WovenEnds(Run):
    """What woven ticks do besides their layers."""

    @cached_property
    def entering(self) -> Entering:
        def embed(item):
            return self.model.embed(self.shared, self.batch_of(item), self.context(item, IDLE))

        return Entering.of(embed)

    @cached_property
    def leaving(self) -> Gathering:
        """The gradients of an item's embedding, as a function of dx."""
        return Gathering.of(self.embedding_gradients, self.stream)

    @cached_property
    def at_head(self) -> Leaving | None:
        """The losses and gradients of an item, as a function of y; None if the head takes some
        positions at a time."""

        def compute(y, item):
            return gradients(self.model, self.shared, y, self.batch_of(item), self.loss_weight)

        whole = is_whole(self.model, self.shared, self.stream)
        return Leaving.of(compute, self.stream) if whole else None

    def stream_of(self, leaves: list) -> Stream:
        return jax.tree.unflatten(jax.tree.structure(self.stream), leaves)

    def beside_layers(self, messages: Messages, op: Tick, phase: Phase):
        """(the sum of the embedding that enters in the next tick, this device's rows of the one
        that enters in the tick after, the last tick's dx on every stage). The sums are over `pipe`;
        each is None if there is nothing to be summed."""
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
        """(what the embedding begins with, from those rows; what its gradient begins with, from
        that dx): what both send over `tensor`."""
        gathered = None
        if own is not None:
            with jax.named_scope("embed"):
                begun = self.entering.over_tensor(own, op.embed[1])
        if left is not None:
            with jax.named_scope("embed_backward"):
                gathered = self.leaving.begin(left, op.embed_backward)
        return begun, gathered

    def entered(self, summed: Arrays | None, item) -> Stream:
        """The stream that enters, from its sums."""
        if summed is None:
            return self.zeros()
        return self.stream_of(self.entering.whole(summed, item))

    def with_embedding(
        self, carry: Carry, item, left: Stream | None, gathered: Arrays | None
    ) -> Carry:  # fmt: skip
        """The carry plus the gradients of an item's embedding, if there are any."""
        if left is None or gathered is None:
            return carry

        def compute(total, left, gathered):
            return self.leaving.add_up(total, gathered, left, item)

        shared = carry.gradients.shared
        with jax.named_scope("embed_backward"):
            shared = lax.cond(
                item != IDLE, compute, lambda kept, *_: kept, shared, left, gathered
            )  # fmt: skip
        return carry._replace(gradients=carry.gradients._replace(shared=shared))

    def finish(self, carry: Carry) -> Carry:
        """The carry plus the gradients of the embedding from the dx that left in the last tick."""
        last = self.schedule.embed_backward[-1]
        if last == IDLE or not self.trains_embedding:
            return carry
        item = jnp.asarray(last)
        with jax.named_scope("embed_backward"):
            left = self.dx_of_first(carry.messages.left)
            gathered = self.leaving.begin(left, item)
        return self.with_embedding(carry, item, left, gathered)

    def head_begins(self, y: Stream, item) -> Arrays:
        """y's leaves and, before them, what the head gathers of it, unless it takes y in parts."""
        leaves = tuple(jax.tree.leaves(y))
        if self.at_head is None:
            return leaves
        with jax.named_scope("broadcast"):
            return (*self.at_head.gathers(*leaves, item), *leaves, item)

    @cached_property
    def sent_beside(self) -> Sends:
        """What a tick sends beside the weight gradients of its last layer."""
        embed, leaving = self.entering, self.leaving if self.trains_embedding else None
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.stream))
        send = send_s(size, "pipe") if self.schedule.stages > 1 else 0.0
        over_pipe, over_tensor = (seconds_of(s.eqns) for s in (embed.second, embed.first))
        ends = over_tensor + (seconds_of(leaving.first.eqns) if leaving else 0.0)
        head, gather, computed = self.at_head, 0.0, 0.0
        if head is not None:
            gather, computed = seconds_of(head.gathers.eqns), matmuls_s(head.own.eqns)
        return Sends(
            with_head=(max(ends, over_pipe), gather, over_pipe), without=(ends, send, send),
            heads=1 / self.schedule.virtual, x=send, head=computed,
        )  # fmt: skip

    @cached_property
    def embedding_beside_losses(self) -> bool:
        """Whether the embedding's gradient lies beside what the losses gather: if the head's own
        takes at least nine tenths as long as the longer of the send of dx and what the head
        scatters."""
        head = self.at_head
        if head is None or not seconds_of(head.of_all.eqns):
            return False
        sent_s = max(self.sent_beside.x, seconds_of(head.over_tensor.eqns))
        return matmuls_s(head.early.eqns) >= 0.9 * sent_s

    def losses(self, carry: Carry, given: Arrays, item, left: tuple) -> tuple[Carry, Arrays]:
        """(carry, what the head has given) after what the losses gather and, beside it, the
        gradients of an item's embedding if `embedding_beside_losses`. left: as `with_embedding`
        takes it."""
        if (head := self.at_head) is None:
            return carry, given
        with jax.named_scope("head"):
            given = (*head.losses(*given), *given)
            if self.embedding_beside_losses:
                given, left = lax.optimization_barrier((given, left))
            of_all = tuple(head.of_all(*given))
        if self.embedding_beside_losses:
            carry = self.with_embedding(carry, item, *left)
            shared = carry.gradients.shared
            with jax.named_scope("head"):
                of_all, shared = lax.optimization_barrier((of_all, shared))
            carry = carry._replace(gradients=carry.gradients._replace(shared=shared))
        return carry, (*of_all, *given)

    def own_of_head(self, given: Arrays, beside: tuple) -> tuple[Arrays, tuple]:
        """(what the head has given up to its sums, `beside`), tied: what `beside` sends next comes
        after it, what has been sent has arrived, and the losses' own collective has the links to
        itself. given: from `losses`."""
        if (head := self.at_head) is None:
            return given, beside
        with jax.named_scope("head"):
            own, beside = lax.optimization_barrier((tuple(head.own(*given)), beside))
        return (*own, *head.before_losses(given)), beside

    def through_head(
        self, carry: Carry, item, given: Arrays, sent: tuple
    ) -> tuple[Carry, Arrays, tuple]:
        """(carry plus the losses and gradients that wait for no sum; what the head has given, now
        with the sum over `pipe`, which does not begin before `sent` has arrived; `sent`)"""
        head, sums = self.at_head, (carry.losses, carry.gradients.shared)
        with jax.named_scope("head"):
            if head is None:
                sums, dy = self.add_gradients(sums, self.stream_of(list(given)), item)
                return self._with_sums(carry, sums, dy), (), sent
            summed = tuple(head.over_tensor(*given))
            # In a branch, after which anything may come (`WovenRun.last_weights`).
            sums = lax.cond(item != IDLE, head.with_early, lambda sums, _: sums, sums, given)
            ends = sums, summed, sent, carry.messages.input
            sums, summed, sent, x = lax.optimization_barrier(ends)
            given = (*summed, *given)
            given = (*head.over_pipe(*given), *given)
        carry = carry._replace(messages=carry.messages._replace(input=x))
        return self._with_sums(carry, sums), given, sent

    def behind_head(self, carry: Carry, given: Arrays) -> Carry:
        """The carry plus what has waited for the sum over `pipe`."""
        if self.at_head is None:
            return carry
        with jax.named_scope("head"):
            sums = carry.losses, carry.gradients.shared
            sums, dy = self.at_head.with_late(sums, given)
        return self._with_sums(carry, sums, self.stream_of(dy))

    @staticmethod
    def _with_sums(carry: Carry, sums: tuple, dy: Stream | None = None) -> Carry:
        """sums: of losses and of gradients."""
        losses, shared = sums
        gradients = carry.gradients._replace(shared=shared)
        carry = carry._replace(losses=losses, gradients=gradients)
        return carry if dy is None else carry._replace(messages=carry.messages._replace(dy=dy))

    @staticmethod
    def some(table: np.ndarray, phase: Phase) -> bool:
        """Whether a table of items, int32 [T], has any in a phase."""
        return bool((table[phase.start : phase.stop] != IDLE).any())
