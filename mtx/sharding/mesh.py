"""The device mesh, and the names of its axes that a module's local shard is written for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mtx.errors import UserError
from mtx.sharding.axes import AXES


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Names of the mesh axes that a module's local shard is written for; None if unsharded.

    The default is one device, the reference that every layout is compared with.
    """

    tensor: str | None = None  # heads and feed-forward
    tensor_shards: int = 1  # devices on it
    vocab: tuple[str, ...] = ()  # vocabulary, over `pipe` x `tensor` together
    pipe: str | None = None  # stages
    context: str | None = None  # parts of a sequence (`mtx.sharding.sequence`)
    context_shards: int = 1  # devices on it
    attention: str = "gather"  # how attention spans them: `mtx.layers.over_context`
    permutes: bool = True  # see `mtx.sharding.ring.Ring`
    past: str | None = None  # shards what a continued text has kept, by positions
    experts: tuple[str, ...] = ()  # the experts: `mtx.sharding.experts`
    expert_shards: int = 1  # devices on them
    expert_tensor: bool = True  # `tensor` splits each expert; else it is one of `experts`
    expert_dispatch: str = "alltoall"
    expert_room: float = 1.2
    sequence_parallel: bool = False  # activations between linears are sharded over `tensor`
    # Linears take whole activations and return their parts of sums: one gather and one reduction
    # serve several of them (`mtx.sharding.linear`).
    joint: bool = False
    # Outputs of column-parallel linears and inputs of row-parallel ones stay in the order in which
    # linears gather, rows shard after shard: nothing between them depends on positions' order.
    by_rows: bool = False
    # The matmul of a weight gradient adds it in place, as XLA:GPU can (`mtx.step.xla`): in the
    # weight's own order, at constant offsets of chunks. Else its small operand is first, for CPUs.
    in_place: bool = False

    @classmethod
    def of(cls, layout: Any) -> Axes:
        """The axes of a `mtx.config.Layout` that have more than one device."""
        there = {axis: axis if size > 1 else None for axis, size in layout.sizes.items()}
        tensor, pipe, context = there["tensor"], there["pipe"], there["context"]
        return cls(
            tensor=tensor,
            tensor_shards=layout.sizes["tensor"],
            pipe=pipe,
            context=context,
            context_shards=layout.sizes["context"],
            attention=layout.context_attention,
            past=context,
            vocab=tuple(axis for axis in (pipe, tensor) if axis),
            experts=tuple(
                axis for axis in (there["expert"], None if layout.expert_tensor else tensor) if axis
            ),
            expert_shards=layout.expert_shards,
            expert_tensor=layout.expert_tensor,
            expert_dispatch=layout.expert_dispatch,
            expert_room=layout.expert_room,
            sequence_parallel=layout.sequence_parallel and tensor is not None,
        )


def make_mesh(layout: Any, devices: list | None = None) -> Mesh:
    """The mesh of a `mtx.config.Layout` over the first devices, or those given; UserError if there
    are too few."""
    names, shown = "*".join(layout.shown), layout.shown.values()
    devices = jax.devices() if devices is None else list(devices)
    processes = jax.process_count()
    if layout.devices > len(devices):
        more = (
            f"virtual CPU devices: --virtual-devices {layout.devices}, or in Python "
            f"mtx.use_virtual_devices({layout.devices}) before JAX starts"
            if processes == 1
            else f"more processes than these {processes}, or more devices in each"
        )
        raise UserError(
            f"{names}={'*'.join(map(str, shown))} asks for "
            f"{layout.devices} devices, and there are {len(devices)}; use a smaller layout, or "
            f"{more}"
        )
    if processes > 1 and layout.devices != len(devices):
        raise UserError(
            f"{names}={layout.devices} leaves some of the {len(devices)} devices of "
            f"{processes} processes without work; use all of them"
        )
    grid = np.array(devices[: layout.devices]).reshape(tuple(layout.sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
