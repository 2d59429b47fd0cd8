"""Seconds of one training step, predicted from the sizes of its matmuls, bytes and messages.

A stage's time for a microbatch is that of its blocks, embedding and head (`mtx.plan.block`); the
pipeline adds messages and waiting (`mtx.plan.makespan`); the step ends with the gradients'
reduction and the optimizer. Nothing overlaps with anything else, except: collectives
in B, if the calibration's `Software` says so; if F and B are woven, all collectives over `tensor`
except the first of a tick, and all-to-alls to experts, as long as computation lasts; ZeRO-3's
all-gathers, under F and B; sends of a ring over `context`, under attention (`mtx.plan.context`);
and a layer's copy to the host or back, under the layer next to it (`mtx.plan.offload`). Not
counted: reading data, logging, and the first steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from operator import add

from mtx.config import Layout, ModelConfig
from mtx.costs.ask import pattern_of
from mtx.costs.cost import ExpertShards
from mtx.costs.place import placement_of
from mtx.errors import UserError
from mtx.plan.block import Passes, Work, embedding_work, head_work, later_work, layer_work
from mtx.plan.calibration import Calibration, calibration_for
from mtx.plan.choose import context_attention
from mtx.plan.experts import first_alone_s, rounds_after_first
from mtx.plan.hardware import Hardware
from mtx.plan.makespan import Seconds, lone_ticks, pipeline_s
from mtx.plan.memory import Zero
from mtx.plan.network import (
    all_reduce_s,
    gather_s,
    pipe_group,
    send_s,
)
from mtx.plan.offload import with_copies
from mtx.plan.reduction import data_parallel_s, matrices_held, updated
from mtx.plan.shard import Shard
from mtx.schedules.partition import Placement


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one training step of an average device, by what they are spent on."""

    matmul_s: float  # products with the blocks' weights
    attention_s: float  # scores: their matmuls, softmax, dropout
    elementwise_s: float  # norms, GELU, residuals, dropout, adding up gradients
    embedding_and_head_s: float  # embedding, logits and loss
    tensor_comm_s: float  # collectives over `tensor`
    context_comm_s: float  # and over `context`, those that nothing hides
    expert_comm_s: float  # and to experts and back
    host_comm_s: float  # copies to the host's memory and back that nothing hides
    pipeline_comm_s: float  # messages between stages
    bubble_s: float  # waiting for other stages: fill, drain, and unequal stages
    data_comm_s: float  # gradients, and parameters if they are sharded, over `data`
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def bubble_over_ideal(self) -> float:
        """The bubble: idle time over ideal time (SC'21, section 2.2), which is that of F and B of
        all microbatches with their collectives and messages. The rest of the step does not
        count."""
        ideal_s = self.matmul_s + self.attention_s + self.elementwise_s + self.embedding_and_head_s
        sent_s = self.tensor_comm_s + self.context_comm_s + self.expert_comm_s
        sent_s += self.host_comm_s + self.pipeline_comm_s
        return self.bubble_s / (ideal_s + sent_s)


