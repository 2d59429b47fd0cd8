"""In which order collectives and matmuls are computed, so that matmuls lie beside collectives.

A list scheduler, tried many times with random factors: what can be done and most waits for comes
first; of what it gives, the order that leaves least of the collectives alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_TRIALS = 240


class Step(NamedTuple):
    """A collective, an equation with matmuls in it, or a value that is written to memory."""

    seconds: float
    communicates: bool
    later: bool  # only weight gradients need it
    side: str  # F or B
    before: frozenset[int] = frozenset()  # the places of those that it waits for
    network: bool = False  # a collective that leaves the node
    writes: bool = False


# A collective's place, and of what lies beside it: of matmuls and, where it leaves the node, blocks
# of collectives that do not; or the place of a matmul by itself.
Block = tuple[Any, ...]


class Order(NamedTuple):
    """Blocks in turn, and behind them the writes that lie beside nothing."""

    blocks: tuple[Block, ...]
    writes: tuple[int, ...]
    exposed_s: float  # of collectives, what no matmul lies beside
    collective_s: float


@lru_cache(maxsize=512)
def order(steps: tuple[Step, ...]) -> Order:
    """The order that leaves least exposed, of many tried: each prefers what most waits for, times a
    random factor. The same steps always get the same one. Writes come last among them."""
    ranks = _ranks([step for step in steps if not step.writes])
    rng, both = random.Random(0), len({step.side for step in steps}) > 1
    best = _tried(steps, ranks)
    for _ in range(_TRIALS if both else _TRIALS // 8):
        if best.exposed_s <= 0.0:
            break
        keys = [rank * rng.uniform(0.3, 1.7) for rank in ranks]
        best = min(best, _tried(steps, keys), key=lambda found: found.exposed_s)
    return best


def _ranks(steps: Sequence[Step]) -> list[float]:
    """The longest way from each step to the end, in seconds."""
    ranks = [step.seconds for step in steps]
    for place in reversed(range(len(steps))):
        for before in steps[place].before:
            ranks[before] = max(ranks[before], steps[before].seconds + ranks[place])
    return ranks


def places_in(block: Block) -> Iterator[int]:
    for each in block:
        yield from places_in(each) if isinstance(each, tuple) else (each,)


def _tried(steps: Sequence[Step], keys: Sequence[float]) -> Order:
    """One order: of what can be done, the larger key comes first, weight gradients last."""
    return _Trial(steps, keys).order()


class _Trial:
    def __init__(self, steps: Sequence[Step], keys: Sequence[float]):
        places = sorted(range(len(keys)), key=lambda n: (steps[n].later, -keys[n]))
        self.steps, self.left, self.done = steps, dict.fromkeys(places), set()
        self.writes = list(range(len(keys), len(steps)))
        self.exposed_s = 0.0

    def order(self) -> Order:
        blocks: list[Block] = []
        while self.left:
            link, work = self.next_of(True), self.next_of(False)
            if work is not None and (
                link is None or (self.steps[link].later and self.steps[work].later)
            ):
                self.take(work)
                blocks.append((work,))
                continue
            assert link is not None  # no step waits for itself
            blocks.append(self.block(link)[0])
        collective_s = sum(step.seconds for step in self.steps if step.communicates)
        return Order(tuple(blocks), tuple(self.writes), self.exposed_s, collective_s)

    def next_of(self, communicates: bool, *, later=True, network=True) -> int | None:
        """The first that can be done."""
        for place in self.left:
            step = self.steps[place]
            if (
                step.communicates == communicates and step.before <= self.done
                and later >= step.later and network >= step.network
            ):  # fmt: skip
                return place
        return None

    def take(self, place: int) -> float:
        del self.left[place]
        self.done.add(place)
        return self.steps[place].seconds

    def block(self, link: int) -> tuple[Block, float]:
        """A collective with what lies beside it, and the seconds of it all."""
        step, beside_s = self.steps[link], 0.0
        writes = [place for place in self.writes if self.can_be_written(place)]
        block: list[Any] = [link]
        del self.left[link]
        while beside_s < step.seconds:
            work = self.next_of(False, later=False)
            inner = self.next_of(True, later=False, network=False) if step.network else None
            if inner is not None and (work is None or self._is_before(inner, work)):
                nested, seconds = self.block(inner)
                block.append(nested)
                beside_s += seconds
            elif work is not None:
                beside_s += self.take(work)
                block.append(work)
            else:
                break
        self.done.add(link)
        self.exposed_s += max(0.0, step.seconds - beside_s)
        if any(isinstance(each, int) for each in block[1:]):  # a matmul that holds them there
            block[1:1] = self.written(writes, step.seconds)
        return tuple(block), max(step.seconds, beside_s)

    def can_be_written(self, place: int) -> bool:
        return not self.steps[place].later and self.steps[place].before <= self.done

    def written(self, writes: Sequence[int], seconds: float) -> list[int]:
        """Those of the writes that can be done in so many seconds."""
        found = []
        for place in writes:
            if place in self.writes and self.steps[place].seconds <= seconds:
                seconds -= self.steps[place].seconds
                self.writes.remove(place)
                found.append(place)
        return found

    def _is_before(self, one: int, other: int) -> bool:
        return next(place for place in self.left if place in (one, other)) == one
