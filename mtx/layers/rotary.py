"""Rotary positions (Su et al. 2021): each pair of a head's numbers is turned by an angle that grows
with the position. Pairs are (k, k + K/2), as in Hugging Face's Llama.

Legend: B rows · S sequence · h heads · K head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from mtx.sharding.custom_vjp import custom_vjp


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How fast heads are turned.

    For texts that are `factor` times longer than those of the first training, "linear" (Chen et al.
    2023) turns every pair that much slower; "llama3" (Llama 3.1) only those that turn less than
    `low` times in `original` positions, leaves alone those that turn `high` times or more, and
    goes evenly from one to the other in between.
    """

    base: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def frequencies(self, size: int) -> np.ndarray:
        """Radians a position of each pair of a head of that size, float64 [K/2]."""
        turning = self.base ** -(np.arange(0, size, 2) / size)
        slower = turning / self.factor
        if self.scaling == "none":
            return turning
        if self.scaling == "linear":
            return slower
        turns = self.original * turning / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * turning + (1 - kept) * slower


@custom_vjp(2)
def rotate(x_BShK, positions_S, rotary: Rotary):
    """x turned by its positions, int32 [S] or [B, S]; in float32, x's dtype out. Keeps only the
    positions."""
    return _turn(x_BShK, positions_S, rotary, 1)


def _turn(x_BShK, positions_S, rotary, sign):
    frequencies_K = rotary.frequencies(x_BShK.shape[-1]).astype(np.float32)
    angle_SK = positions_S[..., None].astype(jnp.float32) * frequencies_K
    cos, sin = jnp.cos(angle_SK)[..., None, :], sign * jnp.sin(angle_SK)[..., None, :]
    first, second = jnp.split(x_BShK.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BShK.dtype)


def _rotate_forward(x_BShK, positions_S, rotary):
    return rotate(x_BShK, positions_S, rotary), positions_S


def _rotate_backward(rotary, positions_S, dy_BShK):
    return _turn(dy_BShK, positions_S, rotary, -1), None


rotate.defvjp(_rotate_forward, _rotate_backward)
