"""Files of text to chunks, in bounded memory: plain text, JSON lines and Parquet.

A chunk is what one worker encodes at a time. JSON lines and texts may be compressed (.gz, .zst).
"""

from __future__ import annotations

import codecs
import importlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from mtx.errors import UserError
from mtx.files import files_in, open_file, parse_json
from mtx.paths import user_path

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_PACKED_SUFFIXES = (".gz", ".zst")
_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES)
_CHUNK_BYTES = 2**19
# Read at once. What is packed may grow 1,000-fold (gz) and 40,000-fold (zst) when it is unpacked.
_READ_BYTES = {".gz": 2**16, ".zst": 2**11}
_BYTE_ORDER_MARK = "\ufeff"

Text = str | list[str]  # a document, or its sentences


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of one file, as it was read."""

    file: str
    kind: Literal["json", "lines", "part", "texts"]
    data: bytes | str | list[Text]  # lines: bytes; a part of a document: str
    line: int = 0  # of lines: the number of the first, from 1
    ends: bool = True  # of a part: whether the document ends with it
    read_bytes: int = 0  # read from the file for this chunk, packed as they are


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents."""

    field: str = "text"  # of JSON lines and Parquet
    lines: bool = False  # a line of a text file is a document, instead of the file
    most_line_bytes: int = 2**26


def find_files(names: Sequence[str]) -> list[Path]:
    """The files that are named and those in the folders that are, in the order of their names.

    Raises UserError where there are none, or one is of no kind that can be read.
    """
    files = []
    for name in names:
        path = user_path(name)
        if path.is_dir():
            inside = ((file, file.relative_to(path)) for file in files_in(path))
            files += [
                f for f, below in inside if _kind(f) and not re.search(r"(^|/)\.", str(below))
            ]
            continue
        if not path.is_file():
            raise UserError(f"{name} must be a file or a folder (from {Path.cwd()})")
        if not _kind(path):
            raise UserError(
                f"{name} is of no kind that can be read: {', '.join(_SUFFIXES)}, these with "
                f"{' or '.join(_PACKED_SUFFIXES)}, or {PARQUET_SUFFIXES[0]}"
            )
        files.append(path)
    if not files:
        raise UserError(f"no files to read in {', '.join(names) or 'nothing'}; name files of text")
    return files


def read_chunks(
    files: Iterable[Path], reading: Reading, *, cuts: re.Pattern | None, most_characters: int
) -> Iterator[Chunk]:
    """The files' chunks in order. A text that is one document is cut at `cuts`, or not at all.

    Raises UserError for what cannot be read, unpacked or decoded, for a line of more than
    `reading.most_line_bytes`, and for a document that cannot be cut below `most_characters`.
    """
    for path in files:
        kind = _kind(path)
        if kind == "parquet":
            yield from _parquet_chunks(path, reading)
        elif kind == "text" and not reading.lines:
            yield from _part_chunks(path, cuts, most_characters)
        else:
            yield from _line_chunks(path, "json" if kind == "json" else "lines", reading)


def texts_of(chunk: Chunk, reading: Reading) -> list[Text]:
    """The documents of a chunk, or the one part of a document."""
    if chunk.kind == "texts":
        return chunk.data
    if chunk.kind == "part":
        return [chunk.data]
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
    lines = enumerate(text.split("\n"), chunk.line)
    if chunk.kind == "lines":
        return [line.removesuffix("\r") for _, line in lines if line.strip()]
    return [
        _field_of(line, reading.field, f"{chunk.file}, line {number}")
        for number, line in lines
        if line.strip()
    ]


def read_texts(
    names: Sequence[str], reading: Reading, *, cuts: re.Pattern, most_bytes: int | None = None
) -> Iterator[str]:
    """The text of the files and folders in `names`, document by document, a long one in parts cut
    at `cuts`; as much of it as is above `most_bytes` of UTF-8, where that is given."""
    read = 0
    chunks = read_chunks(find_files(names), reading, cuts=cuts, most_characters=_CHUNK_BYTES * 8)
    for chunk in chunks:
        for text in texts_of(chunk, reading):
            text = text if isinstance(text, str) else " ".join(text)
            yield text
            read += len(text.encode())
            if most_bytes is not None and read >= most_bytes:
                return


