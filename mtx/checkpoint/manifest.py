"""The small files of a checkpoint, all JSON: what it is, and the checksums of everything in it.

`checkpoint.json` is the manifest; a directory without one is not a checkpoint. It holds the SHA-256
of itself and of every document beside it (run.json, tokenizer.json, extra.json), and the catalog of
the arrays with their fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtx.checkpoint.catalog import Catalog, catalog_from_json, catalog_to_json
from mtx.checkpoint.formats import current_catalog
from mtx.checkpoint.store import Damaged, unreadable
from mtx.data.indexed import sync, sync_folder
from mtx.errors import UserError

MANIFEST = "checkpoint.json"
_FORMAT = 3  # for earlier ones see mtx.checkpoint.formats
_LAST_SECOND = 253402300799  # of the year 9999, beyond which Python has no dates
_MOST_STEPS = 2**31  # counted on devices
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
        """The size of all arrays."""
        return sum(info.size_bytes for info in self.catalog.values())


def write_documents(
    directory: Path, *, step: int, processes: int, catalog: Catalog, documents: Mapping[str, dict]
) -> None:
    """Writes `documents` and then the manifest; all are on the disk on return. Raises OSError."""
    digests = {}
    for name, document in documents.items():
        digests[name] = _write(directory / f"{name}.json", json.dumps(document, indent=1))
    manifest = {
        "format": _FORMAT, "step": step, "unix_time": time.time(), "processes": processes,
        "documents": digests, **catalog_to_json(catalog),
    }  # fmt: skip
    text = _canonical(manifest)
    _write(directory / MANIFEST, f'{{"sha256": "{_digest(text)}",\n"manifest": {text}}}\n')
    sync_folder(directory)


def read_manifest(directory: Path) -> Manifest:
    """A checkpoint's manifest. Raises Damaged if it is not what was written or has impossible
    values, FileNotFoundError if there is none, UserError if it is of a newer format."""
    _require_files(directory)
    text = _read(directory / MANIFEST)
    try:
        whole = _table(text)
        values = whole["manifest"]
        if not isinstance(values, dict) or _digest(_canonical(values)) != whole["sha256"]:
            raise ValueError("its checksum is another")
        written = _whole_number(values, "format", least=1)
        if written > _FORMAT:
            raise UserError(
                f"checkpoint {directory} is of format {written:,}, and this mtx reads 1 to "
                f"{_FORMAT}; use a newer mtx"
            )
        unix_time, documents = values["unix_time"], values["documents"]
        if type(unix_time) not in (int, float) or not 0 <= unix_time <= _LAST_SECOND:
            raise ValueError(f"unix_time={unix_time!r:.60} must be seconds since 1970")
        if not isinstance(documents, dict) or not all(
            isinstance(one, str) and _SHA256.fullmatch(one) for one in documents.values()
        ):
            raise ValueError(f"documents={documents!r:.60} must be a table of their checksums")
        return Manifest(
            step=_whole_number(values, "step"), unix_time=unix_time, documents=documents,
            processes=_whole_number(values, "processes", least=1),
            catalog=current_catalog(catalog_from_json(values), written),
        )  # fmt: skip
    except UserError:
        raise
    except KeyError as error:
        raise Damaged(directory, f"{MANIFEST}: it has no {error}") from error
    except RecursionError:
        raise Damaged(directory, f"{MANIFEST}: it is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise Damaged(directory, f"{MANIFEST}: {error}") from error


def read_document(directory: Path, manifest: Manifest, name: str) -> dict:
    """The document that `write_documents` was given as `name`. Raises Damaged."""
    path = directory / f"{name}.json"
    try:
        text = _read(path)
    except FileNotFoundError as error:
        raise Damaged(directory, f"it has no {path.name}") from error
    if hashlib.sha256(text).hexdigest() != manifest.documents.get(name):
        raise Damaged(directory, f"{path.name} is not what was written")
    try:
        return _table(text)
    except ValueError as error:
        raise Damaged(directory, f"{path.name}: {error}") from error


def _table(text: bytes) -> dict:
    """The JSON object in `text`. Raises ValueError with one line."""
    try:
        values = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it must be a table")
    return values


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs in it twice")
    return found


def _whole_number(values: dict, name: str, *, least: int = 0) -> int:
    value = values[name]
    if type(value) is not int or not least <= value < _MOST_STEPS:  # no bool either
        raise ValueError(f"{name}={value!r:.60} must be a whole number of at least {least}")
    return value


def is_ours(directory: Path) -> bool:
    """Whether a directory is empty, or holds nothing but a checkpoint's files."""
    return directory.is_dir() and all(_OURS.fullmatch(path.name) for path in directory.iterdir())


def _write(path: Path, text: str) -> str:
    """Writes a file; returns the SHA-256 of its bytes."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)
    return _digest(text)


def _require_files(directory: Path) -> None:
    """Raises Damaged if anything of a checkpoint, even one of Orbax's own files, is not a file: a
    reader of a pipe would wait forever."""
    try:
        for path in sorted(directory.iterdir()):
            if _OURS.fullmatch(path.name) and path.exists() and not path.is_file():
                raise Damaged(directory, f"{path.name} must be a file")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(directory, error) from error


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
