"""Converts a trainer's state to canonical arrays, from the parts that devices hold, and back.

Canonical: every array in its global shape, unpadded, and the layers of a kind as [L, ...] in model
order. Arrays are named `params.layers.block.mlp.up.w`, `step`, ..., and those of the optimizer's
state by its fields, such as AdamW's `mu.embed.tokens`; its counts follow from the rest.
A device's shard is cut into runs of consecutive layers, which are parts of the canonical array as
they lie in memory: whatever the layout, nothing is exchanged between devices or copied on one.
Padding is left out when a state is saved, and is zero when it is loaded.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from mtx.checkpoint.catalog import Catalog
from mtx.checkpoint.store import Part, Region, Store
from mtx.config import ModelConfig, from_dict
from mtx.config.run import own_fields
from mtx.errors import UserError
from mtx.optimizers import NAMES, optimizer_module
from mtx.schedules.partition import EMPTY
from mtx.sharding.fp8 import is_history
from mtx.step.optimizer import LossScale, state_arrays, state_with
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

Tree = Any

NUMBERS = ("step", "skipped", *(f"loss_scale.{field}" for field in LossScale._fields))
_ALIGNMENT = 64  # bytes, of XLA's CPU buffers
_SLICE = 1 << 22  # elements that a thread copies at once
_CORES = os.cpu_count() or 1
_COPYING, _READING = min(8, _CORES), min(16, 2 * _CORES)  # threads; those that read also wait


def odd_one_out(catalog: Catalog) -> str | None:
    """The name of an array that does not fit a state, or of a number that is missing: in a state,
    each array of the optimizer has the name, shape and dtype of a parameter, and all numbers are
    there. None if all is well."""
    for name in sorted(catalog.keys() - set(NUMBERS)):
        path = name.partition(".")[2]
        own, info = catalog.get(f"params.{path}"), catalog[name]
        if own is None or (own.shape, own.dtype) != (info.shape, info.dtype):
            return path or name
    return next((name for name in NUMBERS if name not in catalog), None)


def without_moments(catalog: Catalog, run: dict) -> str | None:
    """The name of a parameter that does not have as many arrays of the optimizer as the run's
    config says (none if it is frozen). None if all is well. Runs from before there were several
    optimizers had AdamW."""
    said = run.get("optimizer") or {}
    names = said.get("name", "adamw"), said.get("rest") or said.get("name", "adamw")
    if not set(names) <= set(NAMES):  # an optimizer that is unknown here: restoring says so
        return None
    states = {optimizer_module(name).STATES for name in names}
    states |= {0} if _freezes(run.get("model") or {}) else set()
    paths = [name.partition(".")[2] for name in catalog if name not in NUMBERS]
    counts = Counter(paths)  # with the parameter itself
    return min((path for path, count in counts.items() if count - 1 not in states), default=None)


def _freezes(model: dict) -> bool:
    try:
        return from_dict(ModelConfig, own_fields(model)).freezes
    except UserError:  # perhaps a family that is unknown here: restoring says so
        return True


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers of a shard, or all of a shard that has no layers."""

    start: tuple[int, ...]  # in the canonical array
    local: tuple[slice, ...]  # in the shard, with its first three dims [P, C, N] merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """One array of the state, in both forms."""

    name: str
    shape: tuple[int, ...]  # canonical
    dtype: np.dtype
    master_shape: tuple[int, ...]  # as trained with: layers [P, C, N, ...], padded
    sharding: NamedSharding
    layers: np.ndarray | None  # int [P, C, N]: which layer of its kind is in each place, or EMPTY

    def runs(self, index: tuple[slice, ...]) -> list[Run]:
        """The runs of the shard that `index` cuts from the master."""
        spans = [part.indices(size)[:2] for part, size in zip(index, self.master_shape)]
        if self.layers is None:
            return self._cropped([(0, 0, 1)], spans) if spans else [Run(start=(), local=())]
        layers = self.layers[tuple(slice(*span) for span in spans[:3])].ravel()
        return self._cropped(list(_consecutive(layers)), spans[3:])

    def _cropped(self, stacks: list[tuple[int, int, int]], spans: list[tuple[int, int]]):
        """Runs of (first place, first layer, count), without the padding of the other dims."""
        start, local = (), ()
        for (first, last), size in zip(spans, self.shape[len(self.shape) - len(spans) :]):
            last = min(last, size)
            if first >= last:
                return []
            start, local = (*start, first), (*local, slice(0, last - first))
        if self.layers is None:
            return [Run(start=start, local=local)]
        return [
            Run(start=(layer, *start), local=(slice(place, place + count), *local))
            for place, layer, count in stacks
        ]

    def cut(self, shard: np.ndarray, run: Run) -> np.ndarray:
        """A view of a run in its shard."""
        stacked = shard if self.layers is None else shard.reshape(-1, *shard.shape[3:])
        return stacked[(*run.local, ...)]


