"""The best table for a shape: every maker's, with every number of chunks, priced as we run it.

The price is the makespan in lock-step, as our scan runs; the makespan of a runtime with a program
per stage is given next to it. Memory is what the scan allocates: ring slots of the stash and, if W
is split from B, those that wait for W; the same number on every stage. Receive slots, and the keys
and values of cut sequences, come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtx.errors import UserError
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import WEIGHT_SHARE, Times
from mtx.schedules.simulate import bubble_text, simulate

_MOST_OPS = 2**18  # of a table: a dozen or more are compared, one after another
WORTH_SAYING = 0.1  # share of the makespan that a program per stage must save to be mentioned


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One maker with one number of chunks and slices, and what it would cost."""

    name: str
    virtual: int
    slices: int
    schedule: Schedule | None  # None if there is none for this shape
    lockstep: float = math.inf  # makespan, in the unit of the times
    asynchronous: float = math.inf  # makespan
    bubble_over_ideal: float = math.inf  # in lock-step
    memory: float = math.inf  # stashes of a whole stage
    fits: bool = False
    reason: str = ""  # why it is better than the next one, or why it is out

    @property
    def for_comparison(self) -> bool:
        """Whether it is made for a program per stage, so that ours takes longer than its price."""
        return not MAKERS[self.name].lockstep

    @property
    def label(self) -> str:
        """The name, with the numbers of chunks and slices if they are not 1."""
        chunks = f" v={self.virtual}" if self.virtual > 1 else ""
        return self.name + chunks + (f" slices={self.slices}" if self.slices > 1 else "")


def search_schedules(
    microbatches: int,
    stages: int,
    *,
    virtuals: Sequence[int] = (1,),
    slices: Sequence[int] = (1,),
    times: Times | None = None,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    layers: int | None = None,
) -> tuple[Candidate, ...]:
    """Every maker's table for this shape, best first; then those that do not fit, with the reason.

    virtuals, slices: the numbers to try; memory_limit: stashes of a whole stage; weight_share: the
    part of a stash that stays from B to W; layers: of the model, to leave out numbers of chunks
    that do not divide them. Less time comes first, then less memory, then fewer chunks and slices,
    then the order of the makers.
    """
    times = times or Times()
    found = []
    for name, virtual, cuts in _parameters(virtuals, slices):
        candidate = Candidate(name=name, virtual=virtual, slices=cuts, schedule=None)
        refusal = _refusal(candidate, stages, virtuals, layers)
        if stages * virtual * cuts * (microbatches + stages) > _MOST_OPS:  # idle slots included
            refusal = f"too large a table to be compared, of more than {_MOST_OPS:,} ops"
        if refusal is None:
            try:
                schedule = make(
                    name, microbatches=microbatches, stages=stages, virtual=virtual, slices=cuts,
                    times=times, memory_limit=memory_limit, weight_share=weight_share,
                )  # fmt: skip
            except UserError as error:
                refusal = str(error)
            else:
                candidate = _priced(candidate, schedule, times, memory_limit, weight_share)
        found.append(replace(candidate, reason=refusal) if refusal else candidate)
    found.sort(key=_rank)
    return tuple(_with_reasons(found, memory_limit))


def choose(found: Sequence[Candidate]) -> Candidate:
    """The first of `search_schedules` that is made for lock-step. UserError if none fits."""
    for candidate in found:
        if candidate.fits and not candidate.for_comparison:
            return candidate
    least = min(found, key=lambda c: (c.schedule is None, not c.fits, c.memory))
    if least.schedule is None:
        raise UserError(f"no schedule goes with these numbers; {least.label}: {least.reason}")
    keeps = f"{least.label} {least.reason}"
    if least.fits:
        keeps = f"{least.label}, made for a program per stage, does in {least.memory:.4g}: name it"
    raise UserError(f"no schedule for lock-step fits memory_limit; {keeps}")


