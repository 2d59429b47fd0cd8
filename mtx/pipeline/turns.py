"""Run a chunk layer by layer, with loops where layers repeat; and, if a tick runs F and B side by
side, pair the layers of F's chunk with those of B's.

F goes from its chunk's first layer to its last, B from its chunk's last to its first. Pairs of the
same kinds that lead to the same kinds are one loop, and so is a sequence of several kinds that
repeats. If the chunks differ in length, the last layers of the longer one are by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from mtx.schedules.partition import KindRun, Period
from mtx.schedules.stretches import stretches

Kinds = tuple[str, ...]
_Side = tuple[str | None, ...]  # None once there are no layers left


class Turn(NamedTuple):
    """Pairs that are alike: the kinds of their layers, None if F, or B, has none left."""

    forward: str | None
    following: str | None  # of F's next layer
    backward: str | None
    preceding: str | None  # of the layer before B's
    place: int  # of the first pair
    count: int
    period: int  # the number of pairs after which it repeats; 0: it does not


class At(NamedTuple):
    """A layer of F or of B."""

    layer: Any  # among its chunk's
    index: Any  # among those of its kind
    next: Any  # the index of the layer that comes after it


@dataclass(frozen=True)
class Turns:
    """The kinds of the layers of a chunk of F and of one of B, from the first layer on."""

    forward: Kinds
    backward: Kinds

    @property
    def pairs(self) -> int:
        return max(len(self.forward), len(self.backward))

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        """The kinds of F's and of B's layers, pair by pair."""
        forward, back = (
            (*kinds, *(None,) * (self.pairs - len(kinds)))
            for kinds in (self.forward, self.backward[::-1])
        )
        return forward, back

    @cached_property
    def in_turn(self) -> list[tuple[list[Turn], int]]:
        """(turns, how often they repeat), one after the other. No loop is inside another: there XLA
        would add some gradients in a separate pass."""
        forward, back = self._sides
        met = [*zip(forward, (*forward, None)[1:], back, (*back, None)[1:], strict=True)]
        found = []
        for runs, times, size in ((s.runs, s.times, s.size) for s in stretches(met, nested=False)):
            period = size if times > 1 else 0
            found.append(([Turn(*met[run.place], *run, period) for run in runs], times))
        return found

    def at(self, turn: Turn, n, i) -> tuple[At, At]:
        """The layers of F and of B in pair i of a turn, the nth time that it comes."""
        forward, back = self._sides
        pair = n * turn.period + turn.place + i
        f = At(
            pair,
            _index(forward, turn.forward, turn, n, i),
            _after(forward, turn.forward, turn.following, turn, n, i),
        )
        of_b, before = (self.backward.count(kind) - 1 for kind in (turn.backward, turn.preceding))
        b = At(
            len(self.backward) - 1 - pair,
            of_b - _index(back, turn.backward, turn, n, i),
            before - _after(back, turn.backward, turn.preceding, turn, n, i),
        )
        return f, b

    def run(self, pair: Callable, carry):
        """(carry, what the last pair of B gives besides) after carry, waits = pair(turn, f, b,
        carry) for all pairs."""

        def one(turn: Turn, n, i, carry) -> tuple:
            return pair(turn, *self.at(turn, n, i), carry)

        def repeat(n, carry, turns: list[Turn]):
            for turn in turns:
                carry = loop(turn.count, lambda i, c, t=turn: one(t, n, i, c)[0], carry)
            return carry

        waits = ()
        for turns, times in self.in_turn:
            if turns[0].backward is not None and turns[0].preceding is None:
                carry, waits = one(turns[0], 0, 0, carry)
            else:
                carry = loop(times, partial(repeat, turns=turns), carry)
        return carry, waits


def _index(kinds: _Side, kind: str | None, turn: Turn, n, i, beyond: int = 0):
    """The index among its kind of the layer `i` after a turn's first one, or after one `beyond`
    it."""
    place = turn.place + beyond
    return n * kinds[place : place + turn.period].count(kind) + kinds[:place].count(kind) + i


def _after(kinds: _Side, kind: str | None, following: str | None, turn: Turn, n, i):
    if following == kind:
        return _index(kinds, kind, turn, n, i + 1)
    return _index(kinds, following, turn, n, 0, turn.count)


def through(periods: Sequence[Period], layer: Callable, carry, *, backward: bool):
    """carry = layer(kind, n, index, carry) for the layers of a chunk, from the last to the first if
    `backward`. n: a layer's index in the chunk; index: that among those of its kind."""
    in_turn = reversed if backward else iter

    def repeat(k, carry, period: Period, after):
        k = period.repeats - 1 - k if backward else k
        for run in in_turn(period.runs):
            n = k * period.layers + run.place + after
            index = k * period.of_kind(run.kind) + run.index + after
            carry = loop(run.count, partial(one, run=run, n=n, index=index), carry)
            carry, after = behind(carry, after, period.runs)
        return carry

    def one(i, carry, run: KindRun, n, index):
        i = run.count - 1 - i if backward else i
        return layer(run.kind, plus(n, i), plus(index, i), carry)

    def behind(carry, after, parts: Sequence):
        """Make the next layers wait, as a loop does: if layers are written out, XLA could recompute
        for all of them first, and compute all their weight gradients last."""
        if not backward or len(parts) < 2:
            return carry, after
        return lax.optimization_barrier((carry, jnp.zeros((), jnp.int32)))

    after = 0
    for period in in_turn(periods):
        carry = loop(period.repeats, partial(repeat, period=period, after=after), carry)
        carry, after = behind(carry, after, periods)
    return carry


def loop(count: int, body: Callable, start: Any) -> Any:
    """`lax.fori_loop` from 0 to `count`; without a loop if there are fewer than two turns."""
    if count < 2:
        return body(0, start) if count else start
    return lax.fori_loop(0, count, body, start)


def plus(base, i):
    """base + i; without an op if base is a constant 0."""
    return i if isinstance(base, int) and base == 0 else base + i
