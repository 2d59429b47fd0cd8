"""A device mesh as text and as a picture: who holds what, and which axes cross from node to node.

Devices stand in the order of the mesh: pipeline stages outermost, replicas next, tensor shards
innermost, so that rank = (stage * data + replica) * tensor + shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.config import Layout
from mtx.fields import checked
from mtx.plan.hardware import Hardware
from mtx.sizes import Devices
from mtx.view.colours import hexadecimal, ink
from mtx.view.picture import (
    COMMUNICATION,
    COMMUNICATION_LIGHT,
    FAINT,
    INK,
    Picture,
    check_suffix,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

AXES = ("pipe", "data", "tensor")  # outermost first
_WORK = {
    "pipe": "activations, once a microbatch and chunk",
    "data": "gradients and parameters, once a step",
    "tensor": "activations, several times a layer",
}
_MOST_NODES = 8  # above, the first ones and the last are shown
_FIRST_NODES = 4
_MOST_GROUPS = 4  # of a stage on a node; more are summed up


def mesh_text(layout: Layout, *, node_size: int = 8) -> str:
    """Which devices of each node hold which stage, replica and tensor shards; then, for each axis,
    whether its groups stay inside a node.

    Brackets hold the devices of one tensor group. Of more than eight nodes, the first four and the
    last are shown. Raises UserError where `node_size` is below 1.
    """
    checked("node_size", node_size, Devices)
    nodes = -(-layout.devices // node_size)
    shown = list(range(nodes)) if nodes <= _MOST_NODES else [*range(_FIRST_NODES), nodes - 1]
    name_width = len(f"node {nodes - 1}  ")
    lines = [
        f"pipe {layout.pipe} x data {layout.data} x tensor {layout.tensor} = "
        f"{_count(layout.devices, 'device')} on {_count(nodes, 'node')} of {node_size}"
    ]
    for before, node in zip([-1, *shown], shown, strict=False):
        if node - before > 1:
            lines.append(f"… {node - before - 1} more nodes …")
        for i, row in enumerate(_node_rows(layout, node, node_size)):
            lines.append((f"node {node}" if i == 0 else "").ljust(name_width) + row)
    return "\n".join([*lines, "", *_axis_lines(layout, node_size)])


def _node_rows(layout: Layout, node: int, node_size: int) -> list[str]:
    """One row for each stage on the node: its replicas, and the devices that hold their shards."""
    ranks = range(node * node_size, min((node + 1) * node_size, layout.devices))
    groups: dict[int, list[tuple[int, range]]] = {}  # of each stage: replica and its ranks here
    first = ranks.start
    while first < ranks.stop:
        group = first // layout.tensor
        here = range(first, min((group + 1) * layout.tensor, ranks.stop))
        stage, replica = divmod(group, layout.data)
        groups.setdefault(stage, []).append((replica, here))
        first = here.stop
    return [f"stage {stage}: {_replicas(layout, held)}" for stage, held in groups.items()]


def _replicas(layout: Layout, held: list[tuple[int, range]]) -> str:
    whole = all(len(here) == layout.tensor for _, here in held)
    if len(held) > _MOST_GROUPS and whole:
        (first, start), (last, stop) = held[0], held[-1]
        each = f", {layout.tensor} each" if layout.tensor > 1 else ""
        return f"replicas {first}-{last} [{_span(range(start[0], stop[-1] + 1))}{each}]"
    texts = []
    for replica, here in held:
        text = f"replica {replica} [{_span(here)}]"
        if len(here) < layout.tensor:
            shard = here[0] % layout.tensor
            noun = "shard" if len(here) == 1 else "shards"
            text += f" {noun} {_span(range(shard, shard + len(here)))} of {layout.tensor}"
        texts.append(text)
    return "  ".join(texts)


def _span(numbers: range) -> str:
    if len(numbers) <= 2:
        return " ".join(map(str, numbers))
    return f"{numbers[0]}-{numbers[-1]}"


@dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """What the groups of one axis are like."""

    axis: str
    size: int  # devices of a group
    stride: int  # from one to the next, in the order of the mesh
    reach: str  # "inside a node", "between nodes", or both
    sends: str


def axis_links(layout: Layout, node_size: int) -> list[AxisLinks]:
    """Of `pipe`, `data` and `tensor`: how large their groups are, and which links they use."""
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    node_of = np.arange(layout.devices).reshape(sizes) // node_size
    links = []
    for dim, (axis, size) in enumerate(zip(AXES, sizes, strict=True)):
        nodes = np.sort(np.moveaxis(node_of, dim, -1).reshape(-1, size), axis=1)
        links.append(
            AxisLinks(
                axis=axis,
                size=size,
                stride=int(np.prod(sizes[dim + 1 :])),
                reach=_reach(nodes) if size > 1 else "one device",
                sends=_WORK[axis] if size > 1 else "nothing to send",
            )
        )
    return links


def _axis_lines(layout: Layout, node_size: int) -> list[str]:
    rows = [
        (link.axis, f"{link.size} devices, {link.stride} apart", f"{link.reach}: {link.sends}")
        if link.size > 1
        else (link.axis, "1 device", link.sends)
        for link in axis_links(layout, node_size)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}" for a, b, c in rows]


def _reach(nodes: np.ndarray) -> str:
    """Where the links of an axis run; `nodes` int [groups, size]: each group's nodes, sorted."""
    count = 1 + (np.diff(nodes, axis=1) != 0).sum(axis=1)  # different nodes of each group
    if count.max() == 1:
        return "inside a node"
    if count.min() == nodes.shape[1]:
        return "between nodes"
    if count.min() == count.max():
        return f"inside and between, over {count[0]} nodes"
    return f"inside and between, over {count.min()} to {count.max()} nodes"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


