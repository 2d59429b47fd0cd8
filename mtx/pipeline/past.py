"""What a layer keeps of texts that are continued, for one microbatch.

Legend: M microbatches · B rows · C chunks · N layers of a kind in a chunk · h heads · t the next
positions · S kept ones · K head size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import is_state, kept_slots

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Past:
    """The entries of layer [c, n] and of B rows from `first_row` on, in leaves
    [C, N, n, M*B, h, S, K]; of a `State`, in [C, N, n, M*B, h, ...]."""

    layer: tuple[Any, Any]
    first_row: Any
    rows: int  # B
    positions_B: jax.Array | None  # int32, one position for each row; None: the first t
    axes: Axes

    def _start(self, past) -> tuple:
        return *self.layer, 0, self.first_row, *(0,) * (past.ndim - 4)

    def _replace(self, past, own_nBh):
        """`past` with its first t positions, or its state, replaced."""
        return lax.dynamic_update_slice(past, own_nBh[None, None], self._start(past))

    def _at_positions(self, past, own_nBhtK):
        slots_B = kept_slots(self.positions_B, past.shape[-2], self.axes)
        at = past.at[*self.layer, :, self.first_row + jnp.arange(self.rows), :, slots_B]
        own = jnp.swapaxes(own_nBhtK[:, :, :, 0], 0, 1)
        return at.set(own, unique_indices=True, mode="drop")

    def _held(self, past):
        shape = 1, 1, past.shape[2], self.rows, *past.shape[4:]
        return lax.dynamic_slice(past, self._start(past), shape)[0, 0]

    def keep(self, past: dict[str, Tree], parts: dict[str, Tree | None]) -> tuple[dict, Any]:
        """(the layer's past with these parts, everything it now keeps under their names: see
        `mtx.pipeline.model.Keep`)"""

        def wrote(past, part):
            first = self.positions_B is None or is_state(part)
            return jax.tree.map(self._replace if first else self._at_positions, past, part)

        # Written, then read: the other way round XLA copies all of past, for every layer.
        now = {
            name: past[name] if part is None
            else jax.tree.map(wrote, past[name], part, is_leaf=is_state)
            for name, part in parts.items()
        }  # fmt: skip
        held = None if self.positions_B is None else jax.tree.map(self._held, now)
        return past | now, held