def _consecutive(layers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(first place, first layer, count) of every run of layers l, l + 1, ..."""
    ends = np.flatnonzero(np.diff(layers) != 1) + 1
    for places in np.split(np.arange(len(layers)), ends):
        used = places[layers[places] != EMPTY]
        if len(used):
            yield int(used[0]), int(layers[used[0]]), len(used)


class Snapshot:
    """Copies a trainer's states to the host, and makes states from what is stored.

    On CPU devices the copies of each state overwrite those of the previous one, because fresh
    memory costs more than copying. So a snapshot must be written before the next is taken.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._copies: dict[tuple[str, int], np.ndarray] = {}

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        trainer = self.trainer
        canonical = jax.eval_shape(trainer.to_canonical, trainer.states.shapes.params)
        masters, specs = _arrays(trainer.states.shapes), _arrays(trainer.states.specs)
        shapes: dict[str, Any] = flatten_dict(canonical, sep=".")
        leaves = {}
        for name, master in masters.items():
            stack = None
            if name.split(".")[1:2] == ["layers"]:
                layers = trainer.placement.slots_of(name.split(".")[2])
                widths = [(0, n - m) for n, m in zip(master.shape, layers.shape)]
                stack = np.pad(layers, widths, constant_values=EMPTY)
            leaves[name] = Leaf(
                name=name, shape=shapes.get(name.partition(".")[2], master).shape,
                dtype=np.dtype(master.dtype),
                master_shape=master.shape, sharding=NamedSharding(trainer.mesh, specs[name]),
                layers=stack,
            )  # fmt: skip
        return leaves

    # -- saving -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Allocates the memory that the first copy would otherwise wait for."""
        if self._on_host:
            for leaf in self.leaves.values():
                for place in range(len(leaf.sharding.addressable_devices)):
                    self._copy_for(leaf, place)

    def take(self, state: TrainState) -> list[Part]:
        """The parts of a state that this process writes. The state may be donated afterwards."""
        shards = [
            (self.leaves[name], place, shard.index, array.addressable_data(place))
            for name, array in _arrays(state).items()
            for place, shard in enumerate(array.addressable_shards)
            if shard.replica_id == 0
        ]
        data = [shard for *_, shard in shards]
        if self._on_host:
            copies = [self._copy_for(leaf, place) for leaf, place, *_ in shards]
            _copy(copies, [np.asarray(shard) for shard in data])
        else:
            copies = _to_host(data)
        return [
            Part(name=leaf.name, start=run.start, values=leaf.cut(copy, run))
            for (leaf, _, index, _), copy in zip(shards, copies)
            for run in leaf.runs(index)
        ]

    def _copy_for(self, leaf: Leaf, place: int) -> np.ndarray:
        if (leaf.name, place) not in self._copies:
            shape = leaf.sharding.shard_shape(leaf.master_shape)
            self._copies[leaf.name, place] = np.ones(shape, leaf.dtype)  # written, so it is there
        return self._copies[leaf.name, place]

    @cached_property
    def _on_host(self) -> bool:
        """Whether the devices' memory is the host's, so that `np.asarray` does not copy."""
        return self.trainer.mesh.devices.flat[0].platform == "cpu"

    # -- loading ----------------------------------------------------------------------------------

    def check(self, store: Store) -> None:
        """Raises UserError if `store` does not have all arrays of this trainer's model; histories
        of float8 begin anew if it has none."""
        for leaf in self.leaves.values():
            there = store.catalog.get(leaf.name)
            if there is None and is_history(leaf.name):
                continue
            if there is None or there.shape != leaf.shape or there.dtype != leaf.dtype:
                what = "none" if there is None else f"{there.dtype} {list(there.shape)}"
                other = "model" if leaf.name.startswith("params.") else "optimizer"
                raise UserError(
                    f"checkpoint {store.directory} is of another {other}: {leaf.name} is {what} "
                    f"there and {leaf.dtype} {list(leaf.shape)} here; go on with the {other} that "
                    "it was saved with, or start anew elsewhere"
                )

    def load(self, store: Store) -> TrainState:
        """The state that `store` holds, on this trainer's layout. Raises Damaged, and UserError
        if it is not of this trainer's model."""
        self.check(store)
        there = [name for name in self.leaves if name in store.catalog]
        largest_first = sorted(there, key=lambda name: -store.catalog[name].size_bytes)
        with ThreadPoolExecutor(_READING) as pool:
            loaded = pool.map(lambda name: self._load(store, self.leaves[name]), largest_first)
            arrays = dict(zip(largest_first, loaded))
        anew = {name: _zeros(leaf) for name, leaf in self.leaves.items() if name not in arrays}
        return self._state(arrays | anew)

    def _load(self, store: Store, leaf: Leaf) -> jax.Array:
        """Reads this process's shards of an array, each once for all devices that hold it."""
        devices = defaultdict(list)
        indices = leaf.sharding.addressable_devices_indices_map(leaf.master_shape)
        for device, index in indices.items():
            spans = tuple(part.indices(size) for part, size in zip(index or (), leaf.master_shape))
            devices[spans].append(device)
        shape = leaf.sharding.shard_shape(leaf.master_shape)
        shards = [_aligned(shape, leaf.dtype) for _ in devices]
        regions = []
        for spans, shard in zip(devices, shards):
            runs = leaf.runs(tuple(slice(*span) for span in spans))
            parts = [leaf.cut(shard, run) for run in runs]
            if sum(part.size for part in parts) < shard.size:
                shard[...] = 0
            regions += [Region(start=run.start, target=part) for run, part in zip(runs, parts)]
        store.fill(leaf.name, regions)
        placed = [
            jax.device_put(shard, device)
            for shard, group in zip(shards, devices.values())
            for device in group
        ]
        return jax.make_array_from_single_device_arrays(leaf.master_shape, leaf.sharding, placed)

    def _state(self, arrays: dict[str, jax.Array]) -> TrainState:
        shapes = self.trainer.states.shapes
        updates = np.int32(arrays["step"]) - np.int32(arrays["skipped"])
        replicated = self.leaves["step"].sharding

        def count() -> jax.Array:  # a new one for each use: a step donates them
            return jax.make_array_from_callback((), replicated, lambda _: updates)

        return TrainState(
            step=arrays["step"],
            params=jax.tree.map_with_path(
                lambda path, _: arrays[keystr(path, simple=True, separator=".")],
                {"params": shapes.params},
            )["params"],
            moments=state_with(shapes.moments, arrays, count),
            loss_scale=LossScale(*(arrays[f"loss_scale.{field}"] for field in LossScale._fields)),
            skipped=arrays["skipped"],
        )


def _zeros(leaf: Leaf) -> jax.Array:
    shape = leaf.sharding.shard_shape(leaf.master_shape)
    return jax.make_array_from_callback(
        leaf.master_shape, leaf.sharding, lambda _: np.zeros(shape, leaf.dtype)
    )


def _copy(targets: list[np.ndarray], sources: list[np.ndarray]) -> None:
    """Copies contiguous arrays in slices, so that all threads are done at the same time."""
    slices = [
        (target.reshape(-1)[start : start + _SLICE], source.reshape(-1)[start : start + _SLICE])
        for target, source in zip(targets, sources)
        for start in range(0, target.size, _SLICE)
    ]
    with ThreadPoolExecutor(_COPYING) as pool:
        list(pool.map(lambda pair: np.copyto(*pair), slices))


def _to_host(shards: list[jax.Array]) -> list[np.ndarray]:
    """Copies from devices that have their own memory, all copies at once."""
    for shard in shards:
        shard.copy_to_host_async()
    with ThreadPoolExecutor(_COPYING) as pool:
        return list(pool.map(np.asarray, shards))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device takes as its own, without a copy. It must not be written to after
    that; XLA does not write to it either, even when it is donated."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def _arrays(state: TrainState) -> dict[str, Any]:
    """The saved leaves of a state, or of a tree like it, by name."""
    scalars = {"step": state.step, "skipped": state.skipped}
    scalars |= {"loss_scale": state.loss_scale._asdict()}
    params, numbers = (flatten_dict(tree, sep=".") for tree in ({"params": state.params}, scalars))
    return params | state_arrays(state.moments) | numbers
