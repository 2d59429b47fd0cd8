"""The layouts that a search may try: meshes, their settings, and which of both are given."""

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

MEMORY_AT_MOST = 0.9  # of a device's memory: what JAX can be told to take
# From the fastest to the leanest; for long sequences the third may be faster than the second.
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "around_attention", "full")
ZERO: tuple[Zero, ...] = (1, 3)  # what this program trains with
_UNEVEN = 1.1  # of the heaviest stage's FLOPs, even over balanced: beyond it layers are balanced
_PART = 8192  # least positions per device of a cut sequence: shorter ones need not be cut
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the search may not choose; None: open."""

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
        """The ways to recompute that are open, the leanest last."""
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
        """The predicted step. UserError if the model cannot be laid out."""
        return predict_step(
            self.model, layout, self.global_batch, self.hardware, zero=zero,
            scatter_gather=self.scatter_gather, expert_imbalance=self.expert_imbalance, bound=bound,
        )  # fmt: skip

    def memory(self, layout: Layout, zero: Zero) -> Memory:
        """Predicted bytes of a device. UserError if the model cannot be laid out."""
        return predict_memory(
            self.model, layout, self.global_batch, backend=self.hardware.backend, zero=zero,
            optimizer=self.optimizer,
        )  # fmt: skip

    def ways(self, layout: Layout, zero: Zero) -> tuple[Recompute, ...]:
        """The ways to recompute, the fastest first, without those that are slower than one that
        keeps less."""
        ways, best_s = [], math.inf
        for way in reversed(self.fixed.ways()):
            step_s = self.time(replace(layout, recompute=way), zero, bound=True).step_s
            if step_s < best_s:
                ways.append(way)
                best_s = step_s
        return tuple(reversed(ways))

    def holds(self, size_bytes: int) -> bool:
        """Whether a device has room for that many bytes in MEMORY_AT_MOST of its memory."""
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
        """The values of `zero` to try: with one replica, 3 is the same as 1."""
        return choices(self.fixed.zero, ZERO if mesh.token_shards > 1 else ZERO[:1])

    def mesh_fits(self, mesh: Layout, zero: Zero) -> bool:
        """Whether any layout on a mesh fits. mesh: in its leanest settings."""
        if not self.holds(weights_bytes(self.model, mesh, zero, optimizer=self.optimizer)):
            return False
        chunked = (replace(mesh, virtual=virtual) for virtual in self.virtuals(mesh))
        return any(self.can_hold(layout, zero) for layout in chunked)

    def can_hold(self, layout: Layout, zero: Zero) -> bool:
        """Whether a layout fits if everything is recomputed that may be."""
        leanest = replace(layout, recompute=self.fixed.ways()[-1])
        return self.holds(self.memory(leanest, zero).total_bytes)

    def settings(self, mesh: Layout) -> Iterator[Layout]:
        """Every (microbatch, sequence parallelism, weaving) of one mesh; chunks are left as they
        are. Cut sequences run one at a time: fewer parts would do as well as several sequences."""
        microbatches = divisors(self.global_batch // mesh.replicas) if mesh.context == 1 else (1,)
        for microbatch, parallel, weave in itertools.product(
            choices(self.fixed.microbatch, microbatches),
            self._sequence_parallel(mesh.context, mesh.tensor), self.weaves(mesh),
        ):  # fmt: skip
            layout = replace(mesh, microbatch=microbatch, sequence_parallel=parallel, weave=weave)
            if self.allows(layout):
                yield layout

    def virtuals(self, layout: Layout) -> tuple[int, ...]:
        """The numbers of chunks to try. On one stage only zero=3 needs several: it gathers one at a
        time."""
        matters = layout.pipe > 1 or layout.token_shards > 1
        matters = matters and layout.stage_layers == "even"
        layers = self.model.layers // layout.pipe
        return choices(self.fixed.virtual, divisors(layers) if matters else (1,))

    def weaves(self, mesh: Layout) -> tuple[Weave, ...]:
        """The values of `weave` to try: "on" if there is something to hide and the software is
        ours."""
        hides = self._is_ours(mesh) and mesh.tensor * mesh.expert > 1
        wanted = None if self.fixed.weave == "auto" else self.fixed.weave
        return choices(wanted, ("off", "on") if hides else ("off",))

    def attentions(self, layout: Layout) -> tuple[ContextAttention, ...]:
        """The ways of attention over `context` to try, first the layout's own or what "auto"
        chooses."""
        if layout.context == 1:
            return ()
        own = context_attention(layout, self.model, self.hardware)
        ways: list[ContextAttention] = [own, *(way for way in CONTEXT_WAYS if way != own)]
        return choices(self.fixed.context_attention, tuple(ways))

    def experts(self) -> tuple[int, ...]:
        """The numbers of shards of experts to try."""
        most = self.model.routed_experts
        sizes = (n for n in divisors(self.gpus) if n == 1 or (most and most % n == 0))
        return choices(self.fixed.expert, tuple(sizes))

    def tensors(self) -> tuple[int, ...]:
        """The numbers of tensor shards to try: for a model with experts at most as many as a node
        has devices, since further devices share its experts."""
        most = self.hardware.node_devices if self.model.routed_experts else self.gpus
        return choices(self.fixed.tensor, tuple(n for n in divisors(self.gpus) if n <= most))

    def pipes(self) -> tuple[int, ...]:
        """The numbers of stages to try: those with a layer for every chunk."""
        most = self.model.layers // (self.fixed.virtual or 1)
        return choices(self.fixed.pipe, tuple(n for n in divisors(self.gpus) if n <= most))

    def _stage_layers(self, pipe: int) -> Literal["even", "balanced"]:
        """Layers of several kinds, or of a model with experts, are balanced if stages cannot have
        equal numbers of them, or if the heaviest would then be over a tenth heavier."""
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
        """The values of `expert_tensor` to try (experts split, or whole), the layout's first."""
        if not self.model.routed_experts or layout.tensor == 1:
            return ()
        return choices(self.fixed.expert_tensor, (layout.expert_tensor, not layout.expert_tensor))

    def contexts(self) -> tuple[int, ...]:
        """The numbers of parts of a sequence to try: several if it is long and the software is
        ours."""
        most = self.model.sequence // _PART if self._is_ours(Layout()) else 1
        sizes = divisors(self.gpus)
        return choices(self.fixed.context, tuple(n for n in sizes if n <= max(1, most)))

    def _is_ours(self, layout: Layout) -> bool:
        return calibration_for(layout, self.model, self.hardware).software.name == "mtx"

    def _sequence_parallel(self, context: int, tensor: int) -> tuple[bool, ...]:
        """The values to try, the leaner first; for models with experts only that one."""
        if tensor == 1:
            tried = (True,)
        else:
            divided = self.model.sequence % (context * tensor) == 0
            both = (True,) if self.model.routed_experts else (True, False)
            tried = both if divided else (False,)
        return choices(self.fixed.sequence_parallel, tried)


def divides(layout: Layout, model: ModelConfig, global_batch: int) -> bool:
    """Whether the layout suits the model and divides the batch."""
    try:
        layout.check(model)
        layout.microbatches(global_batch)
    except UserError:
        return False
    return True


def choices(given: T | None, tried: tuple[T, ...]) -> tuple[T, ...]:
    """The values tried, or the one given."""
    return tried if given is None else (given,)


def divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
