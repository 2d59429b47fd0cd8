"""The small files of a checkpoint, all JSON: what it is, and the checksums of everything in it.

`checkpoint.json` is the manifest; a directory without one is no checkpoint. It holds the SHA-256 of
itself and of every document beside it (run.json, tokenizer.json, extra.json), and the catalog of
the arrays with their fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtx.checkpoint.store import Catalog, Damaged, catalog_from_json, catalog_to_json, unreadable
from mtx.errors import UserError
from mtx.files import parse_json

MANIFEST = "checkpoint.json"
_FORMAT = 1
# All that a checkpoint's directory holds; the last two are Orbax's.
_OURS = re.compile(r"\w+\.json|arrays\.\d+\.bin|_CHECKPOINT_METADATA|commit_success\.txt")


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """What `checkpoint.json` says."""

    step: int
    unix_time: float
    processes: int  # that wrote it
    catalog: Catalog
    documents: Mapping[str, str]  # SHA-256 of the files <name>.json

    @property
    def size_bytes(self) -> int:
        """Of the arrays."""
        return sum(info.size_bytes for info in self.catalog.values())


def write_documents(
    directory: Path, *, step: int, processes: int, catalog: Catalog, documents: Mapping[str, dict]
) -> None:
    """Writes `documents` and, at last, the manifest; all on the disk on return. Raises OSError."""
    digests = {}
    for name, document in documents.items():
        digests[name] = _write(directory / f"{name}.json", json.dumps(document, indent=1))
    manifest = {
        "format": _FORMAT, "step": step, "unix_time": time.time(), "processes": processes,
        "documents": digests, **catalog_to_json(catalog),
    }  # fmt: skip
    text = _canonical(manifest)
    _write(directory / MANIFEST, f'{{"sha256": "{_digest(text)}",\n"manifest": {text}}}\n')
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """Raises Damaged where it is not what was written, FileNotFoundError where there is none."""
    text = _read(directory / MANIFEST)
    try:
        whole = parse_json(text, MANIFEST)
        values = whole["manifest"]
        if _digest(_canonical(values)) != whole["sha256"]:
            raise ValueError("its checksum is another")
        if values["format"] != _FORMAT:
            raise ValueError(f"its format is {values['format']}, and this mtx reads {_FORMAT}")
        return Manifest(
            step=values["step"], unix_time=values["unix_time"], processes=values["processes"],
            catalog=catalog_from_json(values), documents=values["documents"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(directory, f"{MANIFEST}: {error}") from error


def read_document(directory: Path, manifest: Manifest, name: str) -> dict:
    """What `write_documents` was given as `name`. Raises Damaged."""
    path = directory / f"{name}.json"
    try:
        text = _read(path)
    except FileNotFoundError as error:
        raise Damaged(directory, f"it has no {path.name}") from error
    if hashlib.sha256(text).hexdigest() != manifest.documents.get(name):
        raise Damaged(directory, f"{path.name} is not what was written")
    try:
        return parse_json(text, path.name)
    except UserError as error:
        raise Damaged(directory, str(error)) from error


def is_ours(directory: Path) -> bool:
    """Whether a directory holds nothing but what is of a checkpoint, if anything."""
    return directory.is_dir() and all(_OURS.fullmatch(path.name) for path in directory.iterdir())


def sync_directory(directory: Path) -> None:
    """What was created and renamed in a directory is on the disk thereafter."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> str:
    """Writes a file; the SHA-256 of its bytes."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return _digest(text)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def _canonical(values: dict) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