def predict_step(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    hardware: Hardware,
    *,
    zero: Zero | None = None,
    scatter_gather: bool = True,
    calibration: Calibration | None = None,
    expert_imbalance: float = 1.0,
    bound: bool = False,
) -> StepTime:
    """The time of one step of `global_batch` sequences.

    zero: by default the layout's; 0: gradients all-reduced and the optimizer on every replica; 1:
    gradients scattered, the optimizer sharded over `data`, parameters gathered; 3: parameters
    sharded too, and gathered for every F and B. scatter_gather: a message between stages is cut
    over `tensor` and gathered on arrival (SC'21, section 4.1); of no account with sequence
    parallelism, which cuts it anyway.
    calibration: by default that of `calibration_for`.
    expert_imbalance: tokens of the fullest expert over the mean of all.
    bound: for SC'21's schedules, a lower bound on the time, which takes no simulation.
    UserError if the model cannot be laid out, or the batch cannot be divided.
    """
    zero = layout.zero if zero is None else zero
    if zero not in (0, 1, 3):
        raise UserError(f"zero={zero} must be 0, 1 or 3")
    calibration = calibration or calibration_for(layout, model, hardware)
    microbatches = layout.microbatches(global_batch)
    on = _on_stages(model, layout, hardware, scatter_gather, calibration, expert_imbalance)
    shard, (first, last, every) = on.shard, on.outside
    software, (stages, arrives_s) = calibration.software, on.times
    messages_s = on.messages_s * microbatches
    pipe_s = pipeline_s(
        layout, stages, microbatches=microbatches, hop_s=arrives_s, model=software.pipeline,
        bound=bound,
    )  # fmt: skip
    lone = Work() if bound else _lone(on, layout, microbatches)
    pipe_s += lone.total_s
    blocks = (on.layers + on.hidden * -1).all * (microbatches / layout.pipe) + lone
    outside = (first.all + last.all) * (microbatches / layout.pipe) + every.all * microbatches
    held = matrices_held(model, layout, on.counts, calibration, frozen=zero == 3)
    data_comm_s = data_parallel_s(
        shard, layout, held, zero, global_batch, computed_s=blocks.total_s + outside.total_s,
        last_s=max(sum(seconds[1:]) for seconds in on.layers_s),
    )  # fmt: skip
    return StepTime(
        matmul_s=blocks.matmul_s,
        attention_s=blocks.attention_s,
        elementwise_s=blocks.elementwise_s,
        embedding_and_head_s=outside.total_s - outside.tensor_comm_s,
        tensor_comm_s=blocks.tensor_comm_s + outside.tensor_comm_s,
        context_comm_s=blocks.context_comm_s,
        expert_comm_s=blocks.expert_comm_s,
        host_comm_s=blocks.host_comm_s,
        pipeline_comm_s=messages_s,
        bubble_s=max(0.0, pipe_s - blocks.total_s - outside.total_s - messages_s),  # not -1e-17
        data_comm_s=data_comm_s,
        optimizer_s=shard.memory_s(updated(held, zero) * software.optimizer_bytes),
    )


def _lone(on: _OnStages, layout: Layout, microbatches: int) -> Work:
    """The work that weaving hides but that is exposed in ticks of F or B alone."""
    if on.hidden == Passes():
        return Work()
    forward, backward = lone_ticks(layout, microbatches)
    each = on.hidden * (1 / (layout.pipe * layout.virtual))
    return each.forward * forward + (each.backward + each.weight) * backward


# --- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _OnStages:
    """What the stages of a layout do for each microbatch."""

    shard: Shard
    counts: tuple[dict[str, int], ...]  # layers of each kind, by stage
    work: dict[str, Passes]  # of a layer of each kind
    outside: tuple[Passes, Passes, Passes]  # what the first, the last, and every stage does besides
    hop_s: float  # of one message
    hides: Callable[[dict[str, int]], Passes] | None  # by weaving alone, of a stage's microbatch
    virtual: int

    def of(self, counts: Mapping[str, int]) -> Passes:
        """The work of that many layers of each kind."""
        return sum((self.work[kind] * n for kind, n in counts.items()), Passes())

    @property
    def layers(self) -> Passes:
        """All layers of the model."""
        return self.of(sum(map(Counter, self.counts), Counter()))

    @cached_property
    def hidden(self) -> Passes:
        """The collectives of all stages' microbatches that weaving alone hides."""
        return sum(map(self.hides, self.counts), Passes()) if self.hides else Passes()

    @property
    def messages_s(self) -> float:
        """Seconds of a microbatch's messages. If a stage does one thing after the other, sending
        and receiving take their time separately, except where the model begins and where it
        ends."""
        in_turn = self.shard.calibration.software.pipeline == "asynchronous"
        return self.hop_s * (2 * (self.virtual - 1 / len(self.counts)) if in_turn else self.virtual)

    def with_more(self, work: Mapping[str, Passes]) -> _OnStages:
        """The same with further work in a layer of each kind, of which weaving hides nothing."""
        return replace(self, work={kind: own + work[kind] for kind, own in self.work.items()})

    @cached_property
    def layers_s(self) -> list[Seconds]:
        """F, B and W of the layers of each stage."""
        found = {}
        for counts in self.counts:
            key = tuple(counts.items())
            if key not in found:
                hidden = self.hides(counts) if self.hides else Passes()
                found[key] = (self.of(counts) + hidden * -1).seconds
        return [found[tuple(counts.items())] for counts in self.counts]

    @property
    def times(self) -> tuple[list[Seconds], float]:
        """F, B and W of each stage, and how long a message takes to arrive: 0 if its time is part
        of the stages' own. In that case stages stand still while they exchange messages with a
        neighbour, both ways at once: with the next one after F, with the previous one after B.

        The last stage is taken for the model's end; in V-shaped schedules it is the first. The
        first stage has no previous one, the last no next one.
        """
        first, last, every = (passes.seconds for passes in self.outside)
        stages = [_added(seconds, every) for seconds in self.layers_s]
        stages[0] = _added(stages[0], first)
        stages[-1] = _added(stages[-1], last)
        if self.shard.calibration.software.pipeline == "lockstep":
            return stages, self.hop_s
        each_s, last_s = self.virtual * self.hop_s, (self.virtual - 1) * self.hop_s
        exchanged = [(each_s, each_s, 0.0)] * len(stages)
        exchanged[0] = each_s, last_s, 0.0
        exchanged[-1] = last_s, each_s, 0.0
        return list(map(_added, stages, exchanged)), 0.0


