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
from collections.abc import Sequence
from typing import NamedTuple

_MOVES = 6000
_HEAT_S = 10e-6  # of the first move; the last has none
_SEARCHES = 3  # of some models' orders one of four ends where it waits for whole collectives
_ALONE = 0.5  # of a second that waits, one that moves memory or a collective alone


class _Kind(NamedTuple):
    """What there is to know of a number."""

    seconds: float
    awaited: tuple[int, ...]  # what it waits for and may not have ended where its turn comes
    is_link: bool
    is_move: bool
    is_loose: bool


# The two streams before a place of a sequence: the clock of the first, and when what is not loose
# has ended there; when the collectives in flight have begun, all of them, and when they will have
# come; these; seconds waited for collectives, and how many matmuls have been computed.
_Clocks = tuple[float, float, float, float, tuple[int, ...], float, int]


class Timed(NamedTuple):
    """A sequence and what it costs."""

    sequence: tuple[int, ...]
    begun_s: list[float]  # when the first stream comes to each
    until_s: list[float]
    clocks: list[_Clocks]  # at each place
    matmuls: tuple[list[float], list[float]]  # when each begins, and what those before it take
    waited_s: float = 0.0  # for collectives
    alone_s: float = 0.0  # of what moves memory, what lies beside no collective
    bare_s: float = 0.0  # of collectives, what lies beside no matmul

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
        # The rest has ended where the first stream is, or where a collective is held back.
        self.kinds = [
            _Kind(
                seconds[number], tuple(each & (links | loose if number in links else links)),
                number in links, number in moves, number in loose,
            )
            for number, each in enumerate(before)
        ]  # fmt: skip

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
        """What costs more is taken too, by chance: the more it costs and the later, the less."""
        best = now = first
        for left in range(_MOVES, 0, -1):
            if best.cost_s <= 0.0:
                break
            if (moved := self._moved(now.sequence, rng)) is None:
                continue
            heat_s = _HEAT_S * left / _MOVES
            most_s = now.cost_s - heat_s * math.log(rng.random() or math.ulp(0.0))
            if found := self._timed(*moved, now, most_s):
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

    def _moved(
        self, sequence: tuple[int, ...], rng: random.Random
    ) -> tuple[tuple[int, ...], int] | None:
        """(with one at another place that it may have, the first place that changes); None where
        that is its own."""
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
        return (*rest[:to], number, *rest[to:]), min(at, to)

    def timed(self, sequence: tuple[int, ...]) -> Timed:
        """XLA begins a collective as late as it thinks that it can: with the next one, if it is
        still in flight then, in either order; and before what is loose, but not before others that
        have come."""
        none, begin = [0.0] * len(self.seconds), (0.0, 0.0, 0.0, 0.0, (), 0.0, 0)
        found = self._timed(sequence, 0, Timed((), none, none, [begin], ([], [0.0])), math.inf)
        assert found is not None  # whatever it costs
        return found

    def _timed(
        self, sequence: tuple[int, ...], place: int, known: Timed, most_s: float
    ) -> Timed | None:
        """known: of a sequence that is the same before a place. None as soon as it is known to cost
        `most_s` or more."""
        clock, held, since, free, flying, waited_s, count = known.clocks[place]
        begun_s, until_s, clocks = known.begun_s.copy(), known.until_s.copy(), known.clocks[:place]
        matmuls, sums_s = (each[: count + n] for n, each in enumerate(known.matmuls))
        sum_s, kinds = sums_s[-1], self.kinds
        for n in flying:
            begun_s[n], until_s[n] = since, free
        for number in sequence[place:]:
            clocks.append((clock, held, since, free, flying, waited_s, len(matmuls)))
            seconds, awaited, is_link, is_move, is_loose = kinds[number]
            ready = max([until_s[n] for n in awaited]) if awaited else 0.0
            if is_link:
                since = max(since, held)
                if ready > since:
                    since = max(clock, ready)
                    waited_s += since - clock
                    clock = held = since
                flying = (*flying, number) if free > since else (number,)
                free = since + sum([kinds[n].seconds for n in flying])
                for n in flying:
                    begun_s[n], until_s[n] = since, free
                continue
            if ready > clock:
                waited_s += ready - clock
                clock = ready
                if waited_s >= most_s:
                    return None
            begun_s[number] = clock
            if flying and free <= clock:
                flying, held = (), clock
            if not is_move:
                matmuls.append(clock)
                sum_s += seconds
                sums_s.append(sum_s)
            clock += seconds
            until_s[number] = clock
            if not is_loose:
                held = clock
        waited_s += max(0.0, free - clock)
        if waited_s >= most_s:
            return None
        busy = sorted({(begun_s[n], until_s[n]) for n in self.links})
        bare_s = 0.0
        for begun, ended in busy:
            first, last = bisect_left(matmuls, begun), bisect_left(matmuls, ended)
            bare_s += max(0.0, ended - begun - (sums_s[last] - sums_s[first]))
        alone_s = sum([self._alone_s(begun_s[n], until_s[n], busy) for n in self.moves])
        costs = waited_s, alone_s, bare_s
        found = Timed(sequence, begun_s, until_s, clocks, (matmuls, sums_s), *costs)
        return found if found.cost_s < most_s else None

    @staticmethod
    def _alone_s(begun_s: float, end_s: float, busy: Sequence[tuple[float, float]]) -> float:
        """Of a time, what is in none of those that do not overlap, in turn."""
        alone_s, place = end_s - begun_s, bisect_left(busy, (end_s,)) - 1
        while place >= 0 and busy[place][1] > begun_s:
            since, until = busy[place]
            alone_s -= (until if until < end_s else end_s) - (since if since > begun_s else begun_s)
            place -= 1
        return alone_s
