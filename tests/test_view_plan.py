"""The picture of a whole plan, and its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.image import AxesImage
from matplotlib.text import Text

from mtx.errors import UserError
from mtx.plan.plan import make_plan
from mtx.presets import preset
from mtx.view.picture import Picture, new_figure
from mtx.view.plan import draw_plan, draw_throughput, draw_time, scaled_plans

TRILLION = make_plan(preset("gpt-1t"))


def test_the_picture_has_all_parts():
    figure = draw_plan(make_plan(preset("miniature")))
    said = "\n".join(text.get_text() for text in figure.findobj(Text))
    for part in ("pipe 2 x data 2 x tensor 2 = 8", "Memory of one", "a step, MFU", "Throughput"):
        assert part in said
    images = figure.findobj(AxesImage)
    assert len(images) == 1 and images[0].get_array().std() > 10, "no timeline"


def test_a_schedule_that_is_too_long_is_left_out():
    run = TRILLION.run
    deep = make_plan(replace(run, layout=replace(run.layout, data=1), global_batch=3072))
    figure = draw_plan(deep)
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
    with pytest.raises(UserError, match="must end with one of"):
        draw(plan, tmp_path / "plan.gif")


def test_a_figure_is_svg_in_a_notebook_and_the_same_bytes_each_time(tmp_path):
    figure = draw_time(TRILLION)
    svg = Picture(figure=figure).svg()
    assert svg.startswith("<svg") and ">matmuls<" in svg
    assert Picture(figure=draw_time(TRILLION)).svg() == svg
    Picture(figure=new_figure(1, 1)).save(tmp_path / "empty.pdf")
    assert (tmp_path / "empty.pdf").read_bytes().startswith(b"%PDF")
