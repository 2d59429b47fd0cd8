"""Seconds of one training step, predicted from the sizes of its matmuls, bytes and messages.

A stage's time for a microbatch is that of its blocks and ends (`mtx.plan.block`); the pipeline adds
messages and waiting; the step ends with the gradients' reduction and the optimizer. Nothing hides
behind anything else, with two exceptions: collectives in B where the calibration's `Software` says
so, and ZeRO-3's gathers, which run under F and B as far as these are long enough.
Not counted: reading data, logging, and the first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.plan.block import Passes, Shard, Work, block_work, embedding_work, head_work
from mtx.plan.calibration import Calibration, calibration_of
from mtx.plan.choose import check_shape, schedule_for
from mtx.plan.families import layer_of
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Zero
from mtx.plan.network import (
    Group,
    all_reduce_s,
    data_group,
    gather_s,
    one_card_gather_s,
    pipe_group,
    send_s,
)
from mtx.schedules.partition import place_layers
from mtx.schedules.shape import Times
from mtx.schedules.simulate import Model, simulate

LOOPED = ("1f1b", "interleaved_1f1b", "eager_1f1b", "gpipe")  # SC'21's, and next of kin


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one training step of an average device, by what they are spent on."""

    matmul_s: float  # of the blocks' weights
    attention_s: float  # scores: their matmuls, softmax, dropout
    elementwise_s: float  # norms, GELU, residuals, dropout, adding up gradients
    ends_s: float  # embedding, logits and loss
    tensor_comm_s: float  # collectives over `tensor`
    pipeline_comm_s: float  # messages between stages
    bubble_s: float  # waiting for other stages: fill, drain, and stages that are not equal
    data_comm_s: float  # gradients, and parameters where they are sharded, over `data`
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def bubble_over_ideal(self) -> float:
        """The bubble: idle time over ideal time (SC'21, section 2.2), that of F and B of all
        microbatches with their collectives and messages. The rest of the step has no part in it."""
        ideal_s = self.matmul_s + self.attention_s + self.elementwise_s + self.ends_s
        return self.bubble_s / (ideal_s + self.tensor_comm_s + self.pipeline_comm_s)


def predict_step(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    hardware: Hardware,
    *,
    zero: Zero | None = None,
    scatter_gather: bool = True,
    calibration: Calibration | None = None,
    bound: bool = False,
) -> StepTime:
    """The time of one step of `global_batch` sequences.

    zero: None, what the layout says; 0, gradients all-reduced and the optimizer on every replica;
    1, gradients scattered, the optimizer sharded over `data`, parameters gathered; 3, parameters
    sharded too, and gathered for every F and B. scatter_gather: a message between stages is cut
    over `tensor` and gathered on arrival (SC'21, section 4.1); of no account with sequence
    parallelism, where it is cut anyway.
    calibration: None, what `calibration_of` says of the hardware and the family.
    bound: of SC'21's schedules a time that none is faster than, which takes no simulation.
    UserError where the model cannot be laid out, or the batch divided.
    """
    zero = layout.zero if zero is None else zero
    if zero not in (0, 1, 3):
        raise UserError(f"zero={zero} must be 0, 1 or 3")
    calibration = calibration or calibration_of(hardware, family=model.family)
    microbatches = layout.microbatches(global_batch)
    on = _on_stages(model, layout, hardware, scatter_gather, calibration)
    shard, counts, block, (first, last, every) = on.shard, on.counts, on.block, on.ends
    software, (stages, arrives_s) = calibration.software, on.times
    in_turn = software.pipeline == "asynchronous"
    exchanges = 2 * (layout.virtual - 1 / layout.pipe) if in_turn else layout.virtual
    messages_s = on.hop_s * exchanges * microbatches
    pipe_s = (pipeline_bound_s if bound else pipeline_s)(
        layout, stages, microbatches=microbatches, hop_s=arrives_s, model=software.pipeline
    )
    blocks = block.all * (model.layers * microbatches / layout.pipe)
    ends = (first.all + last.all) * (microbatches / layout.pipe) + every.all * microbatches
    held = _parameters_held(model, layout, max(counts), calibration)
    if zero == 3:
        data_comm_s = _zero3_s(shard, layout, held, blocks.total_s + ends.total_s, microbatches)
    else:
        last_s = max(counts) * (block.backward.total_s + block.weight.total_s)
        data_comm_s = _reduction_s(shard, layout, held, zero, last_s)
    updated = held / layout.data if zero else held
    return StepTime(
        matmul_s=blocks.matmul_s,
        attention_s=blocks.attention_s,
        elementwise_s=blocks.elementwise_s,
        ends_s=ends.total_s - ends.tensor_comm_s,
        tensor_comm_s=blocks.tensor_comm_s + ends.tensor_comm_s,
        pipeline_comm_s=messages_s,
        bubble_s=max(0.0, pipe_s - blocks.total_s - ends.total_s - messages_s),  # not -1e-17
        data_comm_s=data_comm_s,
        optimizer_s=shard.memory_s(updated * software.optimizer_bytes),
    )


