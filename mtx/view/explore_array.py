"""A placed array as a picture: which device holds which part of it, read off the array itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtx.view.colours import hexadecimal, ink
from mtx.view.explore_device import cut_text, numbers_text
from mtx.view.mesh import stage_colours
from mtx.view.picture import FAINT, IDLE, INK, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PANELS = 8


def show_array(array: Any, name: str = "", dims: Sequence[str] = ()) -> Picture:
    """A `jax.Array` (or anything with a shape and a NamedSharding), cut as its devices hold it.

    The two last dims that are cut span a panel, whose cells name their devices; those before them
    count the panels. Colours are the stages, as in pictures of the mesh; grey is held by several.
    dims: what the array's dims are called.
    """
    parts = array.sharding.devices_indices_map(array.shape)
    dims = tuple(dims) or tuple(f"dim {dim}" for dim in range(len(array.shape)))
    starts = [sorted({index[dim].start or 0 for index in parts.values()})
              for dim in range(len(array.shape))]  # fmt: skip
    cut = [dim for dim, first in enumerate(starts) if len(first) > 1]
    across, inside = cut[:-2], cut[-2:]
    panels: dict[tuple, dict] = {}
    for device, index in parts.items():
        place = tuple(index[dim].start or 0 for dim in across)
        cell = tuple(index[dim].start or 0 for dim in inside)
        panels.setdefault(place, {}).setdefault(cell, []).append((device, index))
    shown = sorted(panels)[:_MOST_PANELS]
    figure = new_figure(min(10.0, 1.2 + 4.2 * len(shown)), 2.9 if len(inside) > 1 else 1.5)
    spec = ", ".join(_entry(entry) for entry in array.sharding.spec)
    left_out = f"; {len(panels) - len(shown)} panels more" if len(shown) < len(panels) else ""
    figure.suptitle(
        f"{name} {'x'.join(map(str, array.shape))} as P({spec}){left_out}".strip(),
        x=0.01, ha="left", fontsize=10, color=INK,
    )  # fmt: skip
    colours = _colours(array.sharding.mesh)
    for axes, place in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        some = next(iter(panels[place].values()))[0][1]
        where = cut_text(
            [dims[dim] for dim in across], [array.shape[dim] for dim in across],
            [_bounds(some[dim], array.shape[dim]) for dim in across],
        )  # fmt: skip
        _fill_panel(axes, panels[place], [starts[dim] for dim in inside], colours)
        axes.set_title(where, loc="left", fontsize=8, color=FAINT)
        _label(axes, [(dims[dim], starts[dim], array.shape[dim]) for dim in inside])
    return Picture(figure=figure)


def _bounds(index: slice, size: int) -> slice:
    return slice(index.start or 0, size if index.stop is None else index.stop)


def _entry(entry: Any) -> str:
    return "-" if entry is None else " x ".join(entry) if isinstance(entry, tuple) else entry


def _colours(mesh: Any) -> dict[Any, str]:
    """Of each device: that of its stage; of all one, where the mesh has no stages."""
    stages = mesh.shape.get("pipe", 1)
    palette = [hexadecimal(colour) for colour in stage_colours(stages)]
    dim = mesh.axis_names.index("pipe") if "pipe" in mesh.axis_names else None
    return {
        device: palette[place[dim] if dim is not None else 0]
        for place, device in np.ndenumerate(mesh.devices)
    }


def _fill_panel(
    axes: Axes, cells: dict[tuple, list], starts: list[list[int]], colours: dict[Any, str]
) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = ([[0], [0]] + starts)[-2:]
    for cell, holders in cells.items():
        y, x = ([0, 0] + [first.index(at) for first, at in zip(starts, cell)])[-2:]
        stages = {colours[device] for device, _ in holders}
        colour = stages.pop() if len(stages) == 1 else IDLE
        axes.add_patch(Rectangle((x + 0.02, y + 0.02), 0.96, 0.96, facecolor=colour, linewidth=0))
        axes.text(
            x + 0.5, y + 0.5, f"device {numbers_text([device.id for device, _ in holders])}",
            ha="center", va="center", fontsize=8, color=ink(colour), wrap=True,
        )  # fmt: skip
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)


def _label(axes: Axes, inside: list[tuple[str, list[int], int]]) -> None:
    """Ticks where the parts begin, and the end of the dim."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, colors=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])
    for (dim, starts, size), along in zip(inside[::-1], ("x", "y")):
        setter = axes.set_xticks if along == "x" else axes.set_yticks
        setter(range(len(starts) + 1), [f"{at:,}" for at in (*starts, size)])
        getattr(axes, f"set_{along}label")(dim, fontsize=8, color=INK)
