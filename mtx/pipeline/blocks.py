"""Put matmuls, and with them memory operations, beside collectives, by a list scheduler.

Of the steps that are ready, the scheduler takes the one with the longest chain of steps waiting for
it. It runs many times with these lengths scaled by random factors; the best order is the one that
leaves the least of the collectives exposed. If collectives leave the node, memory operations
influence the choice too, and may lie beside a collective with nothing else there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

_TRIALS = 240
_ENOUGH = 0.8  # of a collective's seconds, for memory operations alone to fill it


class Step(NamedTuple):
    """A collective, or an equation with matmuls in it."""

    seconds: float
    communicates: bool
    later: bool  # only weight gradients need it
    side: str  # F or B
    before: frozenset[int] = frozenset()  # the places of the steps that it waits for
    network: bool = False  # a collective that leaves the node
    summed: bool = False  # a weight gradient, added up: only the collective beside it is tied


class MemoryOp(NamedTuple):
    """An operation that only moves memory: a pass over arrays, or a value written to one."""

    seconds: float
    before: frozenset[int]  # the places of the steps that it waits for
    until: frozenset[int] = frozenset()  # the places of the steps that wait for it
    after: frozenset[int] = frozenset()  # the numbers of the memory operations that it waits for


class Turn(NamedTuple):
    """One of: a matmul is computed, a collective started or waited for, memory moved."""

    what: Literal["compute", "start", "done", "move"]
    number: int  # the place of a step, or the number of a memory operation


# A collective's place, then the places of the matmuls beside it and, if it leaves the node, the
# blocks of collectives that do not; or the place of a matmul by itself.
Block = tuple[Any, ...]


class Blocks(NamedTuple):
    """Blocks in order, and the memory operations beside their collectives."""

    blocks: tuple[Block, ...]
    exposed_s: float
    waited_s: float
    beside: dict[int, tuple[int, ...]] = {}  # memory operations, by the collective's place

    def turns(self, steps: Sequence[Step]) -> Iterator[Turn]:
        def of(block: Block) -> Iterator[Turn]:
            first, *beside = block
            if not steps[first].communicates:
                yield Turn("compute", first)
                return
            yield Turn("start", first)
            yield from (Turn("move", number) for number in self.beside.get(first, ()))
            for each in beside:
                yield from of(each if isinstance(each, tuple) else (each,))
            yield Turn("done", first)

        for block in self.blocks:
            yield from of(block)


def blocks(steps: Sequence[Step], memory: Sequence[MemoryOp]) -> Blocks:
    """The best of many trials: the order that leaves exposed the least of the collectives that more
    than weight gradients wait for, then the least of all. Each trial prefers the steps with the
    longest chain waiting for them, times a random factor."""
    ranks = _ranks(steps)
    rng, both = random.Random(0), len({step.side for step in steps}) > 1
    best = _Trial(steps, ranks, defers=False).order()
    for trial in range(_TRIALS if both else _TRIALS // 8):
        if best.exposed_s <= 0.0:
            break
        keys = [rank * rng.uniform(0.3, 1.7) for rank in ranks]
        found = _Trial(steps, keys, defers=trial % 2 == 0).order()
        best = min(best, found, key=lambda found: (found.waited_s, found.exposed_s))
    best, cost_s = _with_memory(best, steps, memory, {})
    if not memory or not any(step.network for step in steps):
        return best
    for _ in range(_TRIALS):
        keys = [rank * rng.uniform(0.3, 1.7) for rank in ranks]
        waits = [rng.random() < 0.5 for _ in steps]
        trial = _Trial(steps, keys, memory, defers=rng.random() < 0.5, waits=waits)
        found = _with_memory(trial.order(), steps, memory, trial.beside)
        best, cost_s = min((best, cost_s), found, key=lambda found: found[1])
    return best


def _with_memory(
    found: Blocks, steps: Sequence[Step], memory: Sequence[MemoryOp], given: dict[int, list[int]]
) -> tuple[Blocks, float]:
    """(an order with memory operations placed, the cost to minimise). Exposed collectives cost
    time; memory operations beside nothing do not, and count a twentieth of that. given: the memory
    operations that already have a place."""
    beside = _Beside(found, steps, given)
    put = beside.put(memory)
    return found._replace(beside=put), found.waited_s + beside.left_s / 20


def _ranks(steps: Sequence[Step]) -> list[float]:
    """The longest path from each step to the end, in seconds."""
    ranks = [step.seconds for step in steps]
    for place in reversed(range(len(steps))):
        for before in steps[place].before:
            ranks[before] = max(ranks[before], steps[before].seconds + ranks[place])
    return ranks


class _Trial:
    """One order: of the steps that are ready, the larger key comes first, weight gradients last.
    defers: collectives for weight gradients wait until the rest is done; waits: which collectives
    wait while a matmul is ready. Those that leave the node lie beside memory operations if there
    are enough."""

    def __init__(
        self, steps: Sequence[Step], keys: Sequence[float], memory: Sequence[MemoryOp] = (),
        *, defers: bool, waits: Sequence[bool] = (),
    ):  # fmt: skip
        places = sorted(range(len(steps)), key=lambda n: (steps[n].later, -keys[n]))
        self.steps, self.left, self.done = steps, dict.fromkeys(places), set()
        self.memory, self.passes = memory, dict.fromkeys(range(len(memory)))
        self.beside = dict[int, list[int]]()
        self.defers, self.waits = defers, waits
        self.exposed_s = self.waited_s = 0.0

    def order(self) -> Blocks:
        blocks: list[Block] = []
        while self.left:
            if self.passes and (alone := next(filter(self.fill, self.left), None)) is not None:
                blocks.append((alone,))
                continue
            work = self.next_of(False)
            link = self.next_of(True, waits=work is None)
            if link is None or (work is not None and self.goes_first(work, link)):
                assert work is not None  # no step waits for itself
                self.take(work)
                blocks.append((work,))
            else:
                blocks.append(self.block(link)[0])
        return Blocks(tuple(blocks), self.exposed_s, self.waited_s)

    def goes_first(self, work: int, link: int) -> bool:
        """Whether a matmul goes before a collective, alone."""
        return self.steps[link].later and (self.steps[work].later or self.defers)

    def next_of(self, communicates: bool, *, later=True, network=True, waits=True) -> int | None:
        """The first step that is ready."""
        for place in self.left:
            step = self.steps[place]
            if (
                step.communicates == communicates and step.before <= self.done
                and later >= step.later and network >= step.network
                and (waits or not self.waits or not self.waits[place])
            ):  # fmt: skip
                return place
        return None

    def take(self, place: int) -> float:
        self.begin(place)
        self.done.add(place)
        return self.steps[place].seconds

    def begin(self, place: int) -> None:
        del self.left[place]
        for number in [n for n in self.passes if place in self.memory[n].until]:
            del self.passes[number]  # computed on the way

    def fill(self, link: int) -> bool:
        """Take a collective that leaves the node with memory operations alone beside it, if it can
        be done and there are enough, those that steps wait for first. Returns whether it did."""
        step = self.steps[link]
        if not step.network or not step.before <= self.done:
            return False
        left = {n for n in self.passes if self._may_lie(self.memory[n], link)}
        if sum(self.memory[n].seconds for n in left) < _ENOUGH * step.seconds:
            return False
        filled, filled_s, others = list[int](), 0.0, set(self.passes)
        while ready := [
            n for n in sorted(left)
            if others.isdisjoint(self.memory[n].after)
            and _fits(self.memory[n], step.seconds - filled_s)
        ]:  # fmt: skip
            filled.append(min(ready, key=lambda number: not self.memory[number].until))
            filled_s += self.memory[filled[-1]].seconds
            left.remove(filled[-1])
            others.remove(filled[-1])
        if filled_s < _ENOUGH * step.seconds:
            return False
        self.passes = {n: None for n in self.passes if n in others}
        self.beside[link] = filled
        self.take(link)
        self._expose(step, filled_s)
        return True

    def _may_lie(self, op: MemoryOp, link: int) -> bool:
        """Whether a memory operation may begin with a collective, apart from what it is `after`."""
        return link not in op.until and op.before <= self.done

    def block(self, link: int) -> tuple[Block, float]:
        """(a collective with what lies beside it, the seconds of the whole block)"""
        step, beside_s = self.steps[link], 0.0
        block: list[Any] = [link]
        self.begin(link)
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
        self._expose(step, beside_s)
        return tuple(block), max(step.seconds, beside_s)

    def _expose(self, step: Step, beside_s: float) -> None:
        exposed_s = max(0.0, step.seconds - beside_s)
        self.exposed_s += exposed_s
        self.waited_s += 0.0 if step.later else exposed_s

    def _is_before(self, one: int, other: int) -> bool:
        return next(place for place in self.left if place in (one, other)) == one


def _fits(op: MemoryOp, room_s: float) -> bool:
    """Whether a third of it fits, if nothing else lies beside the collective."""
    return op.seconds <= 3 * room_s


class _Beside:
    """Where memory operations lie: right after the start of a collective that has a matmul beside
    it to hold them there, for no longer than the collective takes; or alone."""

    def __init__(self, order: Blocks, steps: Sequence[Step], given: dict[int, list[int]]):
        """given: memory operations that are alone beside a collective, by its place."""
        self.steps, self.room_s, self.given = steps, dict[int, float](), given
        self.begins, self.ends = dict[int, int](), dict[int, int]()  # the turn of each place
        self.left_s = 0.0  # of memory operations, what lies beside nothing
        # What of the collectives is exposed even with all weight gradients beside them.
        free = (step.seconds for step in steps if step.later and not step.communicates)
        self.alone_s = order.exposed_s - sum(free)
        for block in order.blocks:
            self._follow(block)

    def _follow(self, block: Block) -> None:
        first, *beside = block
        self.begins[first] = len(self.begins) + len(self.ends)
        if any(isinstance(each, int) for each in beside):
            self.room_s[first] = self.steps[first].seconds
        for each in beside:
            self._follow(each if isinstance(each, tuple) else (each,))
        self.ends[first] = len(self.begins) + len(self.ends)

    def put(self, memory: Sequence[MemoryOp]) -> dict[int, tuple[int, ...]]:
        """Place each as late as the steps that wait for it allow; without any, as early as
        possible. What nothing waits for is left over while collectives are exposed; so is what fits
        nowhere."""
        found = {place: list(numbers) for place, numbers in self.given.items()}
        alone = {number: place for place, numbers in found.items() for number in numbers}
        for place, numbers in found.items():
            beside_s = sum(memory[number].seconds for number in numbers)
            self.left_s += max(0.0, beside_s - self.steps[place].seconds)
        at: list[int] = []  # the turn from which each one's result is there
        for number, op in enumerate(memory):
            if number in alone:
                at.append(self.begins[alone[number]])
                continue
            turn = max((at[n] for n in op.after), default=-1)
            windows = [place for place in self.room_s if self._holds(place, op, turn)]
            if not op.until and self.alone_s > 0.0:
                self.alone_s -= op.seconds
                windows = []
            # XLA begins a collective that leaves the node as late as its matmuls allow.
            beside_s = 0.0
            if windows:
                place = windows[-1 if op.until else 0]
                self.room_s[place] -= op.seconds
                found.setdefault(place, []).append(number)
                turn = self.begins[place]
                beside_s = 0.0 if self.steps[place].network else op.seconds
            self.left_s += op.seconds - beside_s
            at.append(turn)
        return {place: tuple(numbers) for place, numbers in found.items()}

    def _holds(self, place: int, op: MemoryOp, turn: int) -> bool:
        begin = self.begins[place]
        return (
            op.seconds <= self.room_s[place] and turn <= begin
            and all(self.ends[n] <= begin for n in op.before)
            and all(self.begins[n] > begin for n in op.until)
        )  # fmt: skip
