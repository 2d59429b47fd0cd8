"""What the compiler says of one training step: memory, largest buffers, collectives, FLOPs.

Plain data; `mtx.compile.step` fills it in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

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
    count: float  # executions a step, a mean over the stages where they differ
    bytes: float  # that a device sends in a step, by ring algorithms


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """An estimate: seconds of the collectives over the same mesh axes in one step of one device,
    by `mtx.compile.overlap`."""

    axes: tuple[str, ...]
    seconds: float  # by the planner's model of the network
    exposed_s: float  # of them, those that the schedule puts no computation beside


@dataclass(frozen=True, kw_only=True)
class Costly:
    """Time of one step that goes into no matmul and no collective, by `mtx.compile.costly`."""

    what: str  # bf16[1,2048,6144] mul: what is made, and how
    part: str  # of the step: woven, F, B, W, head, update, ...; "" where XLA does not say
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One training step, compiled for devices that are not there. Memory is that of one device."""

    target: str
    devices: int
    backend: Backend  # whose compiler it was
    label: str  # what was compiled, and how near it is to the target
    hint: str  # how to get nearer; "" where it is as near as it can be
    jax_version: str
    arguments_bytes: int
    outputs_bytes: int
    alias_bytes: int  # of outputs that lie where arguments lay
    temp_bytes: int
    largest: tuple[Buffer, ...]  # the ten largest, largest first
    collectives: tuple[Traffic, ...]  # most bytes first
    step_s: float | None  # by `mtx.compile.overlap`; None where no GPU was compiled for
    overlap_estimate: tuple[Exposure, ...]  # most exposed first; () where no GPU was compiled for
    costliest: tuple[Costly, ...]  # the ten costliest; () likewise
    matmul_flops: float  # of the whole cluster in one step, loops weighted by their trip counts
    formula_flops: float  # `hardware_matmul_flops` of the same program
    compile_s: float  # tracing, lowering and compiling
    compiler_peak_bytes: int  # the compiling process's largest memory

    @property
    def total_bytes(self) -> int:
        """arguments + outputs - alias + temp: what XLA assigns on one device."""
        return self.arguments_bytes + self.outputs_bytes - self.alias_bytes + self.temp_bytes

    def to_dict(self) -> dict:
        """Plain nested dicts and lists, `total_bytes` included, ready for JSON."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}

    @classmethod
    def from_dict(cls, values: dict) -> Compiled:
        """The inverse of `to_dict`, also after a way through JSON."""
        values = {name: value for name, value in values.items() if name != "total_bytes"}
        values["largest"] = tuple(Buffer(**buffer) for buffer in values["largest"])
        values["costliest"] = tuple(Costly(**row) for row in values["costliest"])
        for name, kind in (("collectives", Traffic), ("overlap_estimate", Exposure)):
            rows = (kind(**row | {"axes": tuple(row["axes"])}) for row in values[name])
            values[name] = tuple(rows)
        return cls(**values)
