"""The devices of a mesh as cells: one by one, in their nodes, or many to a cell, by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtx.config import Layout
from mtx.view.picture import (
    COMMUNICATION,
    COMMUNICATION_LIGHT,
    FAINT,
    INK,
    LIMIT,
    WEIGHT,
    ink,
    stage_colours,
)
from mtx.view.spans import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_MOST_DEVICES = 128  # drawn one by one, with their coordinates
_WIDEST_NODE = 16  # devices; those of larger nodes are not drawn one by one
_MOST_CELLS = 1200  # of the map; with more, a cell is several nodes
_ASPECT = 2.6  # width over height of the map
_PLACES = {  # what the coordinate on an axis is called
    "pipe": "stage", "data": "replica", "expert": "its part, and of the experts",
    "context": "part of sequences", "tensor": "tensor shard",
}  # fmt: skip
# The groups of device 0 on a map, by axis: marker, size, colour, and drawing order. The devices of
# its tensor group are next to each other in a cell.
_GROUPS = {
    "pipe": ("o", 18, COMMUNICATION, 4), "data": ("s", 34, COMMUNICATION_LIGHT, 3),
    "expert": ("^", 18, WEIGHT, 5), "context": ("D", 14, LIMIT, 6),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeshMap:
    """Cells of `unit` devices each, in blocks of `high` x `wide` cells, one block per stage."""

    stages: int
    stage_devices: int
    unit: int  # devices per cell; the last cell of a stage may have fewer
    aligned: bool  # a cell is a part of one node, or whole nodes
    cells: int  # per stage
    high: int
    wide: int
    per_row: int  # blocks side by side

    @classmethod
    def of(cls, layout: Layout, node_size: int, *, alone: int = 0) -> MeshMap:
        """Up to `alone` devices have a cell each; beyond, a cell is part of a node, or several."""
        stage, unit = layout.devices // layout.pipe, 1  # devices
        if layout.devices > alone:
            unit = math.gcd(stage, node_size)
            if unit > _WIDEST_NODE:
                unit = math.gcd(layout.tensor, node_size)
        together = -(-layout.devices // (unit * _MOST_CELLS))
        aligned = together == 1 or unit % node_size == 0
        unit *= together
        cells = -(-stage // unit)
        gap = _gap(cells)

        def misfit(way: tuple[int, int, int]) -> float:
            high, wide, per_row = way
            rows = -(-layout.pipe // per_row)
            aspect = per_row * (wide + gap) / (rows * (high + 2 * gap))
            empty, row = high * wide / cells - 1, wide * unit  # cells, devices
            torn = high > 1 and row % node_size and node_size % row  # if row ends cut nodes
            return abs(math.log(aspect / _ASPECT)) + empty + bool(torn)

        # All ways to fold a stage, with tensor groups side by side, and to wrap the row of stages.
        group = min(cells, max(1, layout.tensor // unit))
        ways = [
            (-(-cells // wide), wide, per_row)
            for wide in range(group, cells + 1, group)
            for per_row in range(1, layout.pipe + 1)
            if layout.pipe % per_row == 0 or layout.pipe > 16
        ]
        high, wide, per_row = min(ways, key=misfit)
        return cls(
            stages=layout.pipe, stage_devices=stage, unit=unit, aligned=aligned, cells=cells,
            high=high, wide=wide, per_row=per_row,
        )  # fmt: skip

    def first(self, rank: int) -> int:
        """The first device of the cell that holds device `rank`."""
        return rank - rank % self.stage_devices % self.unit

    def ranks(self, first: int) -> range:
        """The devices of the cell that begins with `first`."""
        stage_end = (first // self.stage_devices + 1) * self.stage_devices
        return range(first, min(first + self.unit, stage_end))

    def firsts(self) -> list[int]:
        """The first device of every cell, stage by stage."""
        return [
            stage * self.stage_devices + cell * self.unit
            for stage in range(self.stages)
            for cell in range(self.cells)
        ]

    def corner(self, rank: int) -> tuple[float, float]:
        """Left and top of the cell that holds device `rank`."""
        stage, inside = divmod(rank, self.stage_devices)
        row, column = divmod(inside // self.unit, self.wide)
        block_row, block = divmod(stage, self.per_row)
        gap = _gap(self.cells)
        return block * (self.wide + gap) + column, block_row * (self.high + 2 * gap) + row

    def frames(self, node_size: int) -> list[tuple[int, float, float, float, float]]:
        """Number, left, top, width and height of each node, or of each row of its cells if other
        cells lie between them. Empty if cells are nodes, or not aligned with nodes."""
        firsts = self.firsts() if self.aligned and self.unit < node_size else []
        corners = np.array([self.corner(first) for first in firsts])
        nodes, found = np.array(firsts) // node_size, []
        for node in dict.fromkeys(nodes.tolist()):
            own = corners[nodes == node]
            low, high = own.min(axis=0), own.max(axis=0)
            within = ((corners >= low) & (corners <= high)).all(axis=1).sum()
            parts = [own] if within == len(own) else [own[own[:, 1] == y] for y in set(own[:, 1])]
            for part in parts:
                (left, top), (right, bottom) = part.min(axis=0), part.max(axis=0)
                found.append((node, left, top, right - left + 1, bottom - top + 1))
        return found

    def cell_text(self, node_size: int) -> str:
        """What a cell is, in words."""
        devices = count(self.unit, "device")
        if self.aligned and self.unit % node_size == 0:
            return f"{count(self.unit // node_size, 'node')}, {devices}"
        return f"{devices} of a node" if self.aligned else devices


def _group_of_first(layout: Layout, axis: str) -> range:
    """The ranks of device 0's group on an axis."""
    inner = list(layout.sizes)[list(layout.sizes).index(axis) + 1 :]
    stride = math.prod(layout.sizes[each] for each in inner)
    return range(0, layout.sizes[axis] * stride, stride)


