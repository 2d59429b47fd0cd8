"""Chrome traces: events are as viewers expect, and equal the simulation's."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from errors import names

from mtx.errors import UserError
from mtx.schedules.makers import make
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate
from mtx.view import trace
from mtx.view.trace import trace_events, write_trace

RUN = simulate(make("zb_v", microbatches=5, stages=3), Times(comm=0.25))


def by_phase(record: dict) -> dict[str, list[dict]]:
    phases: dict[str, list[dict]] = {}
    for event in record["traceEvents"]:
        phases.setdefault(event["ph"], []).append(event)
    return phases


def test_every_op_is_a_complete_event_of_its_stage():
    phases = by_phase(trace_events(RUN, unit_us=10.0))
    assert set(phases) == {"M", "X", "C", "s", "f"}
    assert len(phases["X"]) == 3 * 5 * 2 * 3
    for stage in range(3):
        mine = [event for event in phases["X"] if event["tid"] == stage]
        np.testing.assert_allclose([e["ts"] for e in mine], RUN.start[stage] * 10)
        np.testing.assert_allclose(
            [e["ts"] + e["dur"] for e in mine], RUN.end[stage] * 10, atol=1e-9
        )
        assert [e["name"] for e in mine] == [op.describe() for op in RUN.orders.of(stage)]
        for event, op in zip(mine, RUN.orders.of(stage), strict=True):
            assert event["args"] == {
                "microbatch": op.item, "chunk": op.chunk,
                "virtual_stage": RUN.schedule.virtual_stages[op.chunk, stage],
            }  # fmt: skip


def test_threads_are_named_stages():
    names = [e for e in by_phase(trace_events(RUN))["M"] if e["name"] == "thread_name"]
    assert {e["tid"]: e["args"]["name"] for e in names} == {s: f"stage {s}" for s in range(3)}
    (process,) = [e for e in by_phase(trace_events(RUN))["M"] if e["name"] == "process_name"]
    assert process["args"]["name"].startswith("zb_v: 3 stages of 2 chunks")


def test_arrows_join_ops_of_neighbouring_virtual_stages():
    """Of 6 virtual stages in a V over 3 stages, 2 and 3 are on one stage: 4 joints, both ways."""
    phases = by_phase(trace_events(RUN))
    ends = {event["id"]: event for event in phases["f"]}
    assert len(phases["s"]) == len(ends) == len(phases["f"]) == 2 * 4 * 5
    ops = phases["X"]

    def around(event: dict) -> dict:
        (op,) = [
            op for op in ops
            if op["tid"] == event["tid"] and op["ts"] < event["ts"] < op["ts"] + op["dur"]
        ]  # fmt: skip
        return op

    steps = Counter()
    for event in phases["s"]:
        source, target = around(event), around(ends[event["id"]])
        assert ends[event["id"]]["bp"] == "e" and source["tid"] != target["tid"]
        assert source["cat"] == target["cat"]
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        assert source["ts"] + source["dur"] + 250 <= target["ts"] + 1e-6
        far = target["args"]["virtual_stage"] - source["args"]["virtual_stage"]
        steps[source["cat"], far] += 1
    assert steps == {("F", 1): 20, ("B", -1): 20}


def test_counters_show_the_memory():
    counters = by_phase(trace_events(RUN))["C"]
    for stage in range(3):
        mine = [event for event in counters if event["tid"] == stage]
        values = [event["args"]["stashes"] for event in mine]
        assert max(values) == RUN.peak_memory[stage] and values[-1] == 0
        assert all(a != b for a, b in zip(values, values[1:], strict=False))
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)


def test_several_simulations_are_several_processes(tmp_path):
    path = tmp_path / "trace.json"
    write_trace([RUN, make("terapipe", microbatches=2, stages=2, slices=2)], path)
    record = json.loads(path.read_text())
    assert {event["pid"] for event in record["traceEvents"]} == {0, 1}
    sliced = [e for e in record["traceEvents"] if e["pid"] == 1 and e["ph"] == "X"]
    assert {e["args"]["slice"] for e in sliced} == {0, 1} and sliced[1]["name"] == "F0/1.0"
    ids = [event["id"] for event in record["traceEvents"] if event["ph"] == "s"]
    assert len(set(ids)) == len(ids)
    sliced_run = simulate(make("terapipe", microbatches=2, stages=2, slices=2), model="lockstep")
    assert record["otherData"] == {
        "unit": "1 of the simulation's time is 1000 us",
        "bubble_over_ideal": [RUN.bubble_over_ideal, sliced_run.bubble_over_ideal],
    }
    with pytest.raises(UserError) as error:
        write_trace(RUN, tmp_path / "no" / "trace.json")
    names(error, tmp_path / "no" / "trace.json")


def test_too_many_arrows_are_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(trace, "MOST_ARROWS", 39)
    record = trace_events(RUN)
    assert set(by_phase(record)) == {"M", "X", "C"}
    assert record["otherData"]["arrows"] == "left out where there are more than 39"
