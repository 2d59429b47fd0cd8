"""The axes of the device mesh, and what each splits: the only place that lists them.

An axis is a record in `MESH`, and its size is a field of `mtx.config.Layout`. What the axes split
decides over which of them anything is summed.
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
    rare: bool = False  # seldom used: not shown if it has one device

    def __post_init__(self):
        if self.splits not in (known := get_args(Splits)):
            raise unknown_name("splits", self.splits, known)


# Outermost first. Devices are taken in the order of their ids: along the last axis they are
# neighbours and stay inside a node, as SC'21's first takeaway asks; stages, which send the least,
# are the farthest apart.
MESH = (
    Axis("pipe", "layers"),
    Axis("data", "batch"),
    Axis("expert", "batch", rare=True),  # and the experts, whose weights name it
    Axis("context", "sequence", rare=True),
    Axis("tensor", "weights"),
)


def axes_that_split(*what: str) -> tuple[str, ...]:
    return tuple(axis.name for axis in MESH if axis.splits in what)


AXES = tuple(axis.name for axis in MESH)
RARE = tuple(axis.name for axis in MESH if axis.rare)
BATCH = axes_that_split("batch")
SEQUENCE = axes_that_split("sequence")
TOKENS = axes_that_split("batch", "sequence")  # along them devices have the same weights, except
# for weights that name one of them, as experts do: see `replica_axes`


def axes_of(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The axes that shard an array with that PartitionSpec."""
    entries = [entry for entry in spec if entry is not None]
    return tuple(a for e in entries for a in (e if isinstance(e, tuple) else (e,)))


def replica_axes(spec: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The axes along which devices have the same shard of an array with that PartitionSpec, but
    other tokens: ZeRO shards the array over them, and its gradient is summed over them."""
    sharded = axes_of(spec)
    return tuple(axis for axis in TOKENS if axis not in sharded)


def sum_axes(
    spec: Iterable[str | tuple[str, ...] | None], *, sequence_parallel: bool
) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed: those that do not shard it and along
    which devices have seen other tokens. With sequence parallelism this is also true of the axes
    that split weights."""
    partial = ("batch", "sequence", "weights") if sequence_parallel else ("batch", "sequence")
    return tuple(axis for axis in axes_that_split(*partial) if axis not in axes_of(spec))
