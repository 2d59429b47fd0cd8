"""The plan of every preset: its numbers, its page and its file."""

import dataclasses
import json

import pytest

from mtx.families.gpt import TABLE1
from mtx.plan.flops import parameters_by_part
from mtx.plan.page import plan_lines
from mtx.plan.plan import load_run, make_plan, save_plan
from mtx.plan.summary import plan_rows
from mtx.presets import NAMES, preset


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_all_numbers_a_page_and_a_file(name, tmp_path):
    run = preset(name)
    plan = make_plan(run)
    check_numbers(name, json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    for width in (80, 100):
        lines = plan_lines(plan, width=width)
        assert max(len(line) for line in lines) <= width
        assert len(lines) > 30
    check_parts(run, [row for row in plan_rows(plan) if row.section.startswith("Parameters")])
    save_plan(plan, tmp_path / "plan.toml")
    layout = dataclasses.replace(run.layout, weave=plan.run.layout.weave)
    assert load_run(tmp_path / "plan.toml") == dataclasses.replace(run, layout=layout)


def check_numbers(name, numbers):
    assert numbers["memory_gib"] == pytest.approx(sum(numbers["memory_parts_gib"].values()))
    assert numbers["step_time_s"] == pytest.approx(sum(numbers["step_time_parts_s"].values()))
    assert numbers["fits"] == (numbers["memory_share"] <= 0.9)
    assert 0 < numbers["mfu"] < 1 and numbers["parameters"] > 0
    assert ("published" in numbers) == (name in TABLE1)


def check_parts(run, rows):
    counts = parameters_by_part(run.model)
    assert len(rows) == sum(count > 0 for count in counts.values())
    if not run.model.tied:
        assert "head" not in parameters_by_part(dataclasses.replace(run.model, tied=True))
        assert counts["head"] == run.model.vocab * run.model.hidden
