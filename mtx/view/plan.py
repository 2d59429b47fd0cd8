"""A plan as one picture: mesh, memory, where the time goes, timeline and scaling."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.pipeline.choose import schedule_for
from mtx.pipeline.shape import Times
from mtx.pipeline.simulate import simulate
from mtx.plan.compare import seconds
from mtx.plan.plan import Plan, make_plan
from mtx.plan.summary import part_name, title
from mtx.view.memory import fill_bars
from mtx.view.mesh import fill_mesh
from mtx.view.picture import (
    BACKWARD,
    COMMUNICATION,
    COMMUNICATION_LIGHT,
    FAINT,
    FORWARD,
    IDLE,
    INK,
    WEIGHT,
    check_suffix,
    new_figure,
    save_figure,
)
from mtx.view.schedule import draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIME_COLOURS = {
    "matmul_s": FORWARD,
    "attention_s": "#7fb0e0",
    "elementwise_s": BACKWARD,
    "ends_s": "#a3d9a5",
    "tensor_comm_s": COMMUNICATION,
    "pipeline_comm_s": "#a07cc5",
    "data_comm_s": COMMUNICATION_LIGHT,
    "bubble_s": IDLE,
    "optimizer_s": WEIGHT,
}
_MOST_OPS = 120_000  # of a schedule that is drawn
_DOUBLINGS = 5  # of the replicas, below and above the plan's


def draw_plan(plan: Plan, path: str | Path | None = None) -> Figure:
    """Mesh, memory, time of a step, timeline and scaling of one plan, saved to `path` if given.

    UserError where matplotlib is missing, or `path` ends otherwise than .svg, .png or .pdf, or
    cannot be written.
    """
    if path is not None:
        check_suffix(path)
    figure = new_figure(13.0, 11.5)
    figure.suptitle(title(plan), x=0.01, ha="left", fontsize=13, color=INK)
    mesh, needs, runs = figure.subfigures(3, 1, height_ratios=(4.6, 2.7, 3.7))
    fill_mesh(mesh, plan.run.layout, plan.hardware)
    left, right = needs.subfigures(1, 2, width_ratios=(1.45, 1))
    fill_bars(left.add_subplot(), [plan])
    fill_time(right.add_subplot(), plan)
    left, right = runs.subfigures(1, 2, width_ratios=(1.45, 1))
    _place_timeline(left.add_subplot(), plan)
    fill_throughput(right.add_subplot(), plan)
    if path is not None:
        save_figure(figure, path)
    return figure


def draw_time(plan: Plan, path: str | Path | None = None) -> Figure:
    """Where the seconds of a step go, part by part."""
    if path is not None:
        check_suffix(path)
    figure = new_figure(8.0, 3.4)
    fill_time(figure.add_subplot(), plan)
    if path is not None:
        save_figure(figure, path)
    return figure


def draw_throughput(plan: Plan, path: str | Path | None = None) -> Figure:
    """TeraFLOP/s of a GPU over their number: the plan with more replicas and fewer."""
    if path is not None:
        check_suffix(path)
    figure = new_figure(7.0, 3.6)
    fill_throughput(figure.add_subplot(), plan)
    if path is not None:
        save_figure(figure, path)
    return figure


def fill_time(axes: Axes, plan: Plan) -> None:
    """The bars of `draw_time`."""
    whole = plan.time.step_s
    parts = [(each.name, getattr(plan.time, each.name)) for each in fields(plan.time)]
    parts = [(name, value) for name, value in parts if value]
    unit, scale = ("seconds", 1.0) if whole > 0.1 else ("milliseconds", 1e3)
    for row, (name, value) in enumerate(parts):
        axes.barh(row, scale * value, height=0.7, color=TIME_COLOURS.get(name, FAINT))
        text = f" {seconds(value)}, {value / whole:.1%}"
        axes.text(scale * value, row, text, va="center", fontsize=7.5, color=INK)
    axes.set_yticks(range(len(parts)), [part_name(name) for name, _ in parts], fontsize=8)
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_xlim(0, 1.4 * scale * max(value for _, value in parts))
    axes.set_xlabel(f"{unit}, predicted", fontsize=8)
    axes.set_title(
        f"{seconds(whole)} a step, MFU {plan.mfu:.1%}",
        loc="left", fontsize=9.5, color=INK,
    )  # fmt: skip
    _plain(axes)


def fill_throughput(axes: Axes, plan: Plan) -> None:
    """The curves of `draw_throughput`."""
    for weak, colour, label in (
        (True, FORWARD, "batch grows with the GPUs"),
        (False, COMMUNICATION, f"batch stays {plan.run.global_batch:,}"),
    ):
        points = scaled_plans(plan, weak=weak)
        axes.plot(
            [one.gpus for one in points], [one.tflops_per_gpu_sc21 for one in points],
            marker="o", markersize=4, color=colour, label=label,
        )  # fmt: skip
    axes.plot(plan.gpus, plan.tflops_per_gpu_sc21, "o", markersize=9, mfc="none", color=INK)
    axes.set_xscale("log", base=2)
    gpus = sorted({one.gpus for weak in (True, False) for one in scaled_plans(plan, weak=weak)})
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=7, rotation=30)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs: more replicas of the same pipe and tensor", fontsize=8)
    axes.set_ylabel("teraFLOP/s a GPU (SC'21's unit)", fontsize=8)
    axes.set_title("Throughput, predicted (circle: this plan)", loc="left", fontsize=9.5, color=INK)
    axes.legend(fontsize=7.5, frameon=False, loc="lower left")
    _plain(axes)


def scaled_plans(plan: Plan, *, weak: bool) -> list[Plan]:
    """The plan with half and twice as many replicas, and so on, where the batch allows it.

    weak: the batch grows with them; otherwise it stays. By ascending number of GPUs.
    """
    run, layout = plan.run, plan.run.layout
    scaled = []
    for doubling in range(-_DOUBLINGS, _DOUBLINGS + 1):
        data = layout.data * 2.0**doubling
        batch = run.global_batch * 2.0**doubling if weak else run.global_batch
        whole = data == int(data) and data >= 1 and batch == int(batch)
        if not whole or batch % (data * layout.microbatch):
            continue
        other = replace(run, layout=replace(layout, data=int(data)), global_batch=int(batch))
        scaled.append(
            make_plan(other, target=plan.target, zero=plan.zero, scatter_gather=plan.scatter_gather)
        )
    return scaled


def _place_timeline(axes: Axes, plan: Plan) -> None:
    """The picture of `draw_timeline` in lock-step, as a bitmap, where it is not too long."""
    layout, microbatches = plan.run.layout, plan.run.microbatches
    axes.set_axis_off()
    if layout.pipe * layout.virtual * microbatches > _MOST_OPS:
        axes.text(0, 1, "the schedule is too long for a picture", fontsize=9, color=FAINT, va="top")
        return
    again = 1.0 if layout.recompute == "full" else 0.0  # B computes F once more
    times = Times(forward=1.0, backward=1.0 + again, weight=1.0)
    run = simulate(schedule_for(layout, microbatches), times, model="lockstep")
    drawn = draw_timeline(run, memory=False)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn.set_dpi(200)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    axes.imshow(np.asarray(canvas.buffer_rgba()), interpolation="antialiased")
    axes.set_aspect("equal", anchor="NW")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT)
