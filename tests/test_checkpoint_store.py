"""Arrays in files: fingerprints that are sums over parts, blocks, and regions across blocks."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st

from mtx.checkpoint.catalog import ArrayInfo, catalog_from_json, catalog_to_json
from mtx.checkpoint.fingerprint import MODULUS, factor_of, fingerprint
from mtx.checkpoint.store import Damaged, Part, Store, write_parts

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def random_array(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- fingerprints ----------------------------------------------------------------------------------


@given(SHAPES.filter(len), st.data())
def test_parts_add_up(shape, data):
    values = random_array(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    parts = np.split(values, [cut], axis=dim)
    start = tuple(cut if d == dim else 0 for d in range(len(shape)))
    one, other = map(np.ascontiguousarray, parts)
    assert (fingerprint(one) + fingerprint(other, start)) % MODULUS == fingerprint(values)


@given(SHAPES, st.data())
def test_any_flipped_bit_shows(shape, data):
    values = random_array(shape)
    bit = data.draw(st.integers(0, 32 * values.size - 1))
    flipped = values.copy().reshape(-1).view(np.uint32)
    flipped[bit // 32] ^= np.uint32(1 << bit % 32)
    assert fingerprint(flipped.view(np.float32).reshape(shape)) != fingerprint(values)


@pytest.mark.parametrize("values", [np.arange(4096), np.float32([0, 1, -1, 0.5] * 1024)])
def test_swaps_signs_and_shifts_show(values):
    """Even changes that keep a plain sum, or one with regular factors, as it was."""
    values = values.astype(np.float32).reshape(8, 16, 32)
    arrays = [values]
    for axis in range(3):
        arrays += [np.flip(values, axis), np.roll(values, 2, axis)]
    for (a, b), (c, d) in (((0, 1), (0, 2)), ((1, 3), (7, 15)), ((2, 2), (3, 3))):
        swapped, negated = values.copy(), values.copy()
        swapped[[a, c], [b, d]] = swapped[[c, a], [d, b]]
        negated[[a, c], [b, d]] *= -1  # both flip the highest bit
        arrays += [swapped, negated]
    fingerprints = {a.tobytes(): fingerprint(np.ascontiguousarray(a)) for a in arrays}
    assert len(set(fingerprints.values())) == len(fingerprints) > 5


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int64, bool]
)
def test_every_dtype(dtype):
    values = np.arange(12).reshape(3, 4).astype(dtype)
    other = values.copy()
    other[2, 1] = 0
    assert fingerprint(values) != fingerprint(other)
    assert fingerprint(np.zeros_like(values)) == 0


# -- stores ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An array in parts of several sizes over two files, in blocks of a few rows; and a scalar."""
    directory = tmp_path_factory.mktemp("store")
    values, scalar = random_array((6, 10, 4)), np.float32(2.5)

    def part(*slices: slice) -> Part:
        return Part(name="a", start=tuple(s.start for s in slices), values=values[slices])

    files = [
        [part(slice(0, 4), slice(0, 10), slice(0, 4)), Part(name="s", start=(), values=scalar)],
        [part(slice(4, 6), slice(0, 7), slice(0, 4)), part(slice(4, 6), slice(7, 10), slice(0, 4))],
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mtx.checkpoint.store.MOST_BLOCK_BYTES", 100)
        blocks = [
            block
            for number, parts in enumerate(files)
            for block in write_parts(directory / f"arrays.{number}.bin", parts)
        ]
    catalog = {
        name: ArrayInfo(
            shape=array.shape, dtype=array.dtype,
            blocks=tuple(block for block in blocks if block.name == name),
        )
        for name, array in (("a", values), ("s", scalar))
    }  # fmt: skip
    catalog = catalog_from_json(catalog_to_json(catalog))
    return SimpleNamespace(directory=directory, values=values, catalog=catalog)


@given(st.data())
def test_any_region_is_read(written, data):
    start, shape = [], []
    for size in written.values.shape:
        start.append(data.draw(st.integers(0, size - 1)))
        shape.append(data.draw(st.integers(1, size - start[-1])))
    with Store(directory=written.directory, catalog=written.catalog) as store:
        there = store.read("a", start, shape)
    wanted = written.values[tuple(slice(a, a + n) for a, n in zip(start, shape))]
    np.testing.assert_array_equal(there, wanted)


def test_whole_arrays_and_their_fingerprints(written):
    assert len(written.catalog["a"].blocks) > 10
    with Store(directory=written.directory, catalog=written.catalog) as store:
        np.testing.assert_array_equal(store.read("a"), written.values)
        assert store.read("s") == 2.5
        assert sum(store.verify("a")) == written.values.nbytes
        store.check_files()
    named = fingerprint(written.values) * factor_of("a", written.values.dtype) % MODULUS
    assert written.catalog["a"].fingerprint == named


def test_a_block_that_is_listed_nowhere_is_missed(written):
    info = written.catalog["a"]
    fewer = ArrayInfo(shape=info.shape, dtype=info.dtype, blocks=info.blocks[1:])
    with Store(directory=written.directory, catalog={"a": fewer}) as store:
        with pytest.raises(Damaged) as error:
            store.read("a")
    assert names(error, 24, "a")
