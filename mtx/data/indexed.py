"""Megatron-LM's indexed datasets: `<prefix>.bin` holds tokens, `<prefix>.idx` says where they lie.

Little-endian, packed, nothing aligned; N sequences, D - 1 documents:

    9 bytes  MMIDIDX, two zeros      8N  i64[N]  byte offset of each sequence in .bin
    u64      version, 1              8D  i64[D]  0, then the sequences up to each document's end
    u8       type of the tokens      N   i8[N]   modes, in multimodal datasets only
    u64 N, u64 D
    4N       i32[N]  length of each sequence, in tokens

GPT's datasets have one sequence per document, BERT's one per sentence. The sequences lie in .bin
one after the other, so all tokens are one array and a document is a slice of it.
Beside them, `<prefix>.json` names the tokenizer; datasets made elsewhere have none.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mtx.data.tokenizer_base import TokenizerIdentity
from mtx.errors import UserError
from mtx.files import Name, open_file, read_json
from mtx.paths import check_path

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, N, D: 34 bytes
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # code: numpy's name
_CODES = {np.dtype(name): code for code, name in TYPES.items()}
_UINT16_BELOW = 65_500  # vocabularies from here on take int32, as in Megatron-LM
_BLOCK = 2**20  # sequences that are checked or written at once


def token_type(vocab: int) -> np.dtype:
    """The type in which Megatron-LM stores the tokens of a vocabulary of this size."""
    return np.dtype("<u2" if vocab < _UINT16_BELOW else "<i4")


class IndexedDataset:
    """The sequences and documents of `<prefix>.bin`, memory-mapped: its arrays are views.

    `tokens` [tokens] holds all of them; `lengths` int32 [N] and `offsets` int64 [N] (bytes)
    describe the sequences, `documents` int64 [D] says which sequences each document has (D - 1
    documents), `modes` is int8 [N] or None. Nothing can be written.
    Raises UserError for files that are missing, cut short or inconsistent: the index is read
    through once, so that no later access can reach outside the files.
    """

    def __init__(self, prefix: Name):
        self.prefix = strip_suffix(prefix)
        index = _map(f"{self.prefix}.idx")
        self.dtype, sequences, ends = self._header(index)
        place = HEADER.size
        self.lengths = np.frombuffer(index, "<i4", sequences, place)
        self.offsets = np.frombuffer(index, "<i8", sequences, place + 4 * sequences)
        self.documents = np.frombuffer(index, "<i8", ends, place + 12 * sequences)
        place += 12 * sequences + 8 * ends
        multimodal = place < len(index)
        self.modes = np.frombuffer(index, "<i1", sequences, place) if multimodal else None
        wanted = self._check_sequences()
        self._check_documents()
        data = _map(f"{self.prefix}.bin")
        if len(data) != wanted:
            what = "it is cut short" if len(data) < wanted else "they do not belong together"
            raise UserError(
                f"{self.prefix}.bin has {len(data):,} bytes, but {self.prefix}.idx describes "
                f"{wanted:,}: {what}; copy both files again, or build them again"
            )
        self.tokens = np.frombuffer(data, self.dtype)
        self.identity = read_identity(self.prefix)

    def __str__(self) -> str:
        return self.prefix

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    def __reduce__(self):  # another process maps the files again
        return IndexedDataset, (self.prefix,)

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def text(self, first: int, end: int) -> np.ndarray:
        """The tokens of sequences `first` to `end`, exclusive, as a view."""
        return self.tokens[self.first_token(first) : self.first_token(end)]

    def document(self, index: int) -> np.ndarray:
        """The tokens of all sequences of document `index`, as a view."""
        return self.text(*self.documents[index : index + 2].tolist())

    def document_lengths(self) -> np.ndarray:
        """The tokens of each document, int64 [documents]."""
        ends = np.append(0, np.cumsum(self.lengths, dtype=np.int64))
        return np.diff(ends[self.documents])

    def first_token(self, sequence: int) -> int:
        """Where sequence `sequence` begins in `tokens`; for N, the number of tokens."""
        if sequence == len(self):
            return len(self.tokens)
        return int(self.offsets[sequence]) // self.dtype.itemsize

    def require_vocab(self, vocab: int) -> None:
        """UserError unless every token lies in a vocabulary of this size. Reads all of .bin."""
        for start in range(0, len(self.tokens), 16 * _BLOCK):
            block = self.tokens[start : start + 16 * _BLOCK]
            require_tokens(block, vocab, f"{self.prefix}.bin: block {start:,}")

    def require_tokenizer(self, identity: TokenizerIdentity) -> None:
        """UserError if the dataset says that another tokenizer made it."""
        if self.identity and not self.identity.same_as(identity):
            raise UserError(
                f"{self.prefix} was made with {self.identity}, not with {identity}; use that "
                "tokenizer, or build the dataset again"
            )

    def _header(self, index: mmap.mmap | bytes) -> tuple[np.dtype, int, int]:
        """The tokens' type, N and D, after a check that the file's size is what these require."""
        name = f"{self.prefix}.idx"
        if index[: len(MAGIC)] != MAGIC:
            old = ", the older TNTIDX format" if index[: len(OLD_MAGIC)] == OLD_MAGIC else ""
            raise UserError(
                f"{name} must be a dataset's index, but begins with {bytes(index[:9])!r}{old}, not "
                f"{MAGIC!r}; name the prefix of a .bin and .idx, or make it again"
            )
        if len(index) < HEADER.size:
            raise UserError(f"{name} ends inside its header, at {len(index)} bytes; copy it again")
        _, version, code, sequences, ends = HEADER.unpack_from(index)
        if version != 1 or code not in TYPES:
            raise UserError(
                f"{name} has version {version} and type code {code}, but version 1 and codes "
                f"{', '.join(map(str, TYPES))} are known"
            )
        plain = HEADER.size + 12 * sequences + 8 * ends
        if len(index) not in (plain, plain + sequences) or not ends:
            raise UserError(
                f"{name} has {len(index):,} bytes, but {sequences:,} sequences and {ends:,} "
                f"document indices take {plain:,}: it is cut short or damaged; copy it again"
            )
        return np.dtype(TYPES[code]), sequences, ends

    def _check_sequences(self) -> int:
        """The size that .bin must have, after a check that the sequences follow each other."""
        offset, size = 0, self.dtype.itemsize
        for start in range(0, len(self), _BLOCK):
            lengths = self.lengths[start : start + _BLOCK].astype(np.int64)
            ends = offset + np.cumsum(lengths) * size
            wrong = self.offsets[start : start + _BLOCK] != ends - lengths * size
            wrong |= lengths < 0
            if wrong.any():
                index = start + int(np.argmax(wrong))
                raise UserError(
                    f"{self.prefix}.idx: sequence {index:,} of {self.lengths[index]} tokens is "
                    f"said to begin at byte {self.offsets[index]}, not where the one before it "
                    "ends; the index is damaged, copy it again"
                )
            offset = int(ends[-1])
        return offset

    def _check_documents(self) -> None:
        first, last = self.documents[0], self.documents[-1]
        if first or last != len(self) or (self.documents[1:] < self.documents[:-1]).any():
            raise UserError(
                f"{self.prefix}.idx: the document indices do not rise from 0 to {len(self)}, the "
                "number of sequences; the index is damaged, copy it again"
            )


class IndexedWriter:
    """Writes a dataset, which appears under its name only if the `with` block ends without error.

    >>> with IndexedWriter("corpus", np.uint16) as writer:
    ...     writer.add(np.array([1, 2, 3]))

    Raises UserError if a dataset of that name exists, or a file cannot be written.
    """

    def __init__(self, prefix: Name, dtype, *, identity: TokenizerIdentity | None = None):
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise ValueError(f"tokens cannot be stored as {self.dtype}")
        self._identity = identity
        # Bytes of i32, i64 and i8 arrays, which grow by appending.
        self._lengths, self._ends, self._modes = bytearray(), bytearray(8), bytearray()
        self._begun = 0  # tokens of the sequence that the next `add` continues
        self.tokens = 0  # written so far

    @property
    def sequences(self) -> int:
        return len(self._lengths) // 4

    @property
    def documents(self) -> int:
        return len(self._ends) // 8 - 1

    def __enter__(self) -> IndexedWriter:
        require_new(self.prefix)
        with file_errors(self.prefix):
            self._folder = Path(self.prefix).parent
            self._folder.mkdir(parents=True, exist_ok=True)
            self._part = TemporaryDirectory(prefix=".", suffix=".part", dir=self._folder)
            self._data = open(self._written(".bin"), "xb")
        return self

    def _written(self, suffix: str) -> Path:
        return Path(self._part.name, f"data{suffix}")

    def add(self, tokens: np.ndarray, lengths=None, counts=None, *, modes=None) -> None:
        """Appends whole documents.

        tokens [n]: of any integer type. lengths [sequences]: of the sequences that they make up;
        None: one sequence. counts [documents]: of sequences in each document; None: one document.
        modes: int8 [sequences], in multimodal datasets. ValueError for tokens that the type cannot
        hold and for lengths and counts that do not add up. Tokens given to `begin` come first in
        the first sequence, and are not counted in its length here.
        """
        tokens = np.asarray(tokens)
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths, np.int64)
        counts = np.array([len(lengths)]) if counts is None else np.asarray(counts, np.int64)
        for parts, whole in ((lengths, len(tokens)), (counts, len(lengths))):
            if parts.sum() != whole or (parts < 0).any():
                raise ValueError(f"{parts.tolist()[:8]} must add up to {whole}")
        if modes is not None and len(modes) != len(lengths):
            raise ValueError(f"{len(modes)} modes are not one for each of {len(lengths)} sequences")
        if self._begun and not len(lengths):
            raise ValueError("a sequence was begun and is to be ended")
        lengths = lengths + self._begun * (np.arange(len(lengths)) == 0)
        if (longest := lengths.max(initial=0)) > np.iinfo(np.int32).max:
            raise UserError(f"a sequence of {longest:,} tokens is above the format's 2^31 - 1")
        ends = self.sequences + np.cumsum(counts)
        self._write(tokens)
        self._begun = 0
        self._lengths += lengths.astype("<i4").tobytes()
        self._ends += ends.astype("<i8").tobytes()
        self._modes += b"" if modes is None else np.asarray(modes, np.int8).tobytes()

    def begin(self, tokens: np.ndarray) -> None:
        """Appends part of a sequence, which the next `add` ends: for those larger than memory."""
        self._write(np.asarray(tokens))
        self._begun += len(tokens)

    def _write(self, tokens: np.ndarray) -> None:
        if tokens.dtype.newbyteorder("<") != self.dtype and tokens.size:
            low, high, kind = tokens.min(), tokens.max(), np.iinfo(self.dtype)
            if low < kind.min or high > kind.max:
                raise ValueError(f"tokens {low} to {high} do not go into {self.dtype}")
        with file_errors(self.prefix):
            self._data.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.tokens += len(tokens)

    def __exit__(self, kind, error, trace) -> None:
        with file_errors(self.prefix), self._part:
            with self._data:
                if kind is None:
                    self._finish()

    def _finish(self) -> None:
        """Moves the files into place, the index last: without it there is no dataset."""
        if len(self._modes) not in (0, self.sequences) or self._begun:
            raise ValueError("a sequence has no end, or some have a mode and some have none")
        sync(self._data)
        suffixes = [".bin", ".idx"]
        if self._identity:
            said = json.dumps({"tokenizer": asdict(self._identity)}, indent=1)
            with open(self._written(".json"), "xb") as file:
                file.write(said.encode())
                sync(file)
            suffixes.insert(1, ".json")
        with open(self._written(".idx"), "xb") as file:
            self._write_index(file)
            sync(file)
        require_new(self.prefix)  # another process may have been first
        for suffix in suffixes:
            os.replace(self._written(suffix), self.prefix + suffix)
        sync_folder(self._folder)

    def _write_index(self, file) -> None:
        code = _CODES[self.dtype]
        file.write(HEADER.pack(MAGIC, 1, code, self.sequences, self.documents + 1))
        file.write(self._lengths)
        lengths, offset = np.frombuffer(self._lengths, "<i4"), 0
        for start in range(0, len(lengths), _BLOCK):
            sizes = lengths[start : start + _BLOCK].astype("<i8") * self.dtype.itemsize
            ends = offset + np.cumsum(sizes)
            file.write((ends - sizes).data)
            offset = int(ends[-1])
        file.write(self._ends)
        file.write(self._modes)


def require_tokens(tokens: np.ndarray, vocab: int, where: str) -> None:
    """UserError, beginning with `where`, unless all `tokens` are in the vocabulary."""
    if tokens.max() >= vocab or tokens.min() < 0:
        wrong = tokens[(tokens >= vocab) | (tokens < 0)][0]
        raise UserError(
            f"{where} holds token {wrong}, outside of the vocabulary of {vocab:,}; use the "
            "tokenizer that made the dataset"
        )


def strip_suffix(prefix: Name) -> str:
    """The prefix of a dataset; either of its files may be named instead."""
    name = os.path.expanduser(os.fspath(prefix))
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def is_dataset(prefix: Name) -> bool:
    """Whether one of its files exists; reading it checks that the other does, too."""
    return any(os.path.isfile(strip_suffix(prefix) + suffix) for suffix in (".bin", ".idx"))


def require_new(prefix: str) -> None:
    """UserError if a file of a dataset with this prefix exists, or cannot exist."""
    check_path("dataset", prefix)
    for suffix in (".idx", ".bin", ".json"):
        if os.path.lexists(prefix + suffix):
            raise UserError(f"{prefix}{suffix} exists; remove it, or choose another name")


def read_identity(prefix: str) -> TokenizerIdentity | None:
    """The tokenizer that `<prefix>.json` names; None if there is no such file."""
    if not os.path.lexists(f"{prefix}.json"):
        return None
    said = read_json(f"{prefix}.json")
    with suppress(ValueError, KeyError, TypeError):
        return TokenizerIdentity(**said["tokenizer"])
    raise UserError(
        f"{prefix}.json does not name the tokenizer of {prefix}.bin (name, sha256, vocab, eod); "
        "remove it if it is something else"
    )


def sync_folder(folder: Name) -> None:
    """Makes renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(file) -> None:
    """Makes what was written durable."""
    file.flush()
    os.fsync(file.fileno())


def _map(path: str) -> mmap.mmap | bytes:
    """A file's content, memory-mapped; no bytes for an empty file, which cannot be mapped."""
    if not os.path.lexists(path):
        raise UserError(
            f"{path} does not exist (from {Path.cwd()}); a dataset is a .bin and an .idx of one "
            "prefix"
        )
    with open_file(path) as file:
        try:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise UserError(f"cannot read {path}: {error}") from None


@contextmanager
def file_errors(prefix: Name) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {prefix}: {error.strerror or error}") from None
