"""Attention over `context` in a plan: the seconds of communication that nothing hides.

What is sent is read off the layer's trace (`mtx.costs`); how much of it computation hides follows
from the order in `mtx.layers.over_context`. In a ring of r devices each send overlaps with the
attention of one step, an r-th of all; gathering keys and values overlaps with the attention of a
device's own positions. The last send of a ring's sums, the scattering of gradients of keys and
values, and all-to-alls count as exposed, though XLA runs a part of these beside weight gradients.
"""

from __future__ import annotations

from collections import defaultdict

from mtx.costs.cost import Collective, Cost
from mtx.plan.network import Group, all_reduce_s, all_to_all_s, gather_s, message_s
from mtx.plan.shard import Shard

_SUM_BYTES = 4  # per element of the gradients of keys and values that go round the ring


def context_group(shard: Shard) -> Group:
    return Group(size=shard.context, stride=shard.tensor)


def exposed_s(shard: Shard, cost: Cost, during: str, attention_s: float) -> float:
    """Seconds of a layer's F ("F") or backward pass ("BW") over `context` that nothing hides, given
    the seconds of its attention."""
    spent: dict[str, float] = defaultdict(float)  # by kind
    devices = shard.context
    for each in cost.collectives:
        if each.axes == ("context",) and each.during in during:
            spent[each.kind] += each.times * _seconds(shard, each)
            devices = shard.context // (each.group or 1) if each.kind == "all_to_all" else devices
    round_s, step_s = spent["ppermute"], attention_s / devices
    last_s = 0.0
    if "B" in during and devices > 1:
        item = shard.item_bytes
        last_s = round_s / (devices - 1) * _SUM_BYTES / (_SUM_BYTES + item)
    beside_s = max(0.0, round_s - last_s - (devices - 1) * step_s)
    gathered_s = max(0.0, spent["all_gather"] - step_s)
    stands_alone_s = spent["reduce_scatter"] + spent["all_to_all"] + spent["psum"]
    return last_s + beside_s + gathered_s + stands_alone_s


def _seconds(shard: Shard, each: Collective) -> float:
    group, payload = context_group(shard), each.bytes.at(shard.microbatch)
    if each.kind == "ppermute":  # a ring of groups leaves a node if the whole axis does
        return message_s(payload, crosses=group.crosses(shard.hardware), **shard.machine)
    if each.kind == "all_to_all":
        group = Group(size=each.group or group.size, stride=group.stride)
        return all_to_all_s(payload, group, **shard.machine)
    if each.kind == "psum":  # of routers' counts
        return all_reduce_s(payload, group, **shard.machine)
    return gather_s(payload, group, **shard.machine)
