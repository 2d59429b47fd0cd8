"""Simulations as Chrome traces, which https://ui.perfetto.dev and chrome://tracing open.

Each simulation is a process. It has a thread for each stage with its ops, arrows from each op to
the one on another stage that takes its output, and a counter for each stage of what it keeps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtx.files import replacing
from mtx.schedules.orders import KINDS, B, F, stages_in_order
from mtx.schedules.simulate import Simulation
from mtx.view.spans import Shown, run_title, runs_of

UNIT_US = 1000.0  # one unit of the simulation's time: times given in ms are shown as such
MOST_ARROWS = 100_000  # of one simulation; if there would be more, none is drawn
_INSIDE = 0.01  # of an op: an arrow attaches to the op that is running, not to one that ends there


def trace_events(shown: Shown | Sequence[Shown], *, unit_us: float = UNIT_US) -> dict[str, Any]:
    """The trace as a JSON object: {"traceEvents": [...], ...}; times in microseconds, from 0.

    "otherData" says what one unit of the simulation's time is, the bubble of each, and whether
    there were too many arrows.
    """
    runs = runs_of(shown)
    events = [event for pid, run in enumerate(runs) for event in _process(run, pid, unit_us)]
    other: dict[str, Any] = {
        "unit": f"1 of the simulation's time is {unit_us:g} us",
        "bubble_over_ideal": [run.bubble_over_ideal for run in runs],
    }
    crowded = [run for run in runs if _sends(run) > MOST_ARROWS]
    if crowded:
        other["arrows"] = f"left out where there are more than {MOST_ARROWS:,}"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(
    shown: Shown | Sequence[Shown], path: str | Path, *, unit_us: float = UNIT_US
) -> None:
    """Write `trace_events` to a file. UserError if it cannot be written."""
    text = json.dumps(trace_events(shown, unit_us=unit_us), separators=(",", ":"))
    with replacing(path) as written:
        written.write_text(text)


def _process(run: Simulation, pid: int, unit_us: float) -> Iterator[dict[str, Any]]:
    schedule, begin = run.schedule, run.start.min()
    start, length = (run.start - begin) * unit_us, (run.end - run.start) * unit_us
    yield _meta(pid, 0, "process_name", name=run_title(run))
    for stage in range(schedule.stages):
        yield _meta(pid, stage, "thread_name", name=f"stage {stage}")
        yield _meta(pid, stage, "thread_sort_index", sort_index=stage)
    for stage in range(schedule.stages):
        shared = {"pid": pid, "tid": stage}
        rows = zip(run.orders.of(stage), start[stage].tolist(), length[stage].tolist())
        for op, ts, dur in rows:
            microbatch, part = divmod(op.item, schedule.slices)
            args = {"microbatch": microbatch, "chunk": op.chunk,
                    "virtual_stage": int(schedule.virtual_stages[op.chunk, stage])}  # fmt: skip
            args |= {"slice": part} if schedule.slices > 1 else {}
            name = op.describe(schedule.slices)
            yield {"ph": "X", "ts": ts, "dur": dur, "cat": KINDS[op.kind], "name": name,
                   "args": args, **shared}  # fmt: skip
        for moment, value in _changes(run, stage):
            yield {"ph": "C", "ts": (moment - begin) * unit_us, "args": {"stashes": value},
                   "name": f"stashes, stage {stage}", **shared}  # fmt: skip
    if _sends(run) <= MOST_ARROWS:
        yield from _arrows(run, pid, start, length)


def _changes(run: Simulation, stage: int) -> Iterator[tuple[float, float]]:
    """(time, stashes that the stage keeps), wherever that changes."""
    times, values = run.memory_over_time(stage)
    lasting = np.append(times[1:] > times[:-1], True)
    times, values = times[lasting], values[lasting]
    changes = np.append(True, values[1:] != values[:-1])
    return zip(times[changes].tolist(), values[changes].tolist())


def _meta(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _sends(run: Simulation) -> int:
    """How many outputs travel from stage to stage."""
    stage_of = stages_in_order(run.schedule.virtual_stages)
    return 2 * run.schedule.items * int((stage_of[1:] != stage_of[:-1]).sum())


def _arrows(
    run: Simulation, pid: int, start: np.ndarray, length: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Arrows from the end of each op that sends to another stage to the start of the op that takes
    what it sent."""
    schedule, orders = run.schedule, run.orders
    stage = np.broadcast_to(np.arange(schedule.stages)[:, None], orders.kind.shape)
    where = (orders.kind, orders.item, schedule.virtual_stages[orders.chunk, stage])
    first, last = np.zeros((2, 3, schedule.items, schedule.virtual_stages.size))
    first[where], last[where] = start + _INSIDE * length, start + (1 - _INSIDE) * length
    stage_of, ids = stages_in_order(schedule.virtual_stages).tolist(), itertools.count(1)
    for kind, step, name in ((F, 1, "activation"), (B, -1, "gradient")):
        for one, source in enumerate(stage_of):
            other = one + step
            if not 0 <= other < len(stage_of) or stage_of[other] == source:
                continue
            for sent, taken in zip(last[kind, :, one].tolist(), first[kind, :, other].tolist()):
                shared = {"pid": pid, "name": name, "cat": "send", "id": f"{pid}.{next(ids)}"}
                yield {"ph": "s", "tid": source, "ts": sent, **shared}
                yield {"ph": "f", "bp": "e", "tid": stage_of[other], "ts": taken, **shared}
