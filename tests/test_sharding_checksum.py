"""A checksum changes with any change, even one that a fault of memory or of a program makes in the
same way in many places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.sharding.checksum import checksum

ROWS, WIDTH = 48, 33
checksum_of = jax.jit(checksum)


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


def flipped(values, places, bit):
    words = values.copy().view(np.uint32)
    words.reshape(-1)[places] ^= np.uint32(1 << bit)
    return words.view(np.float32)


@pytest.mark.parametrize("bit", [0, 9, 22, 29, 30, 31])
@pytest.mark.parametrize("flips", [1, 2, 4])
def test_the_same_bit_of_several_elements(values, flips, bit):
    random, sound = np.random.default_rng(bit), checksum_of(values)
    for _ in range(40):
        places = random.choice(values.size, flips, replace=False)
        assert checksum_of(flipped(values, places, bit)) != sound


@pytest.mark.parametrize(
    "change",
    [
        lambda a: -a,
        lambda a: np.concatenate([-a[:1], a[1:]]),
        lambda a: a[::-1],
        lambda a: np.roll(a, 1, axis=1),
        lambda a: np.concatenate([a[1:2], a[:1], a[2:]]),
        lambda a: a * 2,
        lambda a: np.zeros_like(a),
    ],
    ids=["negated", "one row negated", "reversed", "rolled", "rows exchanged", "doubled", "zeros"],
)
def test_a_whole_array(values, change):
    assert checksum_of(change(values)) != checksum_of(values)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float16, jnp.int32])
def test_every_width(values, dtype):
    narrow = jnp.asarray(values * 50).astype(dtype)
    assert checksum_of(narrow.at[3, 4].add(1)) != checksum_of(narrow)
    assert checksum_of({"a": narrow, "b": values}) != checksum_of({"a": narrow, "b": -values})
