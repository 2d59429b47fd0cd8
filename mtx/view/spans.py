"""What a simulation's picture shows, before it is drawn: what every stage does over time.

Legend: P stages · K ops of one stage · T ticks · N spans of one stage
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.choose import schedule_for
from mtx.schedules.schedule import Schedule
from mtx.schedules.simulate import Simulation, bubble_text, simulate

Shown = Schedule | Simulation
_MOST_OPS = 500_000  # of a schedule that is drawn
MODELS = {"lockstep": "lock-step", "asynchronous": "asynchronous"}  # as titles name them


def runs_of(shown: Shown | Sequence[Shown]) -> list[Simulation]:
    """The simulations; a schedule is simulated in lock-step, as our program runs it."""
    several = [shown] if isinstance(shown, Shown) else list(shown)
    if not several:
        raise UserError("shown=[] must hold a schedule or a simulation to show")
    return [
        one if isinstance(one, Simulation) else simulate(one, model="lockstep") for one in several
    ]


def short_table(layout: Layout, microbatches: int) -> Schedule | None:
    """A run's schedule; None if it is too long to be drawn."""
    if layout.pipe * layout.virtual * microbatches > _MOST_OPS:
        return None
    return schedule_for(layout, microbatches)


def run_title(run: Simulation) -> str:
    """What ran, how, how long, and the bubble: the same in text, picture and trace."""
    ticks = f", {count(run.schedule.ticks, 'tick')}" if run.model == "lockstep" else ""
    priced = f"{MODELS[run.model]}: {run.makespan:.5g}, {bubble_text(run.bubble_over_ideal)}"
    return f"{describe(run.schedule)}{ticks}; {priced}"


def describe(schedule: Schedule) -> str:
    """Name and size, for a title."""
    stages = count(schedule.stages, "stage")
    stages += f" of {schedule.virtual} chunks" if schedule.virtual > 1 else ""
    microbatches = count(schedule.microbatches, "microbatch")
    microbatches += f" of {schedule.slices} slices" if schedule.slices > 1 else ""
    return f"{schedule.name}: {stages}, {microbatches}"


def count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def tick_spans(run: Simulation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ticks of a lock-step run in which any stage works, with the start of each and the end of
    its longest stage; [N] each."""
    schedule, orders = run.schedule, run.orders
    tables = [schedule.forward_ticks, schedule.backward_ticks]
    tables += [] if schedule.weight_ticks is None else [schedule.weight_ticks]
    stage = np.arange(schedule.stages)[:, None]
    ticks = np.stack(tables)[orders.kind, orders.item, orders.chunk, stage]  # [P, K]
    start, end = np.full(schedule.ticks, np.inf), np.full(schedule.ticks, -np.inf)
    np.minimum.at(start, ticks, run.start)
    np.maximum.at(end, ticks, run.end)
    used = np.flatnonzero(np.isfinite(start))
    return used, start[used], end[used]


def waits(run: Simulation, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [N] of the time in which a stage idles because data is on its way.

    Asynchronous: before an op, while its input is on its way. In lock-step: after every tick in
    which any stage sends, all stages wait.
    """
    if not run.times.comm:
        return np.zeros(0), np.zeros(0)
    if run.model == "lockstep":
        _, start, end = tick_spans(run)
        first, last = end[:-1], start[1:]
    else:
        # An op that starts later than its stage was free has waited for another stage's output.
        free = np.concatenate([[-np.inf], run.end[stage][:-1]])
        last = run.start[stage]
        first = np.maximum(free, last - run.times.comm)
        first[0] = max(first[0], run.start.min())
    some = last - first > 1e-9 * run.makespan
    return first[some], last[some]


def shares(run: Simulation, edges: np.ndarray) -> np.ndarray:
    """float [P, N, 5]: the shares of F, B, W, waits and idling in the time between two edges."""
    result = np.zeros((run.schedule.stages, len(edges) - 1, 5))
    for stage in range(run.schedule.stages):
        kind = run.orders.kind[stage]
        spans = [(run.start[stage][kind == k], run.end[stage][kind == k]) for k in range(3)]
        for column, (start, end) in enumerate([*spans, waits(run, stage)]):
            if len(start):
                moments = np.stack([start, end], axis=-1).ravel()
                taken = np.repeat(np.cumsum(end - start), 2)
                taken[::2] -= end - start
                result[stage, :, column] = np.diff(np.interp(edges, moments, taken))
    result /= np.diff(edges)[:, None]
    result[..., 4] = np.clip(1 - result[..., :4].sum(axis=-1), 0, 1)
    return result


def memory_between(run: Simulation, moments: np.ndarray) -> np.ndarray:
    """float [P, N]: the stashes that each stage keeps at these moments."""
    kept = np.zeros((run.schedule.stages, len(moments)))
    for stage in range(run.schedule.stages):
        times, values = run.memory_over_time(stage)
        at = np.searchsorted(times, moments, side="right") - 1
        kept[stage] = np.where(at < 0, 0.0, values[at])
    return kept
