"""Seconds of a pipeline's schedule, given the seconds of each stage for a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mtx.config import Layout
from mtx.config.layout import Weave
from mtx.plan.choose import check_shape, schedule_for
from mtx.schedules.shape import Times
from mtx.schedules.simulate import Model, simulate

LOOPED = ("1f1b", "interleaved_1f1b", "eager_1f1b", "gpipe")  # SC'21's, and their nearest relatives
Seconds = tuple[float, float, float]  # F, B and W of one microbatch on one stage, all its chunks


def pipeline_s(
    layout: Layout, stages: Sequence[Seconds], *, microbatches: int, hop_s: float,
    model: Model = "asynchronous", bound: bool = False,
) -> float:  # fmt: skip
    """Seconds from the first op to the end of the last one: the one place that knows schedules.

    They are the simulator's (`mtx.schedules.simulate`) for the table that is run, with messages
    that take `hop_s` to arrive. `model` is how the software runs it: Megatron has one program per
    stage, so its times are asynchronous, and waiting for a message is part of the stages' own
    seconds; ours is one program, in lock-step, with one message per tick. (That is the price on
    GPUs, according to the simulator.) SC'21's schedules are not simulated to the end if that
    changes nothing.

    bound: return a lower bound for SC'21's schedules instead: close to their time, and found at
    once. UserError if a file's table has another shape.
    """
    if len(stages) == 1:
        return microbatches * sum(stages[0])
    case = _Case(
        layout.schedule, layout.virtual, layout.slices, layout.weave, tuple(stages), hop_s, model
    )  # fmt: skip
    delayed = model == "asynchronous" and hop_s > 0  # the slowest stage may wait in every round
    if bound:
        return case.bound_s(microbatches)
    if layout.schedule not in LOOPED or layout.slices > 1 or delayed:
        return _simulated_s(case, microbatches)
    if case.reaches_bound(microbatches):
        return case.bound_s(microbatches)
    return _looped_s(case, microbatches)


@dataclass(frozen=True)
class _Case:
    """Everything that decides the time of a schedule except the number of microbatches;
    hashable."""

    schedule: str
    virtual: int
    slices: int
    weave: Weave
    stages: tuple[Seconds, ...]
    hop_s: float
    model: Model

    def bound_s(self, microbatches: int) -> float:
        """The longest of three times. First, one microbatch through all stages. Second, for each
        stage, all of its work, and before and after it a chunk of every earlier stage, on the way
        there and back. Third, a pipeline of stages that are all as fast as the fastest, whose last
        group lacks -m mod p microbatches and leaves as many places idle at the end of each chunk
        except the last. It does so in lock-step; with one program per stage, what is left of B
        fills some of these places."""
        pipe, virtual = len(self.stages), self.virtual
        bound_s = through_s = 0.0
        for seconds in self.stages:
            stage_s = sum(seconds)
            bound_s = max(bound_s, through_s / virtual + microbatches * stage_s)
            through_s += stage_s
        bound_s = max(bound_s, through_s)
        short = -microbatches % pipe
        if self.model == "lockstep" or microbatches < pipe or not short:
            fastest_s = min(forward for forward, _, _ in self.stages)
            fastest_s += min(backward + weight for _, backward, weight in self.stages)
            places = microbatches * virtual + (virtual - 1) * short + pipe - 1
            bound_s = max(bound_s, places / virtual * fastest_s)
        sends = microbatches * virtual if self.model == "lockstep" else 0  # the first stage's F
        return bound_s + sends * self.hop_s

    def reaches_bound(self, microbatches: int) -> bool:
        """Whether SC'21's schedules take exactly as long as the bound, in the asynchronous model:
        they do if no stage is slower, in F or in B, than the last one, which then never waits once
        it has begun."""
        whole = self.virtual == 1 or microbatches % len(self.stages) == 0
        *others, last = [(forward, backward + weight) for forward, backward, weight in self.stages]
        leads = all(f <= last[0] and b <= last[1] for f, b in others)
        return self.model == "asynchronous" and not self.hop_s and whole and leads

    @property
    def pace_s(self) -> float:
        """Seconds that one more microbatch eventually adds to SC'21's schedules: the work of the
        slowest stage; in GPipe, where F and B are apart, that of the slowest stage in each."""
        if self.schedule == "gpipe":
            forward_s = max(forward for forward, _, _ in self.stages)
            backward_s = max(backward + weight for _, backward, weight in self.stages)
            return forward_s + backward_s + 2 * self.virtual * self.hop_s
        return max(sum(seconds) for seconds in self.stages) + self.virtual * self.hop_s


@lru_cache(maxsize=4096)
def _simulated_s(case: _Case, microbatches: int) -> float:
    """The simulator's time for the whole table."""
    layout = Layout(
        pipe=len(case.stages), schedule=case.schedule, virtual=case.virtual, slices=case.slices,
        weave=case.weave, idle="phases",
    )  # fmt: skip
    table = schedule_for(layout, microbatches)
    check_shape(table, layout, microbatches)
    times = Times(stage_times=case.stages, comm=case.hop_s / case.slices)
    return simulate(table, times, model=case.model).makespan


def _looped_s(case: _Case, microbatches: int) -> float:
    """Seconds of a schedule of SC'21 by simulation. Its table repeats with every group of p
    microbatches: once one more group adds no less than a group does eventually, so do all the
    others."""
    period = len(case.stages)
    short = period + microbatches % period
    while short + period < microbatches:
        longer_s = _simulated_s(case, short + period)
        added_s = longer_s - _simulated_s(case, short)
        if added_s >= period * case.pace_s * (1 - 1e-12):
            return longer_s + (microbatches - short - period) * case.pace_s
        short += max(period, short // period * period)
    return _simulated_s(case, microbatches)


def lone_ticks(layout: Layout, microbatches: int) -> tuple[int, int]:
    """(ticks with an F on some stage and no B on any, ticks with a B and no F). SC'21's schedules,
    except GPipe, are counted with few microbatches: with more the numbers are the same."""
    if layout.schedule in LOOPED and layout.schedule != "gpipe":
        microbatches = min(microbatches, 2 * layout.pipe + microbatches % layout.pipe)
    return _lone_ticks(
        replace(layout, data=1, tensor=1, microbatch=1, stage_layers="even"), microbatches
    )


@lru_cache(maxsize=4096)
def _lone_ticks(layout: Layout, microbatches: int) -> tuple[int, int]:
    table = schedule_for(layout, microbatches)
    forward, backward = (half.busy.any(axis=1) for half in (table.forward, table.backward))
    return int((forward & ~backward).sum()), int((backward & ~forward).sum())
