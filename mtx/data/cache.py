"""Arrays on disk, under the hash of what determines them: made once, read by many.

An entry is a folder, `<cache>/<hash>`, with one .npy per array, and it appears by a single rename.
So processes that build the same entry at once do not disturb each other: all make the same arrays,
the first to finish is kept, and on disks that are not shared each has its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mtx.data.indexed import sync, sync_folder
from mtx.errors import UserError
from mtx.files import Name, read_json
from mtx.paths import user_path

Arrays = dict[str, np.ndarray]


class CacheError(UserError):
    """The folder cannot be written; without a folder the arrays could be built."""


def cached_arrays(folder: Name | None, description: dict, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` gives: read from `folder` (read-only, memory-mapped) if they are
    there, otherwise built and kept there; folder None: built, and kept nowhere. description: plain
    values that determine the arrays. CacheError if the folder cannot be written, UserError if an
    entry is damaged."""
    if folder is None:
        return build()
    entry = user_path(folder) / hash_of(description)
    if not entry.exists():
        try:
            _write(entry, description, build())
        except OSError as error:
            raise CacheError(
                f"cannot write the index cache {folder}: {error.strerror or error}; name another "
                "folder for it"
            ) from None
    return _read(entry, description)


def hash_of_array(array: np.ndarray) -> str:
    """The hash of an array, for a description."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def hash_of(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def _write(entry: Path, description: dict, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=entry.parent) as folder:
        written = Path(folder, "entry")  # with the user's default permissions, unlike `folder`
        written.mkdir()
        shapes = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
        said = json.dumps({"description": description, "arrays": shapes}, indent=1)
        with open(written / "description.json", "xb") as file:
            file.write(said.encode())
            sync(file)
        for name, array in arrays.items():
            with open(written / f"{name}.npy", "xb") as file:
                np.save(file, array)
                sync(file)
        sync_folder(written)
        try:
            os.rename(written, entry)
        except OSError:
            if not entry.exists():  # otherwise another process was first, with the same arrays
                raise
        sync_folder(entry.parent)


def _read(entry: Path, description: dict) -> Arrays:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError):
        said = read_json(entry / "description.json")
        files = {name: entry / f"{name}.npy" for name in said["arrays"]}
        # Plain arrays over the mapped memory: their items are read faster.
        arrays = {name: np.asarray(np.load(file, mmap_mode="r")) for name, file in files.items()}
        shapes = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
        if said == {"description": json.loads(json.dumps(description)), "arrays": shapes}:
            return arrays
    raise UserError(f"the index cache {entry} is damaged; remove that folder")
