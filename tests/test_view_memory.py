"""The picture of a device's memory."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from errors import names
from matplotlib.patches import Rectangle

from mtx.errors import UserError
from mtx.plan.memory import Memory
from mtx.plan.plan import make_plan
from mtx.plan.priced import GIB
from mtx.presets import preset
from mtx.view.memory import draw_memory

TRILLION = make_plan(preset("gpt-1t"))


def bars(axes) -> list[float]:
    """Widths of all parts."""
    return [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]


def test_the_bar_has_every_part_and_ends_at_the_whole():
    axes = draw_memory(TRILLION).axes[0]
    parts = [getattr(TRILLION.memory, each.name) / GIB for each in fields(Memory)]
    assert bars(axes) == pytest.approx([part for part in parts if part])
    total = TRILLION.memory.total_bytes / GIB
    assert f" {total:.1f}" in [text.get_text() for text in axes.texts]
    assert len({tuple(patch.get_facecolor()) for patch in axes.patches}) == len(axes.patches)


def test_lines_stand_at_the_whole_memory_and_at_what_can_be_had():
    axes = draw_memory(TRILLION).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines] == [80, 72]
    assert {"80 GiB", "72 GiB, 90%"} <= {text.get_text() for text in axes.texts}


def test_stages_use_less_and_less_of_the_stash():
    bars, stages = draw_memory(TRILLION).axes
    assert "127 in flight on stage 0, 1 on stage 63" in stages.get_title(loc="left")
    used, free = stages.collections[-2:]
    stash = TRILLION.memory.stash_bytes / GIB
    heights = used.get_paths()[0].vertices[:, 1]
    assert heights.max() - heights.min() == pytest.approx(stash)
    assert free.get_hatch() == "////"


def test_plans_stand_below_each_other():
    run = TRILLION.run
    ways = ("none", "selective", "full")
    plans = [make_plan(replace(run, layout=replace(run.layout, recompute=way))) for way in ways]
    (axes,) = draw_memory(plans).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"recompute={way}" for way in ways]
    (axes,) = draw_memory(plans, labels=["a", "b", "c"]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_a_toy_is_drawn_in_mib():
    axes = draw_memory(make_plan(preset("miniature"))).axes[0]
    assert axes.get_xlabel().startswith("MiB of a device's 80 GiB") and not axes.lines
    assert sum(bars(axes)) > 0.8 * axes.get_xlim()[1]


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(UserError) as error:
        draw_memory([])
    names(error, "plans=[]")
    with pytest.raises(UserError) as error:
        draw_memory(TRILLION, tmp_path / "memory.jpg")
    names(error, "memory.jpg", ".svg", ".png", ".pdf")
    draw_memory(TRILLION, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
