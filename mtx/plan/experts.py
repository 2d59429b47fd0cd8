"""Experts in a plan: the seconds of what is sent to them and back.

What is sent is read off the layer's trace (`mtx.costs`): all-to-alls, or gathers and scatters, of
as many tokens as experts have room for. In a plain tick XLA hides none of it; woven ticks hide it.

If the fullest expert receives more tokens than it has room for, further rounds with a quarter of
that room run on all devices that share experts, in loops that nothing overlaps with. Each round
costs what its trace says. Memory is the same: the arrays of these rounds have their place whether
the rounds run or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mtx.config import ModelConfig
from mtx.costs.cost import Collective, Cost, total
from mtx.errors import UserError
from mtx.plan.network import Group, all_reduce_s, all_to_all_s, gather_s

if TYPE_CHECKING:
    from mtx.plan.shard import Shard

_SECONDS = {"all_to_all": all_to_all_s, "all_gather": gather_s, "reduce_scatter": gather_s}


def expert_group(shard: Shard) -> Group:
    """The devices that share experts; if `tensor` is one of their axes, those of a node come
    first."""
    experts = shard.experts
    assert experts is not None  # callers have checked it
    if experts.expert_tensor:
        return Group(size=experts.expert, stride=shard.context * shard.tensor)
    return Group(size=experts.expert * shard.tensor, stride=shard.context)


def check_imbalance(model: ModelConfig, expert_imbalance: float) -> None:
    """UserError if no load of experts can have that imbalance."""
    if not model.routed_experts:
        if expert_imbalance != 1:
            raise UserError(
                f"expert_imbalance={expert_imbalance} is of experts, and family={model.family!r} "
                "has none; leave it out"
            )
        return
    most = model.routed_experts / model.routed_choices
    if not 1 <= expert_imbalance <= most:
        raise UserError(
            f"expert_imbalance={expert_imbalance} must be from 1, an even load, to "
            f"experts/choices={most:g}, where all tokens go to one expert; use a number between"
        )


def rounds_after_first(shard: Shard, cost: Cost) -> int:
    """The number of further rounds that the fullest expert needs, on a device whose tokens choose
    as all tokens do."""
    products = [each for each in cost.later.matmuls if each.during == "F"]
    if not products or shard.experts is None:
        return 0

    def slots(batch, m, *_) -> int:
        return batch * m

    of_round, name = slots(*products[0].shape(shard.microbatch)), products[0].weight
    (first,) = (each for each in cost.weights if each.weight == name)
    tokens = shard.tokens if shard.experts.expert_tensor else shard.tokens // shard.tensor
    wanted = shard.expert_imbalance * tokens * shard.model.routed_choices
    left = wanted - slots(*first.shape(shard.microbatch))
    return max(0, math.ceil(left / of_round))


def later_s(shard: Shard, cost: Cost, during: str) -> tuple[float, float, float]:
    """Seconds of matmuls, of other kernels and of what is sent, in the rounds after the first."""
    rounds, rows, later = rounds_after_first(shard, cost), shard.microbatch, cost.later
    if not rounds:
        return 0.0, 0.0, 0.0
    products = (each.shape(rows) for each in later.matmuls if each.during == during)
    moved = [each for each in later.moved if each.during == during]
    return (
        rounds * sum(shard.product_s(m, n, k, batch) for batch, m, n, k in products),
        rounds * sum(shard.memory_s(total(m.bytes, rows), round(m.kernels)) for m in moved),
        rounds * to_experts_s(shard, later.collectives, during),
    )


def to_experts_s(shard: Shard, collectives: Iterable[Collective], during: str) -> float:
    """Seconds of sending to experts and back in a layer's F ("F") or backward pass ("BW")."""
    if shard.experts is None:
        return 0.0
    group = expert_group(shard)
    return sum(
        each.times
        * _SECONDS.get(each.kind, all_reduce_s)(
            each.bytes.at(shard.microbatch), group, **shard.machine
        )
        for each in collectives
        if each.during in during and is_to_experts(each)
    )


def first_alone_s(shard: Shard, cost: Cost, attention_s: float) -> float:
    """Seconds of a pair of woven layers in which B's first all-to-all overlaps with nothing: B has
    nothing to do before it, and F has only attention, which takes `attention_s`, and attention's
    matmuls. cost: of the layer."""
    if shard.experts is None:
        return 0.0
    of_experts = {each.weight for each in cost.later.matmuls}
    before = (
        each.shape(shard.microbatch) for each in cost.weights if each.weight not in of_experts
    )
    before_s = sum(shard.product_s(m, n, k, batch) for batch, m, n, k in before)
    one_s = to_experts_s(shard, cost.collectives, "F") / 2
    return max(0.0, one_s - before_s - attention_s)


def is_to_experts(each: Collective) -> bool:
    """Whether a collective sends tokens to experts or back. Attention sends its heads over
    `context` alone, and nothing else uses all-to-alls."""
    return "expert" in each.axes or (each.kind == "all_to_all" and "context" not in each.axes)