def _added(seconds: Seconds, more: Seconds) -> Seconds:
    forward, backward, weight = map(add, seconds, more)
    return forward, backward, weight


def _shard(
    model: ModelConfig, layout: Layout, hardware: Hardware, calibration: Calibration,
    expert_imbalance: float,
) -> Shard:  # fmt: skip
    return Shard(
        model=model, microbatch=layout.microbatch, tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel, hardware=hardware, calibration=calibration,
        context=layout.context, context_attention=context_attention(layout, model, hardware),
        experts=ExpertShards.of(layout, model), expert_imbalance=expert_imbalance,
    )  # fmt: skip


def _on_stages(
    model: ModelConfig, layout: Layout, hardware: Hardware, scatter_gather: bool,
    calibration: Calibration, expert_imbalance: float,
) -> _OnStages:  # fmt: skip
    shard = _shard(model, layout, hardware, calibration, expert_imbalance)
    pattern = pattern_of(model)
    recompute = "full" if layout.stash == "inputs" else layout.recompute
    work = {kind: layer_work(shard, kind, recompute) for kind in dict.fromkeys(pattern)}
    on = _OnStages(
        shard=shard,
        counts=_stage_layers(placement_of(model, layout)),
        work=with_copies(work, model, layout, shard),
        outside=_outside(shard, layout),
        hop_s=_hop_s(shard, layout, scatter_gather),
        hides=None,
        virtual=layout.virtual,
    )
    later = {kind: later_work(shard, kind, recompute) for kind in on.work}
    if layout.weave != "on" or calibration.software.pipeline == "asynchronous":
        return on.with_more(later)
    apart = replace(calibration, software=replace(calibration.software, overlaps_tensor=False))
    shard = replace(shard, calibration=apart)
    alone = replace(on, work={kind: layer_work(shard, kind, recompute) for kind in on.work})
    last_s = on.layers.weight.matmul_s / on.shard.model.layers
    hides = partial(_hidden, on, alone)
    woven = replace(on, hides=hides, hop_s=max(0.0, on.hop_s - last_s))
    return woven.with_more(later)


def _hidden(on: _OnStages, alone: _OnStages, counts: Mapping[str, int]) -> Passes:
    """The collectives that a stage with these layers hides in ticks in which F and B are woven: all
    of those over `tensor`, and all of those to experts and back except a layer's first all-to-all
    (`first_alone_s`), as long as F and B compute. (Messages are hidden for as long as the weight
    gradients of a layer last.) alone: with all collectives, of which B's matmuls hide none."""
    each, collectives = on.of(counts), alone.of(counts)
    whole_s = collectives.all.sent.total_s
    beside_s = collectives.all.total_s - whole_s
    first_s = sum(
        n * first_alone_s(on.shard, on.shard.cost(kind), alone.work[kind].forward.attention_s)
        for kind, n in counts.items()
    )
    hidden_s = max(0.0, min(whole_s - first_s, beside_s))
    left = 1 - hidden_s / whole_s if whole_s else 1.0
    hidden = (own.sent + all_of.sent * -left for own, all_of in zip(each, collectives, strict=True))
    return Passes(*hidden)