# --- picture --------------------------------------------------------------------------------------

_MOST_DEVICES = 128  # drawn one by one, with their coordinates
_WIDEST_NODE = 16  # whose devices are drawn one by one
_MOST_CELLS = 1200  # of the map; above, a cell is several nodes
_ASPECT = 2.6  # width over height of the map


@dataclass(frozen=True, kw_only=True, repr=False)
class MeshView:
    """A layout on nodes of some hardware: text when printed, a picture in a notebook."""

    layout: Layout
    hardware: Hardware

    def __repr__(self) -> str:
        return mesh_text(self.layout, node_size=self.hardware.node_devices)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return Picture(figure=draw_mesh(self.layout, self.hardware))._repr_png_()


def draw_mesh(layout: Layout, hardware: Hardware, path: str | Path | None = None) -> Figure:
    """Devices or nodes by pipeline stage, the groups of device 0, and the links of every axis.

    Up to 128 devices are drawn one by one. Of more, every cell is a part of one stage: a node, a
    part of one, or several. Saved to `path` (.svg, .png or .pdf) if given. UserError where
    matplotlib is missing, or `path` ends otherwise or cannot be written.
    """
    if path is not None:
        check_suffix(path)
    figure = new_figure(11.5, 5.4)
    fill_mesh(figure, layout, hardware)
    if path is not None:
        save_figure(figure, path)
    return figure


