"""A user's files of arrays, .npy and .npz. What is wrong with one is a UserError."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from mtx.errors import UserError, reason
from mtx.files import open_file

_WRONG = (  # what numpy and zipfile raise for files that are not theirs
    ValueError, TypeError, KeyError, EOFError, OSError, OverflowError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_array(path: Path) -> np.ndarray:
    """What a .npy file holds, memory-mapped: a header that promises more than there is asks for no
    memory."""
    with open_file(path):  # refuses a pipe, which would be waited for
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except _WRONG as error:
            raise UserError(f"{path} is no array of numpy's: {reason(error)}") from None


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """These of the arrays of an .npz."""
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
