"""The layers of a chunk's F and of another chunk's B, in one loop, each pair of layers woven.

F goes through layer n while B goes through layer N - 1 - n (`mtx.pipeline.turns`, also if chunks
differ). F's layer n + 1, up to its first gather, is computed beside layer n. If all chunks begin
with the same kind of layer, B's last layer leaves the matmuls of its weight gradients for later,
beside what the tick sends, except for those that lie beside what it scatters last
(`mtx.pipeline.shares`).

Legend: C chunks · N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.costs import is_nested
from mtx.pipeline.shares import Division, Share
from mtx.pipeline.slots import add, read, write
from mtx.pipeline.stage import Stage
from mtx.pipeline.strands import KindStrands
from mtx.pipeline.ticks import Op
from mtx.pipeline.transfers import Cargo
from mtx.pipeline.turns import At, Kinds, Turn, Turns
from mtx.pipeline.weave import Braid
from mtx.strand import Strand, variables_of
from mtx.vjp import Arrays

Tree = Any


class Side(NamedTuple):
    """F or B of a tick."""

    op: Op
    params: Tree  # {kind: leaves [C, N, ...]}
    held: Any  # int32 []: the place of its chunk in them
    stream: Tree  # what enters its first layer
    ahead: Arrays | None = None  # F: what has been computed of that layer; None: nothing yet


class Kept(NamedTuple):
    """What F and B change besides their streams; {kind: ...} each."""

    rings: Tree  # [R, N, ...] residuals
    gradients: Tree  # [C, N, ...] float32, None for those that W makes
    deferred: Tree  # [R, N, ...]; None if W is not split
    moved: Any = None  # buckets of a cargo


@dataclass(frozen=True, kw_only=True)
class WovenLayers:
    """The layers of a chunk of F and of a chunk of B, in one loop."""

    stage: Stage
    sides: Mapping[str, KindStrands]  # of each kind of layer
    forward: Kinds  # of F's chunk
    backward: Kinds
    split: bool
    cuts: bool  # whether B's last layer leaves the matmuls of its weight gradients for later
    beside: bool  # whether they lie beside B's own collectives if there is no F

    # -- one tick ---------------------------------------------------------------------------------

    def run(self, f: Side | None, b: Side | None, kept: Kept, cargo: Cargo | None = None) -> tuple:
        """(y, dx, kept, what waits for the weight gradients of B's last layer, what is left of F's
        `ahead`) after F of one chunk and B of another, or one of the two. cargo: one of its buckets
        moves beside each layer."""
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stage.stream)
        if f is None and b is None:
            if cargo is not None:

                def move(n, moved):
                    return cargo.write(moved, cargo.move(cargo.read(n)), n)

                pairs = Turns(self.forward, self.backward).pairs
                kept = kept._replace(moved=lax.fori_loop(0, pairs, move, kept.moved))
            return nothing, nothing, kept, (), ()
        x, d = (nothing if side is None else side.stream for side in (f, b))
        turns = Turns(self.forward if f else (), self.backward if b else ())
        braid, of_f, of_b = Braid(), [], []
        if f is not None and f.ahead is not None:
            of_f = braid.given(f.ahead)
        elif f is not None and self.forward:
            of_f = self._ahead(braid, f, self.forward[0], 0, 0, f.stream)
        if b and self.backward:
            kind, n = self.backward[-1], len(self.backward) - 1
            of_b = self._ahead_back(braid, b, kind, n, self.backward.count(kind) - 1)
        braid.run()
        carry = (x, tuple(braid.read(of_f)), d, tuple(braid.read(of_b)), kept)

        def pair(turn: Turn, at_f: At, at_b: At, carry):
            compute = partial(self.pair, f, b, turn, at_f, at_b)
            is_last = turn.following is None and turn.preceding is None
            return self._beside(cargo, at_f.layer, carry, compute, is_last)

        (x, ahead, d, _, kept), waits = turns.run(pair, carry)
        return x, d, kept, waits, ahead if f and f.ahead is not None else ()

    def _beside(
        self, cargo: Cargo | None, n, carry: tuple, pair: Callable, is_last: bool
    ) -> tuple:  # fmt: skip
        """What `pair` makes of the carry, with a bucket of the cargo moved beside it. The bucket
        begins right before the pair, not earlier, because it would hold up the one under way; it is
        written after the pair or, if that is the last, whenever it has arrived. Gradients are not
        tied to it: nothing may come right after those that matmuls add in place."""
        if cargo is None:
            return pair(carry)
        x, ahead, d, *others = carry
        bucket, x, d = lax.optimization_barrier((cargo.read(n), x, d))
        bucket = cargo.move(bucket)
        (x, ahead, d, ahead_back, kept), waits = pair((x, ahead, d, *others))
        if not is_last:
            bucket, x, d = lax.optimization_barrier((bucket, x, d))
        kept = kept._replace(moved=cargo.write(kept.moved, bucket, n))
        return (x, ahead, d, ahead_back, kept), waits

    def pair(self, f: Side | None, b: Side | None, turn: Turn, at_f: At, at_b: At, carry):
        """(carry, what waits) after a layer of F and one of B."""
        x, ahead, d, ahead_back, (rings, gradients, deferred, moved) = carry
        cut = self.cuts and b is not None and turn.preceding is None
        braid, waits, taken, last = Braid(), (), {}, []
        if f and turn.forward:
            kinds = turn.forward, turn.following
            of_f, of_next = self._of_f(braid, f, *kinds, at_f, (x, ahead))
        if b and turn.backward:
            kind, backward = turn.backward, self.sides[turn.backward]
            if f is None and all(len(ring) == 1 for ring in rings[kind]):
                residuals = braid.parts(rings[kind], b.op.slot, at_b.index)
            else:
                values, ring = backward.take(rings[kind], b.op.slot, at_b.index)
                rings, residuals = rings | {kind: ring}, braid.given(values)
            alone = self.beside and backward.in_place
            strand, given = backward.backward(cut=cut, alone=alone), (residuals, d, ahead_back)
            kinds = kind, turn.preceding
            of_b, of_before = self._of_b(braid, b, *kinds, at_b, given, strand)
            taken[kind] = [None if n in backward.late else r for n, r in enumerate(residuals)]
            made, at = backward.taken(of_b, cut=cut), (b.op.held, at_b.index)
            sums = braid.add_up(gradients[kind], made[0], *at) if alone else None
            last = jax.tree.leaves(made[1] if backward.in_place else made)
        if f and turn.forward:
            x, values = jax.tree.unflatten(self.sides[turn.forward].outputs, of_f)
            index, read_of = (f.op.slot, at_f.index), taken.get(turn.forward)
            of_ring = braid.write(rings[turn.forward], values, *index, taken=read_of, last=cut)
        braid.run(last)
        if b and turn.backward:
            dparams, d, waits = backward.taken(braid.read(of_b), cut=cut)
            if f and turn.forward != kind:
                dparams, d, ring = backward.have_read(dparams, d, rings[kind])
                rings = rings | {kind: ring}
            if sums is None:
                summed = add(gradients[kind], dparams, *at)
            else:
                summed = jax.tree.map(braid.value, sums)
            gradients = gradients | {kind: summed}
            if self.split:
                waiting = write(deferred[kind], waits, b.op.deferred, at_b.index)
                deferred, waits = deferred | {kind: waiting}, ()
            ahead_back = tuple(braid.read(of_before))
        if f and turn.forward:
            x = jax.tree.map(braid.value, x)
            ahead = tuple(braid.read(of_next)) if turn.following else ahead  # the last's remains
            rings = rings | {turn.forward: tuple(braid.read(of_ring))}
        return (x, ahead, d, ahead_back, Kept(rings, gradients, deferred, moved)), waits

    def _of_f(
        self, braid: Braid, f: Side, kind: str, following: str | None, at: At, given: tuple
    ) -> tuple[list, list]:
        """(the numbers of what a layer's F gives, of what is computed ahead of the following one).
        given: the stream, what has been computed ahead."""
        (x, ahead), side = given, self.sides[kind]
        inputs = self._inputs(braid, f, kind, *at[:2], braid.given(jax.tree.leaves(x)))
        of_f, of_next = braid.add(side.rest, [*braid.given(ahead), *inputs], side="F"), []
        if following is not None:
            stream = of_f[: len(jax.tree.leaves(x))]
            of_next = self._ahead(braid, f, following, at.layer + 1, at.next, stream)
        return of_f, of_next

    def _of_b(
        self, braid: Braid, b: Side, kind: str, preceding: str | None, at: At, given: tuple,
        equations: tuple[Strand, frozenset],
    ) -> tuple[list, list]:  # fmt: skip
        """The same for B and the preceding layer. given: the numbers of the residuals, the gradient
        of the stream, what has been computed ahead; equations: `KindStrands.backward`."""
        residuals, d, ahead = given
        inputs = [
            *braid.given(ahead),
            *residuals,
            *self._weights(braid, b, kind, at.index),
            *braid.given(jax.tree.leaves((self._context(b, at.layer), d))),
        ]
        strand, later = equations
        of_b, of_before = braid.add(strand, inputs, side="B", later=later), []
        if preceding is not None:
            of_before = self._ahead_back(braid, b, preceding, at.layer - 1, at.next)
        return of_b, of_before

    def _ahead(self, braid: Braid, f: Side, kind: str, n, index, stream) -> list[int]:
        """The numbers of what is computed ahead of a layer's F; stream: arrays or their numbers."""
        side = self.sides[kind]
        if side.ahead is None:
            return []
        numbers = stream if isinstance(stream, list) else braid.given(jax.tree.leaves(stream))
        inputs = self._inputs(braid, f, kind, n, index, numbers)
        return braid.add(side.ahead, inputs, side="F")

    def ahead(self, f: Side) -> Arrays:
        """What can be computed of F's first layer before there is a B beside it."""
        braid = Braid()
        numbers = self._ahead(braid, f, self.forward[0], 0, 0, f.stream)
        braid.run()
        return tuple(braid.read(numbers))

    def _ahead_back(self, braid: Braid, b: Side, kind: str, m, index) -> list[int]:
        """The same for B, from its parameters alone."""
        side = self.sides[kind]
        if side.ahead_back is None:
            return []
        numbers = self._weights(braid, b, kind, index)
        inputs = braid.given([None] * len(side.ahead_back.invars))
        first = len(side.vjp.residuals)
        inputs[first : first + len(numbers)] = numbers
        return braid.add(side.ahead_back, inputs, side="B")

    @property
    def division(self) -> Division:
        """Where the weight gradients of B's last layer lie."""
        return self.sides[self.backward[0]].division

    @property
    def has_plain_weights(self) -> bool:
        """Whether the weight gradients that wait are made without loops."""
        return not any(map(is_nested, self.division.cut.w.eqns))

    def last_weights(self, op: Op, waits: Arrays, gradients: list, *, part: int) -> list:
        """Gradients, one for each share in a part, plus these shares, made from what B has left."""
        braid, (shares, strand) = Braid(), self.division.part(part)
        made = braid.add(strand, braid.given(waits), side="B")
        braid.run()
        return self.added(gradients, braid.read(made), op, shares)

    @staticmethod
    def added(gradients: list, values: Sequence, op: Op, shares: Sequence[Share]) -> list:
        return [
            add(gradient, value, op.held, 0, share.row)
            for gradient, value, share in zip(gradients, values, shares, strict=True)
        ]

    def weights_with_loops(self, waits: Arrays, *, part: int) -> tuple[Arrays, Callable]:
        """The shares in a part by themselves: (what is computed before any loop, a function from
        that to the shares)"""
        (_, strand), late = self.division.part(part), set()
        for eqn in strand.eqns:
            if is_nested(eqn) or late.intersection(variables_of(eqn.invars)):
                late.update(eqn.outvars)
        eqns = enumerate(strand.eqns)
        begin, finish = strand.divided({n for n, eqn in eqns if late.isdisjoint(eqn.outvars)})
        return tuple(begin(*waits)), lambda begun: finish(*begun, *waits)

    # -- a layer's arguments ----------------------------------------------------------------------

    def _context(self, side: Side, n):
        """The model's context for the call of a layer."""
        op = side.op
        return self.stage.context(op.item, read(self.stage.tables["layer"], op.chunk, n))

    def _weights(self, braid: Braid, side: Side, kind: str, index) -> list[int]:
        """The numbers of a layer's parameters. Those that a loop reads are read where they lie."""
        return [
            number
            for place, stack in enumerate(jax.tree.leaves(side.params[kind]))
            for number in (
                braid.parts([stack], side.held, index, weights=True)
                if place in self.sides[kind].in_loops
                else braid.given([read(stack, side.held, index)], weights=True)
            )
        ]

    def _inputs(self, braid: Braid, f: Side, kind: str, n, index, stream: list[int]) -> list[int]:
        """The numbers of F's arguments; those of the stream are given."""
        context = braid.given(jax.tree.leaves(self._context(f, n)))
        return [*self._weights(braid, f, kind, index), *stream, *context]
