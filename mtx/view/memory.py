"""The memory of a device as a picture: its parts against what is available, and by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.errors import UserError
from mtx.plan.candidates import MEMORY_AT_MOST
from mtx.plan.compare import part_name
from mtx.plan.plan import Plan
from mtx.plan.priced import GIB
from mtx.view import picture
from mtx.view.picture import COMMUNICATION, INK, LIMIT, SHADES
from mtx.view.spans import short_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "parameters_bytes": SHADES[0][0],
    "gradients_bytes": SHADES[0][1],
    "optimizer_bytes": "#e08a2e",
    "stash_bytes": SHADES[1][0],
    "transfer_bytes": COMMUNICATION,
    "activations_bytes": SHADES[1][1],
    "logits_bytes": "#d9b44a",
}
_OTHERS = ("#7a7a7a", "#a8a8a8", "#5b7c8d", "#c2c2c2")  # parts that are not named above
_TOY = 0.02  # of a device's memory: below, MiB are shown


def draw_memory(
    plans: Plan | Sequence[Plan],
    path: str | Path | None = None,
    *,
    labels: Sequence[str] | None = None,
) -> Figure:
    """A bar for each plan, of its parts, with lines at the whole memory and at what can be used.

    For one plan with several stages, also what each stage uses of the stash that every device
    holds. labels: of the bars; None: their recomputation. Saved to `path` if given. UserError if
    matplotlib is missing, there are no plans, or `path` is not valid.
    """
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    if not plans:
        raise UserError("plans=[] must hold a plan to draw the memory of")
    waiting = _in_flight(plans[0]) if len(plans) == 1 else None
    heights = (1.9 + 0.5 * len(plans), 3.1)[: 1 if waiting is None else 2]
    figure = picture.new_figure(9.0, sum(heights), path)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if waiting is not None:
        _fill_stages(axes[1], plans[0], waiting)
    fill_bars(axes[0], plans, labels)
    return picture.save_figure(figure, path)


def fill_bars(
    axes: Axes, plans: Sequence[Plan], labels: Sequence[str] | None = None, *, columns: int = 4
) -> None:
    """The bars of `draw_memory`, with a legend of `columns` columns."""
    device = plans[0].hardware
    longest = max(plan.memory.total_bytes for plan in plans) / GIB
    # A toy's bars would be invisible next to a whole device.
    unit, scale = ("MiB", 1024) if longest < _TOY * device.memory_gib else ("GiB", 1)
    reach = scale * (longest if unit == "MiB" else max(longest, device.memory_gib))
    for row, plan in enumerate(plans):
        parts = [(name, scale * size_gib, colour) for name, size_gib, colour in memory_parts(plan)]
        end = picture.stack_bars(axes, row, parts, label_above=0.045 * reach)
        axes.text(end, row, f" {end:.1f}", va="center", fontsize=8, color=INK)
    picture.name_rows(axes, labels or [f"recompute={plan.run.layout.recompute}" for plan in plans])
    axes.set_xlim(0, 1.06 * reach)
    x = f"{unit} of a device's {device.memory_gib:g} GiB, predicted"
    picture.plain_axes(axes, f"Memory of one {device.name}", x, pad=16)
    if unit == "GiB":
        _limits(axes, device.memory_gib)
        for share, align in ((1.0, "left"), (MEMORY_AT_MOST, "right")):
            text = f"{share * device.memory_gib:g} GiB" + ("" if share == 1 else f", {share:.0%}")
            axes.text(
                share * device.memory_gib, 1.01, text, transform=axes.get_xaxis_transform(),
                fontsize=7, color=LIMIT, ha=align, va="bottom",
            )  # fmt: skip
    picture.legend_below(axes, columns)


def _fill_stages(axes: Axes, plan: Plan, waiting: np.ndarray) -> None:
    """Memory over the stages: what all devices hold, and the part of the stash that a stage uses.

    Every device holds the same buffers, since all stages run one program.
    """
    stages = np.arange(len(waiting) + 1) - 0.5
    used = np.append(waiting, waiting[-1]) / waiting.max()
    bottom, stash = np.zeros(len(stages)), part_name("stash_bytes")
    for name, size, colour in sorted(memory_parts(plan), key=lambda part: part[0] == stash):
        top = bottom + size * (used if name == stash else 1.0)
        axes.fill_between(stages, bottom, top, step="post", color=colour, linewidth=0)
        bottom = bottom + size
        if name == stash:
            axes.fill_between(
                stages, top, bottom, step="post", facecolor="none", hatch="////", linewidth=0,
                edgecolor=colour, label="stash that this stage does not need",
            )  # fmt: skip
    _limits(axes, plan.hardware.memory_gib, along="y")
    axes.set_xlim(-0.5, len(waiting) - 0.5)
    axes.set_ylim(0, 1.06 * max(bottom.max(), plan.hardware.memory_gib))
    picture.plain_axes(
        axes, f"By stage: {waiting.max()} in flight on stage 0, {waiting[-1]} on stage "
        f"{len(waiting) - 1}; every device holds the same buffers", "stage", "GiB",
    )  # fmt: skip
    axes.legend(loc="center right", fontsize=7.5, frameon=False)


def _in_flight(plan: Plan) -> np.ndarray | None:
    """int [P]: the most (microbatch, chunk) pairs that wait; None if the stages do not differ."""
    schedule = short_table(plan.run.layout, plan.run.microbatches)
    if schedule is None or not plan.memory.stash_bytes:
        return None
    waiting = schedule.in_flight
    return waiting if waiting.min() < waiting.max() else None


def memory_parts(plan: Plan) -> list[tuple[str, float, str]]:
    """Name, GiB and colour of the parts that are not empty."""
    others = iter(_OTHERS * len(fields(plan.memory)))
    return [
        (part_name(each.name), size / GIB, _COLOURS.get(each.name) or next(others))
        for each in fields(plan.memory)
        if (size := getattr(plan.memory, each.name))
    ]


def _limits(axes: Axes, memory_gib: float, *, along: str = "x") -> None:
    """Lines at the whole memory and at the part of it that JAX can be told to take."""
    line = axes.axvline if along == "x" else axes.axhline
    for share, style in ((1.0, "-"), (MEMORY_AT_MOST, "--")):
        line(share * memory_gib, color=LIMIT, linestyle=style, linewidth=1.0, zorder=4)
