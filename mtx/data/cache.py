"""Arrays on disk under the hash of what decides them: made once, read by many.

An entry is a folder, `<cache>/<hash>`, with one .npy an array, and it appears by one rename. So
processes that build the same entry at once do not disturb each other: all make the same, the first
to finish is kept, and on disks that are not shared each has its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtx.data.indexed import sync, sync_folder
from mtx.errors import UserError
from mtx.files import read_json
from mtx.paths import user_path

Arrays = dict[str, np.ndarray]


class CacheError(UserError):
    """The folder cannot be written; without a folder it would go."""


def cached_arrays(
    folder: str | os.PathLike | None, description: dict, build: Callable[[], Arrays]
) -> Arrays:
    """What `build` gives, from `folder` (read-only, memory-mapped) if it is there, and kept there
    if it is not; folder None: built, and kept nowhere.

    description: plain values that decide the arrays. Raises CacheError where the folder cannot be
    written, and UserError where an entry is damaged.
    """
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
    """For a description."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def hash_of(description: dict) -> str:
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(entry: Path, description: dict, arrays: Arrays) -> None:
    written = entry.with_name(f".{entry.name}.{uuid.uuid4().hex[:12]}")
    written.mkdir(parents=True)
    try:
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
            if not entry.exists():  # else another process was first, with the same arrays
                raise
        sync_folder(entry.parent)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _read(entry: Path, description: dict) -> Arrays:
    try:
        said = read_json(entry / "description.json")
        arrays = {}
        for name, (dtype, *shape) in said["arrays"].items():
            array = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            if (str(array.dtype), array.shape) != (dtype, tuple(shape)):
                raise ValueError(name)
            arrays[name] = np.asarray(array)  # a plain array: its items are read faster
        if said["description"] == json.loads(json.dumps(description)):
            return arrays
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    raise UserError(f"the index cache {entry} is damaged; remove that folder")
