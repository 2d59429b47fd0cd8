"""Order what a layer's F and another's B compute and send, by simulated annealing.

Two streams are modelled. The first computes, one operation at a time; the second runs collectives,
each begun when the first stream reaches it. Waiting for a collective costs time. Memory operations
with no collective in flight cost no time that another order would save, but a collective could hide
there, so they count half. The part of a collective that has only memory operations beside it, and
no matmul, counts half as well: how long matmuls take is better known.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_MOVES = 6000
_HEAT_S = 10e-6  # the temperature at the first move; it falls to zero
_SEARCHES = 3  # for some models one in four ends with an order that waits for whole collectives
_ALONE = 0.5  # weight of a second of memory operations or collectives alone; of waiting it is 1


class _Kind(NamedTuple):
    """What is known of one operation."""

    seconds: float
    awaited: tuple[int, ...]  # what it waits for that may not have ended when its turn comes
    is_link: bool
    is_move: bool
    is_loose: bool


# The two streams just before a place of a sequence: the first one's clock, and when all of it that
# is not loose has ended; when the collectives in flight all began, and when they will be done;
# their numbers; the seconds waited for collectives, and the number of matmuls computed.
_Clocks = tuple[float, float, float, float, tuple[int, ...], float, int]


class Timed(NamedTuple):
    """A sequence and its cost."""

    sequence: tuple[int, ...]
    begun_s: list[float]  # when the first stream reaches each
    until_s: list[float]
    clocks: list[_Clocks]  # at each place
    matmuls: tuple[list[float], list[float]]  # when each begins, and the sum of those before it
    waited_s: float = 0.0  # for collectives
    alone_s: float = 0.0  # of memory operations, what lies beside no collective
    bare_s: float = 0.0  # of collectives, what lies beside no matmul

    @property
    def cost_s(self) -> float:
        return self.waited_s + _ALONE * (self.alone_s + self.bare_s)


class Streams:
    """The operations to be ordered, by number.

    seconds: of each; before: the numbers of the operations that each waits for; links: which are
    collectives; moves: which only move memory; loose: those that cannot hold back a collective that
    comes after them.
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
        # All else has ended when the first stream, or a collective that is held back, gets there.
        self.kinds = [
            _Kind(
                seconds[number], tuple(each & (links | loose if number in links else links)),
                number in links, number in moves, number in loose,
            )
            for number, each in enumerate(before)
        ]  # fmt: skip

    def order(self, wanted: Sequence[float]) -> Timed:
        """The best sequence found, starting from the one that always takes the ready operation with
        the smallest number in `wanted`."""
        best = first = self.timed(self._first(wanted))
        for seed in range(_SEARCHES):
            found = self._search(first, random.Random(seed))
            best = min(best, found, key=lambda each: each.cost_s)
            if best.cost_s <= 0.0:
                break
        return best

    def _search(self, first: Timed, rng: random.Random) -> Timed:
        """One search. A costlier sequence is accepted at random: the more it costs and the later it
        comes, the less often."""
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
        """(the sequence with one operation at another place that it may have, the first place that
        changes); None if that place is its own."""
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
        """The sequence with its times. XLA begins a collective as late as it thinks it can:
        together with the next one if it is still in flight by then, in either order. It may begin
        one ahead of loose operations that come before it, but not ahead of others."""
        none, begin = [0.0] * len(self.seconds), (0.0, 0.0, 0.0, 0.0, (), 0.0, 0)
        found = self._timed(sequence, 0, Timed((), none, none, [begin], ([], [0.0])), math.inf)
        assert found is not None  # no cost is too high
        return found

    def _timed(
        self, sequence: tuple[int, ...], place: int, known: Timed, most_s: float
    ) -> Timed | None:
        """The same from `place` on; `known` is a sequence that is the same before it. None as soon
        as the cost is known to be `most_s` or more."""
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
        """The part of a time span that lies in none of `busy`, disjoint spans in order."""
        alone_s, place = end_s - begun_s, bisect_left(busy, (end_s,)) - 1
        while place >= 0 and busy[place][1] > begun_s:
            since, until = busy[place]
            alone_s -= (until if until < end_s else end_s) - (since if since > begun_s else begun_s)
            place -= 1
        return alone_s
