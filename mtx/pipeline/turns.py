"""Which layers of a chunk's F meet which of another chunk's B, where a tick runs both side by side.

F goes from its chunk's first layer to its last, B from its chunk's last to its first. Pairs that
are of the same kinds, and lead to the same kinds, are one loop; where chunks differ in length, the
longer one's last layers are by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from jax import lax

Kinds = tuple[str, ...]
_Side = tuple[str | None, ...]  # with None where there are no layers left


class Turn(NamedTuple):
    """Pairs that are alike, the kinds of their layers; None where F, or B, has none left."""

    forward: str | None
    following: str | None  # of F's next layer
    backward: str | None
    preceding: str | None  # of the one before B's
    place: int  # of the first pair, in a period
    count: int


class At(NamedTuple):
    """A layer of F or of B."""

    layer: Any  # among its chunk's
    index: Any  # among those of its kind
    next: Any  # the index of the layer that comes after it


@dataclass(frozen=True)
class Turns:
    """Of a chunk of F and of one of B: the kinds of their layers, from the first layer on."""

    forward: Kinds
    backward: Kinds

    @property
    def pairs(self) -> int:
        return max(len(self.forward), len(self.backward))

    @cached_property
    def repeats(self) -> int:
        """The periods of one pattern of several kinds that both chunks consist of."""
        both = [kinds for kinds in (self.forward, self.backward) if kinds]
        if not both or any(kinds != both[0] for kinds in both) or len(set(both[0])) == 1:
            return 1
        kinds, size = both[0], len(both[0])
        counts = (n for n in range(size, 0, -1) if size % n == 0)
        return next(n for n in counts if kinds[: size // n] * n == kinds)

    def _period(self, kinds: Kinds) -> _Side:
        """As far as pairs go in one period."""
        size = self.pairs // self.repeats
        return (*kinds, *(None,) * (self.pairs - len(kinds)))[:size]

    @cached_property
    def _sides(self) -> tuple[_Side, _Side]:
        return self._period(self.forward), self._period(self.backward[::-1])

    def of_period(self, *, last: bool) -> list[Turn]:
        """In turn; after the last period comes nothing."""
        forward, back = self._sides
        met = zip(forward, _next(forward, last), back, _next(back, last), strict=True)
        turns, place = [], 0
        for (f, following, b, preceding), group in groupby(met):
            turns.append(Turn(f, following, b, preceding, place, len(list(group))))
            place += turns[-1].count
        return turns

    def at(self, turn: Turn, period, i) -> tuple[At, At]:
        """The layers of F and of B in pair i of a turn."""
        forward, back = self._sides
        pair = period * (self.pairs // self.repeats) + turn.place + i
        f = At(
            pair,
            _index(forward, turn.forward, period, turn.place, i),
            _after(forward, turn.forward, turn.following, period, turn, i),
        )
        of_b, before = (self.backward.count(kind) - 1 for kind in (turn.backward, turn.preceding))
        b = At(
            len(self.backward) - 1 - pair,
            of_b - _index(back, turn.backward, period, turn.place, i),
            before - _after(back, turn.backward, turn.preceding, period, turn, i),
        )
        return f, b

    def run(self, pair: Callable, carry):
        """(carry, what the last pair of B gives beside it) after carry, waits = pair(turn, f, b,
        carry) for all pairs."""

        def one(turn: Turn, period, i, carry):
            return pair(turn, *self.at(turn, period, i), carry)[0]

        def whole(period, carry):
            for turn in self.of_period(last=False):
                carry = loop(turn.count, lambda i, c, turn=turn: one(turn, period, i, c), carry)
            return carry

        last, waits = self.repeats - 1, ()
        carry = loop(last, whole, carry)
        for turn in self.of_period(last=True):
            if turn.backward is not None and turn.preceding is None:
                carry, waits = pair(turn, *self.at(turn, last, 0), carry)
            else:
                carry = loop(turn.count, lambda i, c, turn=turn: one(turn, last, i, c), carry)
        return carry, waits


def loop(count: int, body: Callable, start: Any) -> Any:
    """`lax.fori_loop` from 0 on; without a loop where there are less than two turns."""
    if count < 2:
        return body(0, start) if count else start
    return lax.fori_loop(0, count, body, start)


def plus(base, i):
    """base + i; where that is i, without an op."""
    return i if isinstance(base, int) and base == 0 else base + i


def _next(kinds: _Side, last: bool) -> _Side:
    return (*kinds[1:], None if last else kinds[0]) if kinds else ()


def _index(kinds: _Side, kind: str | None, period, place: int, i):
    """Of a layer, `i` behind a place in its period, among those of its kind."""
    return period * kinds.count(kind) + kinds[:place].count(kind) + i


def _after(kinds: _Side, kind: str | None, following: str | None, period, turn: Turn, i):
    if following == kind:
        return _index(kinds, kind, period, turn.place, i + 1)
    return _index(kinds, following, period, turn.place + turn.count, 0)
