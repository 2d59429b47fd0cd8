"""The memory of a device as a picture: its parts against what there is, and by pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.errors import UserError
from mtx.plan.candidates import MEMORY_AT_MOST
from mtx.plan.choose import schedule_for
from mtx.plan.plan import Plan
from mtx.plan.priced import GIB
from mtx.plan.summary import part_name
from mtx.view.colours import ink
from mtx.view.picture import FAINT, INK, LIMIT, check_suffix, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY_COLOURS = {
    "parameters_bytes": "#1d4f91",
    "gradients_bytes": "#9cc4ee",
    "optimizer_bytes": "#e08a2e",
    "stash_bytes": "#1d6b3a",
    "transfer_bytes": "#7d4fa8",
    "activations_bytes": "#a3d9a5",
    "logits_bytes": "#d9b44a",
}
_OTHERS = ("#7a7a7a", "#a8a8a8", "#5b7c8d", "#c2c2c2")  # parts that are not named above
_TOY = 0.02  # of a device's memory: below, MiB are shown
_MOST_OPS = 500_000  # of a schedule's table that is made only to count what waits on each stage


def draw_memory(
    plans: Plan | Sequence[Plan],
    path: str | Path | None = None,
    *,
    labels: Sequence[str] | None = None,
) -> Figure:
    """A bar for each plan, of its parts, with lines at all of the memory and at what can be had.

    Of one plan with several stages, also what each stage uses of the stash that every device
    holds. labels: of the bars; None: their recomputation. Saved to `path` if given. UserError where
    matplotlib is missing, there is no plan, or `path` cannot be.
    """
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    if not plans:
        raise UserError("there is no plan to draw the memory of")
    if path is not None:
        check_suffix(path)
    by_stage = len(plans) == 1 and _in_flight(plans[0]) is not None
    figure = new_figure(9.0, (1.9 + 0.5 * len(plans)) + (2.6 if by_stage else 0))
    if by_stage:
        bars, stages = figure.subplots(2, 1, height_ratios=(1, 2.4))
        fill_stages(stages, plans[0])
    else:
        bars = figure.add_subplot()
    fill_bars(bars, plans, labels)
    if path is not None:
        save_figure(figure, path)
    return figure


def fill_bars(axes: Axes, plans: Sequence[Plan], labels: Sequence[str] | None = None) -> None:
    """The bars of `draw_memory`."""
    device = plans[0].hardware
    labels = labels or [f"recompute={plan.run.layout.recompute}" for plan in plans]
    longest = max(plan.memory.total_bytes for plan in plans) / GIB
    # A toy's bars would not be seen beside a whole device.
    unit, scale = ("MiB", 1024) if longest < _TOY * device.memory_gib else ("GiB", 1)
    reach = scale * (longest if unit == "MiB" else max(longest, device.memory_gib))
    for row, plan in enumerate(plans):
        left = 0.0
        for name, size_gib in _parts(plan):
            size, colour = scale * size_gib, _colour(name, plan)
            axes.barh(
                row, size, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.5,
                label=part_name(name) if row == 0 else None,
            )  # fmt: skip
            if size > 0.045 * reach:
                axes.text(
                    left + size / 2, row, f"{size:.1f}", ha="center", va="center", fontsize=7.5,
                    color=ink(colour),
                )  # fmt: skip
            left += size
        axes.text(left, row, f" {left:.1f}", va="center", fontsize=8, color=INK)
    if unit == "GiB":
        _limits(axes, device.memory_gib)
    axes.set_yticks(range(len(plans)), labels, fontsize=8)
    axes.set_ylim(len(plans) - 0.5, -0.6)
    axes.set_xlim(0, 1.06 * reach)
    axes.set_xlabel(f"{unit} of a device's {device.memory_gib:g} GiB, predicted", fontsize=8)
    axes.set_title(f"Memory of one {device.name}", loc="left", fontsize=9.5, color=INK, pad=16)
    _plain(axes)
    axes.figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7.5,
        frameon=False, handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip


def fill_stages(axes: Axes, plan: Plan) -> None:
    """Memory over the stages: what all devices hold, and the part of the stash that a stage uses.

    Every device holds the same buffers, since all stages run one program.
    """
    waiting = _in_flight(plan)
    stages = np.arange(len(waiting) + 1) - 0.5
    used = np.append(waiting, waiting[-1]) / waiting.max()
    bottom = np.zeros(len(stages))
    parts = sorted(_parts(plan), key=lambda part: part[0] == "stash_bytes")
    for name, size_gib in parts:
        top = bottom + size_gib * (used if name == "stash_bytes" else 1.0)
        axes.fill_between(stages, bottom, top, step="post", color=_colour(name, plan), linewidth=0)
        if name == "stash_bytes":
            held = bottom + size_gib
            axes.fill_between(
                stages, top, held, step="post", facecolor="none", hatch="////", linewidth=0,
                edgecolor=_colour(name, plan), label="stash that this stage does not need",
            )  # fmt: skip
        bottom = bottom + size_gib
    _limits(axes, plan.hardware.memory_gib, along="y")
    axes.set_xlim(-0.5, len(waiting) - 0.5)
    axes.set_ylim(0, 1.06 * max(bottom.max(), plan.hardware.memory_gib))
    axes.set_xlabel("stage", fontsize=8)
    axes.set_ylabel("GiB", fontsize=8)
    axes.set_title(
        f"By stage: {waiting.max()} in flight on stage 0, {waiting[-1]} on stage "
        f"{len(waiting) - 1}; every device holds the same buffers",
        loc="left", fontsize=8.5, color=INK,
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=7.5, frameon=False, bbox_to_anchor=(1, 1.0))
    _plain(axes)


def _in_flight(plan: Plan) -> np.ndarray | None:
    """int [P]: (microbatch, chunk) pairs that wait at most, or None where stages do not differ."""
    layout, microbatches = plan.run.layout, plan.run.microbatches
    if layout.pipe == 1 or layout.pipe * layout.virtual * microbatches > _MOST_OPS:
        return None
    waiting = schedule_for(layout, microbatches).in_flight
    return waiting if plan.memory.stash_bytes and waiting.min() < waiting.max() else None


def _parts(plan: Plan) -> list[tuple[str, float]]:
    """Name and GiB of the parts that are not empty."""
    return [
        (each.name, size / GIB)
        for each in fields(plan.memory)
        if (size := getattr(plan.memory, each.name))
    ]


def _colour(name: str, plan: Plan) -> str:
    unknown = [each.name for each in fields(plan.memory) if each.name not in MEMORY_COLOURS]
    if name in unknown:
        return _OTHERS[unknown.index(name) % len(_OTHERS)]
    return MEMORY_COLOURS[name]


def _limits(axes: Axes, memory_gib: float, *, along: str = "x") -> None:
    """Lines at the whole memory and at the part of it that JAX can be told to take."""
    line = axes.axvline if along == "x" else axes.axhline
    for share, style in ((1.0, "-"), (MEMORY_AT_MOST, "--")):
        line(share * memory_gib, color=LIMIT, linestyle=style, linewidth=1.0, zorder=4)
        text = f"{share * memory_gib:g} GiB" + ("" if share == 1 else f", {share:.0%}")
        if along == "x":
            axes.text(
                share * memory_gib, 1.01, text, transform=axes.get_xaxis_transform(), fontsize=7,
                color=LIMIT, ha="left" if share == 1 else "right", va="bottom",
            )  # fmt: skip


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT)
