"""When every op of a schedule runs, what the schedule costs, and what it keeps meanwhile.

There are two models of cost. **Asynchronous**: a program per stage, as in Megatron or torch: an op
starts when its stage has finished the previous op and its input has arrived. **Lock-step**: one
program for all stages, like ours: every tick lasts as long as its longest stage, plus one `comm` if
any stage sends in it. That is the price if sends overlap with computation, as XLA:GPU could do.
XLA's CPU runtime blocks at the send of F, so that a tick lasts max F + max (B + W) there, and
`deferred_zb` costs as much as `aligned_zb` (experiments/bench_schedules.py uses this price).

Legend: P stages · K ops of one stage · T ticks · C chunks · I items
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mtx.errors import UserError, require_kind
from mtx.schedules.orders import B, BadOp, F, Orders, W, orders_of, stages_in_order
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import WEIGHT_SHARE, Times

Model = Literal["asynchronous", "lockstep"]
NOTHING = -1  # for an op that waits for no other stage


def bubble_text(bubble_over_ideal: float) -> str:
    """The bubble in words, with the same digits wherever it is said."""
    return f"bubble {bubble_over_ideal:.2%} of ideal time"


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """When the ops of one schedule run, in the unit of `times`."""

    schedule: Schedule
    times: Times
    model: Model
    weight_share: float  # the share of a stash that stays from B to W
    orders: Orders  # the ops that start and end belong to
    start: np.ndarray  # float [P, K]
    end: np.ndarray  # float [P, K]

    @cached_property
    def makespan(self) -> float:
        """From the start of the first op to the end of the last one, over all stages."""
        return float(self.end.max() - self.start.min())

    @cached_property
    def cost(self) -> float:
        """The longest time of a stage from its first op's start to its last op's end (Qi et al.,
        ICLR'24, section 5.3); shorter than the makespan, as stages begin one after another."""
        return float((self.end.max(axis=1) - self.start.min(axis=1)).max())

    @property
    def ideal(self) -> float:
        """m (F + B + W) of the average stage: the makespan if no stage ever idled."""
        stages = self.schedule.stages
        return self.schedule.microbatches * float(self.times.of_stages(stages).sum()) / stages

    @property
    def bubble_over_ideal(self) -> float:
        """The bubble: idle time over ideal time, of the average stage (Narayanan et al., SC'21,
        section 2.2). Time that a stage waits for sends, or for slower stages, is idle time."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def zero_bubble_rate(self) -> float:
        """(cost - ideal) / cost: the zero-bubble papers' "bubble rate", another measure."""
        return (self.cost - self.ideal) / self.cost

    @cached_property
    def in_flight(self) -> np.ndarray:
        """int [P]: the most (item, chunk) at once between the start of F and the end of B."""
        starts, ends = self.orders.kind == F, self.orders.kind == B
        return (starts.cumsum(axis=1) - ends.cumsum(axis=1) + ends).max(axis=1)

    @cached_property
    def peak_memory(self) -> np.ndarray:
        """float [P]: the most kept at once, in stashes of a whole stage: 1.0 is what one microbatch
        keeps for all chunks of one stage."""
        return self._memory[..., 0].max(axis=1)

    def memory_over_time(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, values), [2K] each: values[i] stashes are kept from times[i] to times[i+1]."""
        moments = np.stack([self.start[stage], self.end[stage]], axis=-1)
        return moments.ravel(), self._memory[stage].ravel()

    @cached_property
    def _memory(self) -> np.ndarray:
        """float [P, K, 2]: stashes while each op runs, and after it."""
        kind = self.orders.kind
        share = self.weight_share if self.schedule.split else 0.0
        # Counted in whole ops, so that the sums are exact however long they are.
        taken, halved, freed = ((kind == k).cumsum(axis=1) for k in (F, B, W))
        after = taken - halved * (1 - share) - freed * share
        during = after + (kind == B) * (1 - share) + (kind == W) * share
        return np.stack([during, after], axis=-1) / (self.schedule.slices * self.schedule.virtual)


def simulate(
    schedule: Schedule,
    times: Times | None = None,
    *,
    model: Model = "asynchronous",
    weight_share: float = WEIGHT_SHARE,
) -> Simulation:
    """Runs a schedule's orders (asynchronous) or its ticks (lockstep) with the given times.

    weight_share: the part of a stash that stays from B to W if they are split. 1.0 frees nothing
    before W, which is how the papers of the V-shaped schedules count; 0.0 frees all of it with B.
    """
    require_kind("schedule", schedule, Schedule, "a table, as of mtx.make('1f1b', ...)")
    times = times or Times()
    for name in ("stage_factors", "stage_times"):
        given = getattr(times, name)
        if given is not None and len(given) != schedule.stages:
            raise UserError(
                f"{name} has {len(given)} values for the {schedule.stages} stages of schedule "
                f"{schedule.name!r}; give one a stage"
            )
    if not 0 <= weight_share <= 1:
        raise UserError(f"weight_share={weight_share} must be from 0 to 1")
    if model == "asynchronous":
        orders = schedule.orders
        lasts = durations(schedule, orders, times)
        start, end = _run_asynchronous(schedule, lasts, times.comm)
    elif model == "lockstep":
        orders = orders_of(*schedule.tables)
        lasts = durations(schedule, orders, times)
        start, end = _run_lockstep(schedule, orders, lasts, times.comm)
    else:
        raise UserError(f"unknown model {model!r}: known are asynchronous, lockstep")
    return Simulation(
        schedule=schedule, times=times, model=model, weight_share=weight_share, orders=orders,
        start=start, end=end,
    )  # fmt: skip


def durations(schedule: Schedule, orders: Orders, times: Times) -> np.ndarray:
    """float [P, K]: how long each op takes."""
    by_kind = times.of_stages(schedule.stages)
    if not schedule.split:
        by_kind[:, B] += by_kind[:, W]
    stage = np.arange(schedule.stages)[:, None]
    return by_kind[stage, orders.kind] / (schedule.virtual * schedule.slices)


def _run_asynchronous(
    schedule: Schedule, lasts_PK: np.ndarray, comm: float
) -> tuple[np.ndarray, np.ndarray]:
    orders = schedule.orders
    stages, ops = orders.kind.shape
    sender_PK = _senders(schedule)
    senders = sender_PK.ravel().tolist()
    lasts = lasts_PK.ravel().tolist()
    end = [-1.0] * (stages * ops)  # below 0: has not run
    position = [stage * ops for stage in range(stages)]
    clock = [0.0] * stages
    ready = deque(range(stages))
    waiting: list[list[int]] = [[] for _ in range(stages)]  # for an op of this stage
    while ready:
        stage = ready.popleft()
        now = clock[stage]
        first = position[stage]
        stop = (stage + 1) * ops
        for at in range(first, stop):
            sender = senders[at]
            if sender >= 0:
                arrives = end[sender]
                if arrives < 0:
                    waiting[sender // ops].append(stage)
                    stop = at
                    break
                arrives += comm
                if arrives > now:
                    now = arrives
            now += lasts[at]
            end[at] = now
        clock[stage], position[stage] = now, stop
        if stop > first:
            ready.extend(waiting[stage])
            waiting[stage].clear()
    _check_finished(schedule, position, ops)
    end_PK = np.array(end).reshape(stages, ops)
    arrival = np.where(sender_PK >= 0, end_PK.ravel()[sender_PK] + comm, 0.0)
    free = np.pad(end_PK[:, :-1], ((0, 0), (1, 0)))
    # The loop adds the same numbers in the same order, so these starts are exactly its own.
    return np.maximum(arrival, free), end_PK


def _senders(schedule: Schedule) -> np.ndarray:
    """int [P, K]: stage * K + position of the op of another stage that sends each op its input.

    NOTHING if the input is from the same stage: then its order ensures that it is there.
    """
    orders = schedule.orders
    stages, ops = orders.kind.shape
    items, last = schedule.items, schedule.virtual * schedule.stages - 1
    stage = np.arange(stages)[:, None]
    virtual_stage = schedule.virtual_stages[orders.chunk, stage]
    index = np.full((3, items, last + 1), NOTHING)
    index[orders.kind, orders.item, virtual_stage] = np.arange(stages * ops).reshape(stages, ops)
    step = np.array([-1, 1, 0])[orders.kind]
    sender = index[orders.kind, orders.item, np.clip(virtual_stage + step, 0, last)]
    return np.where(sender // ops == stage, NOTHING, sender)


def _check_finished(schedule: Schedule, position: list[int], ops: int) -> None:
    for stage, at in enumerate(position):
        if at < (stage + 1) * ops:
            op = schedule.orders.of(stage)[at - stage * ops]
            raise BadOp(
                f"schedule {schedule.name!r} stands still: stage {stage} waits for ever for the "
                f"input of {op.describe(schedule.slices)}",
                stage=stage, op=op,
            )  # fmt: skip


def _run_lockstep(
    schedule: Schedule, orders: Orders, lasts_PK: np.ndarray, comm: float
) -> tuple[np.ndarray, np.ndarray]:
    stages = schedule.stages
    stage = np.broadcast_to(np.arange(stages)[:, None], orders.kind.shape)
    tick = np.stack(schedule.tables)[orders.kind, orders.item, orders.chunk, stage]
    by_kind = np.zeros((3, schedule.ticks, stages))
    by_kind[orders.kind, tick, stage] = lasts_PK
    until = by_kind.cumsum(axis=0)  # F, B and W of a tick follow one another
    length = until[-1].max(axis=1) + comm * _sends(schedule)
    begin = np.concatenate([[0.0], length.cumsum()[:-1]])
    end = begin[tick] + until[orders.kind, tick, stage]
    return begin[tick] + (until - by_kind)[orders.kind, tick, stage], end


def _sends(schedule: Schedule) -> np.ndarray:
    """bool [T]: whether any stage sends to another one in this tick."""
    stage = stages_in_order(schedule.virtual_stages)
    away = np.append(stage[1:] != stage[:-1], False)  # from each virtual stage to the one after
    sends = np.zeros(schedule.ticks, bool)
    sends[schedule.forward_ticks[:, away[schedule.virtual_stages]]] = True
    back = np.insert(away[:-1], 0, False)
    sends[schedule.backward_ticks[:, back[schedule.virtual_stages]]] = True
    return sends
