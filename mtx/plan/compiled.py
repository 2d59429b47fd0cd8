"""What the compiler says of one training step: memory, largest buffers, collectives, FLOPs, time.

Plain data; `mtx.compile.step` fills it in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

Backend = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A place in a device's memory, and what lies there."""

    bytes: int
    shape: str  # of its largest tenant, as XLA writes it: bf16[127,2,1,256,25600]
    what: str  # the argument, the array of the step that has this shape, or the op that writes it


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind, one type and the same mesh axes in one step, on one device."""

    kind: str  # all-reduce, reduce-scatter, all-gather, collective-permute, ...
    axes: tuple[str, ...]  # of the mesh: pipe, data, tensor
    group: int  # devices that take part in one
    dtype: str
    count: float  # executions per step, a mean over the stages if they differ
    bytes: float  # that a device sends in a step, by ring algorithms


@dataclass(frozen=True)
class Exposure:
    """Seconds of the collectives over the same mesh axes in one step, or of copies ("host",)."""

    axes: tuple[str, ...]
    seconds: float  # by the planner's model of the network
    exposed_s: float  # of them, those that the schedule overlaps with no computation


HOST = "host"  # in place of an axis: copies to the host's memory and back
Kind = Literal["matmul", "attention", "other"]


@dataclass(frozen=True)
class Spent:
    """Seconds of a step, or of a tick."""

    what: str  # a Kind; "exposed over tensor"; for the costliest, the output: bf16[1,2048,6144] mul
    part: str  # of the step: woven, F, B, W, head, update, ...; "" if XLA does not say
    seconds: float


@dataclass(frozen=True)
class Span:
    """What a device does for a while."""

    row: str  # a Kind, or a collective's axes: pipe x tensor
    part: str  # of the step, as in Spent
    start_s: float
    seconds: float
    exposed: bool  # whether it is a wait for the collectives of that row


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A steady tick of the step: one iteration of the loop that takes longest."""

    seconds: float  # of the mean tick; `spent` says where they go
    spent: tuple[Spent, ...]
    count: int
    drawn_s: float  # of a tick with all that one may have, the head too; `spans` says what it does
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """An estimate: one run of the program on one device, by `mtx.compile.overlap`. Each tick is
    that of the stage that has the most to do, for which the others wait."""

    step_s: float  # computation and, between it, what is exposed
    exposures: tuple[Exposure, ...]  # the most exposed first
    spent: tuple[Spent, ...]  # the seconds of the step; in a plan, those of the mean stage
    costliest: tuple[Spent, ...]  # the ten costliest, without matmuls, attention, collectives
    tick: Tick | None  # of the loop that takes longest; None if there is no loop


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One training step, compiled for devices that are not there. Memory is that of one device."""

    target: str
    devices: int
    backend: Backend  # whose compiler it was
    label: str  # what was compiled, and how near it is to the target
    hint: str  # how to get nearer; "" if it is as near as it can be
    jax_version: str
    arguments_bytes: int
    outputs_bytes: int
    alias_bytes: int  # of outputs that are stored where arguments were
    temp_bytes: int
    largest: tuple[Buffer, ...]  # the ten largest, largest first
    collectives: tuple[Traffic, ...]  # most bytes first
    timeline: Timeline | None  # None if no GPU was compiled for
    matmul_flops: float  # of the whole cluster in one step, loops weighted by their trip counts
    formula_flops: float  # `hardware_matmul_flops` of the same program
    compile_s: float  # tracing, lowering and compiling
    compiler_peak_bytes: int  # the compiling process's largest memory
    host_bytes: int = 0  # in the host's memory, in addition to those of the device

    @property
    def total_bytes(self) -> int:
        """arguments + outputs - alias + temp: what XLA assigns on one device."""
        return self.arguments_bytes + self.outputs_bytes - self.alias_bytes + self.temp_bytes

    def to_dict(self) -> dict:
        """Plain nested dicts and lists, `total_bytes` included, ready for JSON."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    @classmethod
    def from_dict(cls, values: dict) -> Compiled:
        """The inverse of `to_dict`, also after a round trip through JSON."""
        return _read(cls, {name: each for name, each in values.items() if name != "total_bytes"})


def _read(kind: Any, value: Any) -> Any:
    """A value of that type, from plain dicts and lists."""
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is UnionType and value is not None:
        kind = get_args(kind)[0]
    if isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], each) for name, each in value.items()})
    return value
