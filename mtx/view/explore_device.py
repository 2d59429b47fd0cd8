"""A device of a mesh: where it stands, with whom it talks, and what it holds of every parameter.

Read off the specs of the training step's own state, so that it says of 3,072 devices that are not
there what `jax.Array.addressable_shards` would say of them; nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from mtx.config import Layout, RunConfig
from mtx.schedules.makers import MAKERS
from mtx.schedules.partition import EMPTY
from mtx.sharding.mesh import AXES
from mtx.sharding.optimizer import DataShard
from mtx.step.trainer import Trainer

_STACKED = 3  # dims before a layer's own: stage, chunk, place in the chunk
_DIMS = {  # what the dims of a parameter are, by the end of its name and their number
    ("qkv.w", 4): ("hidden", "q k v", "heads", "head size"),
    ("qkv.b", 3): ("q k v", "heads", "head size"),
    ("qkv.q", 3): ("hidden", "heads", "head size"),
    ("qkv.kv", 4): ("hidden", "k v", "kv heads", "head size"),
    ("out.w", 3): ("heads", "head size", "hidden"),
    ("up.w", 2): ("hidden", "columns"),
    ("up.w", 3): ("hidden", "gate and up", "columns"),
    ("up.b", 1): ("columns",),
    ("down.w", 2): ("rows", "hidden"),
    ("tokens", 2): ("vocabulary", "hidden"),
    ("output", 2): ("vocabulary", "hidden"),
    ("head.bias", 1): ("vocabulary",),
    ("positions", 2): ("positions", "hidden"),
    ("types", 2): ("types", "hidden"),
    ("head.w", 2): ("inputs", "hidden"),
    ("pooler.w", 2): ("inputs", "hidden"),
    ("binary.w", 2): ("hidden", "orders"),
    ("binary.b", 1): ("orders",),
}
_HIDDEN = ("hidden",)  # of norms, and of the biases of what comes out with `hidden` numbers


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a mesh, by its coordinates; ranks count tensor shards innermost."""

    layout: Layout
    stage: int
    replica: int
    shard: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Device:
        group, shard = divmod(rank, layout.tensor)
        stage, replica = divmod(group, layout.data)
        return cls(layout=layout, stage=stage, replica=replica, shard=shard)

    @property
    def rank(self) -> int:
        layout = self.layout
        return (self.stage * layout.data + self.replica) * layout.tensor + self.shard

    @property
    def at(self) -> dict[str, int]:
        """Its coordinate on each axis."""
        return {"pipe": self.stage, "data": self.replica, "tensor": self.shard}

    def group(self, axis: str) -> range:
        """The ranks that it exchanges messages with over `axis`, itself among them."""
        layout = self.layout
        stride = {"pipe": layout.data * layout.tensor, "data": layout.tensor, "tensor": 1}[axis]
        first, size = self.rank - self.at[axis] * stride, getattr(layout, axis)
        return range(first, first + size * stride, stride)

    def __str__(self) -> str:
        return f"device {self.rank:,}: p{self.stage} d{self.replica} t{self.shard}"


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one device holds of one parameter. Slices are of the global array, layers stacked."""

    name: str
    dims: tuple[str, ...]  # of a layer's, or the whole array's, without the stacking
    shape: tuple[int, ...]
    part: tuple[slice, ...]  # that it computes with, and whose gradient it sums
    master: tuple[slice, ...]  # of the float32 master and both moments: ZeRO's shard of the part
    layers: tuple[int, ...] | None  # of its part, chunk by chunk; None: not of a layer
    master_layers: tuple[int, ...] | None  # of its shard of the master

    @property
    def elements(self) -> int:
        """Numbers of the part, with room for as many layers as the fullest stage has."""
        return _count(self.part)

    @property
    def master_elements(self) -> int:
        """Numbers of its shard of the master, with what pads it."""
        return _count(self.master)

    @property
    def part_text(self) -> str:
        """What it has of each layer: "heads 0-1 of 4", or "all"."""
        return cut_text(self.dims, self.shape, self.part[-len(self.dims) :]) or "all"

    @property
    def master_text(self) -> str:
        """What it has of that in its master: "hidden 0-47 of 96", "layers 2", or "all of it"."""
        own = slice(-len(self.dims), None)
        further = [
            index if index != part else slice(0, size)
            for index, part, size in zip(self.master[own], self.part[own], self.shape, strict=True)
        ]
        cuts = [cut_text(self.dims, self.shape, further)]
        if self.master_layers != self.layers:
            cuts.insert(0, f"layers {numbers_text(self.master_layers)}")
        return ", ".join(filter(None, cuts)) or "all of it"


def _count(part: Sequence[slice]) -> int:
    return math.prod(index.stop - index.start for index in part)


def numbers_text(numbers: Sequence[int]) -> str:
    """ "3", "0, 8, … 40" or "8-15": ranks or layers, those that are evenly spaced in short."""
    if not numbers:
        return "none"
    numbers = numbers if isinstance(numbers, range) else tuple(numbers)
    first, last = numbers[0], numbers[-1]
    run = range(first, last + 1)
    if len(numbers) > 2 and numbers == (run if isinstance(numbers, range) else tuple(run)):
        return f"{first:,}-{last:,}"
    if len(numbers) > 5:
        return f"{numbers[0]:,}, {numbers[1]:,}, … {last:,}"
    return ", ".join(f"{number:,}" for number in numbers)


def cut_text(dims: Sequence[str], shape: Sequence[int], part: Sequence[slice]) -> str:
    """The dims of which `part` is not all: "vocabulary 0-63 of 256, hidden 48-95 of 96"."""
    cuts = []
    for dim, size, index in zip(dims, shape, part, strict=True):
        if (index.start, index.stop) == (0, size):
            continue
        inside = range(index.start, min(index.stop, size))
        text = f"{dim} {numbers_text(inside)} of {size:,}" if inside else f"padding of {dim}"
        padded = index.stop - inside.stop if inside else 0
        cuts.append(text + (f" and {padded:,} of padding" if padded else ""))
    return ", ".join(cuts)


def local_slices(
    shape: Sequence[int], spec: PartitionSpec, at: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[slice, ...]:
    """The part of an array of that shape and spec that lies at coordinates `at` of the mesh:
    what `jax.sharding.NamedSharding.devices_indices_map` says, without its devices."""
    slices = []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        index, parts = 0, 1
        for axis in entry if isinstance(entry, tuple) else (entry,) if entry else ():
            index, parts = index * sizes[axis] + at[axis], parts * sizes[axis]
        width = size // parts
        slices.append(slice(index * width, (index + 1) * width))
    return tuple(slices)


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    name: str
    shape: tuple[int, ...]  # global, layers stacked
    spec: PartitionSpec
    shard: DataShard
    stacked: int  # leading dims that say which layer

    @property
    def master_shape(self) -> tuple[int, ...]:
        dim, padded = self.shard.dim, self.shard.padded
        return tuple(padded if n == dim else size for n, size in enumerate(self.shape))


class Holdings:
    """What the devices of a run hold, by their coordinates."""

    def __init__(self, run: RunConfig):
        # The kernel of attention holds nothing; "auto" would ask which devices are there. Of a
        # schedule only its chunks' places count, so that a short one does.
        layout, batch = replace(run.layout, attention="blocked"), run.global_batch
        if layout.schedule in MAKERS:
            most = 4 * layout.pipe * layout.data * layout.microbatch
            batch = min(batch, most)
        self._trainer = Trainer(replace(run, layout=layout, global_batch=batch))
        self.layout = self._trainer.run.layout

    @cached_property
    def _leaves(self) -> list[_Leaf]:
        trainer = self._trainer
        shapes = tree_leaves_with_path(trainer.states.param_shapes)
        leaves = zip(
            shapes,
            tree_leaves(trainer.states.param_specs),
            tree_leaves(trainer.states.shards),
            strict=True,
        )
        return [
            _Leaf(
                name=(name := keystr(path, simple=True, separator=".")),
                shape=leaf.shape, spec=spec, shard=shard,
                stacked=_STACKED if name.startswith("layers.") else 0,
            )
            for (path, leaf), spec, shard in leaves
        ]  # fmt: skip

    def layers(self, part: Sequence[slice]) -> tuple[int, ...]:
        """The layers in a part [P, C, N] of the stack, in its order; padding holds none."""
        placed = self._trainer.placement.layer[tuple(part)].ravel()
        return tuple(placed[placed != EMPTY].tolist())

    def of(self, device: Device) -> list[Held]:
        """What `device` holds of each parameter."""
        sizes = {axis: getattr(self.layout, axis) for axis in AXES}
        held = []
        for leaf in self._leaves:
            part = local_slices(leaf.shape, leaf.spec, device.at, sizes)
            master = local_slices(leaf.master_shape, leaf.shard.spec, device.at, sizes)
            stack, shape = leaf.stacked, leaf.shape[leaf.stacked :]
            held.append(
                Held(
                    name=leaf.name, dims=dims_of(leaf.name, len(shape)), shape=shape,
                    part=part, master=master,
                    layers=self.layers(part[:stack]) if stack else None,
                    master_layers=self.layers(master[:stack]) if stack else None,
                )
            )  # fmt: skip
        return held


def dims_of(name: str, count: int) -> tuple[str, ...]:
    """What the dims of a parameter are called, of a layer's own ones."""
    for parts in (2, 1):
        end = ".".join(name.split(".")[-parts:])
        if (end, count) in _DIMS:
            return _DIMS[end, count]
    return _HIDDEN if count == 1 else tuple(f"dim {dim}" for dim in range(count))
