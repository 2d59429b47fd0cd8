"""Random numbers that do not depend on the layout.

A dropout mask is a function of the step's key, the site, the layer, the sample's place in the
global batch, and the global position and head; never of a device. So a device draws exactly its
part of the mask that an unsharded run would draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_IMPLEMENTATION = "threefry2x32"  # counter-based: a row's bits depend on its key alone


def key_data(seed: int):
    """uint32 [2]: a key as plain data, to be carried through scans, VJPs and checkpoints."""
    return jax.random.key_data(jax.random.key(seed, impl=_IMPLEMENTATION))


def fold(data, *numbers):
    """The key `data` with integers folded in, one after the other."""
    key = jax.random.wrap_key_data(data, impl=_IMPLEMENTATION)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def _row_mask(data, keep, width):
    key = jax.random.wrap_key_data(data, impl=_IMPLEMENTATION)
    return jax.random.bernoulli(key, keep, (width,))


def _row_mask_at(data, keep, at_T):
    """The elements of a `_row_mask` of any width at these places: a counter's bits for each."""
    bits_T2 = jax.vmap(lambda at: fold(data, at))(at_T)
    most = math.ceil(np.float32(keep) * 2.0**23)  # of the 23 bits of floats in [1, 2)
    return ((bits_T2[:, 0] ^ bits_T2[:, 1]) >> 9) < most


def dropout_rows(x_BsD, rate: float, data, samples_B, positions_s):
    """x_BsD with dropout; one key for every (sample, global position)."""
    return _drop(x_BsD, _rows_kept(x_BsD.shape[2], 1 - rate, data, samples_B, positions_s), rate)


# Inline: the program is the same as without jit, but a mask of a shape is traced once per process.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _rows_kept(width: int, keep: float, data, samples_B, positions_s):
    """bool [B, s, D]"""

    def mask(sample, position):
        return _row_mask(fold(data, sample, position), keep, width)

    return jax.vmap(jax.vmap(mask, (None, 0)), (0, None))(samples_B, positions_s)


def dropout_heads(p_BhsT, rate: float, data, samples_B, first_head, positions_s, keys_T):
    """Attention probabilities p_BhsT with dropout; one random key for every (sample, global head,
    global position of the query), and from its row the bits at the positions of the keys."""
    heads_h = first_head + jnp.arange(p_BhsT.shape[1])
    keep_BhsT = _heads_kept(1 - rate, data, samples_B, heads_h, positions_s, keys_T)
    return _drop(p_BhsT, keep_BhsT, rate)


@partial(jax.jit, static_argnums=0, inline=True)
def _heads_kept(keep: float, data, samples_B, heads_h, positions_s, keys_T):
    """bool [B, h, s, T]"""

    def mask(sample, head, position):
        return _row_mask_at(fold(data, sample, head, position), keep, keys_T)

    of_head = jax.vmap(mask, (None, None, 0))
    over_heads = jax.vmap(of_head, (None, 0, None))
    return jax.vmap(over_heads, (0, None, None))(samples_B, heads_h, positions_s)


def _drop(x, keep, rate):
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


# -- initial values --------------------------------------------------------------------------------

Keys = Callable[[], Any]  # gives the next key, such as a stream of `nnx.Rngs`


class NoKeys:
    """Keys for parameters of which only the shapes are needed: tracing how values are drawn would
    take most of the time, so they are constants."""

    def __call__(self):
        """A key for modules that draw values in other ways than those below."""
        return jax.random.key(0)


def normal(keys: Keys, shape: tuple[int, ...]):
    """Float32 with a standard deviation of 1, from the next key."""
    if isinstance(keys, NoKeys):
        return jnp.zeros(shape, jnp.float32)
    return jax.random.normal(keys(), shape, jnp.float32)


def normal_rows(keys: Keys, ids_n, width: int):
    """[n, width] as from `normal`, each row from the next key and its own id."""
    if isinstance(keys, NoKeys):
        return jnp.zeros((*ids_n.shape, width), jnp.float32)
    key = keys()

    def row(number):
        return jax.random.normal(jax.random.fold_in(key, number), (width,))

    return jax.vmap(row)(ids_n)


def uniform(keys: Keys, shape: tuple[int, ...], least: float, most: float):
    """Float32 in [least, most), from the next key."""
    if isinstance(keys, NoKeys):
        return jnp.full(shape, least, jnp.float32)
    return jax.random.uniform(keys(), shape, jnp.float32, least, most)
