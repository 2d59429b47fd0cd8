"""All processes write one checkpoint together, in the background, whole or not at all.

Orbax gives the directory a temporary name, runs this handler in its own thread, and renames the
directory at the end. Each process writes what it holds into its own file; then all report whether
that succeeded, and process 0 adds the manifest. So if one process fails, all know it at once.
Everything is on the disk before the rename.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mtx.checkpoint.catalog import Block, catalog_of
from mtx.checkpoint.manifest import is_ours, read_manifest, write_documents
from mtx.checkpoint.store import Part, Store, write_parts
from mtx.sharding.agree import agree

DISCARDED = "discarded"  # what must be deleted is moved here first: a rename is atomic
_FAILED = "failed: "
_NICE = 10  # of the writing thread: the step comes first


class Writer(ocp.AsyncCheckpointHandler):
    """Orbax's handler for whole checkpoints, which writes `Contents`."""

    def __init__(self, *, timeout_s: float):
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "mtx_save", initializer=_yield_to_others)

    async def async_save(self, directory, args: Contents) -> list:
        return [self._thread.submit(self._write, Path(directory), args)]

    def save(self, directory, args: Contents) -> None:
        self._write(Path(directory), args)

    def restore(self, directory, args: Whole | None = None) -> dict[str, np.ndarray]:
        """Every array by its name, for users who read with Orbax alone."""
        directory = Path(directory)
        with Store(directory=directory, catalog=read_manifest(directory).catalog) as store:
            return {name: store.read(name) for name in store.catalog}

    def finalize(self, directory) -> None:
        """Runs right before the rename: discards an older save of the same step."""
        final = Path(directory).parent / Path(directory).name.partition(".")[0]
        if final.exists():
            if not is_ours(final):
                raise OSError(f"{final} holds other files than a checkpoint's")
            discard(final)

    def _write(self, directory: Path, contents: Contents) -> None:
        path = directory / f"arrays.{jax.process_index()}.bin"
        try:
            blocks = write_parts(path, contents.parts)
            said = json.dumps([astuple(block) for block in blocks])
        except OSError as error:
            said = f"{_FAILED}process {jax.process_index()}: {error.strerror}"

        def complete(all_said: Sequence[str]) -> str:
            failures = [said for said in all_said if said.startswith(_FAILED)]
            if failures:
                return failures[0]
            blocks = [_block(*values) for said in all_said for values in json.loads(said)]
            try:
                write_documents(
                    directory, step=contents.step, processes=jax.process_count(),
                    catalog=catalog_of(contents.arrays, blocks), documents=contents.documents,
                )  # fmt: skip
            except OSError as error:
                return f"{_FAILED}process 0: {error.strerror}"
            return ""

        decided = agree("save", said, complete, timeout_s=self._timeout_s)
        if decided:
            raise OSError(errno.EIO, decided.removeprefix(_FAILED))


@ocp.args.register_with_handler(Writer, for_save=True)
@dataclass(kw_only=True, eq=False)  # Orbax's base is not frozen
class Contents(ocp.args.CheckpointArgs):
    """What to write: this process's parts of the arrays, and the documents."""

    step: int
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]  # shape and dtype
    parts: Sequence[Part]
    documents: Mapping[str, Any]


@ocp.args.register_with_handler(Writer, for_restore=True)
@dataclass
class Whole(ocp.args.CheckpointArgs):
    """All of a checkpoint's arrays, by name."""


def discard(path: Path) -> None:
    """Moves a checkpoint away from those that count, to be deleted."""
    discarded = path.parent / DISCARDED
    discarded.mkdir(exist_ok=True)
    place = next(n for n in range(1_000_000) if not (discarded / f"{path.name}.{n}").exists())
    path.rename(discarded / f"{path.name}.{place}")


def _block(name, start, shape, file, offset, fingerprint) -> Block:
    """A block that went through JSON as a list."""
    return Block(
        name=name, start=tuple(start), shape=tuple(shape), file=file, offset=offset,
        fingerprint=fingerprint,
    )  # fmt: skip


def _yield_to_others() -> None:
    """Lowers the priority of this thread and of those that it starts, if threads have
    their own (Linux)."""
    if sys.platform == "linux":
        os.nice(_NICE)
