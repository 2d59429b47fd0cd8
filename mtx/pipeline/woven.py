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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.errors import UserError
from mtx.pipeline.carry import Carry
from mtx.pipeline.run import Run, where
from mtx.pipeline.slots import add, read, write
from mtx.pipeline.stage import Stage, loop
from mtx.pipeline.ticks import Op, Tick
from mtx.pipeline.weave import Braid, split_ahead, weight_equations
from mtx.schedules.partition import Placement
from mtx.schedules.schedule import IDLE, Schedule
from mtx.vjp import Arrays, LayerVJP, Strand

Tree = Any


class Case(NamedTuple):
    """What a stage may have to do in a tick: F and B, each of a chunk, or IDLE."""

    forward: int
    backward: int


def cases_of(schedule: Schedule, *, by_chunk: bool) -> tuple[tuple[Case, ...], np.ndarray]:
    """All that occur in a table, and which it is, int32 [T, P]. Chunks count as 0 where the program
    needs no branch for each of them."""

    def of(half):
        return np.where(half.busy, half.chunk if by_chunk else 0, IDLE)

    both = np.stack([of(schedule.forward), of(schedule.backward)], axis=-1)
    cases, index = np.unique(both.reshape(-1, 2), axis=0, return_inverse=True)
    return tuple(Case(*row) for row in cases.tolist()), index.reshape(both.shape[:2])


class WovenRun(Run):
    """One call of a pipeline whose ticks are woven."""

    @cached_property
    def cases(self) -> tuple[tuple[Case, ...], np.ndarray]:
        return cases_of(self.schedule, by_chunk=self.in_branches)

    @cached_property
    def layers(self) -> WovenLayers:
        return WovenLayers(stage=self.stage, placement=self.placement, split=self.schedule.split)

    def start(self) -> Carry:
        carry = super().start()
        dx = tuple(self.zeros() for _ in self.schedule.gradient_receives)
        return carry._replace(messages=carry.messages._replace(dx=dx, dy=self.zeros()))

    def ticks(self) -> tuple[Tick, jax.Array]:
        return super().ticks(), read(jnp.asarray(self.cases[1].T, jnp.int32), self.index)

    def tick(self, carry: Carry, row: tuple[Tick, jax.Array]):
        op, case = row
        messages, weights = carry.messages, self.gather(carry, op)
        receives = self.deliver(messages.receives, messages.x, op.receives)
        returns = self.deliver(messages.gradient_receives, messages.dx, op.gradient_receives)
        entered = self.embed(op)
        start = Kept(carry.stash.layers, carry.gradients.of_b, carry.stash.deferred)

        def branch(case: Case, op: Tick, kept: Kept):
            f, b = None, None
            if case.forward != IDLE:
                x = self.input(op, entered, receives, messages.x)
                f = Side(self._held(op.forward, case.forward), self._of(weights[0]), x)
            if case.backward != IDLE:
                is_output = self.holds_last & (op.backward.chunk == self.last_chunk)
                taken = self.take(returns, messages.dx, op.gradient_receives)
                d = where(is_output, messages.dy, taken)
                b = Side(self._held(op.backward, case.backward), self._of(weights[1]), d)
            return self.layers.run(f, b, kept)

        with jax.named_scope("woven"):
            branches = [partial(branch, case) for case in self.cases[0]]
            y, dx, kept, last = lax.switch(case, branches, op, start)
        with jax.named_scope("send_x"):
            x = self.send(y, self.schedule.receives)
        with jax.named_scope("send_dx"):
            sent = self.send(dx, self.schedule.gradient_receives)
        if self.schedule.outputs.slots:
            outputs = write(messages.outputs, y, op.output)
            messages, y = messages._replace(outputs=outputs), read(outputs, op.head_input)
        carry = carry._replace(
            messages=messages._replace(x=x, dx=sent, receives=receives, gradient_receives=returns),
            stash=carry.stash._replace(layers=kept.rings, deferred=kept.deferred),
            weights=weights,
            gradients=carry.gradients._replace(of_b=kept.gradients),
        )
        if self.schedule.split:
            carry = self.weight_half(carry, op)
        else:
            carry = self.last_weights(carry, op.backward, last)
        gradients = carry.gradients
        of_b, reduced = self.weights.reduce_scatter(
            gradients.of_b, gradients.reduced, op.scatter[0], op.backward.chunk
        )
        carry = carry._replace(gradients=gradients._replace(of_b=of_b, reduced=reduced))
        with jax.named_scope("head"):
            carry, dy = self.head(carry, op, y)
        with jax.named_scope("embed_backward"):
            shared = self.embed_backward(carry.gradients.shared, op, dx)
        carry = carry._replace(
            messages=carry.messages._replace(dy=dy),
            gradients=carry.gradients._replace(shared=shared),
        )
        return carry, None

    def gather(self, carry: Carry, op: Tick) -> tuple:
        """The parameters of F's chunk and of B's."""
        with jax.named_scope("F"):
            f = self.weights.all_gather(carry.weights[0], op.gather, op.forward.chunk)
        with jax.named_scope("B"):
            b = self.weights.all_gather(carry.weights[1], op.gather_back, op.backward.chunk)
        return f, b

    def last_weights(self, carry: Carry, op: Op, waits: Arrays) -> Carry:
        """With the weight gradients of the last layer of this tick's B."""

        def compute(op, waits, gradients):
            return self.layers.last_weights(op, waits, gradients)

        with jax.named_scope("W"):
            of_b = self.unless_idle(
                op, compute, lambda op, waits, gradients: gradients, op, waits, carry.gradients.of_b
            )
        return carry._replace(gradients=carry.gradients._replace(of_b=of_b))

    def _of(self, weights: Tree) -> Tree:
        return self.weights.gathered(weights)

    def _held(self, op: Op, chunk: int) -> Op:
        return op._replace(held=chunk) if self.in_branches else op


