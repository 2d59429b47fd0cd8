"""Files of text to chunks, in bounded memory: plain text, JSON lines and Parquet.

A chunk is what one worker encodes at a time. JSON lines and texts may be compressed (.gz, .zst).
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtx.errors import UserError, reason
from mtx.files import open_file, parse_json
from mtx.paths import user_path

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_PACKED_SUFFIXES = (".gz", ".zst")
_JSON = tuple(plain + packed for plain in JSON_SUFFIXES for packed in ("", *_PACKED_SUFFIXES))
_TEXT = tuple(plain + packed for plain in TEXT_SUFFIXES for packed in ("", *_PACKED_SUFFIXES))
_SUFFIXES = (*_TEXT, *_JSON, *PARQUET_SUFFIXES)
_CHUNK_BYTES = 2**19
_BYTE_ORDER_MARK = "\ufeff"

Text = str | list[str]  # a document, or its sentences


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of one file, as it was read."""

    file: str
    texts: list[Text] | None = None  # documents, or one part of one; None: `data` has them
    part: bool = False  # whether `texts` is a part of a document
    ends: bool = True  # of a part: whether the document ends with it
    data: bytes = b""  # lines
    line: int = 0  # of `data`: the number of its first line, from 1
    read_bytes: int = 0  # read from the file for this chunk, before decompression


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents."""

    field: str = "text"  # of JSON lines and Parquet
    lines: bool = False  # a line of a text file is a document, instead of the file
    most_line_bytes: int = 2**26


def find_files(names: Sequence[str]) -> list[Path]:
    """The named files, and those in the named folders: in the order of `names` and, in a folder, of
    paths. Raises UserError for a file that is missing or of no kind that can be read, and for a
    folder without such a file."""
    files = []
    for name in names:
        path = user_path(name)
        if path.is_dir():
            files += sorted(files_below(path, _SUFFIXES))
            continue
        if not path.is_file():
            raise UserError(f"{name} must be a file or a folder (from {Path.cwd()})")
        if not path.name.lower().endswith(_SUFFIXES):
            raise UserError(
                f"{name} must end in one of {', '.join(_SUFFIXES)}; these kinds can be read"
            )
        files.append(path)
    return files


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """The files with one of these suffixes, recursively and through links, except hidden names; a
    folder's files come before those of its subfolders, each sorted by name. Raises UserError if
    there are none, or if a folder cannot be listed."""
    found, visited = False, set()  # real paths: a link to a parent must not be followed for ever

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}; make it readable")

    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if name.lower().endswith(suffixes):
                found = True
                yield Path(parent, name)
    if not found:
        raise UserError(
            f"{folder} holds no file that ends in {', '.join(suffixes)}; name files that do"
        )


def read_chunks(
    files: Iterable[Path], reading: Reading, *, cuts: re.Pattern | None, most_characters: int
) -> Iterator[Chunk]:
    """The files' chunks in order. A file that is one document is cut at `cuts`; None: not at all.
    Raises UserError for a file that cannot be read, unpacked or decoded, for a line of more than
    `reading.most_line_bytes`, and for a document that cannot be cut below `most_characters`."""
    for path in files:
        if path.name.lower().endswith(PARQUET_SUFFIXES):
            yield from _parquet_chunks(path, reading)
        elif reading.lines or path.name.lower().endswith(_JSON):
            yield from _line_chunks(path, reading)
        else:
            yield from _part_chunks(path, cuts, most_characters)


def texts_of(chunk: Chunk, reading: Reading) -> list[Text]:
    """The documents of a chunk, or the one part of a document."""
    if chunk.texts is not None:
        return chunk.texts
    if not chunk.file.lower().endswith(_JSON):
        return [line.removesuffix("\r") for _, line in lines_of(chunk)]
    return [_texts(line, reading.field, f"{chunk.file}, line {n}") for n, line in lines_of(chunk)]


def lines_of(chunk: Chunk) -> list[tuple[int, str]]:
    """The lines of a chunk with their numbers, except blank ones."""
    try:
        text = chunk.data.decode()
    except UnicodeDecodeError as error:
        line = chunk.line + chunk.data.count(b"\n", 0, error.start)
        place = error.start - chunk.data.rfind(b"\n", 0, error.start)
        raise UserError(
            f"{chunk.file}, line {line}: byte {place} of the line, "
            f"0x{chunk.data[error.start]:02x}, is not UTF-8; convert the file, or mend the line"
        ) from None
    if chunk.line == 1:
        text = text.removeprefix(_BYTE_ORDER_MARK)
    return [(n, line) for n, line in enumerate(text.split("\n"), chunk.line) if line.strip()]


def read_texts(
    names: Sequence[str], reading: Reading, *, cuts: re.Pattern, most_bytes: int | None = None
) -> Iterator[str]:
    """The text of the files and folders in `names`, document by document, a long one in parts cut
    at `cuts`; ends when it reaches `most_bytes` of UTF-8."""
    left = math.inf if most_bytes is None else most_bytes
    chunks = read_chunks(find_files(names), reading, cuts=cuts, most_characters=_CHUNK_BYTES * 8)
    for text in (text for chunk in chunks for text in texts_of(chunk, reading)):
        joined = text if isinstance(text, str) else " ".join(text)
        yield joined
        if (left := left - len(joined.encode())) <= 0:
            return


def read_whole(path: Path) -> str:
    """A text file's one document, in memory; UserError as for `read_chunks`."""
    chunks = _part_chunks(path, re.compile(""), _CHUNK_BYTES * 8)
    return "".join(text for chunk in chunks for text in chunk.texts or () if isinstance(text, str))


