"""Seconds of a collective: latency and bandwidth on the links that its groups really cross.

Devices are numbered row-major over the mesh (`mtx.sharding.axes`), and so fill nodes: tensor shards
are neighbours, parts of a sequence come next, stages are far apart. A ring through a node enters
and leaves it once, over the network cards of all the group's members there together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtx.config import Layout
from mtx.plan.calibration import Calibration
from mtx.plan.hardware import Hardware
from mtx.sharding.axes import replica_axes


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that take part in a collective: `size` of them, `stride` apart."""

    size: int
    stride: int

    def members_in_node(self, hardware: Hardware) -> int:
        """How many of the group share a node."""
        return max(1, min(self.size, hardware.node_devices // self.stride))

    def crosses(self, hardware: Hardware) -> bool:
        """Whether it reaches over the network."""
        return self.members_in_node(hardware) < self.size


def data_group(layout: Layout, axes: Sequence[str] = ()) -> Group:
    """The devices over which gradients of parameters sharded over `axes` are summed: replicas, and
    the parts of their sequences."""
    over = replica_axes(axes)
    # If they are farther apart than they need be, as replicas of experts are, the nearest count.
    inner = [axis for axis in layout.sizes if axis not in over and axis in (*axes, "tensor")]
    stride = math.prod(layout.sizes[axis] for axis in inner if axis != "pipe")
    return Group(size=math.prod(layout.sizes[axis] for axis in over), stride=max(1, stride))


def pipe_group(layout: Layout) -> Group:
    return Group(size=layout.pipe, stride=layout.token_shards * layout.tensor)


def ring_bytes_s(group: Group, *, hardware: Hardware, calibration: Calibration) -> float:
    """Bytes per second that pass through each member of a ring.

    A group that has its nodes to itself has all of their cards. Otherwise each of several groups in
    a node has a ring, and the software decides how these share its cards.
    """
    link = hardware.link_gb_s * 1e9 * calibration.link_share
    if not group.crosses(hardware):
        return link
    cards, share = group.members_in_node(hardware), calibration.network_share
    if cards < hardware.node_devices:
        cards = max(1, cards / calibration.software.ring_cards)
        share = calibration.software.ring_share or share
    return min(link, cards * hardware.network_gb_s * 1e9 * share)


def gather_s(
    payload_bytes: float, group: Group, *, hardware: Hardware, calibration: Calibration
) -> float:
    """Seconds of an all-gather that leaves `payload_bytes` on every device, or of a reduce-scatter
    of as many: (n - 1)/n of them pass through each device."""
    if group.size == 1:
        return 0.0
    moved = payload_bytes * (group.size - 1) / group.size
    inside = group.members_in_node(hardware)
    nodes = -(-group.size // inside)
    # Steps within the node, and a tree over the nodes.
    latency = (inside - 1) * calibration.link_latency_s
    latency += math.ceil(math.log2(nodes)) * calibration.network_latency_s
    return moved / ring_bytes_s(group, hardware=hardware, calibration=calibration) + latency


def one_card_gather_s(
    payload_bytes: float, group: Group, *, hardware: Hardware, calibration: Calibration
) -> float:
    """As `gather_s`, by a ring that uses one card of each node, even if there are others."""
    if not group.crosses(hardware):
        return gather_s(payload_bytes, group, hardware=hardware, calibration=calibration)
    moved = payload_bytes * (group.size - 1) / group.size
    return moved / (hardware.network_gb_s * 1e9 * calibration.zero3_share)


def all_reduce_s(
    payload_bytes: float, group: Group, *, hardware: Hardware, calibration: Calibration
) -> float:
    """Seconds of a reduce-scatter and an all-gather."""
    return 2 * gather_s(payload_bytes, group, hardware=hardware, calibration=calibration)


def all_to_all_s(
    payload_bytes: float, group: Group, *, hardware: Hardware, calibration: Calibration
) -> float:
    """Seconds of an all-to-all: each of n devices sends every other one an n-th of its
    `payload_bytes`, to those in its node over their links, and at the same time to all others over
    its own card."""
    if group.size == 1:
        return 0.0
    inside, each = group.members_in_node(hardware), payload_bytes / group.size
    near_s = (inside - 1) * each / (hardware.link_gb_s * 1e9 * calibration.link_share)
    if inside == group.size:
        return near_s + calibration.link_latency_s
    rate = hardware.network_gb_s * 1e9 * calibration.network_share
    return max(near_s, (group.size - inside) * each / rate) + calibration.network_latency_s


def send_s(
    payload_bytes: float, layout: Layout, *, hardware: Hardware, calibration: Calibration
) -> float:
    """Seconds to send from every device of a stage to its peer on the next, all at once. The
    slowest pair counts: once the pipeline leaves a node, that is a pair in two nodes, each with its
    own card."""
    if layout.pipe == 1:
        return 0.0
    crosses = pipe_group(layout).crosses(hardware)
    return message_s(payload_bytes, crosses=crosses, hardware=hardware, calibration=calibration)


def message_s(
    payload_bytes: float, *, crosses: bool, hardware: Hardware, calibration: Calibration
) -> float:
    """Seconds to send from one device to another, in its node or across the network."""
    if crosses:
        rate = hardware.network_gb_s * 1e9 * calibration.send_share
        return payload_bytes / rate + calibration.network_latency_s
    rate = hardware.link_gb_s * 1e9 * calibration.link_share
    return payload_bytes / rate + calibration.link_latency_s
