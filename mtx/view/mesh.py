"""A device mesh as text, and its devices: which holds what, and which axes cross nodes.

Devices are in the order of the mesh's axes, the last innermost: rank = ((stage * replicas +
replica) * context + part) * tensor + shard, where replicas count over both `data` and `expert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.config import Layout
from mtx.fields import checked
from mtx.plan.hardware import Hardware
from mtx.sharding.axes import MESH, Axis
from mtx.sizes import Devices
from mtx.view import picture
from mtx.view.mesh_picture import fill_devices
from mtx.view.picture import FAINT, INK, Picture
from mtx.view.spans import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SENT = {  # what is sent over an axis, by its name or by what it splits
    "expert": "tokens to experts and back; gradients",
    "layers": "activations, once a microbatch and chunk",
    "batch": "gradients and parameters, once a step",
    "sequence": "keys and values, or heads, every layer",
    "weights": "activations, several times a layer",
}
_MOST_NODES = 8  # of more, the first ones and the last are shown
_FIRST_NODES = 4
_MOST_GROUPS = 4  # of a stage on a node; more are summed up


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a mesh, by its rank."""

    layout: Layout
    rank: int

    @classmethod
    def at_place(cls, layout: Layout, at: Mapping[str, int]) -> Device:
        """The device at these coordinates; beyond the mesh, the last ones are taken."""
        place = tuple(min(at.get(axis, 0), size - 1) for axis, size in layout.sizes.items())
        rank = np.ravel_multi_index(place, tuple(layout.sizes.values()))
        return cls(layout=layout, rank=int(rank))

    @property
    def at(self) -> dict[str, int]:
        """Its coordinate on each axis."""
        sizes = self.layout.shown
        place = np.unravel_index(self.rank, tuple(sizes.values()))
        return dict(zip(sizes, map(int, place), strict=True))

    @property
    def label(self) -> str:
        """ "p1 d0 t5" """
        return " ".join(f"{axis[0]}{place}" for axis, place in self.at.items())

    def group(self, axis: str) -> range:
        """The ranks that it exchanges messages with over `axis`, including its own."""
        (links,) = (one for one in axis_links(self.layout) if one.axis == axis)
        first = self.rank - self.at[axis] * links.stride
        return range(first, first + links.size * links.stride, links.stride)

    def __str__(self) -> str:
        return f"device {self.rank:,}: {self.label}"


@dataclass(frozen=True, kw_only=True)
class AxisLinks:
    """The groups of one axis, and the links they use."""

    axis: str
    size: int  # devices of a group
    stride: int  # from one to the next, in the order of the mesh
    reach: str  # "inside a node", "between nodes", or both
    sends: str


def axis_links(layout: Layout, node_size: int = 1) -> list[AxisLinks]:
    """For each axis, outermost first: how large its groups are, and which links they use."""
    sizes = tuple(layout.sizes.values())
    node_of = np.arange(layout.devices).reshape(sizes) // node_size
    return [
        AxisLinks(
            axis=axis.name, size=size, stride=int(np.prod(sizes[dim + 1 :])),
            reach=_reach(np.sort(np.moveaxis(node_of, dim, -1).reshape(-1, size), axis=1)),
            sends=_sends(axis) if size > 1 else "nothing to send",
        )
        for dim, (axis, size) in enumerate(zip(MESH, sizes, strict=True))
        if axis.name in layout.shown
    ]  # fmt: skip


def _sends(axis: Axis) -> str:
    return _SENT.get(axis.name) or _SENT.get(axis.splits, axis.splits)


def _reach(nodes: np.ndarray) -> str:
    """Where the links of an axis run; `nodes` int [groups, size]: each group's nodes, sorted."""
    if nodes.shape[1] == 1:
        return "one device"
    counts = 1 + (np.diff(nodes, axis=1) != 0).sum(axis=1)  # different nodes of each group
    least, most = counts.min(), counts.max()
    if most == 1:
        return "inside a node"
    if least == nodes.shape[1]:
        return "between nodes"
    return f"inside and between, over {least if least == most else f'{least} to {most}'} nodes"


def link_rows(layout: Layout, hardware: Hardware) -> list[tuple[str, str, str, str]]:
    """For each axis: its name, its groups, the links they use with the rate at which a device sends
    over each, and what is sent."""
    inside, outside = f"{hardware.link_gb_s:g} GB/s", f"{hardware.network_gb_s:g} GB/s"
    rates = {
        "one device": "none",
        "inside a node": f"inside a node: {inside} a device",
        "between nodes": f"between nodes: {outside} a device",
    }
    return [
        (
            link.axis,
            f"{layout.devices // link.size:,} of {count(link.size, 'device')}",
            rates.get(link.reach, f"{link.reach}: {inside} and {outside}"),
            link.sends,
        )
        for link in axis_links(layout, hardware.node_devices)
    ]


# --- text -----------------------------------------------------------------------------------------


