"""The layouts that a search may try: meshes, their settings, and what of both is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from mtx.config import Layout, ModelConfig, OptimizerConfig, Recompute
from mtx.config.layout import ContextAttention, Weave
from mtx.costs.ask import pattern_of
from mtx.costs.place import heaviest
from mtx.errors import UserError
from mtx.plan.calibration import calibration_for
from mtx.plan.choose import CONTEXT_WAYS, context_attention
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Memory, Zero, predict_memory, weights_bytes
from mtx.plan.time import StepTime, predict_step

MEMORY_AT_MOST = 0.9  # of a device: what JAX can be told to take
# From the fastest to the leanest; of long sequences the third may be faster than the second.
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "around_attention", "full")
ZERO: tuple[Zero, ...] = (1, 3)  # what this program trains with
_UNEVEN = 1.1  # of FLOPs on the heaviest stage: above, layers are balanced by what they cost
_PART = 8192  # positions of a device, of a sequence that is cut: shorter ones need not be cut
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the search may not choose; None is open."""

    data: int | None = None
    pipe: int | None = None
    expert: int | None = None
    context: int | None = None
    tensor: int | None = None
    virtual: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    zero: Zero | None = None
    weave: Weave | None = None
    context_attention: ContextAttention | None = None
    expert_tensor: bool | None = None

    def ways(self) -> tuple[Recompute, ...]:
        """To recompute, the leanest last."""
        return choices(self.recompute, RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is searched for, and where."""

    model: ModelConfig
    gpus: int
    global_batch: int
    hardware: Hardware
    fixed: Fixed
    scatter_gather: bool = True
    expert_imbalance: float = 1.0
    optimizer: OptimizerConfig | None = None  # AdamW

    def time(self, layout: Layout, zero: Zero, *, bound: bool = False) -> StepTime:
        """The predicted step. UserError where the model cannot be laid out."""
        return predict_step(
            self.model, layout, self.global_batch, self.hardware, zero=zero,
            scatter_gather=self.scatter_gather, expert_imbalance=self.expert_imbalance, bound=bound,
        )  # fmt: skip

    def memory(self, layout: Layout, zero: Zero) -> Memory:
        """Predicted bytes of a device. UserError where the model cannot be laid out."""
        return predict_memory(
            self.model, layout, self.global_batch, backend=self.hardware.backend, zero=zero,
            optimizer=self.optimizer,
        )  # fmt: skip

    def ways(self, layout: Layout, zero: Zero) -> tuple[Recompute, ...]:
        """To recompute, the fastest first: those that are slower than one that keeps less are not
        among them."""
        ways, best_s = [], math.inf
        for way in reversed(self.fixed.ways()):
            step_s = self.time(replace(layout, recompute=way), zero, bound=True).step_s
            if step_s < best_s:
                ways.append(way)
                best_s = step_s
        return tuple(reversed(ways))

    def holds(self, size_bytes: int) -> bool:
        """Whether a device has room for so much: MEMORY_AT_MOST of it is taken."""
        return size_bytes <= MEMORY_AT_MOST * self.hardware.memory_bytes

    def allows(self, layout: Layout) -> bool:
        return divides(layout, self.model, self.global_batch)

    def meshes(self) -> list[Layout]:
        """Every data x pipe x expert x context x tensor that model and batch allow, in its leanest
        settings."""
        fixed, found = self.fixed, []
        for context, expert, tensor, pipe in itertools.product(
            self.contexts(), self.experts(), self.tensors(), self.pipes()
        ):
            data, left = divmod(self.gpus, context * expert * tensor * pipe)
            if left or fixed.data not in (None, data):
                continue
            mesh = Layout(
                data=data, pipe=pipe, expert=expert, context=context, tensor=tensor, idle="phases",
                recompute="full", context_attention=fixed.context_attention or "auto",
                virtual=fixed.virtual or 1, microbatch=fixed.microbatch or 1,
                schedule=fixed.schedule or "1f1b",
                sequence_parallel=self._sequence_parallel(context, tensor)[0],
                weave=fixed.weave or "off", stage_layers=self._stage_layers(pipe),
                expert_tensor=fixed.expert_tensor is not False,
            )  # fmt: skip
            if self.allows(mesh):
                found.append(mesh)
        return found

    def zeros(self, mesh: Layout) -> tuple[Zero, ...]:
        """The values of `zero` to try: 3 is as 1 where there is one replica."""
        return choices(self.fixed.zero, ZERO if mesh.token_shards > 1 else ZERO[:1])

    def mesh_fits(self, mesh: Layout, zero: Zero) -> bool:
        """Whether anything on that mesh does, which is in its leanest settings."""
        if not self.holds(weights_bytes(self.model, mesh, zero, optimizer=self.optimizer)):
            return False
        chunked = (replace(mesh, virtual=virtual) for virtual in self.virtuals(mesh))
        return any(self.can_hold(layout, zero) for layout in chunked)

    def can_hold(self, layout: Layout, zero: Zero) -> bool:
        """Whether it fits where all is recomputed that may be."""
        leanest = replace(layout, recompute=self.fixed.ways()[-1])
        return self.holds(self.memory(leanest, zero).total_bytes)

    def settings(self, mesh: Layout) -> Iterator[Layout]:
        """Every (microbatch, sequence parallelism, weaving) of one mesh; chunks are left as they
        are. Of cut sequences one at a time: fewer parts would do as well as several."""
        microbatches = divisors(self.global_batch // mesh.replicas) if mesh.context == 1 else (1,)
        for microbatch, parallel, weave in itertools.product(
            choices(self.fixed.microbatch, microbatches),
            self._sequence_parallel(mesh.context, mesh.tensor), self.weaves(mesh),
        ):  # fmt: skip
            layout = replace(mesh, microbatch=microbatch, sequence_parallel=parallel, weave=weave)
            if self.allows(layout):
                yield layout

    def virtuals(self, layout: Layout) -> tuple[int, ...]:
        """The numbers of chunks to try: on one stage they serve zero=3 alone, which gathers one of
        them at a time."""
        matters = layout.pipe > 1 or layout.token_shards > 1
        matters = matters and layout.stage_layers == "even"
        layers = self.model.layers // layout.pipe
        return choices(self.fixed.virtual, divisors(layers) if matters else (1,))

    def weaves(self, mesh: Layout) -> tuple[Weave, ...]:
        """Whether to weave: where collectives can hide, and the software priced is ours."""
        hides = self._is_ours(mesh) and mesh.tensor * mesh.expert > 1
        wanted = None if self.fixed.weave == "auto" else self.fixed.weave
        return choices(wanted, ("off", "on") if hides else ("off",))

    def attentions(self, layout: Layout) -> tuple[ContextAttention, ...]:
        """The ways over `context` to try, that which is chosen by itself first."""
        if layout.context == 1:
            return ()
        own = context_attention(layout, self.model, self.hardware)
        ways: list[ContextAttention] = [own, *(way for way in CONTEXT_WAYS if way != own)]
        return choices(self.fixed.context_attention, tuple(ways))

    def experts(self) -> tuple[int, ...]:
        """The shards of experts to try."""
        most = self.model.routed_experts
        sizes = (n for n in divisors(self.gpus) if n == 1 or (most and most % n == 0))
        return choices(self.fixed.expert, tuple(sizes))

    def tensors(self) -> tuple[int, ...]:
        """The shards of matrices to try: of a model with experts as many as a node has, since more
        devices share its experts."""
        most = self.hardware.node_devices if self.model.routed_experts else self.gpus
        return choices(self.fixed.tensor, tuple(n for n in divisors(self.gpus) if n <= most))

    def pipes(self) -> tuple[int, ...]:
        """The numbers of stages to try: those with a layer for every chunk."""
        most = self.model.layers // (self.fixed.virtual or 1)
        return choices(self.fixed.pipe, tuple(n for n in divisors(self.gpus) if n <= most))

    def _stage_layers(self, pipe: int) -> Literal["even", "balanced"]:
        """Layers of several kinds are balanced where as many for each stage cannot be had, or are
        no tenth as even; so are those of models with experts, whatever their number."""
        model = self.model
        several = bool(model.routed_experts) or len(set(pattern_of(model))) > 1
        if not several:
            return "even"
        if model.layers % pipe:
            return "balanced"
        even, balanced = (
            heaviest(model, Layout(pipe=pipe, stage_layers=way)) for way in ("even", "balanced")
        )
        return "balanced" if even > _UNEVEN * balanced else "even"

    def ways_of_experts(self, layout: Layout) -> tuple[bool, ...]:
        """Whether experts may be split over `tensor`, or be whole; the layout's own way first."""
        if not self.model.routed_experts or layout.tensor == 1:
            return ()
        return choices(self.fixed.expert_tensor, (layout.expert_tensor, not layout.expert_tensor))

    def contexts(self) -> tuple[int, ...]:
        """The parts of a sequence to try: where it is long, and the software priced is ours."""
        most = self.model.sequence // _PART if self._is_ours(Layout()) else 1
        sizes = divisors(self.gpus)
        return choices(self.fixed.context, tuple(n for n in sizes if n <= max(1, most)))

    def _is_ours(self, layout: Layout) -> bool:
        return calibration_for(layout, self.model, self.hardware).software.name == "mtx"

    def _sequence_parallel(self, context: int, tensor: int) -> tuple[bool, ...]:
        """What may be tried, the leaner first; of models with experts that alone."""
        if tensor == 1:
            tried = (True,)
        else:
            divided = self.model.sequence % (context * tensor) == 0
            both = (True,) if self.model.routed_experts else (True, False)
            tried = both if divided else (False,)
        return choices(self.fixed.sequence_parallel, tried)


def divides(layout: Layout, model: ModelConfig, global_batch: int) -> bool:
    """Whether the model can be laid out so, and the batch be divided."""
    try:
        layout.check(model)
        layout.microbatches(global_batch)
    except UserError:
        return False
    return True


def choices(given: T | None, tried: tuple[T, ...]) -> tuple[T, ...]:
    """What is tried, unless something is given."""
    return tried if given is None else (given,)


def divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
