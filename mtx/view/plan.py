"""A plan as one picture: mesh, memory, where the time goes, timeline and scaling."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtx.plan.compare import part_name, seconds
from mtx.plan.plan import Plan, make_plan
from mtx.plan.summary import NOTHING, title
from mtx.plan.time import stage_times
from mtx.schedules.shape import Times
from mtx.schedules.simulate import bubble_text, simulate
from mtx.view import picture
from mtx.view.context import fill_context
from mtx.view.memory import fill_bars
from mtx.view.mesh import fill_mesh
from mtx.view.picture import COMMUNICATION, FAINT, FORWARD, IDLE, INK, SHADES
from mtx.view.spans import MODELS, describe, short_table
from mtx.view.timeline import fill_timeline, legend_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIME_COLOURS = {
    "matmul_s": FORWARD,
    "attention_s": "#7fb0e0",
    "elementwise_s": picture.BACKWARD,
    "embedding_and_head_s": SHADES[1][1],
    "tensor_comm_s": COMMUNICATION,
    "context_comm_s": "#7b5ea7",
    "expert_comm_s": "#c4a6dd",
    "host_comm_s": "#d9b8c4",
    "pipeline_comm_s": "#a07cc5",
    "data_comm_s": picture.COMMUNICATION_LIGHT,
    "bubble_s": IDLE,
    "optimizer_s": picture.WEIGHT,
}
_DOUBLINGS = 5  # of the replicas, below and above the plan's


def draw_plan(plan: Plan, path: str | Path | None = None) -> Figure:
    """Mesh, memory, time of a step, timeline and scaling of one plan and, if sequences are split,
    which device has which of their positions (`mtx.view.context`); saved to `path` if given.
    UserError if matplotlib is missing, or `path` does not end with .svg, .png or .pdf, or cannot be
    written."""
    cut = plan.run.layout.context > 1
    figure = picture.new_figure(13.0, 18.0 if cut else 11.0, path)
    picture.figure_title(figure, title(plan), 13)
    above, runs, *below = picture.split_figure(figure, 7.2, 3.8, *([7.0] if cut else []))
    columns: Any = above.subfigures(1, 2, width_ratios=(1.7, 1))
    left, right = columns
    mesh, memory = picture.split_figure(left, 4.4, 2.6)
    time, throughput = picture.split_figure(right, 3.6, 3.4)
    fill_mesh(mesh, plan.run.layout, plan.hardware)
    fill_bars(memory.add_subplot(), [plan])
    fill_time(time.add_subplot(), plan)
    fill_throughput(throughput.add_subplot(), plan)
    fill_schedule(runs.add_subplot(), plan, (11.8, 3.0))  # less labels and legend
    for part in below:
        fill_context(part, plan.run.layout, plan.run.model)
    return picture.save_figure(figure, path)


def draw_time(plan: Plan, path: str | Path | None = None) -> Figure:
    """Where the seconds of a step go, part by part."""
    figure = picture.new_figure(8.0, 3.4, path)
    fill_time(figure.add_subplot(), plan)
    return picture.save_figure(figure, path)


def draw_throughput(plan: Plan, path: str | Path | None = None) -> Figure:
    """TeraFLOP/s per GPU over the number of GPUs: the plan with more replicas and with fewer."""
    figure = picture.new_figure(7.0, 3.6, path)
    fill_throughput(figure.add_subplot(), plan)
    return picture.save_figure(figure, path)


def time_parts(plan: Plan) -> list[tuple[str, float, str]]:
    """Name, seconds and colour of the parts of a step."""
    return [
        (part_name(each.name), getattr(plan.time, each.name), _TIME_COLOURS.get(each.name, FAINT))
        for each in fields(plan.time)
    ]


def fill_time(axes: Axes, plan: Plan) -> None:
    """The bars of `draw_time`."""
    whole = plan.time.step_s
    parts = [part for part in time_parts(plan) if part[1] > NOTHING * whole]
    unit, scale = _unit(whole)
    for row, (_, value, colour) in enumerate(parts):
        axes.barh(row, scale * value, height=0.7, color=colour)
        text = f" {seconds(value)}, {value / whole:.1%}"
        axes.text(scale * value, row, text, va="center", fontsize=7.5, color=INK)
    picture.name_rows(axes, [name for name, _, _ in parts])
    axes.set_xlim(0, 1.4 * scale * max(value for _, value, _ in parts))
    picture.plain_axes(axes, f"{seconds(whole)} a step, MFU {plan.mfu:.1%}", f"{unit}, predicted")


def fill_throughput(axes: Axes, plan: Plan) -> None:
    """The curves of `draw_throughput`."""
    gpus: set[int] = set()
    for weak, colour, label in (
        (True, FORWARD, "batch grows with the GPUs"),
        (False, COMMUNICATION, f"batch stays {plan.run.global_batch:,}"),
    ):
        points = scaled_plans(plan, weak=weak)
        gpus |= {one.gpus for one in points}
        axes.plot(
            [one.gpus for one in points], [one.tflops_per_gpu_sc21 for one in points],
            marker="o", markersize=4, color=colour, label=label,
        )  # fmt: skip
    axes.plot(plan.gpus, plan.tflops_per_gpu_sc21, "o", markersize=9, mfc="none", color=INK)
    axes.set_xscale("log", base=2)
    style = {"fontsize": 7, "rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(sorted(gpus), [f"{count:,}" for count in sorted(gpus)], **style)
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.legend(fontsize=7.5, frameon=False, loc="lower left")
    picture.plain_axes(
        axes, "Throughput, predicted (circle: this plan)",
        "GPUs: more replicas of the same pipe and tensor", "teraFLOP/s a GPU (SC'21's unit)",
    )  # fmt: skip
    axes.tick_params(axis="x", labelsize=7)


def scaled_plans(plan: Plan, *, weak: bool) -> list[Plan]:
    """The plan with half and twice as many replicas, and so on, if the batch allows it.

    weak: the batch grows with them; otherwise it stays. In ascending order of GPUs.
    """
    run, scaled = plan.run, []
    for factor in (2.0**doubling for doubling in range(-_DOUBLINGS, _DOUBLINGS + 1)):
        data, batch = run.layout.data * factor, run.global_batch * (factor if weak else 1)
        whole = data == int(data) and data >= 1 and batch == int(batch)
        if not whole:
            continue
        layout = replace(run.layout, data=int(data))
        if batch % (layout.replicas * layout.microbatch) == 0:
            scaled.append(plan_again(plan, layout=layout, global_batch=int(batch)))
    return scaled


def plan_again(plan: Plan, **changes: object) -> Plan:
    """The plan with other fields of its run, priced in the same way."""
    run = replace(plan.run, **changes)
    return make_plan(
        run, target=plan.target, zero=plan.zero, scatter_gather=plan.scatter_gather,
        expert_imbalance=plan.expert_imbalance,
    )  # fmt: skip


def fill_schedule(axes: Axes, plan: Plan, inches: tuple[float, float]) -> None:
    """The plan's timeline with its predicted times, if it is not too long; `inches` wide, high."""
    layout, (unit, scale) = plan.run.layout, _unit(plan.time.step_s)
    table = short_table(layout, plan.run.microbatches)
    if table is None:
        axes.set_axis_off()
        axes.text(0, 1, "the schedule is too long for a picture", fontsize=9, color=FAINT, va="top")
        return
    stages, hop_s = stage_times(
        plan.run.model, layout, plan.hardware, scatter_gather=plan.scatter_gather,
        expert_imbalance=plan.expert_imbalance,
    )  # fmt: skip
    times = Times(
        comm=scale * hop_s / layout.slices,
        stage_times=tuple((scale * f, scale * b, scale * w) for f, b, w in stages),
    )
    run = simulate(table, times, model=plan.calibration.software.pipeline)
    how = f"{MODELS[run.model]}, {bubble_text(plan.bubble_over_ideal)}"
    swatches = fill_timeline(axes, run, inches, title=f"{describe(table)}; {how}")
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(f"{unit}, predicted", fontsize=8.5)
    legend_of(axes.figure, swatches)


def _unit(step_s: float) -> tuple[str, float]:
    """The unit in which a step's times are drawn, and how many of it are a second."""
    return ("seconds", 1.0) if step_s > 0.1 else ("milliseconds", 1e3)
