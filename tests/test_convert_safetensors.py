"""The safetensors format: what we write is what the format says, and what is broken is one line."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtx.conversion.safetensors import DTYPES, SafetensorsFile, SafetensorsWriter
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
def test_written_in_any_order_and_by_rows(tmp_path, dtype):
    values = np.arange(12, dtype=np.float32).reshape(4, 3) / 3
    shapes = {"a": (4, 3), "none": (0, 5), "one": ()}
    with SafetensorsWriter(tmp_path / "f", shapes, dtype=dtype) as writer:
        writer.write("one", np.float32(2.5))
        writer.write("a", values[3:], row=3)
        writer.write("a", values[:3])
    want = values.astype(DTYPES[dtype])
    with SafetensorsFile(tmp_path / "f") as file:
        assert list(file.tensors) == ["a", "none", "one"]
        assert file.read("a").dtype == DTYPES[dtype] and file.read("none").shape == (0, 5)
        np.testing.assert_array_equal(file.read("a"), want)
        np.testing.assert_array_equal(file.read("a", slice(1, 3)), want[1:3])
        assert file.read("a", slice(3, 9)).shape == (1, 3) and file.read("one") == 2.5


def test_byte_for_byte(tmp_path):
    with SafetensorsWriter(tmp_path / "f", {"a": (2,)}, dtype="BF16") as writer:
        writer.write("a", np.float32([1, -2]))
    header = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    )
    header += b" " * (-len(header) % 8)
    size = len(header).to_bytes(8, "little")
    assert (tmp_path / "f").read_bytes() == size + header + b"\x80\x3f\x00\xc0"


def test_the_package_reads_it_too(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="safetensors is absent: not compared")
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([7])}
    with SafetensorsWriter(tmp_path / "f", {"a": (2, 3), "b": (1,)}, dtype="F16") as writer:
        for name, value in values.items():
            writer.write(name, value)
    for name, value in package.load_file(tmp_path / "f").items():
        np.testing.assert_array_equal(value, values[name].astype(np.float16))
    package.save_file(values, tmp_path / "g")
    with SafetensorsFile(tmp_path / "g") as file:
        for name, value in values.items():
            np.testing.assert_array_equal(file.read(name), value)


def test_other_dtypes_may_be_there_and_are_not_read(tmp_path):
    header = {"ids": entry(0, 16, dtype="I64"), "new": entry(16, 17, dtype="F4")}
    with SafetensorsFile(write_raw(tmp_path / "f", header, bytes(17))) as file:
        assert file.tensors["ids"].shape == (2,)
        with pytest.raises(UserError, match="ids is of dtype I64; save the model in F32, F16"):
            file.read("ids")


def test_what_is_not_written_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not all of b has been written"):
        with SafetensorsWriter(tmp_path / "f", {"a": (1,), "b": (2,)}, dtype="F32") as writer:
            writer.write("a", np.zeros(1, np.float32))
            writer.write("b", np.zeros(1, np.float32))
    with SafetensorsWriter(tmp_path / "g", {}, dtype="F32"):
        pass
    with SafetensorsWriter(tmp_path / "h", {"a": (2,)}, dtype="F32") as writer:
        with pytest.raises(ValueError, match="has no place for"):
            writer.write("a", np.zeros(2, np.float32), row=1)
        writer.write("a", np.zeros(2, np.float32))


# -- broken ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "body", "what"),
    [
        ({"a": entry(0, 8)}, b"", "its tensors take"),
        ({"a": entry(0, 8)}, bytes(9), "its tensors take"),
        ({"a": entry(0, 4)}, bytes(4), "'a' is described as"),
        ({"a": entry(0, 8, shape=(3,))}, bytes(8), "'a' is described as"),
        ({"a": entry(0, 8, shape=(2**62, 2**62))}, bytes(8), "'a' is described as"),
        ({"a": entry(0, 8, shape=(-2,))}, bytes(8), "'a' is described as"),
        ({"a": entry(0, 8, shape=(True, 2))}, bytes(8), "'a' is described as"),
        ({"a": entry(0, 8, shape=(2.0,))}, bytes(8), "'a' is described as"),
        ({"a": entry(8, 0)}, bytes(8), "'a' is described as"),
        ({"a": entry(0, 4, shape=(1,) * 65)}, bytes(4), "'a' is described as"),
        ({"a": [1]}, b"", "'a' is described as"),
        ({"a": {"dtype": "F32"}}, b"", "'a' is described as"),
        ({"a": entry(4, 12)}, bytes(12), "'a' begins at byte 4, not 0"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "'b' begins at byte 4, not 8"),
        ([], b"", "its header is no table"),
        (b'{"a": 1, "a": 2}', b"", "its header cannot be read ('a' stands in it twice)"),
        (b"\xff\xfe{}", b"", "its header cannot be read"),
        (b"[" * 100_000, b"", "its header cannot be read"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "its header cannot be read"),
    ],
)
def test_broken_headers(tmp_path, header, body, what):
    with pytest.raises(UserError, match="is no whole safetensors file: ") as error:
        SafetensorsFile(write_raw(tmp_path / "f", header, body))
    message = str(error.value)
    assert what in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize("length", [3, 2**40, 2**64 - 1, 100_000_001])
def test_lengths_beyond_the_file(tmp_path, length):
    path = write_raw(tmp_path / "f", b"{}", b"", length=length)
    what = "its header cannot be read" if length == 3 else f"a header of {length:,} bytes in a file"
    if length == 3:
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UserError, match=what):
        SafetensorsFile(path)


def test_files_that_are_none(tmp_path):
    (tmp_path / "f").write_bytes(b"1234567")
    with pytest.raises(UserError, match="it has 7 bytes, fewer than the length of a header"):
        SafetensorsFile(tmp_path / "f")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        SafetensorsFile(tmp_path / "g")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    with SafetensorsWriter(tmp_path / "f", {"a": (64,)}, dtype="F32") as writer:
        writer.write("a", np.ones(64, np.float32))
    with SafetensorsFile(tmp_path / "f") as file:
        with (tmp_path / "f").open("r+b") as shrinking:
            shrinking.truncate(200)
        with pytest.raises(UserError, match="ends within a: it has become shorter"):
            file.read("a")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "f"
    with SafetensorsWriter(path, {"a": (3, 2), "b": (4,)}, dtype="F32") as writer:
        writer.write("a", np.ones((3, 2), np.float32))
        writer.write("b", np.ones(4, np.float32))
    return path


@given(
    changes=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 230),
)
def test_fuzzed_files_are_read_within_their_bounds_or_refused(whole, changes, cut):
    """Whatever bytes change: an error of one line, or tensors that lie within the file."""
    data = bytearray(whole.read_bytes())
    for place, byte in changes:
        data[place % len(data)] = byte
    path = whole.with_name("fuzzed")
    path.write_bytes(data[: len(data) - cut])
    try:
        file = SafetensorsFile(path)
    except UserError as error:
        assert "\n" not in str(error)
        return
    with file:
        for name, info in file.tensors.items():
            assert 8 < info.begin <= info.end <= len(data) - cut
            try:
                file.read(name)
            except UserError as error:
                assert "is of dtype" in str(error)


@given(st.binary(max_size=300))
def test_garbage_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    path.write_bytes(data + b"}")
    with pytest.raises(UserError):
        SafetensorsFile(path)


def test_no_value_is_lost_on_the_way_to_float32():
    values = np.array([1 / 3, 3e38, 1e-40], np.float32).astype(ml_dtypes.bfloat16)
    assert (values.astype(np.float32).astype(ml_dtypes.bfloat16) == values).all()
