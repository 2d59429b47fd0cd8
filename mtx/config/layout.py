"""How a model is laid out over a device mesh. No JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Annotated, Literal

from mtx.errors import UserError, nearest_divisors, nearest_multiples
from mtx.families import ModelConfig
from mtx.fields import Between, checked, resolve_types
from mtx.schedules.formats import SUFFIXES
from mtx.schedules.makers import check_virtual
from mtx.schedules.partition import place_layers
from mtx.sharding.axes import AXES, BATCH, RARE, TOKENS
from mtx.sizes import Devices, Fraction, Layers, Sequences, Slices, StageLayers, Stages

Idle = Literal["skip", "phases"]
Stash = Literal["residuals", "inputs"]
Zero = Literal[1, 3]
ZeroUnit = Literal["auto", "layer", "chunk"]
Recompute = Literal["none", "selective", "around_attention", "full"]
Attention = Literal["auto", "blocked", "cudnn"]
Weave = Literal["auto", "off", "on"]
ContextAttention = Literal["auto", "gather", "ring", "ulysses", "usp"]
ExpertDispatch = Literal["alltoall", "gathered"]

_WOVEN = {"offload": 0.0, "idle": "phases", "stash": "residuals", "slices": 1}  # what weaving needs


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is laid out over a device mesh. Changes speed and memory, never the values."""

    data: Devices = 1  # replicas (d)
    pipe: Stages = 1  # pipeline stages (p)
    expert: Devices = 1  # shards of the experts (e), each with its own part of the batch
    context: Devices = 1  # parts that every sequence is split into (c)
    tensor: Devices = 1  # tensor-parallel shards (t)
    virtual: Layers = 1  # model chunks per stage (v): above 1, the schedule is interleaved
    microbatch: Sequences = 1  # sequences per microbatch and replica (b)
    slices: Slices = 1  # slices into which the schedule cuts a microbatch's sequences
    sequence_parallel: bool = True  # shard activations between the linear layers over `tensor`
    schedule: str = "1f1b"  # a name (`mtx schedule --help`), "auto", or a table: .csv, .txt, .json
    idle: Idle = "skip"  # idle half ticks: "skip" each by a cond, or scan in "phases"
    stash: Stash = "residuals"  # what is kept from a microbatch's F to its B
    zero: Zero = 1  # over replicas, 1 shards the optimizer's state; 3 also parameters and gradients
    # what zero=3 gathers at a time; "auto": a layer if computation hides the all-gather
    zero_unit: ZeroUnit = "auto"
    # what is recomputed in a block, with stash="residuals"; "around_attention": all but attention,
    # whose output and log-sum-exp are kept
    recompute: Recompute = "none"
    # fraction of the tokens of each array kept from F to B that is moved to host memory ("auto":
    # the least with which the device's memory suffices, by `mtx plan`)
    offload: Fraction | Literal["auto"] = 0.0
    attention: Attention = "auto"  # "auto": cuDNN's kernel on NVIDIA GPUs, if it applies
    # over `context`: gather keys and values, send them round, or split heads in place of positions
    context_attention: ContextAttention = "auto"
    # split each expert over `tensor`, like other matrices, or keep it whole and have `tensor` times
    # as many shards of experts
    expert_tensor: bool = True
    # how tokens reach their experts: each is sent, or all devices of `expert` gather all tokens
    expert_dispatch: ExpertDispatch = "alltoall"
    # room of an expert, as a multiple of its even share of tokens; tokens beyond it wait for
    # further, smaller rounds and are never dropped
    expert_room: Annotated[float, Between(0.125, 64)] = 1.2
    # run a tick's F and B side by side, so that each hides the other's collectives; "auto": only on
    # GPUs, from JAX 0.11 on, if it fits in memory and is predicted to take less time
    weave: Weave = "auto"
    # layers of each of the pipe*virtual virtual stages, in model order
    stage_layers: StageLayers = "even"

    def __post_init__(self):
        resolve_types(self)
        for axis in (*_sizes_of(type(self)), *AXES):
            if axis not in AXES or not hasattr(self, axis):
                raise UserError(
                    f"{axis} must be both an axis of MESH, in mtx/sharding/axes.py, and a size of "
                    "Layout, in mtx/config/layout.py; add the other"
                )
        if self.schedule != "auto" and not self.schedule_is_file:
            check_virtual(self.schedule, self.virtual, self.slices)
        if self.stash == "inputs" and self.recompute in ("around_attention", "full"):
            raise UserError(
                f"stash='inputs' already recomputes each chunk once; recompute={self.recompute!r} "
                "would pay a third forward pass. Use recompute='none' with it, or stash='residuals'"
            )
        if self.zero != 3 and self.zero_unit != "auto":
            raise UserError(
                f"zero_unit={self.zero_unit!r} is what zero=3 gathers at a time, and zero="
                f"{self.zero}; use zero=3 with it, or zero_unit='auto'"
            )
        if self.weave == "on":
            for name, wanted in _WOVEN.items():
                if (value := getattr(self, name)) != wanted:
                    raise UserError(
                        f"weave='on' is not made for {name}={value!r}; use {name}={wanted!r} with "
                        "it, or weave='off'"
                    )
        if self.offload and self.stash != "residuals":
            raise UserError(
                f"offload={self.offload} is not made for stash={self.stash!r}; use "
                "stash='residuals' with it, or offload=0"
            )
        checked("*".join(AXES), self.devices, Devices)
        checked("pipe*virtual", self.pipe * self.virtual, Layers)

    @property
    def weaves(self) -> bool:
        """Whether the other fields allow weave="on"."""
        return all(getattr(self, name) == wanted for name, wanted in _WOVEN.items())

    @property
    def schedule_text(self) -> str:
        """The schedule in words, for reports and plans."""
        woven = ", woven ticks" if self.weave == "on" else ""
        return f"{self.schedule}, virtual v = {self.virtual}{woven}"

    @property
    def schedule_is_file(self) -> bool:
        return self.schedule.endswith(SUFFIXES)

    @cached_property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, in the mesh's order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def replicas(self) -> int:
        """The number of parts into which the batch is split."""
        return math.prod(self.sizes[axis] for axis in BATCH)

    @cached_property
    def token_shards(self) -> int:
        """The number of devices with the same weights (apart from ZeRO) but different tokens."""
        return math.prod(self.sizes[axis] for axis in TOKENS)

    @property
    def shown(self) -> dict[str, int]:
        """`sizes` as shown to people: without rarely used axes that have one device."""
        return {axis: size for axis, size in self.sizes.items() if size > 1 or axis not in RARE}

    @property
    def mesh_text(self) -> str:
        """The mesh in words, for reports: "data 2 x pipe 4 x tensor 8"."""
        sizes = {"data": self.data} | self.shown
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items())

    @property
    def zero_text(self) -> str:
        """The axes that ZeRO shards over, in words: "data x context"."""
        return " x ".join(axis for axis in TOKENS if self.sizes[axis] > 1) or "data"

    def by_windows(self, model: ModelConfig) -> bool:
        """Whether zero=1 gathers parameters and scatters gradients a chunk at a time, beside the
        first and the last ticks (`mtx.schedules.windows`). It does so only for parameters of one
        type, with the same replicas, in chunks with the same number of layers."""
        even = self.stage_layers in ("even", "balanced")
        even = even and model.layers % (self.pipe * self.virtual) == 0
        several = even and self.virtual > 1 and self.token_shards > 1
        alike = model.fp8 == "off" and not model.routed_experts and not model.freezes
        return self.weave == "on" and self.zero == 1 and several and alike

    @property
    def offload_fraction(self) -> float:
        """`offload` as a number; UserError if it is still to be chosen."""
        if self.offload == "auto":
            raise UserError(
                "offload='auto' is chosen for a target; use `mtx plan --save FILE` and train that "
                "file, or a fraction as offload=0.5"
            )
        return self.offload

    @property
    def vocab_shards(self) -> int:
        """Shards of the vocabulary, which is split over `pipe` x `tensor` together."""
        return self.pipe * self.tensor

    @property
    def expert_shards(self) -> int:
        """Devices over which the experts are split."""
        return self.expert * (1 if self.expert_tensor else self.tensor)

    def microbatches(self, global_batch: int) -> int:
        """m, the microbatches of one replica in one step."""
        unit = self.replicas * self.microbatch
        if global_batch < 1 or global_batch % unit:
            axes = [axis for axis in BATCH if axis in self.shown]
            parts = "*".join(str(self.sizes[axis]) for axis in axes)
            raise UserError(
                f"global_batch={global_batch} cannot be divided into {'*'.join(axes)}*microbatch="
                f"{parts}*{self.microbatch}; use global_batch="
                f"{nearest_multiples(global_batch, unit)}"
            )
        return global_batch // unit

    def check(self, model: ModelConfig) -> None:
        """Raises UserError if `model` cannot be laid out this way."""
        place_layers(
            model.layers, pipe=self.pipe, virtual=self.virtual, stage_layers=self.stage_layers
        )
        widths, repeated = model.split_widths, model.repeated_widths
        common = math.gcd(*widths.values(), *repeated.values())
        for name, value in widths.items():
            if value % self.tensor:
                raise UserError(
                    f"{name}={value} must be a multiple of tensor={self.tensor}; "
                    f"use tensor={nearest_divisors(common, self.tensor)}"
                )
        for name, value in repeated.items():
            if value % self.tensor and self.tensor % value:
                raise UserError(
                    f"{name}={value} can neither be divided over tensor={self.tensor} nor be "
                    f"repeated on it; use tensor={nearest_divisors(common, self.tensor)}"
                )
        if model.fp8 != "off":
            self._check_fp8(model)
        self._check_experts(model)
        if self.slices > 1 and model.objective == "retrieval":
            raise UserError(
                f"slices={self.slices} cut a sequence, and family={model.family!r} reads it in "
                "chunks of its own; use slices=1"
            )
        if self.slices > 1 and not model.causal:
            raise UserError(
                f"slices={self.slices} needs a model that sees no later positions, and family="
                f"{model.family!r} does; use slices=1"
            )
        if self.slices > 1 and model.reads_images:
            raise UserError(
                f"slices={self.slices} cuts texts, whose images would be seen again for each; "
                f"family={model.family!r} has them: use slices=1"
            )
        if model.sequence % self.slices:
            raise UserError(
                f"sequence={model.sequence} cannot be cut into slices={self.slices}; "
                f"use slices={nearest_divisors(model.sequence, self.slices)}"
            )
        if self.context > 1:
            self._check_context(model)
        if self.slices > 1 and model.attention_dropout:
            raise UserError(
                f"attention_dropout={model.attention_dropout} is not made for slices="
                f"{self.slices}; use attention_dropout=0 or slices=1"
            )
        shards = self.slices * self.context * self.tensor
        for name, length in model.sequences.items() if self.sequence_parallel else ():
            if length % shards:
                raise UserError(
                    f"{name}={length} cannot be divided over tensor={self.tensor}"
                    f"{f' in slices={self.slices}' if self.slices > 1 else ''}"
                    f"{f' and context={self.context}' if self.context > 1 else ''} for sequence "
                    f"parallelism; use {name}={nearest_multiples(length, shards)} "
                    "or sequence_parallel=False"
                )

    def _check_experts(self, model: ModelConfig) -> None:
        experts = model.routed_experts
        if not experts and self.expert > 1:
            raise UserError(
                f"expert={self.expert} splits experts, and family={model.family!r} has none; use "
                f"data={self.data * self.expert} and expert=1"
            )
        if not experts:
            return
        if self.slices > 1 and model.counted_by_sequence:
            raise UserError(
                f"{model.counted_by_sequence} counts the choices of whole sequences, and slices="
                f"{self.slices} cuts them; use slices=1, or capacity=None with aux='batch'"
            )
        if experts % self.expert_shards:
            over = "expert" if self.expert_tensor else "expert*tensor"
            raise UserError(
                f"experts={experts} must be a multiple of {over}={self.expert_shards}; use "
                f"{over}={nearest_divisors(experts, self.expert_shards)}"
            )
        if not self.expert_tensor and self.tensor > 1 and not self.sequence_parallel:
            raise UserError(
                "expert_tensor=False needs sequence_parallel=True, where each device of tensor="
                f"{self.tensor} has tokens of its own; use it, or expert_tensor=True"
            )

    def _check_context(self, model: ModelConfig) -> None:
        """Each device of `context` has two equal chunks of a sequence (`mtx.sharding.sequence`)."""
        if len(model.sequences) > 1:
            raise UserError(
                f"context={self.context} cuts one sequence, and family={model.family!r} has "
                f"{' and '.join(model.sequences)}; use context=1"
            )
        if model.sequence % (2 * self.context):
            raise UserError(
                f"sequence={model.sequence} cannot be cut into the 2*context={2 * self.context} "
                f"chunks of context={self.context}; use sequence="
                f"{nearest_multiples(model.sequence, 2 * self.context)}"
            )
        if self.slices > 1:
            raise UserError(
                f"slices={self.slices} and context={self.context} both cut the sequence; use "
                "slices=1 or context=1"
            )
        heads = max(1, model.groups // self.tensor)
        if self.context_attention == "ulysses" and heads % self.context:
            raise UserError(
                f"context_attention='ulysses' needs the {heads} heads of keys and values of a "
                f"device (kv_heads={model.groups}, tensor={self.tensor}) to be a multiple of "
                f"context={self.context}; use context_attention='usp', 'ring' or 'gather', or "
                f"context={nearest_divisors(heads, self.context)}"
            )

    def _check_fp8(self, model: ModelConfig) -> None:
        """Matmuls in float8 on GPUs need sizes that are multiples of 16. The gradient of a head
        that is repeated would be rounded in parts."""
        if model.groups % self.tensor:
            raise UserError(
                f"fp8={model.fp8!r} needs kv_heads={model.groups} to be a multiple of tensor="
                f"{self.tensor}; use tensor={nearest_divisors(model.groups, self.tensor)}, or "
                "fp8='off'"
            )
        t, size = self.tensor, model.head_size
        sizes = {
            "hidden": model.hidden, "ffn_hidden/tensor": model.ffn_hidden // t,
            "heads*head_size/tensor": model.heads * size // t,
            "kv_heads*head_size/tensor": model.groups * size // t,
            "microbatch*sequence/(slices*context)":
                self.microbatch * model.sequence // (self.slices * self.context),
        }  # fmt: skip
        for name, value in sizes.items():
            if value % 16:
                raise UserError(
                    f"fp8={model.fp8!r} needs multiples of 16, and {name}={value}; use "
                    f"{nearest_multiples(value, 16)}, or fp8='off'"
                )


@cache
def _sizes_of(layout: type[Layout]) -> tuple[str, ...]:
    """The names of the fields that are numbers of devices."""
    return tuple(each.name for each in fields(layout) if each.type in ("Devices", "Stages"))
