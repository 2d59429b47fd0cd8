"""Masters and optimizer state, sharded over the replicas as well (ZeRO-1, Rajbhandari et al. 2020):
over all axes that split the batch or its sequences and do not shard the parameter itself.

Every parameter keeps its shape; one dim of its float32 master is sharded over these axes: the first
one that no other axis shards and that divides evenly. If none does (1T's 25,600 over 6 replicas),
the largest is padded with zeros. A step gathers the parameters in the compute type at its start and
reduce-scatters their gradients at its end: in 16 bits a device sends 2n(d-1)/d + 4n(d-1)/d bytes
for n parameters, and the memory of a parameter is 2 + 4 + 12/d bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from mtx.sharding.axes import axes_of, replica_axes


@dataclass(frozen=True, kw_only=True)
class DataShard:
    """How one parameter's master is sharded over the replicas."""

    spec: P  # of the master: the parameter's, with `axes` at `dim`
    dim: int | None  # None: not sharded over the replicas
    size: int  # of that dim in the parameter
    padded: int  # of that dim in the master
    axes: tuple[str, ...] = ()  # along which there are replicas of the parameter

    def below(self, dims: int) -> DataShard:
        """The same for arrays without the first `dims` dims, which it does not shard."""
        if self.dim is None:
            return self
        return replace(self, spec=P(*self.spec[dims:]), dim=self.dim - dims)

    def pad(self, x):
        """The parameter's shape -> the master's."""
        if self.dim is None or self.padded == self.size:
            return x
        widths = [(0, 0)] * x.ndim
        widths[self.dim] = (0, self.padded - self.size)
        return namespace(x).pad(x, widths)

    def unpad(self, x):
        """The master's shape -> the parameter's."""
        if self.dim is None or self.padded == self.size:
            return x
        return x[(slice(None),) * self.dim + (slice(self.size),)]

    def from_shards(self, shards):
        """The parameter from the shards of all replicas, [d, ...]; it has to be sharded."""
        dim = self.dim or 0
        whole = jnp.moveaxis(shards, 0, dim)
        shape = *whole.shape[:dim], -1, *whole.shape[dim + 2 :]
        return _row_major(self.unpad(whole.reshape(shape)))

    def to_shards(self, whole):
        """The inverse of `from_shards`."""
        dim, whole = self.dim or 0, self.pad(whole)
        shape = *whole.shape[:dim], lax.axis_size(self.axes), -1, *whole.shape[dim + 1 :]
        return jnp.moveaxis(whole.reshape(shape), dim, 0)

    def own(self, whole):
        """This device's shard of an array that every device has whole. In `shard_map`."""
        if self.dim is None:
            return whole
        return self.to_shards(whole)[lax.axis_index(self.axes)]

    def gather(self, master, dtype, *, stacked: bool = True):
        """This device's shard of the parameter, from its shard of the master. In `shard_map`.
        stacked: the array has dims of layers, which come first."""
        local = master.astype(dtype)
        if self.dim is None:
            return local
        whole = self.unpad(lax.all_gather(local, self.axes, axis=self.dim, tiled=True))
        # XLA:GPU gathers along the major dim. It would keep `dim` in front of the layers, and
        # reading one layer's weights would be a copy instead of an offset into the stack.
        return _row_major(whole) if stacked else whole

    def reduce_scatter(self, gradient, *, stacked: bool = True):
        """This device's shard of the sum over the replicas of a gradient. In `shard_map`."""
        if self.dim is None:
            return lax.psum(gradient, self.axes) if self.axes else gradient
        # For the same reason: a matmul adds a layer's gradient in place if layers come first.
        gradient = self.pad(_row_major(gradient) if stacked else gradient)
        return lax.psum_scatter(gradient, self.axes, scatter_dimension=self.dim, tiled=True)


def namespace(array):
    """NumPy for host arrays, otherwise jax.numpy: `pad` and `where` that work where an array is."""
    return array.__array_namespace__()


WHOLE = DataShard(spec=P(), dim=None, size=0, padded=0)  # sharded over no replicas


def _row_major(array):
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def shard_over_replicas(
    shape: tuple[int, ...], spec: P, *, sizes: Mapping[str, int], stacked: int = 0, whole=False
) -> DataShard:
    """How to shard a parameter of that (global) shape and spec over its replicas, leaving the first
    `stacked` dims whole. sizes: of the mesh's axes. whole: do not shard it over them."""
    names = tuple(spec) + (None,) * (len(shape) - len(spec))
    axes = replica_axes(names)
    replicas = math.prod(sizes[axis] for axis in axes)
    if replicas == 1:
        return DataShard(spec=P(*names), dim=None, size=0, padded=0)
    free = [dim for dim in range(stacked, len(names)) if names[dim] is None]
    if whole or not free:
        return DataShard(spec=P(*names), dim=None, size=0, padded=0, axes=axes)
    even = [dim for dim in free if shape[dim] % replicas == 0]
    dim = even[0] if even else max(free, key=lambda dim: shape[dim])
    padded = math.ceil(shape[dim] / replicas) * replicas
    spec = P(*(axes if n == dim else name for n, name in enumerate(names)))
    return DataShard(spec=spec, dim=dim, size=shape[dim], padded=padded, axes=axes)


def global_norm(gradients, specs, sizes: dict[str, int]):
    """The norm over the whole mesh, float32 []; every parameter counts once. In `shard_map`.

    The square of a gradient that is replicated over some axes is divided by the number of its
    replicas before one all-reduce over all axes. `sizes` are those of the mesh's axes.
    """

    def square(gradient, spec):
        held = math.prod(sizes[axis] for axis in axes_of(spec))
        replicas = math.prod(sizes.values()) // held
        return jnp.square(gradient.astype(jnp.float32)).sum() / replicas

    squares = jax.tree.leaves(jax.tree.map(square, gradients, specs))
    return jnp.sqrt(lax.psum(sum(squares), tuple(sizes)))
