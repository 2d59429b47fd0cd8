"""The picture of a whole plan, and its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from errors import names
from matplotlib.image import AxesImage, imread
from matplotlib.text import Text

from mtx.errors import UserError
from mtx.plan.plan import make_plan
from mtx.presets import preset
from mtx.view import spans
from mtx.view.picture import Picture, new_figure
from mtx.view.plan import draw_plan, draw_throughput, draw_time, fill_schedule, scaled_plans

TRILLION = make_plan(preset("gpt-1t"))


def test_the_picture_has_all_parts():
    figure = draw_plan(make_plan(preset("miniature")))
    said = "\n".join(text.get_text() for text in figure.findobj(Text))
    for part in ("pipe 2 x data 2 x tensor 2 = 8", "Memory of one", "a step, MFU", "Throughput",
                 "1f1b: 2 stages of 2 chunks, 4 microbatches"):  # fmt: skip
        assert part in said
    assert "F, chunk 1" in said, "no timeline"


def test_the_timeline_is_in_the_times_of_the_plan():
    """Drawn to scale: from the first op to the last it takes the plan's time of F, B, their
    messages and waiting."""
    run = preset("gpt-145b")
    layout = replace(run.layout, data=1, microbatch=1)
    plan = make_plan(replace(run, layout=layout, global_batch=42))
    drawn = new_figure(9, 4).add_subplot()
    fill_schedule(drawn, plan, (8.0, 3.0))
    time = plan.time
    whole_s = time.step_s - time.data_comm_s - time.optimizer_s
    assert drawn.get_xlim()[1] == pytest.approx(whole_s, rel=1e-9)
    assert f"bubble {plan.bubble_over_ideal:.2%} of ideal time" in drawn.get_title(loc="left")


def test_all_text_can_be_read_and_nothing_is_cut_at_an_edge(tmp_path):
    figure = draw_plan(TRILLION, tmp_path / "plan.png")
    sizes = {text.get_text(): text.get_fontsize() for text in figure.findobj(Text)}
    assert sizes["stages 0-3"] >= 8 and min(sizes[text] for text in sizes if text) >= 5.5
    pixels = imread(tmp_path / "plan.png")
    assert all(
        (edge == 1).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:])
    )


def test_a_schedule_that_is_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr(spans, "_MOST_OPS", 64 * 512 - 1)
    figure = draw_plan(TRILLION)
    assert not figure.findobj(AxesImage)
    said = [text.get_text() for text in figure.findobj(Text)]
    assert "the schedule is too long for a picture" in said


def test_the_bars_of_a_step_are_its_parts():
    (axes,) = draw_time(TRILLION).axes
    widths = [patch.get_width() for patch in axes.patches]
    assert sum(widths) == pytest.approx(TRILLION.time.step_s)
    assert len({tuple(patch.get_facecolor()) for patch in axes.patches}) == len(widths)


def test_scaling_passes_through_the_plan():
    for weak in (True, False):
        points = scaled_plans(TRILLION, weak=weak)
        gpus = [point.gpus for point in points]
        assert gpus == sorted(gpus) and 3072 in gpus and len(gpus) > 4
        here = points[gpus.index(3072)]
        assert here.time == TRILLION.time
        for point in points:
            layout = point.run.layout
            assert (layout.pipe, layout.tensor, layout.microbatch) == (64, 8, 1)
            per_replica = point.run.global_batch / layout.data
            assert per_replica == 512 if weak else point.run.global_batch == 3072
    strong = [point.tflops_per_gpu_sc21 for point in scaled_plans(TRILLION, weak=False)]
    assert strong == sorted(strong, reverse=True), "smaller shares of a batch are less efficient"


def test_the_curves_are_those_points():
    (axes,) = draw_throughput(TRILLION).axes
    weak, strong, circle = axes.lines
    assert list(weak.get_xdata()) == [one.gpus for one in scaled_plans(TRILLION, weak=True)]
    assert list(circle.get_xdata()) == [3072]
    assert list(strong.get_ydata()) == pytest.approx(
        [one.tflops_per_gpu_sc21 for one in scaled_plans(TRILLION, weak=False)]
    )


@pytest.mark.parametrize("draw", [draw_plan, draw_time, draw_throughput])
def test_pictures_are_saved_or_refused(draw, tmp_path):
    plan = make_plan(preset("bench-s"))
    draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError) as error:
        draw(plan, tmp_path / "plan.gif")
    names(error, "plan.gif", ".svg", ".png", ".pdf")


def test_a_figure_is_svg_in_a_notebook_and_the_same_bytes_each_time(tmp_path):
    figure = draw_time(TRILLION)
    svg = Picture(figure=figure).svg()
    assert svg.startswith("<svg") and ">matmuls<" in svg
    assert Picture(figure=draw_time(TRILLION)).svg() == svg
    Picture(figure=new_figure(1, 1)).save(tmp_path / "empty.pdf")
    assert (tmp_path / "empty.pdf").read_bytes().startswith(b"%PDF")