def field_of(record: object, field: str, where: str) -> Any:
    """`record[field]`; UserError if there is none."""
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where} has no field {field!r}, but {has or 'nothing'}; name another")
    return record[field]


def _texts(line: str, field: str, where: str) -> Text:
    text = field_of(parse_json(line, where), field, where)
    for part in text if isinstance(text, list) else [text]:
        require_text(part, f"{where}: field {field!r}")
    return text


def require_text(value: object, what: str) -> str:
    """`value`; UserError if it is not text, or holds half of a surrogate pair."""
    if not isinstance(value, str):
        raise UserError(f"{what} holds {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise UserError(f"{what} has half of a surrogate pair, {half}; mend it") from None
    return value


def _line_chunks(path: Path, reading: Reading) -> Iterator[Chunk]:
    line, read, rest = 1, 0, []  # rest: blocks since the last line's end

    def chunk(data: bytes) -> Chunk:
        return Chunk(file=str(path), data=data, line=line, read_bytes=read)

    for block, size in _blocks(path):
        read += size
        first, last = block.find(b"\n"), block.rfind(b"\n")
        length = sum(map(len, rest)) + (len(block) if first < 0 else first)
        if length > reading.most_line_bytes:
            raise UserError(
                f"{path}, line {line} has more than {reading.most_line_bytes:,} bytes; cut it, "
                "or raise most_line_bytes"
            )
        if last < 0:
            rest.append(block)
            continue
        data = b"".join([*rest, block[:last]])
        yield chunk(data)
        line += data.count(b"\n") + 1
        read, rest = 0, [block[last + 1 :]] if last + 1 < len(block) else []
    if rest or read:
        yield chunk(b"".join(rest))


def _part_chunks(path: Path, cuts: re.Pattern | None, most: int) -> Iterator[Chunk]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, read, place, first = "", 0, 0, True
    for block, size in _blocks(path):
        read += size
        if b"\0" in block:
            raise UserError(
                f"{path} is not text: NUL at byte offset {place + block.index(0)}; leave it out, "
                "or convert it to UTF-8 if it is UTF-16 or UTF-32"
            )
        text += _decode(decoder, block, path, place)
        place += len(block)
        if first and text:
            text, first = text.removeprefix(_BYTE_ORDER_MARK), False
        while len(text) > _CHUNK_BYTES and (cut := cuts and cuts.search(text, _CHUNK_BYTES)):
            part, text = text[: cut.start()], text[cut.start() :]
            yield Chunk(file=str(path), texts=[part], part=True, ends=False, read_bytes=read)
            read = 0
        if len(text) > most:
            raise UserError(
                f"{path} has more than {most:,} characters in which it cannot be cut for this "
                "tokenizer; make it several files, or read its lines as documents"
            )
    text += _decode(decoder, b"", path, place)
    yield Chunk(file=str(path), texts=[text], part=True, read_bytes=read)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, place: int) -> str:
    held = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at byte offset "
            f"{place - held + error.start}; convert it (iconv -t UTF-8), or leave it out"
        ) from None


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """(block, bytes read from the file for it): the file's content, unpacked."""
    suffix, read = path.suffix.lower(), 0
    with open_file(path) as file:
        stream = file
        if suffix == ".gz":
            stream = gzip.GzipFile(fileobj=file)
        elif suffix == ".zst":
            stream = _library("pyarrow", ".zst").input_stream(file, compression="zstd")
        try:
            while block := stream.read(_CHUNK_BYTES):
                before, read = read, file.tell()
                yield block, read - before
        except (EOFError, zlib.error) as error:
            raise UserError(f"cannot read {path}: {reason(error)}; copy it again") from None


def _parquet_chunks(path: Path, reading: Reading) -> Iterator[Chunk]:
    parquet, pyarrow = (_library(name, ".parquet") for name in ("pyarrow.parquet", "pyarrow"))
    field, size = reading.field, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise UserError(f"{path} has no column {field!r}, but {', '.join(names)}")
            kind = file.schema_arrow.field(field).type
            inner = getattr(kind, "value_type", kind)
            if not (pyarrow.types.is_string(inner) or pyarrow.types.is_large_string(inner)):
                raise UserError(f"{path}: column {field!r} holds {kind}, not text or lists of text")
            rows = max(1, file.metadata.num_rows)
            texts: list[Text] = []
            read = length = 0
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                some = [text for text in batch.column(0).to_pylist() if text is not None]
                texts += some
                length += batch.nbytes
                read += size * batch.num_rows // rows
                if length >= _CHUNK_BYTES:
                    yield Chunk(file=str(path), texts=texts, read_bytes=read)
                    texts, read, length = [], 0, 0
            yield Chunk(file=str(path), texts=texts, read_bytes=read)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{what} files need the library {name}; pip install 'mtx[data]'") from None
