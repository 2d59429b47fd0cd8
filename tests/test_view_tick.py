"""The picture of a compiled step's steady tick is to scale, and shows exposed time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from errors import names
from matplotlib.image import imread
from matplotlib.text import Text
from test_plan_summary import COMPILED

from mtx.errors import UserError
from mtx.plan.compiled import Span, Spent, Tick
from mtx.plan.plan import Plan, make_plan
from mtx.presets import preset
from mtx.view.tick import draw_tick

TICK = Tick(
    seconds=0.028, count=183, drawn_s=0.030,
    spent=(
        Spent("matmul", "woven", 0.021), Spent("matmul", "W", 0.0042),
        Spent("exposed over tensor", "head", 0.0014), Spent("other", "", 0.0014),
    ),
    spans=(
        Span("matmul", "woven", 0.0, 0.010, False), Span("tensor", "woven", 0.002, 0.003, False),
        Span("other", "woven", 0.010, 0.001, False), Span("matmul", "woven", 0.011, 0.008, False),
        Span("tensor", "head", 0.018, 0.004, False), Span("tensor", "head", 0.019, 0.003, True),
        Span("matmul", "head", 0.022, 0.008, False),
    ),
)  # fmt: skip


def plan_of(tick: Tick | None) -> Plan:
    assert COMPILED.timeline
    compiled = replace(COMPILED, timeline=replace(COMPILED.timeline, tick=tick))
    return make_plan(preset("gpt-1t"), compiled=compiled)


def test_rows_are_streams_to_scale_and_what_is_exposed_is_labelled():
    above, below = draw_tick(plan_of(TICK)).axes
    rows = [label.get_text() for label in above.get_yticklabels()]
    assert rows == ["matmuls", "attention", "all else", "over tensor"]
    assert above.get_xlim() == (0, pytest.approx(30))
    start, end = below.get_xlim()
    assert end - start == pytest.approx(5) and start <= 19 and end >= 22, "not where it is exposed"
    ends = {round(path.get_extents().x1, 6) for each in above.collections for path in
            each.get_paths()}  # fmt: skip
    assert {10, 11, 19, 22, 30, 5} <= ends
    for axes in (above, below):
        assert "3" in {text.get_text() for text in axes.texts}, "milliseconds of the wait"


def test_the_caption_has_the_mean_tick_and_its_shares():
    figure = draw_tick(plan_of(TICK))
    said = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
    for part in ("compiled", "28 ms, the mean of 183 ticks: matmuls 90.0%, all else 5.0%, exposed "
                 "over tensor 5.0%.", "layers, F and B woven"):  # fmt: skip
        assert part in said


def test_it_fits_a_page_of_680_pixels_and_nothing_is_cut(tmp_path):
    figure = draw_tick(plan_of(TICK), tmp_path / "tick.png")
    pixels = imread(tmp_path / "tick.png")
    assert pixels.shape[1] <= 150 * 7.3
    assert all(
        (edge == 1).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:])
    )
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 6.5


def test_without_a_tick_there_is_nothing_to_draw():
    with pytest.raises(UserError) as error:
        draw_tick(plan_of(None))
    names(error, "plan.compiled")
