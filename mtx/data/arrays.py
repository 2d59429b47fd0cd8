"""Arrays in a user's files, .npy and .npz. Anything wrong with a file is a UserError."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from mtx.errors import UserError, reason
from mtx.files import open_file

_WRONG = (  # what numpy and zipfile raise for files of other formats
    ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file, memory-mapped: a header that promises more data than there is
    allocates no memory."""
    with open_file(path):  # refuses a pipe, on which we would wait
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except _WRONG as error:
            raise UserError(f"{path} is no array of numpy's: {reason(error)}") from None


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays with these names in an .npz file."""
    asked = f"{path} must hold the arrays {' and '.join(names)}"
    with open_file(path) as file:
        try:
            with np.lib.npyio.NpzFile(file) as held:
                found = [held[name] for name in names]
        except _WRONG as error:
            raise UserError(f"{asked}: {reason(error)}") from None
    if not all(isinstance(each, np.ndarray) for each in found):  # other files are read as bytes
        raise UserError(f"{asked}, and has other files of these names")
    return found
