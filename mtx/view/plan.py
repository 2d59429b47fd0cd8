"""A plan as one picture: mesh, memory, where the time goes, timeline and scaling."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtx.plan.choose import schedule_for
from mtx.plan.compare import seconds
from mtx.plan.plan import Plan, make_plan
from mtx.plan.summary import NOTHING, part_name, title
from mtx.plan.time import stage_times
from mtx.schedules.shape import Times
from mtx.schedules.simulate import Simulation, bubble_text, simulate
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
from mtx.view.spans import MODELS, describe
from mtx.view.timeline import fill_timeline, legend_of

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
_MOST_OPS = 500_000  # of a schedule that is drawn
_DOUBLINGS = 5  # of the replicas, below and above the plan's


def draw_plan(plan: Plan, path: str | Path | None = None) -> Figure:
    """Mesh, memory, time of a step, timeline and scaling of one plan, saved to `path` if given.

    UserError where matplotlib is missing, or `path` ends otherwise than .svg, .png or .pdf, or
    cannot be written.
    """
    if path is not None:
        check_suffix(path)
    figure = new_figure(13.0, 11.0)
    figure.suptitle(title(plan), x=0.005, ha="left", fontsize=13, color=INK)
    above, runs = figure.subfigures(2, 1, height_ratios=(7.2, 3.8))
    left, right = above.subfigures(1, 2, width_ratios=(1.7, 1))
    mesh, memory = left.subfigures(2, 1, height_ratios=(4.4, 2.6))
    time, throughput = right.subfigures(2, 1, height_ratios=(3.6, 3.4))
    fill_mesh(mesh, plan.run.layout, plan.hardware)
    fill_bars(memory.add_subplot(), [plan])
    fill_time(time.add_subplot(), plan)
    fill_throughput(throughput.add_subplot(), plan)
    fill_schedule(runs.add_subplot(), plan, (11.8, 3.0))  # less labels and legend
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
    parts = [(name, value) for name, value in parts if value > NOTHING * whole]
    unit, scale = _unit(whole)
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
    axes.set_xticks(
        gpus,
        [f"{count:,}" for count in gpus],
        fontsize=7,
        rotation=35,
        ha="right",
        rotation_mode="anchor",
    )
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
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


def fill_schedule(axes: Axes, plan: Plan, inches: tuple[float, float]) -> None:
    """The plan's table in its predicted times, where it is not too long; so wide and high."""
    layout, microbatches = plan.run.layout, plan.run.microbatches
    if layout.pipe * layout.virtual * microbatches > _MOST_OPS:
        axes.set_axis_off()
        axes.text(0, 1, "the schedule is too long for a picture", fontsize=9, color=FAINT, va="top")
        return
    unit, scale = _unit(plan.time.step_s)
    run = _simulation(plan, scale)
    how = f"{MODELS[run.model]}, {bubble_text(plan.bubble_over_ideal)}"
    swatches = fill_timeline(axes, run, inches, title=f"{describe(run.schedule)}; {how}")
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(f"{unit}, predicted", fontsize=8.5)
    axes.figure.legend(loc="outside lower right", fontsize=8.5, **legend_of(swatches))


def _unit(step_s: float) -> tuple[str, float]:
    """In which a step's times are drawn, and how many of it are a second."""
    return ("seconds", 1.0) if step_s > 0.1 else ("milliseconds", 1e3)


def _simulation(plan: Plan, scale: float) -> Simulation:
    """The plan's table with the times of its stages, `scale` a second, as its software runs it."""
    layout = plan.run.layout
    stages, hop_s = stage_times(
        plan.run.model, layout, plan.hardware, scatter_gather=plan.scatter_gather
    )
    times = Times(
        comm=scale * hop_s / layout.slices,
        stage_times=tuple(tuple(scale * part for part in seconds) for seconds in stages),
    )
    table = schedule_for(layout, plan.run.microbatches)
    return simulate(table, times, model=plan.calibration.software.pipeline)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT)
