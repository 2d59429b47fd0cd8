"""Text files to an indexed dataset, in many processes; the result does not depend on their number.

One process reads and writes; the others decode and tokenize chunks of about half a megabyte. At
most a few chunks per process wait, so memory does not grow with the files.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mtx.data.indexed import IndexedDataset, IndexedWriter, require_new, token_type
from mtx.data.sources import Chunk, Reading, Text, find_files, read_chunks, texts_of
from mtx.data.subwords import MOST_CHARACTERS
from mtx.data.tokenizer import Tokenizer
from mtx.data.tokenizer_base import TokenizerIdentity
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError
from mtx.fields import checked
from mtx.sizes import Processes

Level = Literal["document", "sentence"]

_WAITING = 3  # chunks per process
# A line's end, or . ! ? with closing quotes or brackets, before a blank and a sentence's opening.
_SENTENCE_END = re.compile(
    r"""\n+|[.!?]+["'\u201d\u2019)\]]*(?=\s+["'\u201c\u2018(\[]*[A-Z0-9\u00c0-\u00de])|[\u3002\uff01\uff1f]+"""
)
_NO_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|No|cf|e\.g|i\.e)|\b[A-Z])\.$")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a worker needs to know."""

    tokenizer: str = "bytes"  # or a file or folder, as `load_tokenizer` takes it
    eod: str = "auto"  # the end-of-document token: its name or number, auto, or none
    level: Level = "document"  # a sequence is a document (GPT) or a sentence (BERT)
    reading: Reading = Reading()

    def load(self) -> Tokenizer:
        """The tokenizer; for BERT, documents have no end token unless one is asked for."""
        bert = self.level == "sentence" and self.eod == "auto"
        return load_tokenizer(self.tokenizer, eod="none" if bert else self.eod)


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was written."""

    dataset: IndexedDataset
    empty: int  # documents without a token, left out
    text_bytes: int  # after decompression


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the build has come."""

    read_bytes: int  # of the files, before decompression
    total_bytes: int
    text_bytes: int  # after decompression
    tokens: int


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A chunk's tokens [n], lengths of its sequences, and counts of sequences in its documents."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    text_bytes: int
    empty: int = 0  # documents left out
    only_end: bool = False  # it is the last part of a document, and has no token of text