# --- the pipeline ---------------------------------------------------------------------------------

Seconds = tuple[float, float, float]  # F, B and W of one microbatch on one stage, all its chunks


def pipeline_s(
    layout: Layout,
    stages: Sequence[Seconds],
    *,
    microbatches: int,
    hop_s: float,
    model: Model = "asynchronous",
) -> float:
    """Seconds from the first op to the end of the last one: the one place that knows schedules.

    They are the simulator's (`mtx.schedules.simulate`) for the table that is run, where a
    message takes `hop_s` to arrive. `model` is how the software runs it: Megatron has a program a
    stage, so its numbers are asynchronous, and what it waits for a message is part of the stages'
    own seconds; ours is one program, in lock-step, with a message a tick. (As on GPUs: there, says
    the simulator, that is the price.)

    SC'21's schedules are not simulated through where that changes nothing. UserError where a
    file's table is of another shape.
    """
    if len(stages) == 1:
        return microbatches * sum(stages[0])
    case = _Case(layout.schedule, layout.virtual, layout.slices, tuple(stages), hop_s, model)
    delayed = model == "asynchronous" and hop_s > 0  # the slowest stage may wait in every round
    if layout.schedule not in LOOPED or layout.slices > 1 or delayed:
        return _simulated_s(case, microbatches)
    if case.reaches_bound(microbatches):
        return case.bound_s(microbatches)
    return _looped_s(case, microbatches)


def pipeline_bound_s(
    layout: Layout,
    stages: Sequence[Seconds],
    *,
    microbatches: int,
    hop_s: float,
    model: Model = "asynchronous",
) -> float:
    """What none of SC'21's schedules is faster than: near to their time, and found at once."""
    if len(stages) == 1:
        return microbatches * sum(stages[0])
    case = _Case(layout.schedule, layout.virtual, layout.slices, tuple(stages), hop_s, model)
    return case.bound_s(microbatches)


@dataclass(frozen=True)
class _Case:
    """What decides the time of a schedule, but the number of microbatches; hashable."""

    schedule: str
    virtual: int
    slices: int
    stages: tuple[Seconds, ...]
    hop_s: float
    model: Model

    def bound_s(self, microbatches: int) -> float:
        """The longest of these. One microbatch through all stages. For each stage all of its work,
        and before and after it a chunk of every earlier stage, on the way there and back. And a
        pipeline of stages that are all as fast as the fastest, whose last group is short by -m mod
        p microbatches and leaves so many places idle at the end of each chunk but the last: as it
        does in lock-step, while a program a stage fills some of them with what is left of B.
        """
        pipe, virtual = len(self.stages), self.virtual
        bound_s = through_s = 0.0
        for seconds in self.stages:
            stage_s = sum(seconds)
            bound_s = max(bound_s, through_s / virtual + microbatches * stage_s)
            through_s += stage_s
        bound_s = max(bound_s, through_s)
        short = -microbatches % pipe
        if self.model == "lockstep" or microbatches < pipe or not short:
            fastest_s = min(forward for forward, _, _ in self.stages)
            fastest_s += min(backward + weight for _, backward, weight in self.stages)
            places = microbatches * virtual + (virtual - 1) * short + pipe - 1
            bound_s = max(bound_s, places / virtual * fastest_s)
        sends = microbatches * virtual if self.model == "lockstep" else 0  # the first stage's F
        return bound_s + sends * self.hop_s

    def reaches_bound(self, microbatches: int) -> bool:
        """Whether SC'21's schedules take as long as the bound, in the asynchronous model: where no
        stage is slower than the last one, in F or in B, that never waits once it has begun."""
        whole = self.virtual == 1 or microbatches % len(self.stages) == 0
        *others, last = [(forward, backward + weight) for forward, backward, weight in self.stages]
        leads = all(f <= last[0] and b <= last[1] for f, b in others)
        return self.model == "asynchronous" and not self.hop_s and whole and leads

    @property
    def pace_s(self) -> float:
        """What a microbatch more adds in the end to SC'21's schedules: the work of the slowest
        stage; in GPipe, where F and B lie apart, of the one that is slowest in each."""
        if self.schedule == "gpipe":
            forward_s = max(forward for forward, _, _ in self.stages)
            backward_s = max(backward + weight for _, backward, weight in self.stages)
            return forward_s + backward_s + 2 * self.virtual * self.hop_s
        return max(sum(seconds) for seconds in self.stages) + self.virtual * self.hop_s


