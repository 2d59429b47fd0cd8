"""Parameters of a model drawn by NumPy, for tests that ask for any: of those that training starts
from, `mtx.init_params`, the generator alone is a program to compile for each model."""

import functools
import zlib

import jax
import numpy as np
from jax.tree_util import keystr

import mtx
from mtx.config import Layout

_SAME = {"norm": 1.0, "bias": 0.0, "state": 0.0}  # in all elements, by role


@functools.cache
def params_of(model, seed=0):
    """Float32, in canonical form; matrices of the standard deviation that the model names. Not of
    state-space models, whose recurrences begin in ranges of their own."""
    return drawn(mtx.trainer_for(model, Layout(), global_batch=1), model.init_std, seed)


def drawn(trainer, deviation, seed=0):
    """`params_of` a trainer's model, matrices of this standard deviation."""
    shapes = jax.eval_shape(trainer.to_canonical, trainer.states.shapes.params)

    def draw(path, shape, role):
        assert role not in ("recurrence", "filter")
        name = keystr(path, simple=True, separator=".")
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if role in _SAME:
            drawn = np.full(shape.shape, _SAME[role])
        else:
            drawn = random.normal(0.0, deviation, shape.shape)
        return drawn.astype(np.float32)

    return jax.tree.map_with_path(draw, shapes, trainer.model.roles)
