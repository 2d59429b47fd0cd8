"""Parts of arrays at traced indices: changed in place, and the meaning of indices out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.pipeline.slots import add, read, write
from mtx.schedules.schedule import IDLE

ARRAY = jnp.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("index, stands_for", [(0, 0), (2, 2), (IDLE, 0), (-3, 0), (3, 2), (99, 2)])
def test_an_index_outside_stands_for_the_nearest_part(index, stands_for):
    index, value = jnp.int32(index), jnp.full(2, 9.0)
    np.testing.assert_array_equal(jax.jit(read)(ARRAY, index), ARRAY[stands_for])
    np.testing.assert_array_equal(
        jax.jit(write)(ARRAY, value, index), ARRAY.at[stands_for].set(value)
    )
    np.testing.assert_array_equal(
        jax.jit(add)(ARRAY, value, index), ARRAY.at[stands_for].add(value)
    )