def stage_times(
    model: ModelConfig, layout: Layout, hardware: Hardware, *, scatter_gather: bool = True,
    calibration: Calibration | None = None, expert_imbalance: float = 1.0,
) -> tuple[list[Seconds], float]:  # fmt: skip
    """F, B and W of a microbatch on each stage as in `predict_step`, and how long a message takes
    to arrive: 0 if its time is part of the stages' own."""
    calibration = calibration or calibration_for(layout, model, hardware)
    return _on_stages(model, layout, hardware, scatter_gather, calibration, expert_imbalance).times


def later_rounds(
    model: ModelConfig, layout: Layout, hardware: Hardware, *, expert_imbalance: float
) -> int:
    """The number of rounds after the first, for tokens whose experts have no room in the first."""
    calibration = calibration_for(layout, model, hardware)
    shard = _shard(model, layout, hardware, calibration, expert_imbalance)
    kinds = dict.fromkeys(pattern_of(model))
    return max(rounds_after_first(shard, shard.cost(kind)) for kind in kinds)


def _hop_s(shard: Shard, layout: Layout, scatter_gather: bool) -> float:
    """Seconds of one message from stage to stage, b s h, and of putting it together again."""
    if layout.pipe == 1:
        return 0.0
    cut = layout.tensor > 1 and (layout.sequence_parallel or scatter_gather)
    payload_bytes = shard.hidden_bytes / (layout.tensor if cut else 1)
    sent_s = send_s(payload_bytes, layout, **shard.machine)
    return sent_s + (shard.gather_s() if cut and not layout.sequence_parallel else 0.0)


@lru_cache(maxsize=4096)
def _stage_layers(placement: Placement) -> tuple[dict[str, int], ...]:
    return tuple(
        {kind: int((stage == number).sum()) for number, kind in enumerate(placement.kinds)}
        for stage in placement.kind
    )


def _outside(shard: Shard, layout: Layout) -> tuple[Passes, Passes, Passes]:
    """What the first stage, the last, and every stage does besides its blocks."""
    if shard.calibration.software.head == "last stage":
        return embedding_work(shard, layout.tensor), head_work(shard, layout.tensor), Passes()
    # All stages look up and compute logits: embeddings come from all, the last one's output goes to
    # all, and their gradients likewise; the loss needs three numbers of all shards' logits. Woven
    # ticks hide all of that except those numbers and, in some layouts, the head's gradient.
    stream_bytes = shard.hidden_bytes / (layout.tensor if layout.sequence_parallel else 1)
    pipe, machine = pipe_group(layout), shard.machine
    sum_s = all_reduce_s(stream_bytes, pipe, **machine)
    numbers_bytes = 3 * 4 * shard.tokens * layout.tensor
    loss_s = gather_s(numbers_bytes, shard.group, **machine)
    loss_s += gather_s(numbers_bytes * layout.pipe, pipe, **machine)
    both = embedding_work(shard, layout.vocab_shards) + head_work(shard, layout.vocab_shards)
    sent = Passes(Work(tensor_comm_s=2 * sum_s), Work(tensor_comm_s=2 * sum_s))
    if layout.weave == "on":
        both = Passes(*(work._replace(tensor_comm_s=0.0) for work in both))
        # Under the weight gradients of B's last layer, which wait if all chunks begin alike.
        hides = placement_of(shard.model, layout).first_kind is not None
        sent = Passes() if hides else Passes(backward=Work(tensor_comm_s=sum_s + shard.gather_s()))
    return Passes(), Passes(), both + sent + Passes(forward=Work(tensor_comm_s=loss_s))
