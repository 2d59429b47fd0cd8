"""Tensors in Hugging Face's safetensors files: read by its library, a few rows at a time.

Written here, because the library takes all tensors of a file at once, by their addresses in memory
(`safetensors.numpy.save_file`): a model's files are written piece by piece as its layers are read.
A file is the length of its header (8 bytes, little endian), the header as JSON ({"name": {"dtype":
"F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, offsets from its end on), and the
tensors' bytes, row-major and little endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mtx.errors import UserError

DTYPES = {  # those of parameters
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)
}  # fmt: skip


class TensorInfo(NamedTuple):
    """What the header says of a tensor."""

    dtype: str  # as the format names it
    shape: tuple[int, ...]


class SafetensorsFile:
    """The tensors of one file. Reads only the header at first, and later only what is asked for.

    Raises UserError for a file that cannot be opened or is not whole.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        try:  # not mapped into memory: a mapped file that shrinks kills the process
            self._file = safe_open(self.path, framework="numpy", backend="pread")
            for name in self._file.offset_keys():
                described = self._file.get_slice(name)
                shape = tuple(described.get_shape())
                self.tensors[name] = TensorInfo(described.get_dtype(), shape)
        except (SafetensorError, AttributeError) as error:  # the latter: a type that NumPy has not
            raise UserError(f"{self.path} is no whole safetensors file: {_line(error)}") from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {_line(error)}") from error

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some rows of it, in its own dtype; UserError where that is not in DTYPES."""
        dtype, shape = self.tensors[name]
        if dtype not in DTYPES:
            raise UserError(
                f"{self.path}: {name} is of dtype {dtype}; save the model in {', '.join(DTYPES)}"
            )
        try:
            if not math.prod(shape) or rows == slice(None):
                return self._file.get_tensor(name)[rows if shape else ...]
            return self._file.get_slice(name)[slice(*rows.indices(shape[0])[:2])]
        except (SafetensorError, ValueError, OSError) as error:
            raise UserError(f"{self.path}: {name} cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


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