def build_dataset(
    inputs: Sequence[str],
    prefix: str,
    recipe: Recipe,
    *,
    processes: int | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Built:
    """Writes `<prefix>.bin`, `.idx` and `.json` from the files and folders named in `inputs`.

    Files are in the order of `inputs` and, within a folder, of their paths; documents are in their
    order in the files. processes: 1 works in this process, None uses one for each CPU. `report` is
    called after each chunk.
    Raises UserError for inputs that cannot be read or hold no text; nothing is written then.
    """
    if processes is None:
        affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        processes = len(affinity(0))
    checked("processes", processes, Processes)
    tokenizer = recipe.load()
    require_new(prefix)
    files = find_files(inputs)
    total, dtype = sum(os.path.getsize(file) for file in files), token_type(tokenizer.vocab)
    cuts = tokenizer.cuts if recipe.level == "document" else None
    chunks = read_chunks(files, recipe.reading, cuts=cuts, most_characters=MOST_CHARACTERS)
    empty = text_bytes = read_bytes = 0
    begun = False  # whether an unfinished document has tokens in earlier chunks
    with IndexedWriter(prefix, dtype, identity=tokenizer.identity) as writer:
        for chunk, encoded in _encode_all(chunks, recipe, tokenizer, processes):
            text_bytes += encoded.text_bytes
            read_bytes += chunk.read_bytes
            if not chunk.ends:
                writer.begin(encoded.tokens)
            elif begun or not encoded.only_end:
                writer.add(encoded.tokens, encoded.lengths, encoded.counts)
                empty += encoded.empty
            else:
                empty += 1
            begun = not chunk.ends and (begun or len(encoded.tokens) > 0)
            report(Progress(
                read_bytes=read_bytes, total_bytes=total, text_bytes=text_bytes,
                tokens=writer.tokens,
            ))  # fmt: skip
        if not writer.documents:
            raise UserError(f"no text in {', '.join(inputs[:3])}: there is nothing to write")
    return Built(dataset=IndexedDataset(prefix), empty=empty, text_bytes=text_bytes)


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, without the blanks around them.

    A sentence ends with its line, or at . ! ? before a capital or a digit, but not after a few
    abbreviations and initials. If that is too simple, give the sentences as a JSON list.
    """
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        if not _NO_END.search(text, max(start, end.end() - 12), end.end()):
            sentences.append(text[start : end.end()])
            start = end.end()
    return [stripped for part in [*sentences, text[start:]] if (stripped := part.strip())]


# --- workers --------------------------------------------------------------------------------------


def _encode_all(
    chunks: Iterable[Chunk], recipe: Recipe, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[Chunk, _Encoded]]:
    """Each chunk with its encoding, in order."""
    if processes == 1:
        yield from ((chunk, _encode_chunk(chunk, recipe, tokenizer)) for chunk in chunks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy the threads' locks
        initializer=_start_worker,
    )
    waiting: deque = deque()
    try:
        for chunk in chunks:
            waiting.append(
                (chunk, pool.submit(_encode_in_worker, chunk, recipe, tokenizer.identity))
            )
            if len(waiting) >= _WAITING * processes:
                chunk, result = waiting.popleft()
                yield chunk, result.result()
        yield from ((chunk, result.result()) for chunk, result in waiting)
    except concurrent.futures.process.BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps for want of memory; use fewer processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough


@functools.lru_cache(maxsize=1)
def _worker_tokenizer(recipe: Recipe, identity: TokenizerIdentity) -> Tokenizer:
    tokenizer = recipe.load()
    if tokenizer.identity != identity:
        raise UserError(f"{recipe.tokenizer} changed while the dataset was built; build it again")
    return tokenizer


def _encode_in_worker(chunk: Chunk, recipe: Recipe, identity: TokenizerIdentity) -> _Encoded:
    return _encode_chunk(chunk, recipe, _worker_tokenizer(recipe, identity))


def _encode_chunk(chunk: Chunk, recipe: Recipe, tokenizer: Tokenizer) -> _Encoded:
    groups = [_sequences(text, recipe.level) for text in texts_of(chunk, recipe.reading)]
    try:
        encoded = tokenizer.encode_all([sequence for group in groups for sequence in group])
    except UserError as error:
        where = f", from line {chunk.line}" if chunk.line else ""
        raise UserError(f"{chunk.file}{where}: {error}") from None
    end = [] if tokenizer.eod is None else [np.array([tokenizer.eod], np.int32)]
    dtype, text_bytes = token_type(tokenizer.vocab), _text_bytes(chunk)
    if chunk.part and recipe.level == "document":
        tokens = np.concatenate([*encoded, *(end if chunk.ends else [])]).astype(dtype)
        return _Encoded(
            tokens=tokens, lengths=np.array([len(tokens)]), counts=np.array([1]),
            text_bytes=text_bytes, only_end=not len(encoded[0]),
        )  # fmt: skip
    ids = iter(encoded)
    parts, lengths, counts = [np.empty(0, np.int32)], [], []
    for group in groups:
        kept = [some for some in (next(ids) for _ in group) if len(some)]
        if kept:
            parts += [*kept, *end]
            lengths += map(len, kept)
            lengths[-1] += len(end)
            counts.append(len(kept))
    return _Encoded(
        tokens=np.concatenate(parts).astype(dtype), lengths=np.array(lengths, np.int64),
        counts=np.array(counts, np.int64), text_bytes=text_bytes, empty=len(groups) - len(counts),
    )  # fmt: skip


def _sequences(text: Text, level: Level) -> list[str]:
    if level == "document":
        return [text if isinstance(text, str) else " ".join(text)]
    return text if isinstance(text, list) else split_sentences(text)


def _text_bytes(chunk: Chunk) -> int:
    if chunk.texts is None:
        return len(chunk.data)
    return sum(len(_sequences(text, "document")[0].encode()) for text in chunk.texts)
