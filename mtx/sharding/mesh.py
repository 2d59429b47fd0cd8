"""The device mesh: pipeline stages outermost, replicas next, tensor shards innermost.

Devices are taken in the order of their ids, so tensor groups are neighbours and stay inside a node,
as SC'21's first takeaway asks; pipeline stages are the farthest apart, since they send the least.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mtx.config import Layout
from mtx.errors import UserError

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Names of the mesh axes that a module's local shard is written for; None where unsharded.

    The default is one device, which is the reference that every layout is compared with.
    """

    tensor: str | None = None  # heads and feed-forward
    tensor_shards: int = 1  # devices on it
    vocab: tuple[str, ...] = ()  # vocabulary, over `pipe` x `tensor` together
    data: str | None = None  # replicas
    pipe: str | None = None  # stages
    sequence_parallel: bool = False  # activations between linears are sharded over `tensor`

    @classmethod
    def of(cls, layout: Layout) -> Axes:
        """The axes of `layout` that have more than one device."""
        tensor = "tensor" if layout.tensor > 1 else None
        pipe = "pipe" if layout.pipe > 1 else None
        return cls(
            tensor=tensor,
            tensor_shards=layout.tensor,
            pipe=pipe,
            data="data" if layout.data > 1 else None,
            vocab=tuple(axis for axis in (pipe, tensor) if axis),
            sequence_parallel=layout.sequence_parallel and tensor is not None,
        )


def make_mesh(layout: Layout, devices: list | None = None) -> Mesh:
    """A mesh [pipe, data, tensor] over the first devices, or those given. UserError if too few."""
    devices = jax.devices() if devices is None else list(devices)
    if layout.devices > len(devices):
        raise UserError(
            f"pipe*data*tensor={layout.pipe}*{layout.data}*{layout.tensor} asks for "
            f"{layout.devices} devices, and there are {len(devices)}; use a smaller layout, or "
            f"virtual CPU devices: --virtual-devices {layout.devices}, or in Python "
            f"mtx.use_virtual_devices({layout.devices}) before JAX starts"
        )
    if jax.process_count() > 1 and layout.devices != len(devices):
        raise UserError(
            f"pipe*data*tensor={layout.devices} leaves some of the {len(devices)} devices of "
            f"{jax.process_count()} processes without work; use all of them"
        )
    grid = np.array(devices[: layout.devices]).reshape(layout.pipe, layout.data, layout.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
