"""The automatic zero-bubble order: greedy in time, under a memory limit.

It follows the heuristic of Qi et al., ICLR'24 (arXiv 2401.10241), section 3.1. For each microbatch
the stages run one more F, first to last, then the B of this microbatch, last to first. W runs when
a stage would otherwise wait, or must make room for an F; the remaining Ws come last. Three rules
have two variants each, and every combination is tried.

An order is a list of kinds per stage: its n-th F is that of microbatch n, and so for B and W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from mtx.schedules.orders import B, F, W
from mtx.schedules.shape import Shape


class _Costs(NamedTuple):
    """How long an op takes on each stage."""

    forward: list[float]
    backward: list[float]
    weight: list[float]
    comm: float
    close: float  # differences below this are rounding

    @classmethod
    def of(cls, shape: Shape) -> _Costs:
        times = shape.times
        factors = times.stage_factors or (1.0,) * shape.stages
        by_kind = ([t * f for f in factors] for t in (times.forward, times.backward, times.weight))
        return cls(*by_kind, comm=times.comm, close=1e-9 * (times.work + times.comm))


def automatic_kinds(
    shape: Shape, *, memory_limit: float, weight_share: float, below: float = math.inf
) -> list[list[int]] | None:
    """The kinds [P][3 M] of the order whose longest stage takes the least time from its first op to
    its last; None if no order takes less than `below`.

    A stage never keeps more than memory_limit (at least 1) stashes, each counted as 1 from F to B
    and as weight_share from B to W.
    """
    costs = _Costs.of(shape)
    most = math.floor(min(memory_limit, shape.microbatches) + 1e-9)
    kinds = None
    for delay_backward, hold, fill in product((False, True), (True, False), (True, False)):
        warm_up = _count_warm_up(costs, shape.microbatches, most, delay_backward)
        run = _Greedy(costs, shape.microbatches, memory_limit, weight_share, hold, fill)
        if run.finish(warm_up, below=below):
            below, kinds = run.longest, run.kinds
    return kinds


def _count_warm_up(costs: _Costs, microbatches: int, most: int, delay_backward: bool) -> list[int]:
    """How many Fs each stage runs before its first B: as many as there is time for until that B.

    delay_backward: whether one more may run even if it ends too late for that B. A stage runs fewer
    than the stage before it, unless that one runs them all.
    """
    stages = len(costs.forward)
    ends, end = [], -costs.comm  # of the first F
    for forward in costs.forward:
        end += costs.comm + forward
        ends.append(end)
    counts = [1] * stages
    b_arrives = ends[-1]
    for stage in reversed(range(stages)):
        clock, forward = ends[stage], costs.forward[stage]
        last_start = b_arrives - (costs.close if delay_backward else forward - costs.close)
        most_here = min(microbatches, most) if stage < stages - 1 else 1
        while counts[stage] < most_here and clock <= last_start:
            counts[stage] += 1
            clock += forward
        b_arrives = max(clock, b_arrives) + costs.backward[stage] + costs.comm
    for stage in range(1, stages):
        before = counts[stage - 1]
        counts[stage] = min(counts[stage], before if before == microbatches else max(1, before - 1))
    return counts


class _Greedy:
    """One run of the heuristic, op after op; all lists have one entry per stage."""

    def __init__(
        self,
        costs: _Costs,
        microbatches: int,
        memory_limit: float,
        weight_share: float,
        hold: bool,
        fill: bool,
    ):
        stages = len(costs.forward)
        self.costs, self.microbatches, self.hold, self.fill = costs, microbatches, hold, fill
        self.memory_limit, self.weight_share = memory_limit, weight_share
        self.kinds: list[list[int]] = [[] for _ in range(stages)]
        self.clock = [0.0] * stages  # when the stage is free
        self.begun = [0] * stages  # F
        self.in_flight = [0] * stages  # between F and B
        self.pending = [0] * stages  # between B and W
        self.f_ends: list[list[float]] = [[] for _ in range(stages)]
        self.b_end = 0.0  # of this microbatch, on the stage after
        # Time of each stage from its first op to its last: all its work, and its waits so far.
        work = zip(costs.forward, costs.backward, costs.weight, strict=True)
        self.takes = [microbatches * sum(times) for times in work]
        self.longest = max(self.takes)

    def finish(self, warm_up: Sequence[int], *, below: float) -> bool:
        """Runs all ops; whether the longest stage takes less than `below`. Stops if it cannot."""
        stages = range(len(warm_up))
        for stage in stages:
            for _ in range(warm_up[stage]):
                self._run_forward(stage)
        for microbatch in range(self.microbatches):
            if microbatch:
                for stage in self._stages_to_run_forward():
                    self._run_weights(stage, self._count_weights_to_fit(stage))
                    self._run_forward(stage)
            for stage in reversed(stages):
                self._run_backward(stage)
            if self.longest >= below - self.costs.close:
                return False
        for stage in stages:
            self._run_weights(stage, self.pending[stage])
        return True

    def _run_forward(self, stage: int) -> None:
        if stage:
            arrival = self.f_ends[stage - 1][self.begun[stage]] + self.costs.comm
            if self.begun[stage]:
                self._wait(stage, arrival)
            else:
                self.clock[stage] = arrival
        self.clock[stage] += self.costs.forward[stage]
        self.f_ends[stage].append(self.clock[stage])
        self.kinds[stage].append(F)
        self.begun[stage] += 1
        self.in_flight[stage] += 1

    def _run_backward(self, stage: int) -> None:
        if stage < len(self.clock) - 1:
            self._wait(stage, self.b_end + self.costs.comm)
        if stage == 0 and self.begun[0] == self.microbatches:
            self._run_weights(0, self.pending[0])  # no stage waits for this B
        self.clock[stage] += self.costs.backward[stage]
        self.b_end = self.clock[stage]
        self.kinds[stage].append(B)
        self.in_flight[stage] -= 1
        self.pending[stage] += 1

    def _run_weights(self, stage: int, count: int) -> None:
        if count:
            self.kinds[stage] += [W] * count
            self.pending[stage] -= count
            self.clock[stage] += count * self.costs.weight[stage]

    def _wait(self, stage: int, arrival: float) -> None:
        """Runs W until an input arrives.

        A W that ends after the arrival runs if waiting would make this stage the longest one;
        otherwise the rule `fill` decides.
        """
        gap = arrival - self.clock[stage]
        close, weight = self.costs.close, self.costs.weight[stage]
        if gap > close and self.pending[stage]:
            fit = self.pending[stage]
            if weight > close:
                fit = min(fit, int((gap + close) / weight))
            self._run_weights(stage, fit)
            gap -= fit * weight
            if gap > close and self.pending[stage] and (self.fill or gap > self._slack(stage)):
                self._run_weights(stage, 1)
                return
        if gap > close:
            self.clock[stage] = arrival
            self.takes[stage] += gap
            self.longest = max(self.longest, self.takes[stage])

    def _slack(self, stage: int) -> float:
        """How long this stage can wait without becoming the longest one."""
        return self.longest - self.takes[stage] + self.costs.close

    def _count_weights_to_fit(self, stage: int) -> int:
        """How many Ws must run before there is memory for one more F."""
        share = self.weight_share
        over = self.in_flight[stage] + 1 + share * self.pending[stage] - self.memory_limit
        # Without a share, F always fits: one runs for each B, and those of the warm-up fitted.
        return math.ceil((over - 1e-9) / share) if over > 1e-9 and share else 0

    def _stages_to_run_forward(self) -> list[int]:
        """The stages that run an F in this round: those after the last stage that holds its F back.

        That stage makes the ones before it hold theirs back too: else they would run ahead of it.
        """
        running: list[int] = []
        for stage in reversed(range(len(self.clock))):
            if self.begun[stage] == self.microbatches:
                break
            if self.hold and self._may_hold_forward(stage):
                break
            running.append(stage)
        return running[::-1]

    def _may_hold_forward(self, stage: int) -> bool:
        """Whether it costs nothing to run B before the next F, which the next stage, two or more Fs
        behind, does not need yet."""
        if stage == len(self.clock) - 1 or self.begun[stage] < self.begun[stage + 1] + 2:
            return False
        costs, clock = self.costs, self.clock
        after = stage + 1
        b_arrives = clock[after] + costs.forward[after] + costs.backward[after] + costs.comm
        wait = b_arrives - clock[stage]
        if wait <= costs.close:
            return True
        weights = self._count_weights_to_fit(stage) * costs.weight[stage]
        if weights + costs.forward[stage] <= wait + costs.close:
            return False  # there is time for F before that B
        return wait <= self._slack(stage)