def mesh_text(layout: Layout, *, node_size: int = 8) -> str:
    """Which devices of each node hold which stage, replica and tensor shards; then, for each axis,
    whether its groups stay inside a node.

    Brackets hold the devices of one tensor group. If there are more than eight nodes, the first
    four and the last are shown. UserError if `node_size` is below 1.
    """
    checked("node_size", node_size, Devices)
    nodes = -(-layout.devices // node_size)
    shown = list(range(nodes)) if nodes <= _MOST_NODES else [*range(_FIRST_NODES), nodes - 1]
    name_width = len(f"node {nodes - 1}  ")
    devices = count(layout.devices, "device")
    lines = [f"{shape_text(layout)} = {devices} on {count(nodes, 'node')} of {node_size}"]
    for before, node in zip([-1, *shown], shown, strict=False):
        if node - before > 1:
            lines.append(f"… {node - before - 1} more nodes …")
        for i, row in enumerate(_node_rows(layout, node, node_size)):
            lines.append((f"node {node}" if i == 0 else "").ljust(name_width) + row)
    rows = [
        (link.axis, f"{link.size} devices, {link.stride} apart", f"{link.reach}: {link.sends}")
        if link.size > 1
        else (link.axis, "1 device", link.sends)
        for link in axis_links(layout, node_size)
    ]
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    links = [f"{a.ljust(wide[0])}  {b.ljust(wide[1])}  {c}" for a, b, c in rows]
    return "\n".join([*lines, "", *links])


def shape_text(layout: Layout) -> str:
    """ "pipe 2 x data 2 x tensor 2" """
    return " x ".join(f"{axis} {size}" for axis, size in layout.shown.items())


def _node_rows(layout: Layout, node: int, node_size: int) -> list[str]:
    """One row for each stage on the node: its replicas, and the devices that hold their shards."""
    ranks = range(node * node_size, min((node + 1) * node_size, layout.devices))
    rows = []
    for stage, own in groupby(ranks, lambda rank: rank * layout.pipe // layout.devices):
        held = [(group % layout.token_shards, list(here))
                for group, here in groupby(own, lambda rank: rank // layout.tensor)]  # fmt: skip
        rows.append(f"stage {stage}: {_replicas(layout, held)}")
    return rows


def _replicas(layout: Layout, held: list[tuple[int, list[int]]]) -> str:
    whole = all(len(here) == layout.tensor for _, here in held)
    if len(held) > _MOST_GROUPS and whole:
        (first, start), (last, stop) = held[0], held[-1]
        each = f", {layout.tensor} each" if layout.tensor > 1 else ""
        named = f"replicas {first}-{last}"
        if layout.context > 1:
            named = f"{_replica(layout, first)} to {_replica(layout, last)}"
        return f"{named} [{_span(range(start[0], stop[-1] + 1))}{each}]"
    texts = []
    for group, here in held:
        text = f"{_replica(layout, group)} [{_span(here)}]"
        if len(here) < layout.tensor:
            shard = here[0] % layout.tensor
            noun = "shard" if len(here) == 1 else "shards"
            text += f" {noun} {_span(range(shard, shard + len(here)))} of {layout.tensor}"
        texts.append(text)
    return "  ".join(texts)


def _replica(layout: Layout, group: int) -> str:
    """A tensor group of a stage: its replica, and which part of the sequences it has."""
    replica, part = divmod(group, layout.context)
    return f"replica {replica}" + (f" part {part}" if layout.context > 1 else "")


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else " ".join(map(str, numbers))


# --- picture --------------------------------------------------------------------------------------


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

    Up to 128 devices are drawn one by one. Of more, every cell is a part of one stage: a node, part
    of a node, or several nodes. Saved to `path` (.svg, .png or .pdf) if given. UserError if
    matplotlib is missing, or `path` has another suffix or cannot be written.
    """
    figure = picture.new_figure(11.5, 5.4, path)
    fill_mesh(figure, layout, hardware)
    return picture.save_figure(figure, path)


def fill_mesh(figure: Figure | SubFigure, layout: Layout, hardware: Hardware) -> None:
    """The picture of `draw_mesh` in a figure, or in a part of one."""
    nodes = count(-(-layout.devices // hardware.node_devices), "node")
    above, below = picture.split_figure(figure, 4, 1.15)
    devices = f"{layout.devices:,} x {hardware.name}, {nodes} of {hardware.node_devices}"
    picture.figure_title(above, f"{shape_text(layout)} = {devices}")
    fill_devices(above, layout, hardware.node_devices)
    _write_links(below.add_subplot(), layout, hardware)


def _write_links(axes: Axes, layout: Layout, hardware: Hardware) -> None:
    """Write for each axis its groups, their links with the rate of one device, and what is sent."""
    rows = [("axis", "groups", "links of a group", "what is sent"), *link_rows(layout, hardware)]
    axes.set_axis_off()
    axes.set_ylim(len(rows) - 1, -0.6)
    for row, texts in enumerate(rows):
        y, points, colour = (row - 0.5, 8.5, INK) if row else (-0.3, 7.5, FAINT)
        for x, text in zip((0.0, 0.065, 0.235, 0.68), texts, strict=True):
            axes.text(x, y, text, fontsize=points, color=colour, va="center")