class Side(NamedTuple):
    """F or B of a tick."""

    op: Op
    params: Tree  # {kind: leaves [C, N, ...]}
    stream: Tree  # what enters its first layer


class Kept(NamedTuple):
    """What F and B change beside their streams; {kind: ...} each."""

    rings: Tree  # [R, N, ...] residuals
    gradients: Tree  # [C, N, ...] float32, None for those that W makes
    deferred: Tree  # [R, N, ...]; None where W is not split


class Turn(NamedTuple):
    """Layers of a chunk in which F meets the same kinds: n of F with N - 1 - n of B."""

    forward: str  # the kind of F's layer, of the next one, and of B's
    following: str
    backward: str
    place: int  # of F's first, among the period's layers
    count: int


@dataclass(frozen=True, kw_only=True)
class WovenLayers:
    """A chunk's layers, F and B in one loop. Every chunk is a period of kinds, repeated."""

    stage: Stage
    placement: Placement
    split: bool

    @cached_property
    def period(self) -> tuple[str, ...]:
        """Kinds, from the first layer of a chunk on."""
        found = self.placement.period
        if found is None:
            raise UserError(
                "weave='on' needs the same kinds of layers in every chunk; use "
                "stage_layers='even', a pattern of layers that repeats, or weave='off'"
            )
        kinds = tuple(run.kind for run in found.runs for _ in range(run.count))
        return kinds[:1] if len(set(kinds)) == 1 else kinds

    @cached_property
    def layers(self) -> int:
        """N, of all kinds."""
        return self.placement.layer.shape[-1]

    def turns(self) -> list[Turn]:
        """Of one period, F's from its first layer, B's from its last."""
        kinds = self.period
        met = zip(kinds, (*kinds[1:], kinds[0]), reversed(kinds), strict=True)
        turns, place = [], 0
        for key, group in groupby(met):
            turns.append(Turn(*key, place, len(list(group))))
            place += turns[-1].count
        return turns

    @cached_property
    def sides(self) -> dict[str, KindStrands]:
        return {kind: KindStrands.of(vjp, self.split) for kind, vjp in self.stage.vjps.items()}

    # -- one tick ---------------------------------------------------------------------------------

    def run(self, f: Side | None, b: Side | None, kept: Kept) -> tuple:
        """(y, dx, kept, what waits for the weight gradients of B's last layer): F of one chunk and
        B of another, or one of the two."""
        waits = self.zeros_of_last()
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stage.stream)
        if f is None and b is None:
            return nothing, nothing, kept, waits
        x, d = (nothing if side is None else side.stream for side in (f, b))
        ahead = self.ahead(f, self.period[0], 0) if f else ()
        size = len(self.period)
        repeats, turns = self.layers // size, self.turns()
        carry = (x, ahead, d, kept)

        def turn(each: Turn, k, i, carry):
            """One layer of each."""
            carry, _ = self.pair(f, b, each, k * size + each.place + i, carry)
            return carry

        def period(k, carry):
            for each in turns:
                carry = loop(each.count, partial(turn, each, k), carry)
            return carry

        carry = loop(repeats - 1, period, carry)
        *others, last = turns
        for each in others:
            carry = loop(each.count, partial(turn, each, repeats - 1), carry)
        carry = loop(last.count - 1, partial(turn, last, repeats - 1), carry)
        carry, waits = self.pair(f, b, last, self.layers - 1, carry, is_last=True)
        x, _, d, kept = carry
        return x, d, kept, waits if waits else self.zeros_of_last()

    def pair(self, f: Side | None, b: Side | None, turn: Turn, n, carry, *, is_last=False):
        """(carry, what waits) after layer n of F and layer N - 1 - n of B."""
        x, ahead, d, kept = carry
        braid, waits = Braid(), ()
        cut = is_last and not self.split
        if f is not None:
            forward = self.sides[turn.forward]
            inputs = braid.given(self._inputs(f, turn.forward, n, x))
            of_f = braid.add(forward.rest, [*braid.given(ahead), *inputs])
            of_next: list[int] = []
            if not is_last and (following := self.sides[turn.following]).ahead is not None:
                inputs = braid.given(self._inputs(f, turn.following, n + 1, None))
                stream = of_f[: len(jax.tree.leaves(x))]
                of_next = braid.add(following.ahead, following.with_stream(inputs, stream))
        if b is not None:
            kind, m = turn.backward, self.layers - 1 - n
            backward = self.sides[kind]
            residuals = read(kept.rings[kind], b.op.slot, self._index(kind, m))
            params, given = self._given(b, kind, m)
            inputs = braid.given(jax.tree.leaves((residuals, params, given, d)))
            strand, later = backward.backward(cut=cut)
            of_b = braid.add(strand, inputs, later)
        braid.run()
        rings, gradients, deferred = kept
        if b is not None:
            dparams, d, waits = backward.taken(braid.read(of_b), cut=cut)
            index = self._index(kind, m)
            summed = add(gradients[kind], dparams, b.op.held, index)
            gradients = gradients | {kind: summed}
            if self.split:
                waiting = write(deferred[kind], waits, b.op.deferred, index)
                deferred, waits = deferred | {kind: waiting}, ()
        if f is not None:
            x, residuals = jax.tree.unflatten(forward.outputs, braid.read(of_f))
            ring = write(rings[turn.forward], residuals, f.op.slot, self._index(turn.forward, n))
            rings, ahead = rings | {turn.forward: ring}, tuple(braid.read(of_next))
        return (x, ahead, d, Kept(rings, gradients, deferred)), waits

    def ahead(self, f: Side, kind: str, n) -> tuple:
        """What is computed ahead of a layer's F."""
        strand = self.sides[kind].ahead
        return () if strand is None else tuple(strand(*self._inputs(f, kind, n, f.stream)))

    def last_weights(self, op: Op, waits: Arrays, gradients: Tree) -> Tree:
        """With the weight gradients of a chunk's first layer, of which B is done."""
        kind = self.period[0]
        dparams = self.stage.vjps[kind].cut.weight(waits)
        return gradients | {kind: add(gradients[kind], dparams, op.held, 0)}

    def zeros_of_last(self) -> Arrays:
        """What waits, where there is no B."""
        if self.split:
            return ()
        deferred = self.stage.vjps[self.period[0]].cut.deferred
        return tuple(jnp.zeros(a.shape, a.dtype) for a in deferred)

    # -- a layer's arguments ----------------------------------------------------------------------

    def _index(self, kind: str, n):
        """Of layer n among those of its kind."""
        size = len(self.period)
        within = np.cumsum([each == kind for each in self.period]) - 1
        if size == 1:
            return n
        of_kind = self.period.count(kind)
        return n // size * of_kind + jnp.asarray(within, jnp.int32)[n % size]

    def _given(self, side: Side, kind: str, n) -> tuple[Tree, tuple]:
        op = side.op
        layer = read(self.stage.tables["layer"], op.chunk, n)
        params = read(side.params[kind], op.held, self._index(kind, n))
        return params, (self.stage.context(op.item, layer),)

    def _inputs(self, side: Side, kind: str, n, stream: Tree) -> list:
        """Leaves of F's arguments; without a stream, its places are None."""
        params, given = self._given(side, kind, n)
        if stream is None:
            leaves = [None] * len(jax.tree.leaves(self.stage.stream))
        else:
            leaves = jax.tree.leaves(stream)
        return [*jax.tree.leaves(params), *leaves, *jax.tree.leaves(given)]


