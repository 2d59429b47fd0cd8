"""A placed array as a picture: which device holds which part of it, read from the array itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtx.view import picture
from mtx.view.explore_device import cut_text, numbers_text
from mtx.view.picture import FAINT, IDLE, INK, Picture, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PANELS = 8
_Cells = dict[tuple[int, ...], list]  # devices by where their part begins


def show_array(array: Any, name: str = "", dims: Sequence[str] = ()) -> Picture:
    """A `jax.Array` (or anything with a shape and a NamedSharding), split as its devices hold it.

    The last two dims that are split span a panel, whose cells name their devices; there is a panel
    for each index of the split dims before them. Colours are the stages, as in pictures of the
    mesh; grey cells are held by several stages. dims: the names of the array's dims.
    """
    shape, sharding = array.shape, array.sharding
    dims = tuple(dims) or tuple(f"dim {dim}" for dim in range(len(shape)))
    begins = {device: tuple(part.start or 0 for part in parts)
              for device, parts in sharding.devices_indices_map(shape).items()}  # fmt: skip
    starts = [sorted({begin[dim] for begin in begins.values()}) for dim in range(len(shape))]
    cut = [dim for dim, first in enumerate(starts) if len(first) > 1]
    across, inside = cut[:-2], cut[-2:]
    panels: dict[tuple[int, ...], _Cells] = {}
    for device, begin in begins.items():
        panel = panels.setdefault(tuple(begin[dim] for dim in across), {})
        panel.setdefault(tuple(begin[dim] for dim in inside), []).append(device)
    shown = sorted(panels)[:_MOST_PANELS]
    figure = picture.new_figure(min(10.0, 1.2 + 4.2 * len(shown)), 2.9 if len(inside) > 1 else 1.5)
    spec = ", ".join(_entry(entry) for entry in sharding.spec)
    left_out = f"; {len(panels) - len(shown)} panels more" if len(shown) < len(panels) else ""
    title = f"{name} {'x'.join(map(str, shape))} as P({spec}){left_out}".strip()
    picture.figure_title(figure, title, 10)
    colours = _colours(sharding.mesh)
    for axes, panel in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        parts = [slice(at, at + shape[dim] // len(starts[dim])) for dim, at in zip(across, panel)]
        where = cut_text([dims[dim] for dim in across], [shape[dim] for dim in across], parts)
        _fill_panel(axes, panels[panel], [starts[dim] for dim in inside], colours)
        axes.set_title(where, loc="left", fontsize=8, color=FAINT)
        for dim, along in zip(inside[::-1], (axes.xaxis, axes.yaxis)):
            ends = [f"{at:,}" for at in (*starts[dim], shape[dim])]
            along.set_ticks(range(len(ends)), ends)
            along.set_label_text(dims[dim], fontsize=8, color=INK)
    return Picture(figure=figure)


def _entry(entry: Any) -> str:
    return "-" if entry is None else " x ".join(entry) if isinstance(entry, tuple) else entry


def _colours(mesh: Any) -> dict[Any, str]:
    """The colour of each device's stage; one colour for all if the mesh has no stages."""
    palette = picture.stage_colours(mesh.shape.get("pipe", 1))
    dim = mesh.axis_names.index("pipe") if "pipe" in mesh.axis_names else None
    return {
        device: palette[place[dim] if dim is not None else 0]
        for place, device in np.ndenumerate(mesh.devices)
    }


def _fill_panel(
    axes: Axes, cells: _Cells, starts: list[list[int]], colours: dict[Any, str]
) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = ([[0], [0]] + starts)[-2:]
    for cell, holders in cells.items():
        y, x = ([0, 0] + [first.index(at) for first, at in zip(starts, cell)])[-2:]
        stages = {colours[device] for device in holders}
        colour = stages.pop() if len(stages) == 1 else IDLE
        axes.add_patch(Rectangle((x + 0.02, y + 0.02), 0.96, 0.96, facecolor=colour, linewidth=0))
        axes.text(
            x + 0.5, y + 0.5, f"device {numbers_text([device.id for device in holders])}",
            ha="center", va="center", fontsize=8, color=ink(colour), wrap=True,
        )  # fmt: skip
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, colors=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])