def _parameters(virtuals: Sequence[int], slices: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    if not virtuals or not slices:
        raise UserError("virtuals and slices must each hold a number to try")
    for name, maker in MAKERS.items():
        for virtual in dict.fromkeys([maker.virtual] if maker.virtual else virtuals):
            for cuts in dict.fromkeys(slices if maker.sliced else (1,)):
                yield name, virtual, cuts


def _refusal(
    candidate: Candidate, stages: int, virtuals: Sequence[int], layers: int | None
) -> str | None:
    virtual = candidate.virtual
    if virtual not in virtuals:
        return f"made for virtual={virtual}; allowed is {_either(virtuals)}"
    if layers is not None and layers % (stages * virtual):
        return f"layers={layers} cannot be divided over stages*virtual={stages}*{virtual}"
    return None


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _priced(
    candidate: Candidate,
    schedule: Schedule,
    times: Times,
    memory_limit: float | None,
    weight_share: float,
) -> Candidate:
    lockstep = simulate(schedule, times, model="lockstep")
    waiting = schedule.weight_stash.slots * weight_share if schedule.weight_stash else 0
    memory = (schedule.slots + waiting) / (schedule.virtual * schedule.slices)
    return replace(
        candidate,
        schedule=schedule,
        lockstep=lockstep.makespan,
        asynchronous=simulate(schedule, times).makespan,
        bubble_over_ideal=lockstep.bubble_over_ideal,
        memory=memory,
        fits=memory_limit is None or memory <= memory_limit,
    )


def _rank(candidate: Candidate) -> tuple:
    # To 9 digits, so that sums of the same times in another order are the same price.
    price = float(f"{candidate.lockstep:.9g}"), float(f"{candidate.memory:.9g}")
    return (not candidate.fits, *price, candidate.virtual, candidate.slices)


def _with_reasons(ranked: Sequence[Candidate], limit: float | None) -> Iterator[Candidate]:
    fitting = [candidate for candidate in ranked if candidate.fits]
    leader = None  # the first of those with this table
    for place, candidate in enumerate(ranked):
        if candidate.schedule is None:
            yield candidate  # which already has its reason
        elif not candidate.fits:
            over = f"keeps {candidate.memory:.4g} stashes, over the limit of {limit:g}"
            yield replace(candidate, reason=over)
        elif leader is not None and _same_table(candidate, leader):
            yield replace(candidate, reason=f"the same table as {leader.label}")
        else:
            leader = candidate
            others = (other for other in fitting[place + 1 :] if not _same_table(other, leader))
            yield replace(
                candidate, reason=_advantage(leader, next(others, None)) + _remark(leader)
            )


def _advantage(candidate: Candidate, other: Candidate | None) -> str:
    if other is None:
        return "the last that fits"
    faster, price = _rank(candidate)[1:3], _rank(other)[1:3]
    if faster[0] < price[0]:
        percent = 100 * (other.lockstep / candidate.lockstep - 1)
        return (
            f"{percent:.2g} % faster than {other.label}: "
            f"{bubble_text(candidate.bubble_over_ideal)}, not {other.bubble_over_ideal:.2%}"
        )
    if faster[1] < price[1]:
        return f"as fast as {other.label} in {candidate.memory:.4g} stashes, not {other.memory:.4g}"
    return f"as fast and as small as {other.label}"


def _same_table(first: Candidate, second: Candidate) -> bool:
    one, other = first.schedule, second.schedule
    return (
        one is not None
        and other is not None
        and one.slices == other.slices
        and np.array_equal(one.virtual_stages, other.virtual_stages)
        and len(one.tables) == len(other.tables)
        and all(map(np.array_equal, one.tables, other.tables))
    )


def _remark(candidate: Candidate) -> str:
    saved = 1 - candidate.asynchronous / candidate.lockstep
    if saved < WORTH_SAYING:
        return ""
    return (
        f"; lock-step does not suit it: {candidate.lockstep:.4g}, with a program per stage "
        f"{candidate.asynchronous:.4g}"
    )
