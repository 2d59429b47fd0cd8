"""Safetensors files: we write what the format says, and a broken file is reported in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mtx.conversion.safetensors import DTYPES, SafetensorsFile, write_safetensors
from mtx.errors import UserError


def write_raw(path, header, body=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + body)
    return path


def entry(begin, end, *, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# -- whole files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_by_rows_and_read_by_rows(tmp_path, dtype):
    values = np.arange(12, dtype=np.float32).reshape(4, 3) / 3
    shapes = {"one": (), "a": (4, 3), "none": (0, 5), "row": (3,)}
    parts = [np.full((), 2.5, np.float32), values[:3], values[3:], values[0]]
    write_safetensors(tmp_path / "f", shapes, iter(parts), dtype=dtype)
    want = values.astype(DTYPES[dtype])
    file = SafetensorsFile(tmp_path / "f")
    assert file.tensors == {name: (dtype, shape) for name, shape in shapes.items()}
    assert file.read("a").dtype == DTYPES[dtype] and file.read("none").shape == (0, 5)
    np.testing.assert_array_equal(file.read("a"), want)
    np.testing.assert_array_equal(file.read("a", slice(1, 3)), want[1:3])
    np.testing.assert_array_equal(file.read("row", slice(1, 2)), want[0, 1:2])
    assert file.read("a", slice(3, 9)).shape == (1, 3) and file.read("one") == 2.5
    for name, read in load_file(tmp_path / "f").items():
        np.testing.assert_array_equal(read, file.read(name))


def test_byte_for_byte(tmp_path):
    write_safetensors(tmp_path / "f", {"a": (2,)}, [np.float32([1, -2])], dtype="BF16")
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    )
    header += b" " * (-len(header) % 8)
    size = len(header).to_bytes(8, "little")
    assert (tmp_path / "f").read_bytes() == size + header + b"\x80\x3f\x00\xc0"


def test_what_the_library_writes(tmp_path):
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([7])}
    save_file(values, tmp_path / "f", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "f")
    for name, value in values.items():
        np.testing.assert_array_equal(file.read(name), value)
    shapes = {name: value.shape for name, value in values.items()}
    write_safetensors(tmp_path / "g", shapes, values.values(), dtype="F32")
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()


def test_other_dtypes_may_be_there_and_are_not_read(tmp_path):
    header = {"ids": entry(0, 16, dtype="I64"), "tiny": entry(16, 17, dtype="F4")}
    file = SafetensorsFile(write_raw(tmp_path / "f", header, bytes(17)))
    assert file.tensors["ids"] == ("I64", (2,))
    for name, (dtype, _) in file.tensors.items():
        with pytest.raises(UserError) as error:
            file.read(name)
        assert names(error, tmp_path / "f", name, dtype, "F32", "BF16")


def test_what_is_not_written_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="4 bytes"):
        parts = [np.zeros(1, np.float32), np.zeros(1, np.float32)]
        write_safetensors(tmp_path / "f", {"a": (1,), "b": (2,)}, parts, dtype="F32")
    write_safetensors(tmp_path / "g", {}, [], dtype="F32")
    assert SafetensorsFile(tmp_path / "g").tensors == {}


# -- broken ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"a": entry(0, 8)}, b""),
        ({"a": entry(0, 8)}, bytes(9)),
        ({"a": entry(0, 4)}, bytes(4)),
        ({"a": entry(0, 8, shape=(3,))}, bytes(8)),
        ({"a": entry(0, 8, shape=(2**62, 2**62))}, bytes(8)),
        ({"a": entry(0, 8, shape=(-2,))}, bytes(8)),
        ({"a": entry(0, 8, shape=(True, 2))}, bytes(8)),
        ({"a": entry(0, 8, shape=(2.0,))}, bytes(8)),
        ({"a": entry(8, 0)}, bytes(8)),
        ({"a": entry(0, 1, dtype="F3")}, bytes(1)),
        ({"a": [1]}, b""),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry(4, 12)}, bytes(12)),
        ({"a" * 5000: entry(4, 12)}, bytes(12)),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        ([], b""),
        (b'{"a": 1, "a": 2}', b""),
        (b"\xff\xfe{}", b""),
        (b"[" * 100_000, b""),
        (b'{"a": ' + b"9" * 5000 + b"}", b""),
    ],
)
def test_broken_headers(tmp_path, header, body):
    with pytest.raises(UserError) as error:
        SafetensorsFile(write_raw(tmp_path / "f", header, body))
    assert names(error, tmp_path / "f") and len(str(error.value)) < 400


@pytest.mark.parametrize("length", [1, 3, 2**40, 2**64 - 1, 100_000_001])
def test_lengths_beyond_the_file(tmp_path, length):
    with pytest.raises(UserError) as error:
        SafetensorsFile(write_raw(tmp_path / "f", b"{}", b"", length=length))
    assert names(error, tmp_path / "f")


def test_more_dims_than_an_array_has(tmp_path):
    file = SafetensorsFile(write_raw(tmp_path / "f", {"a": entry(0, 4, shape=(1,) * 65)}, bytes(4)))
    with pytest.raises(UserError) as error:
        file.read("a")
    assert names(error, tmp_path / "f", "a cannot be read")


def test_files_that_are_none(tmp_path):
    (tmp_path / "f").write_bytes(b"1234567")
    for path in (tmp_path / "f", tmp_path / "g", tmp_path):
        with pytest.raises(UserError) as error:
            SafetensorsFile(path)
        assert names(error, path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    save_file({"a": np.ones(64, np.float32)}, tmp_path / "f")
    file = SafetensorsFile(tmp_path / "f")
    with (tmp_path / "f").open("r+b") as shrinking:
        shrinking.truncate(200)
    for rows in (slice(None), slice(0, 60)):
        with pytest.raises(UserError) as error:
            file.read("a", rows)
        assert names(error, tmp_path / "f", "a cannot be read")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "f"
    save_file({"a": np.ones((3, 2), np.float32), "b": np.ones(4, np.float32)}, path)
    return path


@given(
    changes=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 230),
)
def test_fuzzed_files_are_read_within_their_bounds_or_refused(whole, changes, cut):
    """Whatever bytes change, there is a one-line error, or tensors lie within the file."""
    data = bytearray(whole.read_bytes())
    for place, byte in changes:
        data[place % len(data)] = byte
    path = whole.with_name("fuzzed")
    path.write_bytes(data[: len(data) - cut])
    try:
        file = SafetensorsFile(path)
        read = [file.read(name) for name, (dtype, _) in file.tensors.items() if dtype in DTYPES]
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert sum(array.nbytes for array in read) <= len(data) - cut


@given(st.binary(max_size=300))
def test_garbage_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    path.write_bytes(data + b"}")
    with pytest.raises(UserError):
        SafetensorsFile(path)
