"""Records of evaluation sets: JSON lines, or files that are one JSON object each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtx.data.sources import (
    Reading,
    field_of,
    files_below,
    lines_of,
    read_chunks,
    require_text,
)
from mtx.errors import UserError
from mtx.files import open_file, parse_json, read_text
from mtx.paths import user_path

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt")  # looked for in folders
_MOST_BYTES = 2**26  # of one object


def read_records(names: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """(where, a JSON object) for each object in the named files and folders, in order.

    Each line is an object, or else the whole file is one; blank lines are left out. `where` is for
    people: "dev.jsonl, line 3". Raises UserError for anything missing, unreadable, not UTF-8 or not
    a JSON object, for an object of more than 64 MiB, and if there is no object at all.
    """
    found = False
    for path in _files(names):
        for where, line in _lines(path):
            found, record = True, parse_json(line, where)
            if not isinstance(record, dict):
                raise UserError(f"{where} is {type(record).__name__}, not a JSON object")
            yield where, record
    if not found:
        raise UserError(f"no records in {', '.join(names) or 'no files'}; name other files")


def text_field(record: dict, name: str, where: str) -> str:
    """`record[name]`; UserError if it is missing or not a text."""
    return require_text(field_of(record, name, where), f"{where}: {name!r}")


def _files(names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = user_path(name)
        if path.is_dir():
            yield from sorted(files_below(path, _SUFFIXES))
        elif path.is_file():
            yield path
        else:
            raise UserError(f"{name} must be a file or a folder (from {Path.cwd()})")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of each line that is not blank, or of the whole file if that is one object."""
    with open_file(path) as file:
        whole = file.read(_MOST_BYTES + 1)
    if len(whole) <= _MOST_BYTES and _is_one_object(whole):
        yield str(path), read_text(path)
        return
    reading = Reading(lines=True, most_line_bytes=_MOST_BYTES)
    for chunk in read_chunks([path], reading, cuts=None, most_characters=0):
        yield from ((f"{path}, line {number}", line) for number, line in lines_of(chunk))


def _is_one_object(text: bytes) -> bool:
    """Whether a file must be read as one object, because its first line alone is not JSON."""
    lines = text.split(b"\n", 1)
    if len(lines) == 1 or not lines[1].strip():
        return False  # one line: an object, or a mistake that is best named by its line
    try:
        parse_json(lines[0], "the first line")
        return False
    except UserError:
        pass
    try:
        return isinstance(parse_json(text, "the file"), dict)
    except UserError:
        return False
