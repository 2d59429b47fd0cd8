"""A checkpoint for others, which safetensors, or Orbax without any of our code, can read.

Names, shapes and the order of layers are the checkpoint's own: `params.embed.tokens` is
`embed.tokens` in model.safetensors, and ["params"]["embed"]["tokens"] with Orbax.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.snapshot import NUMBERS
from mtx.checkpoint.store import Store
from mtx.config import to_dict
from mtx.conversion.convert import new_directory
from mtx.conversion.huggingface import write_json
from mtx.conversion.safetensors import DTYPES, SHORT_NAMES, DtypeName, write_safetensors
from mtx.paths import check_path

Format = Literal["safetensors", "orbax"]
_ROWS_BYTES = 256 << 20  # of an array, in memory at a time


def export(
    checkpoints: Checkpoints,
    out: Path,
    *,
    step: int | None = None,
    format: Format = "safetensors",
    dtype: DtypeName = "float32",
    optimizer: bool = False,
) -> int:
    """Makes the folder `out`, whole or not at all; returns the number of parameters in it.

    safetensors: model.safetensors, a few rows in memory at a time. With `optimizer`, also its state
    as optimizer.safetensors, in float32 and named as AdamW's mu.<name> and nu.<name>, and the
    numbers of its state (step, skipped, loss_scale) as state.json.
    orbax: a folder for `ocp.StandardCheckpointer().restore`: {"params": ...}, NumPy arrays in
    nested dicts; with `optimizer` also its state, as AdamW's "mu" and "nu", "step", "skipped" and
    "loss_scale". All of it has to fit into memory.

    `dtype` is that of the parameters. The folder also holds run.json and tokenizer.json. Raises
    Damaged, and UserError if `out` exists already or cannot be written.
    """
    check_path("out", out)
    step = checkpoints.manifest(step).step
    checkpoints.look(step)
    documents = {
        "run": to_dict(checkpoints.run(step)),
        "tokenizer": checkpoints.document("tokenizer", step),
    }
    with new_directory(out) as written:
        with checkpoints.open(step) as store:
            names = sorted(store.catalog)
            write = _write_orbax if format == "orbax" else _write_safetensors
            write(store, written, names, dtype, optimizer)
        for name, values in documents.items():
            write_json(written / f"{name}.json", values)
    return sum(math.prod(store.catalog[name].shape) for name in names if _is_of(name, "params"))


def _is_of(name: str, *trees: str) -> bool:
    return name in trees or name.partition(".")[0] in trees


def _write_safetensors(
    store: Store, folder: Path, names: list[str], dtype: DtypeName, optimizer: bool
) -> None:
    parameters = {n.removeprefix("params."): n for n in names if _is_of(n, "params")}
    _write_tensors(store, folder / "model.safetensors", parameters, SHORT_NAMES[dtype])
    if optimizer:
        moments = {name: name for name in names if not _is_of(name, "params", *NUMBERS)}
        _write_tensors(store, folder / "optimizer.safetensors", moments, SHORT_NAMES["float32"])
        numbers = {name: store.read(name).item() for name in NUMBERS}
        write_json(folder / "state.json", unflatten_dict(numbers, sep="."))


def _write_tensors(store: Store, path: Path, names: dict[str, str], dtype: str) -> None:
    """Writes one file. names: the checkpoint's names, by those in the file."""
    shapes = {name: store.catalog[source].shape for name, source in names.items()}

    def values() -> Iterator[np.ndarray]:
        for name, shape in shapes.items():
            rows = max(1, _ROWS_BYTES // (4 * math.prod(shape[1:])))
            for row in range(0, shape[0], rows):
                start = (row, *(0,) * (len(shape) - 1))
                part = (min(rows, shape[0] - row), *shape[1:])
                yield store.read(names[name], start, part)

    write_safetensors(path, shapes, values(), dtype=dtype)


def _write_orbax(
    store: Store, folder: Path, names: list[str], dtype: DtypeName, optimizer: bool
) -> None:
    def read(name: str) -> np.ndarray:
        values = store.read(name)
        return values.astype(DTYPES[SHORT_NAMES[dtype]]) if _is_of(name, "params") else values

    wanted = [name for name in names if optimizer or _is_of(name, "params")]
    # If there is no room, Orbax's threads would say so in tracebacks.
    needed = sum(store.catalog[name].size_bytes for name in wanted)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"it takes {needed:,} bytes, and {free:,} are free")
    tree = unflatten_dict({name: read(name) for name in wanted}, sep=".")
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder, tree, force=True)  # the folder exists, and is empty
    except (ValueError, RuntimeError) as error:  # TensorStore's, ending with the system's message
        reason = str(error).splitlines()[0].rpartition(": ")[2].partition(" [")[0]
        raise OSError(errno.EIO, reason) from error