@dataclass(frozen=True, kw_only=True)
class KindStrands:
    """F and B of a layer of one kind, as equations."""

    vjp: LayerVJP
    ahead: Strand | None  # of F: up to its first gather
    rest: Strand  # takes what that gives first
    outputs: Any  # the structure of (stream, residuals)
    first: int  # of the stream's leaves among F's inputs
    later: frozenset  # of B's equations, those of weight gradients
    split: bool

    @classmethod
    def of(cls, vjp: LayerVJP, split: bool) -> KindStrands:
        forward, backward = vjp.strands
        ahead, rest = split_ahead(forward) or (None, forward)
        weights = len(jax.tree.leaves(vjp.params))
        return cls(
            vjp=vjp, ahead=ahead, rest=rest, first=weights, split=split,
            outputs=jax.tree.structure((vjp.output, vjp.residuals)),
            later=weight_equations(backward, weights),
        )  # fmt: skip

    def with_stream(self, inputs: Sequence[int], stream: Sequence[int]) -> list[int]:
        return [*inputs[: self.first], *stream, *inputs[self.first + len(stream) :]]

    def backward(self, *, cut: bool) -> tuple[Strand, frozenset]:
        """B, and which of its equations only weight gradients need."""
        if cut or self.split:
            return self.vjp.cut.b, frozenset()
        return self.vjp.strands[1], self.later

    def taken(self, values: list, *, cut: bool) -> tuple[Tree, Tree, Arrays]:
        """What B gives: (gradients of the parameters, that of the stream, what waits)"""
        if cut or self.split:
            dparams, others, waits = self.vjp.cut.of_b(values)
            return dparams, others[0], waits
        structure = jax.tree.structure((self.vjp.params, (self.vjp.stream,)))
        dparams, (dstream,) = structure.unflatten(values)
        return dparams, dstream, ()
