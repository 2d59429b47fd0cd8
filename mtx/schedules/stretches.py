"""A sequence with its repetitions written out once: layers of several kinds as loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple


class Run(NamedTuple):
    """Elements that are alike, one behind the other."""

    place: int  # of the first
    count: int


class Stretch(NamedTuple):
    """Runs that come `times` times, one after the other; their places are those of the first
    time."""

    runs: tuple[Run, ...]
    times: int = 1

    @property
    def size(self) -> int:
        """The elements of all runs, once."""
        return sum(run.count for run in self.runs)


def stretches(sequence: Sequence, *, nested: bool = True) -> tuple[Stretch, ...]:
    """All of the sequence, in the fewest runs. nested: whether what comes more than once may have
    runs of several elements in it."""
    end = len(sequence)
    best: dict[int, tuple[int, tuple[Stretch, ...]]] = {end: (0, ())}  # of all from a place on
    for first in reversed(range(end)):
        ways = []
        for stretch in _from(sequence, first, nested):
            runs, rest = best[first + stretch.size * stretch.times]
            ways.append((len(stretch.runs) + runs, (stretch, *rest)))
        best[first] = min(ways, key=lambda way: way[0])
    return best[0][1]


def _from(sequence: Sequence, first: int, nested: bool) -> Iterator[Stretch]:
    """Those that can begin there: what comes more than once, a run, and the beginning of one."""
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
    """How many elements they begin with are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _runs(sequence: Sequence, first: int) -> tuple[Run, ...]:
    """first: the place of its first element."""
    runs = []
    for _, alike in groupby(sequence):
        runs.append(Run(first, sum(1 for _ in alike)))
        first += runs[-1].count
    return tuple(runs)
