"""Reads a user's files as text, JSON or TOML, or replaces them. Every failure is a UserError."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mtx.errors import UserError, reason
from mtx.paths import user_path

MOST_BYTES = 2**28  # most for a file that is read whole: ten times the largest tokenizers
_MOST_TOML_BYTES = 2**20
_MOST_LEVELS = 64  # of nested tables and lists
# Parsing a key such as a.b.c takes time quadratic in its number of parts.
_LONG_KEY = re.compile(rf"(?:[^\s.,=]{{1,64}} ?\. ?){{{_MOST_LEVELS}}}")

Name = str | os.PathLike


@contextmanager
def open_file(path: Name, what: str = "") -> Iterator[BinaryIO]:
    """Open a file to read its bytes. what: precedes its name in errors, such as "plan file".

    UserError if it cannot be opened or read, or is a pipe or a device, which may have no end.
    """
    name = f"{what} {path}".lstrip()
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"cannot read {name}: it is a pipe or a device; name a file")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError as error:
        if "\0" not in os.fspath(path):  # with a NUL, the name is wrong
            raise
        raise UserError(f"cannot read {name!r}: {error}") from None


def read_bytes(path: Name, what: str = "", *, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file. UserError as for `open_file`, and if there are more than `most`."""
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(f"{path} has {size:,} bytes, more than {most:,}: it is something else")
        return file.read()


def read_text(path: Name, what: str = "", *, most: int = MOST_BYTES) -> str:
    """All text of a file. UserError as for `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path, what, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text, at byte {error.start + 1}") from None


def read_json(path: Name, what: str = "") -> Any:
    """The value of a JSON file. UserError as for `read_text` and `parse_json`, and for a whole
    number beyond 64 bits."""
    return _within_64_bits(parse_json(read_text(path, what), str(path)), path)


def read_toml(path: Name, what: str = "") -> dict[str, Any]:
    """The table of a TOML file. UserError as for `read_json`."""
    text = read_text(path, what, most=_MOST_TOML_BYTES)
    if _LONG_KEY.search(text):
        raise UserError(f"{path} is not TOML: it has a key of more than {_MOST_LEVELS} parts")
    try:
        return _within_64_bits(tomllib.loads(text), path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not TOML: {_reason(error)}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of JSON text. UserError, beginning with `where`, if it is not JSON, or is nested so
    deeply that it could be read but not written."""
    try:
        value = json.loads(text)
        for _ in _levels(value):
            pass
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"more than {_MOST_LEVELS} lists and tables within each other"
    return reason(error).partition("; use sys.")[0]  # for a number of thousands of digits


def _within_64_bits(value: Any, path: Name) -> Any:
    for level in _levels(value):
        if any(type(part) is int and not -(2**63) <= part < 2**64 for part in level):
            raise UserError(f"{path} has a whole number beyond 64 bits; use a smaller one")
    return value


def _levels(value: Any) -> Iterator[list[Any]]:
    """The parts of a nested `value`, level by level; RecursionError for too many levels."""
    level = [value]
    for _ in range(_MOST_LEVELS + 2):
        yield level
        tables = [each for each in level if isinstance(each, dict | list)]
        if not tables:
            return
        lists = [each.values() if isinstance(each, dict) else each for each in tables]
        level = [part for each in lists for part in each]
    raise RecursionError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path next to `path`, with the same suffix, to write to. It replaces `path` at the end, so
    that a file is there whole or not at all.

    If writing fails, nothing is left behind and `path` keeps its contents; if the system refuses
    it, UserError says why. A path that is not a file, such as /dev/null, is written to directly.
    """
    path = user_path(path)
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        written = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        written.touch()  # fails, if the folder is wrong, before anything is computed
        try:
            yield written
            os.replace(written, target)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
