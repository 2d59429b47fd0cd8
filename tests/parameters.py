"""Parameters of a model drawn by NumPy, for tests to which any will do: `mtx.init_params`, which
training starts from, needs a program compiled for each model just for its random numbers."""

import functools
import zlib

import jax
import numpy as np
from jax.tree_util import keystr

import mtx
from mtx.config import Layout

_SAME = {"norm": 1.0, "bias": 0.0, "state": 0.0}  # the value of all elements, by role


@functools.cache
def params_of(model, seed=0):
    """Float32, in canonical form; matrices have the model's standard deviation. Not for state-space
    models, whose recurrences are initialized in their own ranges."""
    return drawn(mtx.trainer_for(model, Layout(), global_batch=1), model.init_std, seed)


def drawn(trainer, deviation, seed=0):
    """`params_of` for a trainer's model; matrices have this standard deviation."""
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
