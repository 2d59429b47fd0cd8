"""Hugging Face's safetensors format, read and written a part of a tensor at a time.

A file is the length of its header (8 bytes, little endian), the header as JSON, and the tensors'
bytes, row-major and little endian: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets":
[begin, end]}, ...}, offsets from the end of the header, without holes. There is nothing in it to
execute. The `safetensors` package writes a file from tensors that are all in memory; here none but
the part at hand is.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from mtx.errors import UserError

_MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MOST_DIMS = 64  # NumPy's
_SIZES = {  # bytes of an element
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
DTYPES = {  # those of parameters
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What the header says of a tensor."""

    dtype: str  # as the format names it
    shape: tuple[int, ...]
    begin: int  # bytes from the file's start
    end: int


class SafetensorsFile:
    """The tensors of one file. Reads only the header at first, and later only what is asked for.

    Raises UserError for a file that cannot be opened or is not whole.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = _open(self.path)
        try:
            self.tensors = _read_header(self._file, self.path)
        except UserError:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some rows of it, in its own dtype; UserError where that is not in DTYPES."""
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise UserError(
                f"{self.path}: {name} is of dtype {info.dtype}; save the model in "
                f"{', '.join(DTYPES)}"
            )
        dtype, shape = DTYPES[info.dtype], info.shape
        begin, count = info.begin, math.prod(shape)
        if shape:
            start, stop, _ = rows.indices(shape[0])
            row = math.prod(shape[1:])
            shape = (max(stop - start, 0), *shape[1:])
            begin, count = begin + start * row * dtype.itemsize, shape[0] * row
        self._file.seek(begin)
        array = np.fromfile(self._file, dtype.newbyteorder("<"), count)
        if array.size != count:
            raise UserError(f"{self.path} ends within {name}: it has become shorter; copy it again")
        return array.reshape(shape)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read_header(file: BinaryIO, path: Path) -> dict[str, TensorInfo]:
    def wrong(what: str) -> UserError:
        return UserError(f"{path} is no whole safetensors file: {what}; download or save it again")

    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise wrong(f"it has {size} bytes, fewer than the length of a header")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise wrong(f"a header of {length:,} bytes in a file of {size:,}")
        text = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        raise wrong(f"its header cannot be read ({_first_line(error)})") from error
    if not isinstance(header, dict):
        raise wrong("its header is no table of tensors")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _info(entry, start)
        except (ValueError, TypeError, KeyError) as error:
            raise wrong(f"{name!r} is described as {_short(entry)}") from error
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != end:
            raise wrong(f"{name!r} begins at byte {info.begin - start:,}, not {end - start:,}")
        end = info.end
    if end != size:
        raise wrong(f"its tensors take {end:,} bytes with the header, and it has {size:,}")
    return tensors


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise ValueError(f"{_short(name)} stands in it twice")
    return found


def _info(entry: dict, start: int) -> TensorInfo:
    """ValueError, TypeError or KeyError where the entry is not as the format has it."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("no whole numbers")
    if not isinstance(dtype, str) or len(shape) > _MOST_DIMS or end < begin:
        raise ValueError("no tensor")
    if dtype in _SIZES and math.prod(shape) * _SIZES[dtype] != end - begin:
        raise ValueError("its shape takes other bytes")
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def _short(value: object) -> str:
    return _cut(repr(value))


def _first_line(error: Exception) -> str:
    return _cut(str(error).partition("\n")[0] or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


class SafetensorsWriter:
    """A file whose tensors, all of one dtype, are written in any order and by parts.

    Use it as a context: on leaving it, every byte has to have been written. Raises OSError where
    the disk says so.
    """

    def __init__(self, path: str | Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str):
        self.path = Path(path)
        self.dtype = DTYPES[dtype].newbyteorder("<")
        self._shapes = dict(shapes)
        self._left = {name: math.prod(shape) for name, shape in shapes.items()}  # elements
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        end = 0
        self._begins = {}
        for name, shape in shapes.items():
            self._begins[name], begin = end, end
            end += math.prod(shape) * self.dtype.itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = self.path.open("xb", buffering=0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind, *exception) -> None:
        self._file.close()
        missing = [name for name, left in self._left.items() if left]
        if missing and kind is None:
            raise ValueError(f"{self.path}: not all of {', '.join(missing)} has been written")

    def write(self, name: str, array: np.ndarray, *, row: int = 0) -> None:
        """A tensor, or its rows from `row` on, cast to the file's dtype."""
        shape = self._shapes[name]
        rows = array.shape[0] if shape else 0
        if array.shape[1:] != shape[1:] or (shape and row + rows > shape[0]):
            raise ValueError(f"{name} {shape} has no place for {array.shape} at row {row}")
        offset = row * math.prod(shape[1:]) * self.dtype.itemsize
        self._file.seek(self._start + self._begins[name] + offset)
        # Not `tofile`, whose error does not say why.
        left = memoryview(np.ascontiguousarray(array, self.dtype).reshape(-1).view(np.uint8))
        while left:
            left = left[self._file.write(left) :]
        self._left[name] -= array.size
