"""Tensor groups that span nodes, as a picture: which links they use, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.compare import seconds
from mtx.plan.plan import Plan
from mtx.view import picture
from mtx.view.mesh import link_rows
from mtx.view.mesh_picture import fill_devices
from mtx.view.picture import INK, Picture
from mtx.view.plan import plan_again, time_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST_NODE = 16  # devices; those of larger nodes are not drawn


def tensor_plans(plan: Plan) -> list[Plan]:
    """The plan with other tensor groups on the same number of GPUs: pipe is halved when tensor
    doubles, and so on. Only those that divide the model, smallest groups first."""
    layout, found = plan.run.layout, []
    for tensor in (2**n for n in range(8)):
        pipe, rest = divmod(layout.pipe * layout.tensor, tensor)
        if pipe and not rest:
            try:
                found.append(plan_again(plan, layout=replace(layout, pipe=pipe, tensor=tensor)))
            except UserError:  # it does not divide the model
                continue
    return found


def show_tensor_groups(plan: Plan) -> Picture:
    """Two tensor groups on their nodes, one of a node's size and one of two nodes, with the links
    that they use; and the step's time with groups of each size on the same number of GPUs.
    UserError if a node is too large to be drawn."""
    plans, node = tensor_plans(plan), plan.hardware.node_devices
    if not 1 < node <= _LARGEST_NODE:
        raise UserError(
            f"node_devices={node} of {plan.hardware.name} must lie from 2 to {_LARGEST_NODE} to be "
            "drawn; use another target"
        )
    figure = picture.new_figure(10.0, 3.2 + 0.36 * len(plans))
    above, below = picture.split_figure(figure, 2.0, 1.2 + 0.36 * len(plans))
    groups: Any = above.subfigures(1, 2)
    for part, tensor in zip(groups, (node, 2 * node)):
        layout = Layout(tensor=tensor)
        fill_devices(part, layout, node)
        (*_, (_, _, links, _)) = link_rows(layout, plan.hardware)
        picture.figure_title(part, f"tensor = {tensor}, {links}", 9)
    _fill_times(below.add_subplot(), plans)
    return Picture(figure=figure)


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
