"""Tensors in Hugging Face's safetensors files: read by its library, a few rows at a time.

We write them ourselves, because the library takes all tensors of a file at once, by their addresses
in memory (`safetensors.numpy.save_file`): here a file is written while layers are read, and none
are kept. A file is the length of its header (8 bytes, little endian), the header as JSON ({"name":
{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, with offsets counted from its
end), and the tensors' bytes, row-major and little endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mtx.errors import UserError, reason
from mtx.huggingface import Shape

DTYPES = {  # those of parameters
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)
}  # fmt: skip
DtypeName = Literal["float32", "bfloat16", "float16"]
SHORT_NAMES = {dtype.name: short for short, dtype in DTYPES.items()}


class SafetensorsFile:
    """The tensors of one file. Reads only the header at first, and later only what is asked for.
    Raises UserError for a file that cannot be opened or is incomplete."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tensors: dict[str, tuple[str, Shape]] = {}  # (dtype as the format names it, shape)
        try:  # not mapped into memory: a mapped file that shrinks kills the process
            self._file = safe_open(self.path, framework="numpy", backend="pread")
            for name in self._file.offset_keys():
                described = self._file.get_slice(name)
                shape = tuple(described.get_shape())
                self.tensors[name] = described.get_dtype(), shape
        except SafetensorError as error:
            raise UserError(
                f"{self.path} is not a whole safetensors file: {reason(error)}"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {reason(error)}") from error

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some of its rows, in its own dtype; UserError if that is not in DTYPES."""
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
            raise UserError(f"{self.path}: {name} cannot be read: {reason(error)}") from error


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Shape],
    values: Iterable[np.ndarray],
    *,
    dtype: str,
    float32: Collection[str] = (),
) -> None:
    """Writes a file of tensors of these shapes. values: the tensors in that order, or rows of them
    one after the other; each is cast to `dtype`, or to float32 if its name is in `float32`,
    written, and not kept. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    dtypes = {name: "F32" if name in float32 else dtype for name in shapes}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtypes[name]].itemsize
        header[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        tensors, left = iter(shapes.items()), 0
        for array in values:  # not by `tofile`, whose error does not say why
            while not left and array.size:
                name, shape = next(tensors)
                left = math.prod(shape)
            left -= array.size
            array = np.ascontiguousarray(array, DTYPES[dtypes[name]].newbyteorder("<"))
            end -= file.write(array.reshape(-1).view(np.uint8).data)
    if end:
        raise ValueError(f"{path}: {end:,} bytes of {', '.join(shapes)} have not been written")