def fill_mesh(figure: Figure | SubFigure, layout: Layout, hardware: Hardware) -> None:
    """The picture of `draw_mesh` in a figure, or in a part of one."""
    node_size = hardware.node_devices
    nodes = -(-layout.devices // node_size)
    few = layout.devices <= _MOST_DEVICES and node_size <= _WIDEST_NODE
    above, below = figure.subfigures(2, 1, height_ratios=(4, 1.15))
    above.suptitle(
        f"pipe {layout.pipe} x data {layout.data} x tensor {layout.tensor} = "
        f"{layout.devices:,} x {hardware.name}, {_count(nodes, 'node')} of {node_size}",
        x=0.008, ha="left", fontsize=11, color=INK,
    )  # fmt: skip
    if few:
        _draw_nodes(above.add_subplot(), layout, node_size, range(nodes))
    elif node_size > _WIDEST_NODE:
        _draw_map(above.add_subplot(), layout, node_size)
    else:
        parts = above.add_gridspec(1, 2, width_ratios=(4.2, 1))
        _draw_map(above.add_subplot(parts[0]), layout, node_size)
        _draw_nodes(above.add_subplot(parts[1]), layout, node_size, range(1), row=2)
    _write_links(below.add_subplot(), layout, hardware)


def stage_colours(stages: int) -> np.ndarray:
    """float [stages, 3]: from dark to light, so that neighbours differ and the order is seen."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0.12, 0.95, stages) if stages > 1 else [0.4])[:, :3]


def _draw_nodes(axes: Axes, layout: Layout, node_size: int, nodes: range, *, row: int = 4) -> None:
    """Nodes as frames of devices, `row` side by side, with stage, replica and tensor shard."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    wide = min(row, node_size)
    high = -(-node_size // wide)
    label = "p{}\nd{}\nt{}"
    columns = max(1, math.ceil(math.sqrt(len(nodes) * 1.2)))
    colours = stage_colours(layout.pipe)
    for place, node in enumerate(nodes):
        left, top = (place % columns) * (wide + 0.6), (place // columns) * (high + 0.9)
        axes.add_patch(
            FancyBboxPatch(
                (left - 0.08, top - 0.08), wide + 0.16, high + 0.16, facecolor="none",
                boxstyle="round,pad=0.04", edgecolor=FAINT, linewidth=1.0,
            )
        )  # fmt: skip
        axes.text(left, top - 0.2, f"node {node}", fontsize=8, color=INK)
        for slot, rank in enumerate(
            range(node * node_size, min((node + 1) * node_size, layout.devices))
        ):
            x, y = left + slot % wide, top + slot // wide
            group, shard = divmod(rank, layout.tensor)
            stage, replica = divmod(group, layout.data)
            colour = colours[stage]
            axes.add_patch(
                Rectangle((x + 0.02, y + 0.02), 0.96, 0.96, facecolor=colour, edgecolor="none")
            )
            axes.text(
                x + 0.5, y + 0.5, label.format(stage, replica, shard), ha="center", va="center",
                fontsize=7 if row > 2 and len(nodes) <= 6 else 5.5, color=ink(hexadecimal(colour)),
            )  # fmt: skip
    rows = -(-len(nodes) // columns)
    axes.set_xlim(-0.3, columns * (wide + 0.6) - 0.3)
    axes.set_ylim(rows * (high + 0.9) - 0.5, -0.75)
    axes.set_aspect("equal" if row > 2 else "auto", anchor="NW")
    axes.set_axis_off()
    legend = "p: stage, d: replica,{}t: tensor shard".format(" " if row > 2 else "\n")
    axes.set_title(legend, loc="left", fontsize=8, color=FAINT, pad=2)


@dataclass(frozen=True, kw_only=True)
class MeshMap:
    """Cells of `unit` devices each, in blocks of `high` x `wide` cells, one block a stage."""

    unit: int  # devices of a cell; those of the last cell of a stage may be fewer
    aligned: bool  # a cell is a part of one node, or whole nodes
    cells: int  # of a stage
    high: int
    wide: int
    per_row: int  # blocks side by side

    @classmethod
    def of(cls, layout: Layout, node_size: int, *, alone: int = 0) -> MeshMap:
        """Up to `alone` devices have a cell each; of more, a cell is part of a node, or several."""
        stage, unit = layout.data * layout.tensor, 1  # devices
        if layout.devices > alone:
            unit = math.gcd(stage, node_size)
            if unit > _WIDEST_NODE:
                unit = math.gcd(layout.tensor, node_size)
        together = -(-layout.devices // (unit * _MOST_CELLS))
        aligned = together == 1 or unit % node_size == 0
        unit *= together
        cells = -(-stage // unit)
        gap = _gap(cells)

        def misfit(high: int, wide: int, per_row: int) -> float:
            rows = -(-layout.pipe // per_row)
            aspect = per_row * (wide + gap) / (rows * (high + 2 * gap))
            empty = high * wide / cells - 1
            return abs(math.log(aspect / _ASPECT)) + empty

        # All ways to fold a stage, its tensor groups in one piece, and to wrap the row of stages.
        group = min(cells, max(1, layout.tensor // unit))
        ways = [
            (-(-cells // wide), wide, per_row)
            for wide in range(group, cells + 1, group)
            for per_row in range(1, layout.pipe + 1)
            if layout.pipe % per_row == 0 or layout.pipe > 16
        ]
        high, wide, per_row = min(ways, key=lambda way: misfit(*way))
        return cls(unit=unit, aligned=aligned, cells=cells, high=high, wide=wide, per_row=per_row)

    def corner(self, rank: int, stage_devices: int) -> tuple[float, float]:
        """Left and top of the cell that holds device `rank`."""
        stage, inside = divmod(rank, stage_devices)
        row, column = divmod(inside // self.unit, self.wide)
        block_row, block = divmod(stage, self.per_row)
        left, top = block * (self.wide + self.gap), block_row * (self.high + 2 * self.gap)
        return left + column, top + row

    @property
    def gap(self) -> float:
        return _gap(self.cells)


def _gap(cells: int) -> float:
    """Between stages side by side, and twice of it between rows of them."""
    return 0.0 if cells == 1 else 0.3


def _draw_map(axes: Axes, layout: Layout, node_size: int) -> None:
    """All cells, coloured by stage, and the groups to which device 0 belongs."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    grid, stage_devices = MeshMap.of(layout, node_size), layout.data * layout.tensor
    colours = stage_colours(layout.pipe)
    corners = [
        (stage, grid.corner(stage * stage_devices + cell * grid.unit, stage_devices))
        for stage in range(layout.pipe)
        for cell in range(grid.cells)
    ]
    axes.add_collection(
        PatchCollection(
            [Rectangle((x + 0.03, y + 0.03), 0.94, 0.94) for _, (x, y) in corners],
            facecolors=[colours[stage] for stage, _ in corners], edgecolors="none",
        )
    )  # fmt: skip
    # One cell a stage, or one stage a row, leaves room for names at the left of each row only.
    alone = 1 in (grid.cells, grid.per_row) and layout.pipe > grid.per_row
    every = grid.per_row if alone else -(-layout.pipe // 32)
    for stage in range(0, layout.pipe, every):
        x, y = grid.corner(stage * stage_devices, stage_devices)
        x, y, align = (x - 0.1, y + 0.7, "right") if alone else (x + 0.06, y - 0.08, "left")
        axes.text(x, y, f"p{stage}", fontsize=6, color=FAINT, ha=align, clip_on=False)
    for axis, stride, marker, size in (
        ("pipe", stage_devices, "o", layout.pipe), ("data", layout.tensor, "s", layout.data),
    ):  # fmt: skip
        if size > 1:
            places = {grid.corner(i * stride, stage_devices) for i in range(size)}
            x, y = np.array(sorted(places)).T
            colour = COMMUNICATION if axis == "pipe" else COMMUNICATION_LIGHT
            axes.scatter(
                x + 0.5, y + 0.5, s=18 if axis == "pipe" else 34, marker=marker, color=colour,
                edgecolors="white", linewidths=0.6, zorder=4 if axis == "pipe" else 3,
                label=f"{axis} group of device 0",
            )  # fmt: skip
    width = grid.per_row * (grid.wide + grid.gap)
    height = -(-layout.pipe // grid.per_row) * (grid.high + 2 * grid.gap)
    axes.set_xlim(-1.4 if alone else -0.2, width)
    axes.set_ylim(height, -0.9)
    axes.set_aspect("equal" if 0.4 < width / height < 8 else "auto", anchor="NW")
    axes.set_axis_off()
    axes.set_title(
        f"colour: stage p0 to p{layout.pipe - 1}; a cell: {_cell(grid, node_size)}",
        loc="left", fontsize=8, color=FAINT, pad=2,
    )  # fmt: skip
    if axes.collections[1:]:
        axes.legend(
            loc="upper right", bbox_to_anchor=(1, -0.01), ncols=2, fontsize=7.5, frameon=False,
            borderaxespad=0,
        )  # fmt: skip


def _cell(grid: MeshMap, node_size: int) -> str:
    devices = _count(grid.unit, "device")
    if not grid.aligned:
        return devices
    if grid.unit % node_size == 0:
        return f"{_count(grid.unit // node_size, 'node')}, {devices}"
    return f"{devices} of a node"


def _write_links(axes: Axes, layout: Layout, hardware: Hardware) -> None:
    """For every axis: its groups, the links they use with the rate of one device, what is sent."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(3, -0.6)
    columns = (0.0, 0.065, 0.235, 0.68)
    for x, title in zip(columns, ("axis", "groups", "links of a group", "what is sent")):
        axes.text(x, -0.3, title, fontsize=7.5, color=FAINT, va="center")
    for row, link in enumerate(axis_links(layout, hardware.node_devices)):
        groups = f"{layout.devices // link.size:,} of {_count(link.size, 'device')}"
        for x, text in zip(columns, (link.axis, groups, link_text(link, hardware), link.sends)):
            axes.text(x, row + 0.5, text, fontsize=8.5, color=INK, va="center")


def link_text(link: AxisLinks, hardware: Hardware) -> str:
    """The links of an axis, and the rate at which a device sends over each."""
    if link.size == 1:
        return "none"
    inside, outside = f"{hardware.link_gb_s:g} GB/s", f"{hardware.network_gb_s:g} GB/s"
    if link.reach == "inside a node":
        return f"inside a node: {inside} a device"
    if link.reach == "between nodes":
        return f"between nodes: {outside} a device"
    return f"{link.reach}: {inside} and {outside}"
