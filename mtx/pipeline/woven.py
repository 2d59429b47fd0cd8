"""A tick whose F and B run side by side, a layer at a time (see `weave` for what lies beside what).

    receive · embed · {F and B of one layer each, woven}, layer after layer · send x and dx ·
    W of the last layer, head and loss, gradient of the embedding

F's and B's microbatches are different ones, and the table (`Schedule.woven`) has the head run a
tick before the B that it feeds, so neither waits for the other. The first gather of a layer's F is
asked for while the layer before it is computed. What is sent has the weight gradients of B's last
layer beside it, all W's where the table splits them from B, and the head.

Legend: B rows · S sequence (s: shard) · C chunks · N layers of a kind in a chunk · R ring slots ·
T ticks · P stages
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.pipeline.carry import Carry
from mtx.pipeline.run import Run, where
from mtx.pipeline.slots import read, write
from mtx.pipeline.ticks import Op, Tick
from mtx.pipeline.woven_layers import Kept, Side, WovenLayers
from mtx.schedules.schedule import IDLE, Phase
from mtx.vjp import Arrays

Tree = Any


class Case(NamedTuple):
    """What a stage may have to do in a tick: F and B, each of a chunk, or IDLE."""

    forward: int
    backward: int


def codes(halves, *, by_chunk: bool, always: bool, wanted: tuple[bool, bool]) -> tuple:
    """For F and for B: 1 + the chunk, or 0 where there is none; of a table's halves, [T, P], or of
    a tick's ops, []. by_chunk: else chunks count as 0. always: what is sat out counts as chunk 0.
    """

    def of(half, is_wanted: bool):
        chunk = 1 + half.chunk * by_chunk
        return chunk * (1 if always else half.busy) * is_wanted

    return of(halves[0], wanted[0]), of(halves[1], wanted[1])


class WovenRun(Run):
    """One call of a pipeline whose ticks are woven."""

    @cached_property
    def layers(self) -> WovenLayers:
        return WovenLayers(stage=self.stage, placement=self.placement, split=self.schedule.split)

    def start(self) -> Carry:
        carry = super().start()
        dx = tuple(self.zeros() for _ in self.schedule.gradient_receives)
        return carry._replace(messages=carry.messages._replace(dx=dx, dy=self.zeros()))

    def tick(self, carry: Carry, op: Tick, *, phase: Phase):
        forward, backward = phase.forward, phase.backward
        messages, weights = carry.messages, self.gather(carry, op, forward, backward)
        receives = self.deliver(messages.receives, messages.x, op.receives)
        returns = self.deliver(messages.gradient_receives, messages.dx, op.gradient_receives)
        entered = self.embed(op) if forward else self.zeros()

        def branch(case: Case, op: Tick, kept: Kept):
            f, b = None, None
            if case.forward != IDLE:
                x = self.input(op, entered, receives, messages.x)
                f = self._side(op.forward, case.forward, weights[0], x)
            if case.backward != IDLE:
                is_output = self.holds_last & (op.backward.chunk == self.last_chunk)
                taken = self.take(returns, messages.dx, op.gradient_receives)
                d = self.nothing_where_idle(op.backward, where(is_output, messages.dy, taken))
                b = self._side(op.backward, case.backward, weights[1], d)
            return self.layers.run(f, b, kept)

        cases, number = self.cases(op, phase)
        with jax.named_scope("woven"):
            y, dx, kept, last = lax.switch(
                number, [partial(branch, case) for case in cases], op,
                Kept(carry.stash.layers, carry.gradients.of_b, carry.stash.deferred),
            )  # fmt: skip
        messages = messages._replace(receives=receives, gradient_receives=returns)
        if forward:
            with jax.named_scope("send_x"):
                messages = messages._replace(x=self.send(y, self.schedule.receives))
        if backward:
            with jax.named_scope("send_dx"):
                sent = self.send(dx, self.schedule.gradient_receives)
                messages = messages._replace(dx=sent)
        if self.schedule.outputs.slots:
            if forward:
                messages = messages._replace(outputs=write(messages.outputs, y, op.output))
            y = read(messages.outputs, op.head_input)
        carry = carry._replace(
            messages=messages, weights=weights,
            stash=carry.stash._replace(layers=kept.rings, deferred=kept.deferred),
            gradients=carry.gradients._replace(of_b=kept.gradients),
        )  # fmt: skip
        return self.beside_sends(carry, op, phase, y, dx, last), None

    def beside_sends(self, carry: Carry, op: Tick, phase: Phase, y, dx, last: Arrays) -> Carry:
        """What a tick's sends have beside them. y, dx: what F and B have made; last: what waits for
        the weight gradients of B's last layer."""
        if phase.backward:
            carry = self.last_weights(carry, op, last)
        if phase.weight and op.weight is not None:
            carry = self.weight_half(carry, op.weight, op.scatter[1])
        if (self.schedule.head[phase.start : phase.stop] != IDLE).any():
            with jax.named_scope("head"):
                carry, dy = self.head(carry, op, y)
            carry = carry._replace(messages=carry.messages._replace(dy=dy))
        if phase.backward:
            gradients = carry.gradients
            with jax.named_scope("embed_backward"):
                shared = self.embed_backward(gradients.shared, op, dx)
            carry = carry._replace(gradients=gradients._replace(shared=shared))
        return carry

    def cases(self, op: Tick, phase: Phase) -> tuple[list[Case], jax.Array]:
        """All that occur in a phase, and the place of this tick's among them, int32 []."""
        of = partial(
            codes, by_chunk=self.in_branches, always=self.layout.idle != "skip",
            wanted=(phase.forward, phase.backward),
        )  # fmt: skip
        table = np.stack(of(self.schedule.halves), axis=-1)[phase.start : phase.stop]
        found = np.unique(table.reshape(-1, 2), axis=0)
        places = np.zeros((self.schedule.virtual + 1,) * 2, np.int32)
        places[*found.T] = np.arange(len(found))
        now = of((op.forward, op.backward))
        return [Case(*row) for row in (found - 1).tolist()], read(jnp.asarray(places), *now)

    def gather(self, carry: Carry, op: Tick, forward: bool, backward: bool) -> tuple:
        """The parameters of F's chunk and of B's."""
        f, b = carry.weights
        if forward:
            with jax.named_scope("F"):
                f = self.weights.all_gather(f, op.gather, op.forward.chunk)
        if backward:
            with jax.named_scope("B"):
                b = self.weights.all_gather(b, op.gather_back, op.backward.chunk)
        return f, b

    def last_weights(self, carry: Carry, op: Tick, waits: Arrays) -> Carry:
        """With the weight gradients of the last layer of this tick's B, where W is not split."""
        of_b, reduced = carry.gradients.of_b, carry.gradients.reduced
        if not self.schedule.split:
            with jax.named_scope("last/W"):
                of_b = self.unless_idle(
                    op.backward, self.layers.last_weights, lambda op, waits, gradients: gradients,
                    op.backward, waits, of_b,
                )  # fmt: skip
        with jax.named_scope("B"):
            of_b, reduced = self.weights.reduce_scatter(
                of_b, reduced, op.scatter[0], op.backward.chunk
            )
        return carry._replace(gradients=carry.gradients._replace(of_b=of_b, reduced=reduced))

    def _side(self, op: Op, chunk: int, gathered: Tree, stream: Tree) -> Side:
        op = op._replace(held=chunk) if self.in_branches else op
        return Side(op, self.weights.gathered(gathered), stream)
