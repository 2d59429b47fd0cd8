"""In which order collectives and matmuls are computed, so that matmuls lie beside collectives, and
with them what only moves memory.

A list scheduler finds a first one (`mtx.pipeline.blocks`). Of F with B, where no collective leaves
the node, that is improved by simulated annealing (`mtx.pipeline.anneal`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from mtx.pipeline.anneal import Streams, Timed
from mtx.pipeline.blocks import MemoryOp, Step, Turn, blocks


class Order(NamedTuple):
    turns: tuple[Turn, ...]  # what moves memory and is in none is computed in passing
    waited_s: float  # for collectives, by what is not only for weight gradients
    is_timed: bool  # what comes behind the done of a collective is not computed before it


@lru_cache(maxsize=512)
def order(steps: tuple[Step, ...], memory: tuple[MemoryOp, ...] = ()) -> Order:
    """The same steps always get the same one."""
    found = blocks(steps, memory)
    first = tuple(found.turns(steps))
    sent, sides = [step for step in steps if step.communicates], {step.side for step in steps}
    if not sent or any(step.network for step in sent) or len(sides) < 2:
        return Order(first, found.waited_s, False)
    return _annealed(steps, memory, first)


def _annealed(
    steps: Sequence[Step], memory: Sequence[MemoryOp], first: Sequence[Turn]
) -> Order:  # fmt: skip
    """The best that follows from a first one. What moves memory has a number behind all steps'."""
    count = len(steps)
    before = [set(step.before) for step in steps]
    before += [{*op.before, *(count + n for n in op.after)} for op in memory]
    for number, op in enumerate(memory):
        for place in op.until:
            before[place].add(count + number)
    links = frozenset(n for n, step in enumerate(steps) if step.communicates)
    later = frozenset(n for n, step in enumerate(steps) if step.later) - links
    for place in later:  # XLA has them when it likes, mostly last
        before[place] |= {*range(count)} - later - links
    wanted = [0.0] * count + [0.0 if op.until else math.inf for op in memory]
    for at, (what, number) in enumerate(first, start=1):
        if what != "done":
            wanted[number + (count if what == "move" else 0)] = at
    streams = Streams(
        [each.seconds for each in (*steps, *memory)],
        [frozenset(each) for each in before],
        links=links,
        moves=frozenset(range(count, count + len(memory))),
        loose=frozenset(n for n, step in enumerate(steps) if step.summed),
    )
    best = streams.order(wanted)
    return Order(tuple(_turns(best, streams, count, later)), best.waited_s, True)


def _turns(
    timed: Timed, streams: Streams, steps: int, later: frozenset[int]
) -> Iterator[Turn]:  # fmt: skip
    """The sequence, with each collective waited for when it has come, at the latest by what needs
    it. What moves memory has a turn only where it lies beside a collective and would not lie there
    anyway, between what comes before and after it; none where only what is `later` is left.
    steps: their count."""
    links = deque(sorted(streams.links, key=lambda n: timed.until_s[n]))
    computed = [n for n in timed.sequence if n not in streams.links]
    left = sum(n < steps and n not in later for n in computed)  # matmuls
    flying: list[int] = []
    last, previous = -1, ""  # what was computed or moved, and what the last turn was

    def come(now: float) -> set[int]:
        return {n for n in flying if timed.until_s[n] <= now}

    def done(numbers: Collection[int]) -> Iterator[Turn]:
        for n in [n for n in flying if n in numbers]:
            flying.remove(n)
            yield Turn("done", n)

    for number, following in pairwise([*computed, -1]):
        now, needed = timed.begun_s[number], streams.before[number]
        while links and timed.begun_s[links[0]] <= now:
            yield from done(streams.before[links[0]] | come(timed.begun_s[links[0]]))
            flying.append(links.popleft())
            yield Turn(previous := "start", flying[-1])
        yield from done(needed | come(now))
        forced = (
            previous == "compute" and last in needed
            and following >= 0 and number in streams.before[following]
        )  # fmt: skip
        if number < steps:
            left -= number not in later
            yield Turn(previous := "compute", number)
        elif flying and (left or not later) and not forced:
            yield Turn(previous := "move", number - steps)
        last = number
    for n in links:  # with nothing left to lie beside
        yield from done(streams.before[n])
        flying.append(n)
        yield Turn("start", n)
    yield from done(flying)
