"""The layers of a chunk's F and of another chunk's B, in one loop, each pair of layers woven.

F goes through layer n while B goes through layer N - 1 - n. What F's layer n + 1 does up to its
first gather is computed beside layer n; B's last layer leaves the matmuls of its weight gradients
for later, beside what the tick sends.

Legend: C chunks · N layers of a kind in a chunk · R ring slots
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
from jax.extend.core import Literal

from mtx.errors import UserError
from mtx.pipeline.slots import add, read, write
from mtx.pipeline.stage import Stage, loop
from mtx.pipeline.ticks import Op
from mtx.pipeline.weave import Braid, split_ahead, weight_equations
from mtx.schedules.partition import Placement
from mtx.sharding.fp8 import arrays_of
from mtx.vjp import Arrays, Cut, LayerVJP, Strand

Tree = Any


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
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stage.stream)
        if f is None and b is None:
            return nothing, nothing, kept, ()
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
        return x, d, kept, waits

    def pair(self, f: Side | None, b: Side | None, turn: Turn, n, carry, *, is_last=False):
        """(carry, what waits) after layer n of F and layer N - 1 - n of B."""
        x, ahead, d, kept = carry
        braid, waits = Braid(), ()
        cut = is_last and not self.split
        if f is not None:
            forward = self.sides[turn.forward]
            inputs = self._numbers(braid, self._inputs(f, turn.forward, n, x), forward)
            of_f = braid.add(forward.rest, [*braid.given(ahead), *inputs], side="F")
            of_next: list[int] = []
            if not is_last and (following := self.sides[turn.following]).ahead is not None:
                inputs = self._inputs(f, turn.following, n + 1, None)
                inputs = self._numbers(braid, inputs, following)
                stream = of_f[: len(jax.tree.leaves(x))]
                of_next = braid.add(
                    following.ahead, following.with_stream(inputs, stream), side="F"
                )
        if b is not None:
            kind, m = turn.backward, self.layers - 1 - n
            backward = self.sides[kind]
            residuals, ring = backward.take(kept.rings[kind], b.op.slot, self._index(kind, m))
            kept = kept._replace(rings=kept.rings | {kind: ring})
            params, given = self._given(b, kind, m)
            inputs = [
                *braid.given(residuals),
                *braid.given(jax.tree.leaves(params), weights=True),
                *braid.given(jax.tree.leaves((given, d))),
            ]
            strand, later = backward.backward(cut=cut)
            of_b = braid.add(strand, inputs, side="B", later=later)
        braid.run()
        rings, gradients, deferred = kept
        if b is not None:
            dparams, d, waits = backward.taken(braid.read(of_b), cut=cut)
            index = self._index(kind, m)
            gradients = gradients | {kind: add(gradients[kind], dparams, b.op.held, index)}
            if self.split:
                waiting = write(deferred[kind], waits, b.op.deferred, index)
                deferred, waits = deferred | {kind: waiting}, ()
        if f is not None:
            x, residuals = jax.tree.unflatten(forward.outputs, braid.read(of_f))
            ring = write(rings[turn.forward], residuals, f.op.slot, self._index(turn.forward, n))
            rings, ahead = rings | {turn.forward: ring}, tuple(braid.read(of_next))
        return (x, ahead, d, Kept(rings, gradients, deferred)), waits

    def _numbers(self, braid: Braid, inputs: list, of: KindStrands) -> list[int]:
        """Of F's inputs."""
        weights = braid.given(inputs[: of.first], weights=True)
        return weights + braid.given(inputs[of.first :])

    def ahead(self, f: Side, kind: str, n) -> tuple:
        """What is computed ahead of a layer's F."""
        strand = self.sides[kind].ahead
        return () if strand is None else tuple(strand(*self._inputs(f, kind, n, f.stream)))

    def last_weights(self, op: Op, waits: Arrays, gradients: Tree) -> Tree:
        """With the weight gradients of a chunk's first layer, of which B is done."""
        kind = self.period[0]
        dparams = self.sides[kind].cut.weight(waits)
        return gradients | {kind: add(gradients[kind], dparams, op.held, 0)}

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


@dataclass(frozen=True, kw_only=True, eq=False)
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
        weights, gradients = (len(jax.tree.leaves(a)) for a in (vjp.params, arrays_of(vjp.params)))
        return cls(
            vjp=vjp, ahead=ahead, rest=rest, first=weights, split=split,
            outputs=jax.tree.structure((vjp.output, vjp.residuals)),
            later=weight_equations(backward, gradients),
        )  # fmt: skip

    def with_stream(self, inputs: Sequence[int], stream: Sequence[int]) -> list[int]:
        return [*inputs[: self.first], *stream, *inputs[self.first + len(stream) :]]

    def take(self, ring: Arrays, slot, index) -> tuple[Arrays, Arrays]:
        """(residuals, the ring), of which those that weight gradients read are read before F
        writes: they come late, and XLA would copy the ring to keep what it was."""
        residuals = read(ring, slot, index)
        tied = [
            lax.optimization_barrier(pair) if place in self.late else pair
            for place, pair in enumerate(zip(residuals, ring, strict=True))
        ]
        return tuple(value for value, _ in tied), tuple(whole for _, whole in tied)

    @cached_property
    def late(self) -> set[int]:
        """The residuals that weight gradients read."""
        backward = self.vjp.strands[1]
        read_by_w = {
            atom
            for place in self.later
            for atom in backward.eqns[place].invars
            if not isinstance(atom, Literal)
        }
        residuals = backward.invars[: len(self.vjp.residuals)]
        return {place for place, var in enumerate(residuals) if var in read_by_w}

    @property
    def cut(self) -> Cut:
        """B and W; where W is only the last layer's, it is left no collective."""
        return self.vjp.cut if self.split else self.vjp.cut_behind_collectives

    def backward(self, *, cut: bool) -> tuple[Strand, frozenset]:
        """B, and which of its equations only weight gradients need."""
        if cut or self.split:
            return self.cut.b, frozenset()
        return self.vjp.strands[1], self.later

    def taken(self, values: list, *, cut: bool) -> tuple[Tree, Tree, Arrays]:
        """What B gives: (gradients of the parameters, that of the stream, what waits)"""
        if cut or self.split:
            dparams, others, waits = self.cut.of_b(values)
            return dparams, others[0], waits
        structure = jax.tree.structure((arrays_of(self.vjp.params), (self.vjp.stream,)))
        dparams, (dstream,) = structure.unflatten(values)
        return dparams, dstream, ()
