"""The closed form of a step beside the timeline of the compiled program."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from test_plan_summary import COMPILED

from mtx.plan.calibration import calibration_of
from mtx.plan.compiled import Spent
from mtx.plan.differences import differences
from mtx.plan.plan import Plan, make_plan
from mtx.plan.summary import compiled_rows
from mtx.plan.time import StepTime
from mtx.presets import preset


def plan_of(*spent: Spent, step_s: float) -> Plan:
    assert COMPILED.timeline
    times = replace(COMPILED.timeline, spent=spent, step_s=step_s)
    return make_plan(
        preset("gpt-175b"), target="h100", compiled=replace(COMPILED, timeline=times)
    )  # fmt: skip


def test_what_is_spent_has_its_part_of_the_closed_form():
    spent = {
        "matmul_s": [("matmul", "woven"), ("matmul", "W")],
        "attention_s": [("attention", "B")],
        "elementwise_s": [("other", "F")],
        "embedding_and_head_s": [("matmul", "head"), ("other", "embed")],
        "tensor_comm_s": [
            ("exposed over tensor", "woven"), ("exposed over pipe", "head"),
            ("exposed over pipe x tensor", "head"),
        ],
        "context_comm_s": [("exposed over context", "F"), ("exposed over context", "head")],
        "expert_comm_s": [("exposed over expert", "woven"), ("exposed over expert x tensor", "B")],
        "host_comm_s": [("exposed over host", "F"), ("exposed over host", "")],
        "pipeline_comm_s": [("exposed over pipe", "send_x"), ("exposed over pipe", "")],
        "data_comm_s": [("exposed over data", "reduce"), ("other", "reduce"),
                        ("exposed over context", "reduce"),
                        ("exposed over pipe x data x tensor", "clip")],
        "optimizer_s": [("other", "update"), ("other", "")],
    }  # fmt: skip
    rows = [(part, Spent(*key, 2.0**n)) for n, (part, key) in enumerate(
        (part, key) for part, keys in spent.items() for key in keys)]  # fmt: skip
    whole_s = sum(one.seconds for _, one in rows)
    found = {
        row.part: row.compiled_s
        for row in differences(plan_of(*(one for _, one in rows), step_s=whole_s + 7.0))
    }
    for part in spent:
        assert found.pop(part) == sum(one.seconds for name, one in rows if name == part)
    assert found == {"bubble_s": 7.0, "kernel_starts_s": 0.0, "step_s": whole_s + 7.0}


def test_the_closed_form_is_of_this_program_and_starts_of_kernels_are_apart():
    """Even on an A100, where the plan itself prices Megatron-LM."""
    plan = make_plan(preset("gpt-175b"), target="a100-80gb", compiled=COMPILED)
    rows = {row.part: row.predicted_s for row in differences(plan)}
    whole = plan.time_with(calibration_of(plan.hardware, "mtx"))
    assert rows["step_s"] == whole.step_s != plan.time.step_s
    parts = sum(rows[each.name] for each in fields(StepTime))
    assert parts + rows["kernel_starts_s"] == pytest.approx(whole.step_s, rel=1e-12)
    assert rows["matmul_s"] < whole.matmul_s


def test_a_difference_above_a_tenth_has_a_reason():
    plan = plan_of(step_s=1.0)
    matmul_s = {row.part: row.predicted_s for row in differences(plan)}["elementwise_s"]
    for factor, said in ((1.05, False), (1.2, True), (0.5, True)):
        plan = plan_of(Spent("other", "F", factor * matmul_s), step_s=9.0)
        assert plan.compiled
        (row,) = [row for row in differences(plan) if row.part == "elementwise_s"]
        assert row.share == pytest.approx(1 / factor - 1) and bool(row.why) == said
        page = [row for row in compiled_rows(plan.compiled, plan) if "timeline" in row.section]
        (line,) = [row.value for row in page if row.name == "norms and activations"]
        assert f"({1 / factor - 1:+.1%})" in line and line.endswith(row.why)
    assert differences(make_plan(preset("gpt-175b"))) == ()
