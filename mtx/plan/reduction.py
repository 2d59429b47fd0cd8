"""Seconds of data parallelism: gradients reduced over the replicas, parameters gathered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mtx.config import Layout, ModelConfig
from mtx.costs.ask import model_parameters
from mtx.costs.cost import ExpertShards
from mtx.plan.calibration import Calibration
from mtx.plan.choose import zero_unit
from mtx.plan.memory import Zero
from mtx.plan.network import (
    Group,
    all_reduce_s,
    data_group,
    gather_s,
    one_card_gather_s,
    pipe_group,
)
from mtx.plan.shard import Shard

Held = Mapping[Group, float]  # parameters of a device, by the group that holds the same ones


def matrices_held(
    model: ModelConfig, layout: Layout, counts: Sequence[Mapping[str, int]],
    calibration: Calibration, *, frozen: bool,
) -> Held:  # fmt: skip
    """Matrices held by the fullest device: its layers' and its shard of a token table. counts:
    layers of each kind, by stage. frozen: include what is not trained, which zero=3 gathers as
    well."""
    each = _of_layers(model, layout, frozen)
    stages: list[Any] = []  # Counters of floats
    for stage in counts:
        stages.append(Counter())
        for kind, layers in stage.items():
            stages[-1] += Counter({group: layers * n for group, n in each[kind].items()})
    held = max(stages, key=Counter.total)
    everywhere = calibration.software.head == "all stages"
    shards = layout.vocab_shards if everywhere else layout.tensor
    tables = 1 if model.tied or (layout.pipe > 1 and not everywhere) else 2
    if frozen or model.trains("embed.tokens", "embedding"):
        held[data_group(layout)] += tables * model.padded_vocab(shards) / shards * model.hidden
    return held


@lru_cache(maxsize=4096)
def _of_layers(model: ModelConfig, layout: Layout, frozen: bool) -> dict[str, Counter]:
    """The same for one layer of each kind."""
    experts = ExpertShards.of(layout, model)
    found: dict[str, Counter] = {}
    parameters = model_parameters(model, tensor=layout.tensor, experts=experts)
    for kind, of_layer in parameters.layers.items():
        found[kind] = Counter()
        for each in of_layer:
            if each.is_matrix and (each.trained or frozen):
                split = math.prod(layout.sizes[axis] for axis in each.axes)
                found[kind][data_group(layout, each.axes)] += each.elements.number // split
    return found


def updated(held: Held, zero: Zero) -> float:
    """Parameters that a device's optimizer updates."""
    return sum(n / group.size if zero else n for group, n in held.items())


def data_parallel_s(
    shard: Shard, layout: Layout, held: Held, zero: Zero, global_batch: int, *, computed_s: float,
    last_s: float,
) -> float:  # fmt: skip
    """Seconds that a step waits for replicas.

    computed_s: F and B of all microbatches, under which ZeRO-3 gathers and scatters. last_s: the
    blocks' B of the last microbatch, under which some software reduces.
    """
    if zero == 3:
        return _zero3_s(shard, layout, held, computed_s, global_batch)
    return _reduction_s(shard, layout, held, zero, last_s)


def _sent_s(held: Held, size: float, gather: Callable, shard: Shard) -> float:
    """Seconds to gather, or scatter, `size` bytes of each parameter."""
    return sum(gather(n * size, group, **shard.machine) for group, n in held.items())


def _reduction_s(shard: Shard, layout: Layout, held: Held, zero: Zero, last_s: float) -> float:
    """Seconds to reduce gradients over `data`, gather parameters, and add a tied table's two
    gradients."""
    software, machine = shard.calibration.software, shard.machine
    reduced_s = _sent_s(held, software.gradient_bytes, gather_s, shard)
    back_bytes = software.parameter_bytes if zero else software.gradient_bytes
    reduced_s += _sent_s(held, back_bytes, gather_s, shard)
    if software.pipeline == "lockstep" and zero == 1 and layout.by_windows(shard.model):
        reduced_s /= layout.virtual  # of the first and the last chunk; ticks hide the others
    if software.overlaps_data:
        reduced_s = _beside(reduced_s, last_s, shard.calibration)
    reduced = sum(n for group, n in held.items() if group.size > 1)
    if reduced:
        reduced_s += shard.memory_s(reduced * software.reduction_bytes)
    if software.head == "last stage" and shard.model.tied and layout.pipe > 1:
        table = shard.model.padded_vocab(layout.tensor) / layout.tensor * shard.model.hidden
        both = Group(size=2, stride=(layout.pipe - 1) * pipe_group(layout).stride)
        reduced_s += all_reduce_s(table * software.gradient_bytes, both, **machine)
    return reduced_s


def _beside(traffic_s: float, computed_s: float, calibration: Calibration) -> float:
    """Seconds that traffic adds to the work it overlaps with: what it outlasts it by, or what
    matmuls lose because they have fewer cores meanwhile, whichever is longer."""
    return max(traffic_s - computed_s, calibration.comm_cores * traffic_s)


def _zero3_s(
    shard: Shard, layout: Layout, held: Held, computed_s: float, global_batch: int
) -> float:
    """Seconds that ZeRO-3's traffic adds to F and B: for every microbatch parameters are gathered
    in F and again in B, and gradients are scattered. If this program does so by chunk, it does so
    for p microbatches together, and nothing hides it; if by layer, in woven ticks, everything
    that can be hidden is, except for the first and the last layer.

    DeepSpeed's rings reached about 16 GB/s per GPU in SC'21's table 2, as if they went through a
    single card per node, however many GPUs took part: other software is priced accordingly.
    """
    software = shard.calibration.software
    microbatches, ours = layout.microbatches(global_batch), software.pipeline == "lockstep"
    sizes = (software.parameter_bytes, software.parameter_bytes, software.gradient_bytes)
    gather = gather_s if ours else one_card_gather_s
    each_s = sum(_sent_s(held, size, gather, shard) for size in sizes)
    if ours and zero_unit(layout, shard.model, global_batch) == "chunk":
        return -(-microbatches // layout.pipe) * each_s
    if ours and layout.weave == "on":
        return max(microbatches * each_s - computed_s, each_s / shard.model.layers)
    return _beside(microbatches * each_s, computed_s, shard.calibration)
