"""Rotary positions (Su et al. 2021): each pair of a head's numbers is rotated by an angle that
grows with the position. Pairs are (k, k + K/2), as in Hugging Face's Llama, or neighbours.

Legend: B rows · S sequence · h heads · K head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from mtx.sharding.custom_vjp import custom_vjp

Scaling = Literal["none", "linear", "llama3", "yarn", "dynamic"]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How fast heads are rotated.

    For texts that are `factor` times longer than those of the first training, "linear" (Chen et al.
    2023) rotates every pair that many times slower. "llama3" (Llama 3.1) does so only for pairs
    that turn less than `low` times in `original` positions, leaves pairs that turn `high` times or
    more as they are, and interpolates linearly in between. "yarn" (Peng et al. 2023) does the same,
    but interpolates by the pair's number, and multiplies cosine and sine by `scale`. "dynamic"
    (NTK, for a `sequence` above the original) raises the base, so that only the slowest pair is
    slowed down by as much as the sequence is longer.
    """

    base: float
    scaling: Scaling = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    sequence: int | None = None  # "dynamic": used for all texts, whatever their own length
    truncate: bool = True  # "yarn": the range in between begins and ends at whole pairs
    scale: float | None = None  # "yarn": of cosine and sine; None: 0.1 ln(factor) + 1
    part: float = 1.0  # the fraction of a head's numbers, the first ones, that is rotated
    neighbours: bool = False  # pairs are (2k, 2k + 1), as in the paper and DeepSeek's models

    @property
    def amplitude(self) -> float:
        """The factor by which cosine and sine are multiplied."""
        if self.scaling != "yarn":
            return 1.0
        return yarn_scale(self.factor) if self.scale is None else self.scale

    def frequencies(self, size: int) -> np.ndarray:
        """Radians per position of each pair of a head of that size, float64 [K/2]."""
        turning = self._base(size) ** -(np.arange(0, size, 2) / size)
        if self.scaling in ("none", "dynamic"):
            return turning
        slower = turning / self.factor
        if self.scaling == "linear":
            return slower
        if self.scaling == "yarn":
            kept = self._kept_by_yarn(size)
        else:
            turns = self.original * turning / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * turning + (1 - kept) * slower

    def _base(self, size: int) -> float:
        longer = (self.sequence or 0) / self.original
        if self.scaling != "dynamic" or longer <= 1 or size == 2:
            return self.base
        return self.base * (self.factor * longer - (self.factor - 1)) ** (size / (size - 2))

    def _kept_by_yarn(self, size: int) -> np.ndarray:
        """The share of each pair's own frequency: 1 for pairs that are left as they are, 0 for
        those that are slowed down in full."""

        def pair(turns: float) -> float:
            """The number, maybe a fraction, of the pair that turns that often in `original`
            positions."""
            return size * math.log(self.original / (turns * 2 * math.pi)) / 2 / math.log(self.base)

        first, last = pair(self.high), pair(self.low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        last += 0.001 * (first == last)
        return 1 - np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Peng et al.'s square root of 1/t, for texts that are `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1


@custom_vjp(2)
def rotate(x_BShK, positions_S, rotary: Rotary):
    """x rotated by its positions, int32 [S] or [B, S], and scaled; in float32, x's dtype out. Keeps
    only the positions."""
    return _turn(x_BShK, positions_S, rotary, 1)


def _turn(x_BShK, positions_S, rotary, sign):
    size = int(x_BShK.shape[-1] * rotary.part)
    frequencies_K = rotary.frequencies(size).astype(np.float32)
    angle_SK = positions_S[..., None].astype(jnp.float32) * frequencies_K
    cos, sin = jnp.cos(angle_SK)[..., None, :], sign * jnp.sin(angle_SK)[..., None, :]
    if rotary.amplitude != 1:
        cos, sin = rotary.amplitude * cos, rotary.amplitude * sin
    first, second = _pairs(x_BShK[..., :size].astype(jnp.float32), rotary)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rotary.neighbours:
        turned = jnp.stack(turned, axis=-1).reshape(*x_BShK.shape[:-1], size)
    else:
        turned = jnp.concatenate(turned, axis=-1)
    turned = turned.astype(x_BShK.dtype)
    return jnp.concatenate([turned, x_BShK[..., size:]], axis=-1) if rotary.part < 1 else turned


def _pairs(x_BShK, rotary):
    """The first and the second number of each pair."""
    if rotary.neighbours:
        return x_BShK[..., 0::2], x_BShK[..., 1::2]
    return jnp.split(x_BShK, 2, axis=-1)


def _rotate_forward(x_BShK, positions_S, rotary):
    return rotate(x_BShK, positions_S, rotary), positions_S


def _rotate_backward(rotary, positions_S, dy_BShK):
    return _turn(dy_BShK, positions_S, rotary, -1), None


rotate.defvjp(_rotate_forward, _rotate_backward)
