"""The order of what a layer's F and another's B compute and send, by simulated annealing.

Two streams run: one computes, one thing after the other; on the other are collectives, begun when
the first stream comes to them. What a collective is waited for costs time. What only moves memory
while no collective is in flight costs none that another order would save, but a collective could
hide there: it counts half. So does what of a collective has only that beside it, and no matmul: how
long matmuls take is better known.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MOVES = 6000
_HEAT_S = 10e-6  # of the first move; the last has none
_SEARCHES = 3  # of some models' orders one of four ends where it waits for whole collectives
_ALONE = 0.5  # of a second that waits, one that moves memory or a collective alone


class Timed(NamedTuple):
    """A sequence and what it costs."""

    sequence: tuple[int, ...]
    waited_s: float  # for collectives
    alone_s: float  # of what moves memory, what lies beside no collective
    bare_s: float  # of collectives, what lies beside no matmul
    begun_s: tuple[float, ...]  # when the first stream comes to each
    until_s: tuple[float, ...]

    @property
    def cost_s(self) -> float:
        return self.waited_s + _ALONE * (self.alone_s + self.bare_s)


class Streams:
    """What there is to be put in order, by number.

    seconds: of each; before: the numbers of those that it waits for; links: which are collectives;
    moves: which move memory; loose: behind which no collective can be held back.
    """

    def __init__(
        self, seconds: Sequence[float], before: Sequence[frozenset[int]], *,
        links: frozenset[int], moves: frozenset[int], loose: frozenset[int],
    ):  # fmt: skip
        self.seconds, self.before = seconds, before
        self.links, self.moves, self.loose = links, moves, loose
        self.behind: list[set[int]] = [set() for _ in seconds]
        for number, each in enumerate(before):
            for other in each:
                self.behind[other].add(number)

    def order(self, wanted: Sequence[float]) -> Timed:
        """The best sequence found, from that on in which what has the smallest number in `wanted`
        comes as soon as it can."""
        best = first = self.timed(self._first(wanted))
        for seed in range(_SEARCHES):
            found = self._search(first, random.Random(seed))
            best = min(best, found, key=lambda each: each.cost_s)
            if best.cost_s <= 0.0:
                break
        return best

    def _search(self, first: Timed, rng: random.Random) -> Timed:
        best = now = first
        for left in range(_MOVES, 0, -1):
            if best.cost_s <= 0.0:
                break
            if (moved := self._moved(now.sequence, rng)) is None:
                continue
            found = self.timed(moved)
            heat_s = _HEAT_S * left / _MOVES
            if rng.random() < math.exp(min(0.0, now.cost_s - found.cost_s) / heat_s):
                now = found
                best = min(best, now, key=lambda each: each.cost_s)
        return best

    def _first(self, wanted: Sequence[float]) -> tuple[int, ...]:
        done, left = list[int](), {*range(len(self.seconds))}
        while left:
            ready = (n for n in left if self.before[n].isdisjoint(left))
            done.append(min(ready, key=lambda n: (wanted[n], n)))
            left.remove(done[-1])
        return tuple(done)

    def _moved(self, sequence: tuple[int, ...], rng: random.Random) -> tuple[int, ...] | None:
        """With one at another place that it may have; None where that is its own."""
        at = rng.randrange(len(sequence))
        number, first, last = sequence[at], at, at
        before, behind = self.before[number], self.behind[number]
        while first and sequence[first - 1] not in before:
            first -= 1
        while last + 1 < len(sequence) and sequence[last + 1] not in behind:
            last += 1
        if (to := rng.randint(first, last)) == at:
            return None
        rest = sequence[:at] + sequence[at + 1 :]
        return (*rest[:to], number, *rest[to:])

    def timed(self, sequence: tuple[int, ...]) -> Timed:
        """XLA begins a collective as late as it thinks that it can: with the next one, if it is
        still in flight then, in either order; and before what is loose, but not before others that
        have come."""
        begun_s, until_s = [0.0] * len(self.seconds), [0.0] * len(self.seconds)
        clock = held = now = free = waited_s = 0.0  # held: where what is not loose has ended
        flying: list[int] = []
        matmuls, sums_s = list[float](), [0.0]  # when they begin, and what those before take
        for number in sequence:
            ready = max((until_s[n] for n in self.before[number]), default=0.0)
            if number in self.links:
                now = max(now, held)
                if ready > now:
                    now = max(clock, ready)
                    waited_s += now - clock
                    clock = held = now
                flying = [*(n for n in flying if until_s[n] > now), number]
                free = now + sum(self.seconds[n] for n in flying)
                for n in flying:
                    begun_s[n], until_s[n] = now, free
                continue
            if ready > clock:
                waited_s += ready - clock
                clock = ready
            begun_s[number] = clock
            if len(still := [n for n in flying if until_s[n] > clock]) < len(flying):
                flying, held = still, clock
            if number not in self.moves:
                matmuls.append(clock)
                sums_s.append(sums_s[-1] + self.seconds[number])
            clock = until_s[number] = clock + self.seconds[number]
            if number not in self.loose:
                held = clock
        waited_s += max(0.0, free - clock)
        busy = {(begun_s[n], until_s[n]) for n in self.links}
        alone_s = sum(self._alone_s(begun_s[n], until_s[n], busy) for n in self.moves)
        bare_s = 0.0
        for since, until in busy:
            first, last = bisect_left(matmuls, since), bisect_left(matmuls, until)
            bare_s += max(0.0, until - since - (sums_s[last] - sums_s[first]))
        return Timed(sequence, waited_s, alone_s, bare_s, tuple(begun_s), tuple(until_s))

    @staticmethod
    def _alone_s(begun_s: float, end_s: float, busy: Iterable[tuple[float, float]]) -> float:
        """Of a time, what is in none of those that do not overlap."""
        alone_s = end_s - begun_s
        for since, until in busy:
            if since < end_s and begun_s < until:
                alone_s -= min(end_s, until) - max(begun_s, since)
        return alone_s
