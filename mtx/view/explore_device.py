"""What a device of a mesh holds of every parameter.

Read from the specs of the training step's own state, so that it can say of 3,072 devices that do
not exist what `jax.Array.addressable_shards` would say of them; nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from mtx.config import RunConfig
from mtx.schedules.makers import MAKERS
from mtx.schedules.partition import EMPTY
from mtx.step.trainer import Trainer
from mtx.view.mesh import Device

_STACKED = 3  # dims before a layer's own: stage, chunk, place in the chunk


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one device holds of one parameter. Slices index the global array, layers stacked."""

    name: str
    dims: tuple[str, ...]  # of one layer, or of the whole array, without the stacked dims
    shape: tuple[int, ...]
    part: tuple[slice, ...]  # what it computes with, and whose gradient it sums
    master: tuple[slice, ...]  # of the float32 master and both moments: ZeRO's shard of the part
    layers: tuple[int, ...] | None  # in its part, chunk by chunk; None: not a layer's parameter
    master_layers: tuple[int, ...] | None  # in its shard of the master

    @property
    def elements(self) -> int:
        """Elements of the part, with room for as many layers as the fullest stage has."""
        return math.prod(index.stop - index.start for index in self.part)

    @property
    def master_elements(self) -> int:
        """Elements of its shard of the master, with padding."""
        return math.prod(index.stop - index.start for index in self.master)

    @property
    def part_text(self) -> str:
        """What it has of each layer: "heads 0-1 of 4", or "all"."""
        return cut_text(self.dims, self.shape, self.part[-len(self.dims) :]) or "all"

    @property
    def master_text(self) -> str:
        """What its master has of its part: "hidden 0-47 of 96", "layers 2", or "all of it"."""
        own = slice(-len(self.dims), None)
        further = [
            index if index != part else slice(0, size)
            for index, part, size in zip(self.master[own], self.part[own], self.shape, strict=True)
        ]
        cuts = [cut_text(self.dims, self.shape, further)]
        if self.master_layers is not None and self.master_layers != self.layers:
            cuts.insert(0, f"layers {numbers_text(self.master_layers)}")
        return ", ".join(filter(None, cuts)) or "all of it"


def numbers_text(numbers: Sequence[int]) -> str:
    """ "3", "0, 8, … 40" or "8-15": ranks or layers; evenly spaced ones are abbreviated."""
    if not numbers:
        return "none"
    first, last = numbers[0], numbers[-1]
    run = range(first, last + 1)
    whole = run if isinstance(numbers, range) else tuple(run)
    if len(numbers) > 2 and numbers == whole:
        return f"{first:,}-{last:,}"
    if len(numbers) > 5:
        return f"{first:,}, {numbers[1]:,}, … {last:,}"
    return ", ".join(f"{number:,}" for number in numbers)


def cut_text(dims: Sequence[str], shape: Sequence[int], part: Sequence[slice]) -> str:
    """The dims that `part` covers only partly: "vocabulary 0-63 of 256, hidden 48-95 of 96"."""
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
    """The part of an array of that shape and spec that lies at coordinates `at` of the mesh: what
    `jax.sharding.NamedSharding.devices_indices_map` returns, but without devices."""
    slices = []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        index, parts = 0, 1
        for axis in entry if isinstance(entry, tuple) else (entry,) if entry else ():
            index, parts = index * sizes[axis] + at.get(axis, 0), parts * sizes[axis]
        width = size // parts
        slices.append(slice(index * width, (index + 1) * width))
    return tuple(slices)


class Holdings:
    """What the devices of a run hold, by their coordinates."""

    def __init__(self, run: RunConfig):
        # The attention kernel holds nothing, and "auto" would ask which devices are there. All that
        # matters of a schedule is where its chunks are, so a short one will do.
        layout, batch = replace(run.layout, attention="blocked"), run.global_batch
        if layout.schedule in MAKERS:
            batch = min(batch, 4 * layout.pipe * layout.replicas * layout.microbatch)
        self._trainer = Trainer(replace(run, layout=layout, global_batch=batch))
        self.layout = self._trainer.run.layout
        model = self._trainer.model
        self._dims = [
            dims or tuple(f"dim {dim}" for dim in range(shape.ndim))
            for shape, dims in zip(
                tree_leaves(model.shapes),
                tree_leaves(model.dims, is_leaf=lambda each: isinstance(each, tuple)), strict=True,
            )
        ]  # fmt: skip

    def layers(self, name: str, part: Sequence[slice]) -> tuple[int, ...] | None:
        """The layers in a part [P, C, N_kind] of a parameter's stack, in its order; padding holds
        none. None if the parameter is not stacked."""
        if not part:
            return None
        placement, kind = self._trainer.placement, name.split(".")[1]
        numbers = placement.slots_of(kind)[tuple(part)].ravel()
        return tuple(placement.layers_of(kind)[numbers[numbers != EMPTY]].tolist())

    def of(self, device: Device) -> list[Held]:
        """What `device` holds of each parameter."""
        sizes, at, held, states = self.layout.sizes, device.at, [], self._trainer.states
        for (path, leaf), spec, shard, dims in zip(
            tree_leaves_with_path(states.param_shapes), tree_leaves(states.param_specs),
            tree_leaves(states.shards), self._dims, strict=True,
        ):  # fmt: skip
            name, shape = keystr(path, simple=True, separator="."), leaf.shape
            stack = _STACKED if name.startswith("layers.") else 0
            padded = [shard.padded if n == shard.dim else size for n, size in enumerate(shape)]
            part = local_slices(shape, spec, at, sizes)
            master = local_slices(padded, shard.spec, at, sizes)
            held += [Held(
                name=name, dims=dims, shape=shape[stack:],
                part=part, master=master, layers=self.layers(name, part[:stack]),
                master_layers=self.layers(name, master[:stack]),
            )]  # fmt: skip
        return held