def read_whole(path: Path) -> str:
    """A text file's one document, in memory; UserError as for `read_chunks`."""
    return "".join(chunk.data for chunk in _part_chunks(path, re.compile(""), _CHUNK_BYTES * 8))


def _field_of(line: str, field: str, where: str) -> Text:
    record = parse_json(line, where)
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where} has no field {field!r}, but {has or 'nothing'}; name another")
    text = record[field]
    parts = text if isinstance(text, list) else [text]
    for part in parts:
        if not isinstance(part, str):
            kind = type(part).__name__
            raise UserError(f"{where}: field {field!r} holds {kind}, not text or a list of texts")
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: field {field!r} has half of a surrogate pair, "
                f"\\u{ord(part[error.start]):04x}, which is no character; mend the line"
            ) from None
    return text


def _kind(path: Path) -> Literal["text", "json", "parquet"] | None:
    name = path.name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return "parquet"
    name = next((name.removesuffix(s) for s in _PACKED_SUFFIXES if name.endswith(s)), name)
    if name.endswith(JSON_SUFFIXES):
        return "json"
    return "text" if name.endswith(TEXT_SUFFIXES) else None


def _line_chunks(path: Path, kind: Literal["json", "lines"], reading: Reading) -> Iterator[Chunk]:
    line, read, rest = 1, 0, []  # rest: blocks since the last line's end

    def chunk(data: bytes) -> Chunk:
        return Chunk(file=str(path), kind=kind, data=data, line=line, read_bytes=read)

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
            yield Chunk(file=str(path), kind="part", data=part, ends=False, read_bytes=read)
            read = 0
        if len(text) > most:
            raise UserError(
                f"{path} has more than {most:,} characters in which it cannot be cut for this "
                "tokenizer; make it several files, or read its lines as documents"
            )
    text += _decode(decoder, b"", path, place)
    yield Chunk(file=str(path), kind="part", data=text, read_bytes=read)


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
    suffix = path.suffix.lower()
    with open_file(path) as file:
        blocks = iter(lambda: file.read(_READ_BYTES.get(suffix, _CHUNK_BYTES)), b"")
        if suffix == ".gz":
            yield from _unpacked(path, blocks, lambda: zlib.decompressobj(wbits=31))
        elif suffix == ".zst":
            zstandard = _library("zstandard", ".zst")
            yield from _unpacked(path, blocks, zstandard.ZstdDecompressor().decompressobj)
        else:
            yield from ((block, len(block)) for block in blocks)


def _unpacked(path: Path, blocks: Iterator[bytes], start) -> Iterator[tuple[bytes, int]]:
    """What `start`'s objects make of the blocks: one after the other, as files can be appended."""
    unpacker, begun, read, waiting = start(), False, 0, bytearray()
    for block in blocks:
        read, left = read + len(block), block
        while left:
            try:
                waiting += unpacker.decompress(left)
            except Exception as error:  # zlib.error, ZstdError
                raise UserError(f"{path} is damaged: {error}; copy it again") from None
            begun, left = True, b""
            if unpacker.eof:
                left, begun = unpacker.unused_data.lstrip(b"\0"), False  # zeros: padding of tapes
                unpacker = start()
        while len(waiting) >= _CHUNK_BYTES:
            yield bytes(waiting[:_CHUNK_BYTES]), read
            del waiting[:_CHUNK_BYTES]
            read = 0
    if begun:
        raise UserError(f"{path} is cut short: its packed data do not end; copy it again")
    if waiting or read:
        yield bytes(waiting), read


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
            texts, read, length = [], 0, 0
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                some = [text for text in batch.column(0).to_pylist() if text is not None]
                texts += some
                length += batch.nbytes
                read += size * batch.num_rows // rows
                if length >= _CHUNK_BYTES:
                    yield Chunk(file=str(path), kind="texts", data=texts, read_bytes=read)
                    texts, read, length = [], 0, 0
            yield Chunk(file=str(path), kind="texts", data=texts, read_bytes=read)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def _library(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{what} files need the library {name}; pip install 'mtx[data]'") from None
