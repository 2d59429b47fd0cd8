"""A sequence with each repetition written once, so that layers of several kinds run as loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple


class Run(NamedTuple):
    """Equal elements that follow one another."""

    place: int  # of the first element
    count: int


class Stretch(NamedTuple):
    """Runs that are repeated `times` times; their places are those of the first repetition."""

    runs: tuple[Run, ...]
    times: int = 1

    @property
    def size(self) -> int:
        """The number of elements in one repetition."""
        return sum(run.count for run in self.runs)


def stretches(sequence: Sequence, *, nested: bool = True) -> tuple[Stretch, ...]:
    """The whole sequence, in the fewest runs. nested: whether a stretch that is repeated may have
    runs of several elements."""
    end = len(sequence)
    best: dict[int, tuple[int, tuple[Stretch, ...]]] = {end: (0, ())}  # of the rest from a place on
    for first in reversed(range(end)):
        ways = []
        for stretch in _from(sequence, first, nested):
            runs, rest = best[first + stretch.size * stretch.times]
            ways.append((len(stretch.runs) + runs, (stretch, *rest)))
        best[first] = min(ways, key=lambda way: way[0])
    return best[0][1]


def _from(sequence: Sequence, first: int, nested: bool) -> Iterator[Stretch]:
    """The stretches that can begin at `first`: repeated ones, a run, and beginnings of that run."""
    rest = sequence[first:]
    run = 1 + _alike(rest, rest[1:])
    for size in range(run + 1, len(rest) // 2 + 1):
        times = 1 + _alike(rest, rest[size:]) // size
        if times > 1:
            runs = _runs(rest[:size], first)
            if nested or len(runs) == size:
                yield Stretch(runs, times)
    for count in range(run, 0, -1):
        yield Stretch((Run(first, count),))


def _alike(one: Sequence, other: Sequence) -> int:
    """The number of elements at their beginnings that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _runs(sequence: Sequence, first: int) -> tuple[Run, ...]:
    """The runs of a sequence. first: the place of its first element."""
    runs = []
    for _, alike in groupby(sequence):
        runs.append(Run(first, sum(1 for _ in alike)))
        first += runs[-1].count
    return tuple(runs)
