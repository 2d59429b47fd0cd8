"""Experts in a plan: the seconds of what is sent to them and back.

What is sent is read off the layer's trace (`mtx.costs`): all-to-alls, or gathers and scatters, of
as many tokens as experts have room for. In a plain tick XLA hides none of it; woven ticks do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtx.costs.cost import Collective, Cost
from mtx.plan.network import Group, all_reduce_s, all_to_all_s, gather_s

if TYPE_CHECKING:
    from mtx.plan.shard import Shard

_SECONDS = {"all_to_all": all_to_all_s, "all_gather": gather_s, "reduce_scatter": gather_s}


def expert_group(shard: Shard) -> Group:
    """Devices that share experts: where `tensor` is one of their axes, those of a node first."""
    experts = shard.experts
    assert experts is not None  # who asks has experts
    if experts.expert_tensor:
        return Group(size=experts.expert, stride=shard.context * shard.tensor)
    return Group(size=experts.expert * shard.tensor, stride=shard.context)


def to_experts_s(shard: Shard, cost: Cost, during: str) -> float:
    """Seconds of a layer's F ("F") or backward pass ("BW")."""
    if shard.experts is None:
        return 0.0
    group = expert_group(shard)
    return sum(
        each.times
        * _SECONDS.get(each.kind, all_reduce_s)(
            each.bytes.at(shard.microbatch), group, **shard.machine
        )
        for each in cost.collectives
        if each.during in during and is_to_experts(each)
    )


def is_to_experts(each: Collective) -> bool:
    """Attention sends its heads over `context` alone, and nothing else by all-to-all."""
    return "expert" in each.axes or (each.kind == "all_to_all" and "context" not in each.axes)