def _gap(cells: int) -> float:
    """The gap between stages side by side; between rows of stages it is twice as large."""
    return 0.0 if cells == 1 else 0.3


def fill_devices(figure: Figure | SubFigure, layout: Layout, node_size: int) -> None:
    """Draw few devices one by one; many as a map, with the first node next to it."""
    grid = MeshMap.of(layout, node_size, alone=_MOST_DEVICES)
    if grid.unit == 1 or node_size > _WIDEST_NODE:
        _draw_map(figure.add_subplot(), layout, grid, node_size)
        return
    parts = figure.add_gridspec(1, 2, width_ratios=(4.2, 1))
    _draw_map(figure.add_subplot(parts[0]), layout, grid, node_size)
    axes = figure.add_subplot(parts[1])
    _draw_cells(axes, layout, {rank: (rank % 2, rank // 2) for rank in range(node_size)}, 1)
    axes.set_xlim(-0.3, 2.3)
    axes.set_ylim(-(-node_size // 2) + 0.2, -0.3)
    axes.set_axis_off()
    axes.set_title("node 0", loc="left", fontsize=8, color=INK, pad=2)


def _draw_cells(
    axes: Axes, layout: Layout, corners: dict[int, tuple[float, float]], unit: int
) -> None:
    """A box for each cell, coloured by stage; single devices have their coordinates in it."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    palette = stage_colours(layout.pipe)
    colours = [palette[rank * layout.pipe // layout.devices] for rank in corners]
    boxes = [Rectangle((x + 0.03, y + 0.03), 0.94, 0.94) for x, y in corners.values()]
    axes.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="none"))
    for (rank, (x, y)), colour in zip(corners.items(), colours) if unit == 1 else ():
        places = np.unravel_index(rank, tuple(layout.shown.values()))
        names = [f"{axis[0]}{place}" for axis, place in zip(layout.shown, places)]
        a_line = 2 if len(names) > 3 else 1
        lines = [" ".join(names[at : at + a_line]) for at in range(0, len(names), a_line)]
        axes.text(
            x + 0.5, y + 0.5, "\n".join(lines), ha="center", va="center",
            fontsize=7 if len(corners) <= 48 else 5.5, color=ink(colour),
        )  # fmt: skip


def _draw_map(axes: Axes, layout: Layout, grid: MeshMap, node_size: int) -> None:
    """All cells, coloured by stage, in their nodes, and the groups to which device 0 belongs."""
    from matplotlib.patches import Rectangle

    _draw_cells(axes, layout, {first: grid.corner(first) for first in grid.firsts()}, grid.unit)
    corners = {grid.corner(first) for first in grid.firsts()}
    for node, x, y, wide, high in grid.frames(node_size):
        axes.add_patch(Rectangle((x, y), wide, high, fill=False, edgecolor=FAINT, linewidth=1.0))
        if grid.unit == 1 and (x, y - 1) not in corners:  # there is room
            axes.text(x + 0.04, y - 0.04, f"node {node}", fontsize=6, color=FAINT)
    # One cell per stage, or one stage per row, leaves room for names only to the left of each row.
    alone = 1 in (grid.cells, grid.per_row) and layout.pipe > grid.per_row
    every = grid.per_row if alone else -(-layout.pipe // 32)
    for stage in range(0, layout.pipe, every) if grid.unit > 1 else ():
        x, y = grid.corner(stage * grid.stage_devices)
        x, y, align = (x - 0.1, y + 0.7, "right") if alone else (x + 0.06, y - 0.08, "left")
        axes.text(x, y, f"p{stage}", fontsize=6, color=FAINT, ha=align, clip_on=False)
    for axis, (marker, area, colour, order) in _GROUPS.items() if grid.unit > 1 else ():
        if layout.sizes[axis] > 1:
            x, y = np.array(sorted({grid.corner(rank) for rank in _group_of_first(layout, axis)})).T
            axes.scatter(
                x + 0.5, y + 0.5, s=area, marker=marker, color=colour, edgecolors="white",
                linewidths=0.6, zorder=order, label=f"{axis} group of device 0",
            )  # fmt: skip
    width = grid.per_row * (grid.wide + _gap(grid.cells))
    height = -(-layout.pipe // grid.per_row) * (grid.high + 2 * _gap(grid.cells))
    axes.set_xlim(-1.4 if alone else -0.2, width)
    axes.set_ylim(height, -0.9 if grid.unit > 1 else -0.3)
    axes.set_aspect("equal" if 0.4 < width / height < 8 else "auto", anchor="NW")
    axes.set_axis_off()
    text = f"colour: stage p0 to p{layout.pipe - 1}; a cell: {grid.cell_text(node_size)}"
    if grid.unit == 1:
        text = ", ".join(f"{axis[0]}: {_PLACES.get(axis, axis)}" for axis in layout.shown)
    axes.set_title(text, loc="left", fontsize=8, color=FAINT, pad=2)
    if axes.collections[1:]:
        axes.legend(
            loc="upper right", bbox_to_anchor=(1, -0.01), ncols=3, fontsize=7.5, frameon=False,
            borderaxespad=0,
        )  # fmt: skip
