"""Tensor groups that leave their node, as a picture: which links they use, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mtx.errors import UserError
from mtx.plan.compare import seconds
from mtx.plan.plan import Plan
from mtx.view import picture
from mtx.view.mesh import axis_links
from mtx.view.picture import FAINT, INK, Picture
from mtx.view.plan import plan_again, time_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HIGH, _PITCH = 0.62, 1.9  # of a device's box; from a node to the next
_LARGEST_NODE = 16  # whose devices are drawn side by side


def tensor_plans(plan: Plan) -> list[Plan]:
    """The plan with other tensor groups on as many GPUs: pipe is halved where tensor doubles, and
    so on. Those that divide the model, smallest groups first."""
    layout, found = plan.run.layout, []
    for tensor in (2**n for n in range(8)):
        pipe, rest = divmod(layout.pipe * layout.tensor, tensor)
        if pipe and not rest:
            try:
                found.append(plan_again(plan, layout=replace(layout, pipe=pipe, tensor=tensor)))
            except UserError:  # what does not divide is no choice
                continue
    return found


def show_tensor_groups(plan: Plan) -> Picture:
    """Two tensor groups on their nodes, one of a node's size and one of two nodes, with the links
    of their rings; and the step's time with groups of each size on as many GPUs. UserError where a
    node is too large to be drawn."""
    plans, node = tensor_plans(plan), plan.hardware.node_devices
    if not 1 < node <= _LARGEST_NODE:
        raise UserError(
            f"node_devices={node} of {plan.hardware.name} must lie from 2 to {_LARGEST_NODE} to be "
            "drawn; use another target"
        )
    figure = picture.new_figure(10.0, 3.4 + 0.36 * len(plans))
    above, below = picture.split_figure(figure, 2.1, 1.1 + 0.36 * len(plans))
    for axes, tensor in zip(above.subplots(1, 2), (node, 2 * node)):
        _draw_group(axes, plan, tensor)
    _fill_times(below.add_subplot(), plans)
    return Picture(figure=figure)


def _draw_group(axes: Axes, plan: Plan, tensor: int) -> None:
    """The first tensor group of that many devices, node below node, and the ring through it."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    hardware, (colour,) = plan.hardware, picture.stage_colours(1)
    size = hardware.node_devices
    boxes = [(rank % size, _PITCH * (rank // size)) for rank in range(tensor)]
    for rank, (x, y) in enumerate(boxes):
        axes.add_patch(Rectangle((x, y), 0.9, _HIGH, facecolor=colour, linewidth=0))
        axes.text(
            x + 0.45, y + _HIGH / 2, f"t{rank}", ha="center", va="center", fontsize=8,
            color=picture.ink(colour),
        )  # fmt: skip
        start, stop, bend = _link((x, y), boxes[(rank + 1) % tensor])
        inside = y == boxes[(rank + 1) % tensor][1]
        axes.add_patch(
            FancyArrowPatch(
                start, stop, arrowstyle="-|>", mutation_scale=7, shrinkA=0, shrinkB=0,
                connectionstyle=f"arc3,rad={bend}", linewidth=1.1 if inside else 2.0,
                color=picture.COMMUNICATION if inside else picture.LIMIT,
            )
        )  # fmt: skip
    for node in range(tensor // size):
        top = _PITCH * node - 0.2
        axes.add_patch(Rectangle((-0.15, top), size + 0.2, 1.02, fill=False, edgecolor=FAINT))
        axes.text(-0.15, top - 0.08, f"node {node}", fontsize=8, color=INK, va="bottom")
    layout = replace(plan.run.layout, tensor=tensor, pipe=1, data=1, virtual=1)
    reach = axis_links(layout, size)[-1].reach
    rates = f"{hardware.link_gb_s:g} GB/s a device in a node"
    if tensor > size:
        rates += f", {hardware.network_gb_s:g} GB/s a device between nodes"
    axes.set_title(f"tensor = {tensor}, {reach}\n{rates}", loc="left", fontsize=9, color=INK)
    axes.set_xlim(-0.3, size + 0.3)
    axes.set_ylim(3.1, -0.6)
    axes.set_axis_off()


Point = tuple[float, float]


def _link(box: Point, to: Point) -> tuple[Point, Point, float]:
    """(start, stop, bend) of the arrow from one box to the next of the ring: to a neighbour's side;
    back to the first of the row beneath the others; or to another row."""
    (x, y), (to_x, to_y) = box, to
    if y != to_y:
        down = to_y > y
        return (x + 0.45, y + _HIGH * down), (to_x + 0.45, to_y + _HIGH * (not down)), 0.0
    if to_x > x:
        return (x + 0.9, y + _HIGH / 2), (to_x, y + _HIGH / 2), 0.0
    return (x + 0.45, y + _HIGH), (to_x + 0.45, y + _HIGH), -0.12


def _fill_times(axes: Axes, plans: list[Plan]) -> None:
    """A bar for each size of the groups: where the step's time goes."""
    for row, plan in enumerate(plans):
        end = picture.stack_bars(axes, row, time_parts(plan))
        fits = "" if plan.fits else ", does not fit"
        text = f" {seconds(end)}, {seconds(plan.time.tensor_comm_s)} over tensor{fits}"
        axes.text(end, row, text, va="center", fontsize=8, color=INK)
    layouts = [plan.run.layout for plan in plans]
    picture.name_rows(axes, [f"tensor {one.tensor}, pipe {one.pipe}" for one in layouts])
    axes.set_xlim(0, 1.3 * max(plan.time.step_s for plan in plans))
    title = f"The same {plans[0].gpus:,} GPUs, data {layouts[0].data}: what larger groups cost"
    picture.plain_axes(axes, title, "seconds of a step, predicted")
    picture.legend_below(axes, 5)
