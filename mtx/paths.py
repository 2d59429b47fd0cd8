"""Paths that a user names, on this machine or on what is mounted there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mtx.errors import UserError, require_kind

_STORES = "s3|s3a|s3n|gs|gcs|az|abfs|abfss|wasb|wasbs|adl|hdfs|r2|oss|cos|b2|dbfs|hf|https?|s?ftp"
# gs://bucket/run, also gs:/bucket/run as pathlib shortens it, s3:bucket, simplecache::s3://bucket.
# A drive (C:/runs) is not an address, nor is ./gs:/bucket.
_ADDRESS = re.compile(rf"\s*(\w+::)*([a-z][a-z0-9+.-]+:[/\\]|({_STORES}|file):)", re.IGNORECASE)
_MOST_NAME = 255  # bytes, on Linux and nearly all its file systems
_MOST_PATH = 3840  # bytes: Linux's 4096, less the paths made below a run's folder


def user_path(path: str | os.PathLike, name: str = "path") -> Path:
    """The path, which need not exist, with ~ expanded. UserError as for `check_path`, and if it
    cannot be reached, so that Path's own methods (`is_dir`) do not fail."""
    check_path(name, path)
    path = Path(os.path.expanduser(path))
    try:
        str(path).encode()  # it is written to JSON files
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise UserError(f"{name}={str(path)!r} cannot be reached: {why}; use another") from None
    return path


def check_path(name: str, path: str | os.PathLike) -> None:
    """Raises UserError if `path` cannot be a file or folder: it is an address, has a NUL in it, or
    is too long. name: the argument or option that it was given as."""
    require_kind(name, path, (str, os.PathLike), "a path")
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise UserError(
            f"{name}={_short(text)} is an address, and mtx reads and writes files of this machine "
            "alone; mount the bucket (gcsfuse, mountpoint-s3, rclone mount) and name a folder there"
        )
    if "\0" in text:
        raise UserError(f"{name}={_short(text)!r} has a NUL in it; use another")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate, from a JSON file
        raise UserError(f"{name}={_short(text)!r} is no text; use another") from None
    longest = max(map(len, encoded.split(b"/")))
    if longest > _MOST_NAME or len(encoded) > _MOST_PATH:
        raise UserError(
            f"{name}={_short(text)} is longer than a path can be: {longest:,} bytes between two /, "
            f"{len(encoded):,} in all; use at most {_MOST_NAME} and {_MOST_PATH:,}"
        )


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}..."
