"""The layers of a chunk's F and of another chunk's B, in one loop, each pair of layers woven.

F goes through layer n while B goes through layer N - 1 - n. What F's layer n + 1 does up to its
first gather is computed beside layer n; B's last layer leaves the matmuls of its weight gradients
for later, beside what the tick sends, but for the smallest, beside what it scatters last.

Legend: C chunks · N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.errors import UserError
from mtx.pipeline.slots import add, read, write
from mtx.pipeline.stage import Stage, loop
from mtx.pipeline.ticks import Op
from mtx.pipeline.transfers import Cargo
from mtx.pipeline.weave import Braid, split_ahead, weight_equations
from mtx.schedules.partition import Placement
from mtx.vjp import Arrays, Cut, LayerVJP, Strand, variables_of

Tree = Any


class Side(NamedTuple):
    """F or B of a tick."""

    op: Op
    params: Tree  # {kind: leaves [C, N, ...]}
    held: Any  # int32 []: the place of its chunk in them
    stream: Tree  # what enters its first layer
    ahead: Arrays | None = None  # of F: what has been computed of that layer; None: nothing yet


class Kept(NamedTuple):
    """What F and B change beside their streams; {kind: ...} each."""

    rings: Tree  # [R, N, ...] residuals
    gradients: Tree  # [C, N, ...] float32, None for those that W makes
    deferred: Tree  # [R, N, ...]; None where W is not split
    moved: Any = None  # of a cargo


class Turn(NamedTuple):
    """Layers of a chunk in which F meets the same kinds: n of F with N - 1 - n of B."""

    forward: str  # the kind of F's layer, of F's next one, and of B's
    following: str
    backward: str
    preceding: str  # of B's next one
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
        kinds, back = self.period, self.period[::-1]
        met = zip(kinds, _next(kinds), back, _next(back), strict=True)
        turns, place = [], 0
        for key, group in groupby(met):
            turns.append(Turn(*key, place, len(list(group))))
            place += turns[-1].count
        return turns

    @cached_property
    def sides(self) -> dict[str, KindStrands]:
        in_place = self.stage.shards is None
        return {
            kind: KindStrands(vjp=vjp, split=self.split, in_place=in_place)
            for kind, vjp in self.stage.vjps.items()
        }

    # -- one tick ---------------------------------------------------------------------------------

    def run(self, f: Side | None, b: Side | None, kept: Kept, cargo: Cargo | None = None) -> tuple:
        """(y, dx, kept, what waits for the weight gradients of B's last layer): F of one chunk and
        B of another, or one of the two. cargo: a bucket of it moves beside each layer."""
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stage.stream)
        if f is None and b is None:
            if cargo is not None:

                def move(n, moved):
                    return cargo.write(moved, cargo.bucket(n), n)

                kept = kept._replace(moved=lax.fori_loop(0, self.layers, move, kept.moved))
            return nothing, nothing, kept, ()
        x, d = (nothing if side is None else side.stream for side in (f, b))
        size, braid = len(self.period), Braid()
        repeats, turns = self.layers // size, self.turns()
        of_f = ()
        if f is not None and f.ahead is not None:
            of_f = braid.given(f.ahead)
        elif f is not None:
            of_f = self._ahead(braid, f, turns[0].forward, 0, f.stream)
        of_b = self._ahead_back(braid, b, turns[0].backward, self.layers - 1) if b else ()
        braid.run()
        carry = (x, tuple(braid.read(of_f)), d, tuple(braid.read(of_b)), kept)

        def turn(each: Turn, k, i, carry):
            """One layer of each."""
            n = k * size + each.place + i
            return self._beside(cargo, n, carry, partial(self.pair, f, b, each, n))[0]

        def period(k, carry):
            for each in turns:
                carry = loop(each.count, partial(turn, each, k), carry)
            return carry

        carry = loop(repeats - 1, period, carry)
        *others, last = turns
        for each in others:
            carry = loop(each.count, partial(turn, each, repeats - 1), carry)
        carry = loop(last.count - 1, partial(turn, last, repeats - 1), carry)
        pair = partial(self.pair, f, b, last, self.layers - 1, is_last=True)
        carry, waits = self._beside(cargo, self.layers - 1, carry, pair)
        x, _, d, _, kept = carry
        return x, d, kept, waits

    def _beside(self, cargo: Cargo | None, n, carry: tuple, pair: Callable) -> tuple:
        """What `pair` makes of the carry, with a bucket of the cargo moved beside it: begun before
        and written after it."""
        if cargo is None:
            return pair(carry)
        bucket = cargo.bucket(n)
        (x, ahead, d, ahead_back, kept), waits = pair(carry)
        bucket, x, d, gradients = lax.optimization_barrier((bucket, x, d, kept.gradients))
        kept = kept._replace(gradients=gradients, moved=cargo.write(kept.moved, bucket, n))
        return (x, ahead, d, ahead_back, kept), waits

    def pair(self, f: Side | None, b: Side | None, turn: Turn, n, carry, *, is_last=False):
        """(carry, what waits) after layer n of F and layer N - 1 - n of B."""
        x, ahead, d, ahead_back, kept = carry
        braid, waits, of_next, of_before = Braid(), (), [], []
        cut = is_last and not self.split
        if f is not None:
            forward = self.sides[turn.forward]
            inputs = self._numbers(braid, self._inputs(f, turn.forward, n, x), forward)
            of_f = braid.add(forward.rest, [*braid.given(ahead), *inputs], side="F")
            if not is_last:
                stream = of_f[: len(jax.tree.leaves(x))]
                of_next = self._ahead(braid, f, turn.following, n + 1, stream)
        if b is not None:
            kind, m = turn.backward, self.layers - 1 - n
            backward = self.sides[kind]
            residuals, ring = backward.take(kept.rings[kind], b.op.slot, self._index(kind, m))
            kept = kept._replace(rings=kept.rings | {kind: ring})
            params, given = self._given(b, kind, m)
            inputs = [
                *braid.given(ahead_back),
                *braid.given(residuals),
                *braid.given(jax.tree.leaves(params), weights=True),
                *braid.given(jax.tree.leaves((given, d))),
            ]
            strand, later = backward.backward(cut=cut)
            of_b = braid.add(strand, inputs, side="B", later=later)
            if not is_last:
                of_before = self._ahead_back(braid, b, turn.preceding, m - 1)
        braid.run()
        rings, gradients, deferred, _ = kept
        if b is not None:
            dparams, d, waits = backward.taken(braid.read(of_b), cut=cut)
            if f is not None:
                free = backward.in_place  # where nothing may stand between a gradient and its sum
                of_both = rings[turn.forward], d, *(() if free else (dparams, waits))
                ring, d, *others = lax.optimization_barrier(of_both)
                dparams, waits = (dparams, waits) if free else others
                rings = rings | {turn.forward: ring}
            index = self._index(kind, m)
            gradients = gradients | {kind: add(gradients[kind], dparams, b.op.held, index)}
            if self.split:
                waiting = write(deferred[kind], waits, b.op.deferred, index)
                deferred, waits = deferred | {kind: waiting}, ()
            ahead_back = tuple(braid.read(of_before))
        if f is not None:
            x, residuals = jax.tree.unflatten(forward.outputs, braid.read(of_f))
            ring = write(rings[turn.forward], residuals, f.op.slot, self._index(turn.forward, n))
            rings, ahead = rings | {turn.forward: ring}, tuple(braid.read(of_next))
        kept = kept._replace(rings=rings, gradients=gradients, deferred=deferred)
        return (x, ahead, d, ahead_back, kept), waits

    def _numbers(self, braid: Braid, inputs: list, of: KindStrands) -> list[int]:
        """Of F's inputs."""
        weights = braid.given(inputs[: of.first], weights=True)
        return weights + braid.given(inputs[of.first :])

    def _ahead(self, braid: Braid, f: Side, kind: str, n, stream) -> list[int]:
        """What is computed ahead of a layer's F, of its stream: arrays, or their numbers."""
        side = self.sides[kind]
        if side.ahead is None:
            return []
        inputs = self._numbers(braid, self._inputs(f, kind, n, None), side)
        leaves = jax.tree.leaves(stream)
        numbers = leaves if isinstance(stream, list) else braid.given(leaves)
        return braid.add(side.ahead, side.with_stream(inputs, numbers), side="F")

    def ahead(self, f: Side) -> Arrays:
        """What can be computed of F's first layer before there is a B beside it."""
        braid = Braid()
        numbers = self._ahead(braid, f, self.period[0], 0, f.stream)
        braid.run()
        return tuple(braid.read(numbers))

    def _ahead_back(self, braid: Braid, b: Side, kind: str, m) -> list[int]:
        """The same of B, of its parameters alone."""
        side = self.sides[kind]
        if side.ahead_back is None:
            return []
        params, _ = self._given(b, kind, m)
        numbers = braid.given(jax.tree.leaves(params), weights=True)
        inputs = braid.given([None] * len(side.ahead_back.invars))
        first = len(side.vjp.residuals)
        inputs[first : first + len(numbers)] = numbers
        return braid.add(side.ahead_back, inputs, side="B")

    def last_weights(self, op: Op, waits: Arrays, gradients: Tree, *, first: bool) -> Tree:
        """With weight gradients of a chunk's first layer, of which B is done: the first of those
        that wait, or the others."""
        kind, braid = self.period[0], Braid()
        cut = self.sides[kind].cut
        wanted = [(place == 0) == first for place in range(len(cut.w.outvars))]
        made = iter(braid.add(cut.w.choose(wanted), braid.given(waits), side="B"))
        braid.run()
        values = [braid.read([next(made)])[0] if one else None for one in wanted]
        return gradients | {kind: add(gradients[kind], cut.of_w(values), op.held, 0)}

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
        params = read(side.params[kind], side.held, self._index(kind, n))
        return params, (self.stage.context(op.item, layer),)

    def _inputs(self, side: Side, kind: str, n, stream: Tree) -> list:
        """Leaves of F's arguments; without a stream, its places are None."""
        params, given = self._given(side, kind, n)
        if stream is None:
            leaves = [None] * len(jax.tree.leaves(self.stage.stream))
        else:
            leaves = jax.tree.leaves(stream)
        return [*jax.tree.leaves(params), *leaves, *jax.tree.leaves(given)]


def _next(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return (*kinds[1:], kinds[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class KindStrands:
    """F and B of a layer of one kind, as equations."""

    vjp: LayerVJP
    split: bool
    in_place: bool  # whether weight gradients are added where they lie

    @property
    def first(self) -> int:
        """Of the stream's leaves among F's inputs."""
        return len(jax.tree.leaves(self.vjp.params))

    @property
    def gradients(self) -> int:
        """How many B gives, of parameters."""
        return len(jax.tree.leaves(self.vjp.gradients))

    @property
    def outputs(self) -> Any:
        """The structure of (stream, residuals)."""
        return jax.tree.structure((self.vjp.output, self.vjp.residuals))

    @cached_property
    def _of_f(self) -> tuple[Strand | None, Strand]:
        return split_ahead(self.vjp.strands[0]) or (None, self.vjp.strands[0])

    @property
    def ahead(self) -> Strand | None:
        """Of F: up to what its first matmul gathers."""
        return self._of_f[0]

    @property
    def rest(self) -> Strand:
        """Of F: takes what `ahead` gives first."""
        return self._of_f[1]

    @cached_property
    def _of_b(self) -> dict[bool, tuple[Strand | None, Strand]]:
        """By whether it is cut: what of B is computed ahead, of parameters alone, and the rest."""
        first = len(self.vjp.residuals)

        def divided(strand: Strand) -> tuple[Strand | None, Strand]:
            there = slice(first, first + self.first)
            late = [v for v in strand.invars if v not in strand.invars[there]]
            return split_ahead(strand, late) or (None, strand)

        return {True: divided(self.cut.b), False: divided(self.vjp.strands[1])}

    @property
    def ahead_back(self) -> Strand | None:
        return self._of_b[self.split][0]

    def with_stream(self, inputs: Sequence[int], stream: Sequence[int]) -> list[int]:
        return [*inputs[: self.first], *stream, *inputs[self.first + len(stream) :]]

    def take(self, ring: Arrays, slot, index) -> tuple[Arrays, Arrays]:
        """(residuals, the ring). F writes there as well, and XLA would copy the ring to keep what
        it was: what weight gradients read late, where they are added in place, is read first. (Else
        F writes last, see `WovenLayers.pair`.)"""
        residuals = read(ring, slot, index)
        tied = [
            lax.optimization_barrier(pair) if place in self.late else pair
            for place, pair in enumerate(zip(residuals, ring, strict=True))
        ]
        return tuple(value for value, _ in tied), tuple(whole for _, whole in tied)

    @cached_property
    def late(self) -> set[int]:
        """The residuals that weight gradients read, where they are added in place."""
        if not self.in_place:
            return set()
        strand = self.vjp.strands[1]
        read_by_w = {
            atom
            for place in weight_equations(strand, self.gradients)
            for atom in variables_of(strand.eqns[place].invars)
        }
        residuals = strand.invars[: len(self.vjp.residuals)]
        return {place for place, var in enumerate(residuals) if var in read_by_w}

    @property
    def cut(self) -> Cut:
        """B and W; where W is only the last layer's, it is left no collective."""
        return self.vjp.cut if self.split else self.vjp.cut_behind_collectives

    def backward(self, *, cut: bool) -> tuple[Strand, frozenset]:
        """B, after what is computed ahead, and which of its equations only weight gradients need
        and nothing may lie beside."""
        if self.split or not self.in_place:
            return self._of_b[cut or self.split][1], frozenset()
        return self._of_b[cut][1], self._later[cut]

    @cached_property
    def _later(self) -> dict[bool, frozenset]:
        """By whether B is cut."""
        gradients = {False: self.gradients, True: jax.tree.leaves(self.cut.made_by_w).count(False)}
        return {cut: weight_equations(self._of_b[cut][1], n) for cut, n in gradients.items()}

    def taken(self, values: list, *, cut: bool) -> tuple[Tree, Tree, Arrays]:
        """What B gives: (gradients of the parameters, that of the stream, what waits)"""
        if cut or self.split:
            dparams, others, waits = self.cut.of_b(values)
            return dparams, others[0], waits
        structure = jax.tree.structure((self.vjp.gradients, (self.vjp.stream,)))
        dparams, (dstream,) = structure.unflatten(values)
        return dparams, dstream, ()
