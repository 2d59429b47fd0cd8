"""The axes of the device mesh, and what each splits: the one place that lists them.

An axis is a record in `MESH` and its size, a field of `mtx.config.Layout`. Over which axes anything
is summed follows from what they split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from mtx.errors import unknown_name

Splits = Literal["layers", "batch", "sequence", "weights"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh."""

    name: str
    splits: Splits
    rare: bool = False  # few ask for it: not shown where it has one device

    def __post_init__(self):
        if self.splits not in (known := get_args(Splits)):
            raise unknown_name("splits", self.splits, known)


# Outermost first. Devices are taken in the order of their ids: along the last axis they are
# neighbours and stay inside a node, as SC'21's first takeaway asks; stages, which send the least,
# are the farthest apart.
MESH = (
    Axis("pipe", "layers"),
    Axis("data", "batch"),
    Axis("expert", "batch", rare=True),  # and the experts: their weights name it
    Axis("context", "sequence", rare=True),
    Axis("tensor", "weights"),
)


def axes_that_split(*what: str) -> tuple[str, ...]:
    return tuple(axis.name for axis in MESH if axis.splits in what)


AXES = tuple(axis.name for axis in MESH)
RARE = tuple(axis.name for axis in MESH if axis.rare)
BATCH = axes_that_split("batch")
SEQUENCE = axes_that_split("sequence")
TOKENS = axes_that_split("batch", "sequence")  # along them devices have the same weights, but for
# those that name one of them, as experts do: see `replica_axes`


def axes_of(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The axes that shard an array of that PartitionSpec."""
    entries = [entry for entry in spec if entry is not None]
    return tuple(a for e in entries for a in (e if isinstance(e, tuple) else (e,)))


def replica_axes(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The axes along which devices have the same shard of an array of that PartitionSpec, and other
    tokens: over them ZeRO shards it and its gradient is summed."""
    sharded = axes_of(spec)
    return tuple(axis for axis in TOKENS if axis not in sharded)


def sum_axes(
    spec: Iterable[str | tuple[str, ...] | None], *, sequence_parallel: bool
) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed, of those that do not shard it: devices
    along them have seen other tokens; with sequence parallelism, along those that split weights as
    well."""
    partial = ("batch", "sequence", "weights") if sequence_parallel else ("batch", "sequence")
    return tuple(axis for axis in axes_that_split(*partial) if axis not in axes_of(spec))
