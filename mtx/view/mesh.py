"""A device mesh as text: who holds what, and which axes cross from node to node.

Devices stand in the order of the mesh: pipeline stages outermost, replicas next, tensor shards
innermost, so that rank = (stage * data + replica) * tensor + shard.
"""

from __future__ import annotations

import numpy as np

from mtx.config import Layout
from mtx.errors import UserError

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
    if node_size < 1:
        raise UserError(f"node_size={node_size} must be at least 1")
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


def _axis_lines(layout: Layout, node_size: int) -> list[str]:
    sizes = tuple(getattr(layout, axis) for axis in AXES)
    node_of = np.arange(layout.devices).reshape(sizes) // node_size
    rows = []
    for dim, (axis, size) in enumerate(zip(AXES, sizes, strict=True)):
        if size == 1:
            rows.append((axis, "1 device", "nothing to send"))
            continue
        stride = int(np.prod(sizes[dim + 1 :]))
        nodes = np.sort(np.moveaxis(node_of, dim, -1).reshape(-1, size), axis=1)
        reach = _reach(nodes)
        rows.append((axis, f"{size} devices, {stride} apart", f"{reach}: {_WORK[axis]}"))
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
