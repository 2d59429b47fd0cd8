"""Find an order in which matmuls and memory operations lie beside collectives.

A list scheduler finds a first one (`mtx.pipeline.blocks`). For F with B, if no collective leaves
the node, simulated annealing improves it (`mtx.pipeline.anneal`).
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
    turns: tuple[Turn, ...]  # memory operations in none of them are computed on the way
    waited_s: float  # for collectives, by more than weight gradients
    is_timed: bool  # what comes after a collective's done is not computed before it


@lru_cache(maxsize=512)
def order(steps: tuple[Step, ...], memory: tuple[MemoryOp, ...] = ()) -> Order:
    """The order of these steps and memory operations, always the same one for the same input."""
    found = blocks(steps, memory)
    first = tuple(found.turns(steps))
    sent, sides = [step for step in steps if step.communicates], {step.side for step in steps}
    if not sent or any(step.network for step in sent) or len(sides) < 2:
        return Order(first, found.waited_s, False)
    return _annealed(steps, memory, first)


def _annealed(
    steps: Sequence[Step], memory: Sequence[MemoryOp], first: Sequence[Turn]
) -> Order:  # fmt: skip
    """The best order found from a first one. Memory operations are numbered after all steps."""
    count = len(steps)
    before = [set(step.before) for step in steps]
    before += [{*op.before, *(count + n for n in op.after)} for op in memory]
    for number, op in enumerate(memory):
        for place in op.until:
            before[place].add(count + number)
    links = frozenset(n for n, step in enumerate(steps) if step.communicates)
    later = frozenset(n for n, step in enumerate(steps) if step.later) - links
    for place in later:  # XLA computes them when it likes, mostly last
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
    """The sequence in turns, with each collective waited for as soon as it is done, at the latest
    before what needs it. A memory operation has a turn only if it lies beside a collective and the
    steps before and after it would not keep it there anyway; none has one once all that is left is
    `later`. steps: the number of steps."""
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
    for n in links:  # with nothing left to lie beside them
        yield from done(streams.before[n])
        flying.append(n)
        yield Turn("start", n)
    yield from done(flying)
