"""Rotary positions (Su et al. 2021): each pair of a head's numbers is turned by an angle that grows
with the position. Pairs are (k, k + K/2), as in Hugging Face's Llama.

Legend: B rows · S sequence · h heads · K head size
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mtx.config import ModelConfig


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position of each pair, float64 [K/2].

    For texts that are `rotary_factor` times longer than those of the first training, "linear"
    (Chen et al. 2023) turns every pair that much slower; "llama3" (Llama 3.1) only those that turn
    less than `rotary_low` times in `rotary_original` positions, leaves alone those that turn
    `rotary_high` times or more, and goes evenly from one to the other in between.
    """
    pairs = np.arange(0, config.head_size, 2) / config.head_size
    turning = config.rotary_base**-pairs
    slower = turning / config.rotary_factor
    if config.rotary_scaling == "none":
        return turning
    if config.rotary_scaling == "linear":
        return slower
    turns = config.rotary_original * turning / (2 * math.pi)
    kept = (turns - config.rotary_low) / (config.rotary_high - config.rotary_low)
    kept = np.clip(kept, 0, 1)
    return kept * turning + (1 - kept) * slower


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotate(x_BShK, positions_S, config: ModelConfig):
    """x turned by its positions, int32 [S] or [B, S]; in float32, x's dtype out. Keeps only the
    positions."""
    return _turn(x_BShK, positions_S, config, 1)


def _turn(x_BShK, positions_S, config, sign):
    angle_SK = positions_S[..., None].astype(jnp.float32) * frequencies(config).astype(np.float32)
    cos, sin = jnp.cos(angle_SK)[..., None, :], sign * jnp.sin(angle_SK)[..., None, :]
    first, second = jnp.split(x_BShK.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BShK.dtype)


def _rotate_forward(x_BShK, positions_S, config):
    return rotate(x_BShK, positions_S, config), positions_S


def _rotate_backward(config, positions_S, dy_BShK):
    return _turn(dy_BShK, positions_S, config, -1), None


rotate.defvjp(_rotate_forward, _rotate_backward)