@lru_cache(maxsize=4096)
def _simulated_s(case: _Case, microbatches: int) -> float:
    """The simulator's time for the whole table."""
    layout = Layout(
        pipe=len(case.stages), schedule=case.schedule, virtual=case.virtual, slices=case.slices
    )
    table = schedule_for(layout, microbatches)
    check_shape(table, layout, microbatches)
    times = Times(stage_times=case.stages, comm=case.hop_s / case.slices)
    return simulate(table, times, model=case.model).makespan


def _looped_s(case: _Case, microbatches: int) -> float:
    """A schedule of SC'21 by simulation. Its table repeats with every group of p microbatches: once
    one more of these adds no less than it does in the end, all the others do as well."""
    period = len(case.stages)
    short = period + microbatches % period
    while short + period < microbatches:
        longer_s = _simulated_s(case, short + period)
        added_s = longer_s - _simulated_s(case, short)
        if added_s >= period * case.pace_s * (1 - 1e-12):
            return longer_s + (microbatches - short - period) * case.pace_s
        short += max(period, short // period * period)
    return _simulated_s(case, microbatches)


def _hop_s(shard: Shard, layout: Layout, scatter_gather: bool) -> float:
    """One message from stage to stage, b s h, and what puts it together again."""
    if layout.pipe == 1:
        return 0.0
    cut = layout.tensor > 1 and (layout.sequence_parallel or scatter_gather)
    payload_bytes = shard.hidden_bytes / (layout.tensor if cut else 1)
    sent_s = send_s(payload_bytes, layout, hardware=shard.hardware, calibration=shard.calibration)
    return sent_s + (shard.gather_s() if cut and not layout.sequence_parallel else 0.0)


def _with_messages(stages: Sequence[Seconds], hop_s: float, virtual: int) -> list[Seconds]:
    """Stages that stand still while they and a neighbour exchange messages, both ways at once: with
    the next one after F, with the one before after B. Past the ends of the model is none."""
    each_s, last_s = virtual * hop_s, (virtual - 1) * hop_s
    longer = [(forward + each_s, backward + each_s, weight) for forward, backward, weight in stages]
    forward, backward, weight = stages[0]
    longer[0] = forward + each_s, backward + last_s, weight
    forward, backward, weight = stages[-1]
    longer[-1] = forward + last_s, backward + each_s, weight
    return longer


# --- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _OnStages:
    """What the stages of a layout do for each microbatch."""

    shard: Shard
    counts: tuple[int, ...]  # layers
    block: Passes
    ends: tuple[Passes, Passes, Passes]  # what the first, the last, and every stage does beside
    hop_s: float  # a message
    virtual: int

    @property
    def times(self) -> tuple[list[Seconds], float]:
        """F, B and W of each stage, and how long a message takes to arrive: 0 where its time is
        part of the stages' own."""
        first, last, every = self.ends
        stages = _stage_seconds(self.counts, block=self.block, first=first, last=last, every=every)
        if self.shard.calibration.software.pipeline == "lockstep":
            return stages, self.hop_s
        return _with_messages(stages, self.hop_s, self.virtual), 0.0


def _on_stages(
    model: ModelConfig, layout: Layout, hardware: Hardware, scatter_gather: bool,
    calibration: Calibration,
) -> _OnStages:  # fmt: skip
    shard = Shard(
        model=model, microbatch=layout.microbatch, tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel, hardware=hardware, calibration=calibration,
    )  # fmt: skip
    return _OnStages(
        shard=shard,
        counts=_stage_layers(model.layers, layout.pipe, layout.virtual, layout.stage_layers),
        block=block_work(shard, "full" if layout.stash == "inputs" else layout.recompute),
        ends=_ends(shard, layout),
        hop_s=_hop_s(shard, layout, scatter_gather),
        virtual=layout.virtual,
    )


def stage_times(
    model: ModelConfig, layout: Layout, hardware: Hardware, *, scatter_gather: bool = True,
    calibration: Calibration | None = None,
) -> tuple[list[Seconds], float]:  # fmt: skip
    """F, B and W of a microbatch on each stage as `predict_step` has them, and how long a message
    takes to arrive: 0 where its time is part of the stages' own."""
    calibration = calibration or calibration_of(hardware, family=model.family)
    return _on_stages(model, layout, hardware, scatter_gather, calibration).times


@lru_cache(maxsize=4096)
def _stage_layers(
    layers: int, pipe: int, virtual: int, stage_layers: tuple[int, ...] | str
) -> tuple[int, ...]:
    placement = place_layers(layers, pipe=pipe, virtual=virtual, stage_layers=stage_layers)
    return tuple(int(count) for count in placement.count.sum(axis=1))


def _stage_seconds(
    counts: Sequence[int], *, block: Passes, first: Passes, last: Passes, every: Passes
) -> list[Seconds]:
    """F, B and W of each stage: its blocks, and what stands at its end of the model.

    The last stage is taken for the model's end; in schedules that come back in a V it is the first.
    """
    each, always = _seconds(block), _seconds(every)
    stages = [
        tuple(count * part + more for part, more in zip(each, always, strict=True))
        for count in counts
    ]
    for stage, end in ((0, first), (-1, last)):
        added = zip(stages[stage], _seconds(end), strict=True)
        stages[stage] = tuple(part + more for part, more in added)
    return stages


def _seconds(passes: Passes) -> Seconds:
    return passes.forward.total_s, passes.backward.total_s, passes.weight.total_s


def _ends(shard: Shard, layout: Layout) -> tuple[Passes, Passes, Passes]:
    """What the first stage, the last, and every stage does beside its blocks."""
    embedding = embedding_work(shard)
    if shard.calibration.software.head == "last stage":
        return embedding, head_work(shard, layout.tensor), Passes()
    # All stages compute logits: the last one's output goes to all, its gradient comes from all.
    shared_s = all_reduce_s(
        shard.hidden_bytes / (layout.tensor if layout.sequence_parallel else 1),
        pipe_group(layout), hardware=shard.hardware, calibration=shard.calibration,
    )  # fmt: skip
    shared = Work(tensor_comm_s=shared_s)
    head = head_work(shard, layout.vocab_shards)
    return embedding, Passes(), head + Passes(forward=shared, backward=shared)


# --- data parallelism -----------------------------------------------------------------------------


def _parameters_held(
    model: ModelConfig, layout: Layout, layers: int, calibration: Calibration
) -> float:
    """Of the device that has most: matrices of so many layers, and its part of a token table."""
    matrices = _matrices_held(model, layout.tensor)
    everywhere = calibration.software.head == "all stages"
    shards = layout.vocab_shards if everywhere else layout.tensor
    tables = 1 if model.tied or (layout.pipe > 1 and not everywhere) else 2
    return layers * matrices + tables * model.padded_vocab(shards) / shards * model.hidden


@lru_cache(maxsize=4096)
def _matrices_held(model: ModelConfig, tensor: int) -> int:
    return sum(linear.held(tensor)[0] for linear in layer_of(model).linears)


def _reduction_s(shard: Shard, layout: Layout, held: float, zero: Zero, last_s: float) -> float:
    """Gradients over `data`, parameters back, and a tied table's two gradients.

    last_s: the blocks' B of the last microbatch, under which some software reduces.
    """
    software, group = shard.calibration.software, data_group(layout)
    machine = dict(hardware=shard.hardware, calibration=shard.calibration)
    reduced_s = gather_s(held * software.gradient_bytes, group, **machine)
    back_bytes = software.parameter_bytes if zero else software.gradient_bytes
    reduced_s += gather_s(held * back_bytes, group, **machine)
    if software.overlaps_data:
        reduced_s = _beside(reduced_s, last_s, shard.calibration)
    if group.size > 1:
        reduced_s += shard.memory_s(held * software.reduction_bytes)
    if software.head == "last stage" and shard.model.tied and layout.pipe > 1:
        table = shard.model.padded_vocab(layout.tensor) / layout.tensor * shard.model.hidden
        ends = Group(size=2, stride=(layout.pipe - 1) * layout.data * layout.tensor)
        reduced_s += all_reduce_s(table * software.gradient_bytes, ends, **machine)
    return reduced_s


def _beside(traffic_s: float, computed_s: float, calibration: Calibration) -> float:
    """What traffic adds to the work that it runs beside: matmuls have fewer cores meanwhile; what
    is longer decides."""
    return max(traffic_s - computed_s, calibration.comm_cores * traffic_s)


def _zero3_s(
    shard: Shard, layout: Layout, held: float, computed_s: float, microbatches: int
) -> float:
    """What ZeRO-3's traffic adds to F and B: for every microbatch the parameters are gathered in F
    and again in B, and the gradients scattered.

    DeepSpeed's rings reached about 16 GB/s a GPU in SC'21's table 2, as if they went through a
    single card a node, however many GPUs took part: so they are priced here.
    """
    software = shard.calibration.software
    machine = dict(hardware=shard.hardware, calibration=shard.calibration)
    each_s = [
        one_card_gather_s(held * size, data_group(layout), **machine)
        for size in (software.parameter_bytes, software.parameter_bytes, software.gradient_bytes)
    ]
    return _beside(microbatches * sum(each_s), computed_s, shard.calibration)
