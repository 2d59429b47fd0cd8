"""Checksums of what devices hold: has any of it changed by itself, and do replicas still agree?

Masters and moments are sharded over `data`, so most of them are held once. Arrays that several
devices do hold must be identical to the bit: the parameters in the compute type, which every
replica gathers; norms, biases and positions, which every device of `tensor`, or every stage, holds.

Legend: P stages · D replicas · T tensor shards
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mtx.sharding.axes import AXES, axes_of
from mtx.sharding.checksum import checksum, on_each_device
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer
from mtx.train.guard import name_devices

Tree = Any


class Audit:
    """Compares what the devices of a trainer's mesh hold of a state."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._compiled: jax.stages.Compiled | None = None

    def differences(self, state: TrainState) -> list[str]:
        """One line for each array whose copies differ: its name, and the devices whose copy is not
        the one that most devices hold. Empty if all copies agree."""
        specs = self._specs()
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(specs)]
        table_LPDT = np.asarray(jax.device_get((self._compiled or self._table)(state)))
        return [
            f"{path} differs on {name_devices(odd)}"
            for path, spec, words_PDT in zip(paths, jax.tree.leaves(specs), table_LPDT, strict=True)
            if (odd := _odd_ones(words_PDT, spec)).any()
        ]

    def compile(self, state: TrainState) -> None:
        """Compiles ahead of time, so that the first call of `differences` need not."""
        self._compiled = self._table.lower(state).compile()

    def _specs(self) -> Tree:
        trainer = self._trainer
        held = {
            "params": trainer.states.specs.params,
            "moments": trainer.states.specs.moments,
        }
        gathered = dict(trainer.states.param_specs)
        if trainer.run.layout.zero == 3:
            del gathered["layers"]  # no device holds them for longer than a chunk's turn
        return held | {"gathered": gathered}

    @cached_property
    def _table(self):
        """state -> uint32 [L, P, D, C, T]: the checksum of each array on each device."""
        trainer = self._trainer

        def table(params, moments):
            gathered = trainer.step.gather(params, float8=False)
            if trainer.run.layout.zero == 3:
                del gathered["layers"]
            leaves = jax.tree.leaves({"params": params, "moments": moments, "gathered": gathered})
            words_L = jnp.stack([checksum(leaf) for leaf in leaves])
            return on_each_device(words_L, tuple(trainer.run.layout.sizes.values()))

        specs = trainer.states.specs
        mapped = trainer.shard_map(table, (specs.params, specs.moments), P())
        return jax.jit(lambda state: mapped(state.params, state.moments))


def _odd_ones(words_PDT: np.ndarray, spec: P) -> np.ndarray:
    """bool [P, D, C, T]: the devices whose checksum is not the most frequent one among the devices
    that hold the same shard; if there is a tie, all of those devices."""
    shared = [dim for dim, axis in enumerate(AXES) if axis not in axes_of(spec)]
    odd = np.zeros(words_PDT.shape, bool)
    own = [range(1) if dim in shared else range(n) for dim, n in enumerate(words_PDT.shape)]
    for place in np.ndindex(*map(len, own)):
        group = tuple(slice(None) if dim in shared else place[dim] for dim in range(len(AXES)))
        words, counts = np.unique(words_PDT[group], return_counts=True)
        most = words[counts == counts.max()]
        odd[group] = words_PDT[group] != most[0] if len(most) == 1 else len(words) > 1
    return odd
