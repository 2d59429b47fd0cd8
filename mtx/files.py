"""A user's files: read as text, JSON or TOML, or replaced. What is wrong is a UserError."""

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

MOST_BYTES = 2**28  # of a file that is read whole: ten times the largest tokenizers
_MOST_TOML_BYTES = 2**20
_MOST_LEVELS = 64  # of tables and lists within each other
# A key such as a.b.c takes the square of its parts in time.
_LONG_KEY = re.compile(rf"(?:[^\s.,=]{{1,64}} ?\. ?){{{_MOST_LEVELS}}}")

Name = str | os.PathLike


@contextmanager
def open_file(path: Name, what: str = "") -> Iterator[BinaryIO]:
    """The file, to read its bytes; in errors `what` stands before its name: "plan file", perhaps.

    UserError where it cannot be opened or read, as a pipe or a device, which may have no end.
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
        if "\0" not in os.fspath(path):  # else it is the name that is wrong
            raise
        raise UserError(f"cannot read {name!r}: {error}") from None


def read_bytes(path: Name, what: str = "", *, most: int = MOST_BYTES) -> bytes:
    """All of a file. UserError as for `open_file`, and where it has more than `most` bytes."""
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(f"{path} has {size:,} bytes, more than {most:,}: it is something else")
        return file.read()


def read_text(path: Name, what: str = "", *, most: int = MOST_BYTES) -> str:
    """All of a file in UTF-8. UserError as for `read_bytes`, and where it is something else."""
    try:
        return read_bytes(path, what, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text, at byte {error.start + 1}") from None


def read_json(path: Name, what: str = "") -> Any:
    """What a file holds as JSON. UserError as for `read_text` and `parse_json`, and for a whole
    number beyond 64 bits."""
    return _within_64_bits(parse_json(read_text(path, what), str(path)), path)


def read_toml(path: Name, what: str = "") -> dict[str, Any]:
    """What a file holds as TOML. UserError as for `read_json`."""
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
    """What `text` says; UserError, which begins with `where`, where it is not JSON, or nested so
    deeply that it could be read, but not written."""
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
    return reason(error).partition("; use sys.")[0]  # of a number with thousands of digits


def _within_64_bits(value: Any, path: Name) -> Any:
    for level in _levels(value):
        if any(type(part) is int and not -(2**63) <= part < 2**64 for part in level):
            raise UserError(f"{path} has a whole number beyond 64 bits; use a smaller one")
    return value


def _levels(value: Any) -> Iterator[list[Any]]:
    """What stands in `value`, level by level; RecursionError where there are too many."""
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
    """A path beside `path` to write to, with its suffix, which takes its place at the end, so that
    a file is there whole or not at all.

    Where writing fails nothing is left behind and what was at `path` stays; where it fails because
    it cannot be done, UserError says why. What is no file, such as /dev/null, is written to itself.
    """
    path = user_path(path)
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        written = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        written.touch()  # says what is wrong with a folder before anything is computed
        try:
            yield written
            os.replace(written, target)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
