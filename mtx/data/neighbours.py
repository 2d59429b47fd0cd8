"""Texts with their neighbours, what a RETRO trains on (Borgeaud et al. 2022, section 2.2).

Each document of a dataset is cut into chunks of M tokens from its beginning; the last chunk is
padded with the end-of-document token. For each chunk, `mtx data neighbours` finds k similar ones
among the chunks of the documents to train on, none of them from its own document, and writes

    <prefix>.neighbours.npy    int32 or int64 [chunks, k]: numbers of chunks, the most similar first
    <prefix>.neighbours.json   what they were made from, and by what; written last

A sample is S tokens from a chunk's beginning on, from documents in GPT's order (`mtx.data.gpt`).
The model is given R tokens of a neighbour: the chunk and what follows it in its document, padded
with the end-of-document token. What is read depends on data, seed and the sample's number alone.

B batch rows · S sequence · M tokens of a chunk · k neighbours of one · R tokens of a neighbour ·
N = S / M k R
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data.arrays import read_array
from mtx.data.batches import Batch, Rows, rows_to_read
from mtx.data.blend import BlendedDataset
from mtx.data.cache import hash_of_array
from mtx.data.gpt import GPTDataset, divide_tokens
from mtx.data.indexed import IndexedDataset, require_tokens
from mtx.data.split import parse_split, split_range
from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError, shown
from mtx.families.retro import Retro
from mtx.files import read_json, replacing

_VERSION = 1
_SAID = {"chunk": int, "neighbours": int, "split": str, "dataset": dict}


class ChunkedDataset(IndexedDataset):
    """A dataset whose documents are cut into chunks, numbered in the order of the dataset.
    `lengths` are rounded up to whole chunks; `own_lengths` are those of `tokens` themselves."""

    def __init__(self, prefix: str, chunk: int):
        """Raises UserError for a dataset of sentences, and as IndexedDataset does."""
        super().__init__(prefix)
        if self.document_count != len(self):
            raise UserError(
                f"{self.prefix} has {len(self):,} sequences of {self.document_count:,} documents; "
                "chunks are of documents, so build it with --level document"
            )
        self.chunk, self.own_lengths = chunk, self.lengths
        counts = -(-self.own_lengths.astype(np.int64) // chunk)
        self.lengths = counts * chunk
        self.first_chunks = np.append(0, np.cumsum(counts))  # int64 [documents + 1]

    def __reduce__(self):
        return ChunkedDataset, (self.prefix, self.chunk)

    @property
    def chunk_count(self) -> int:
        return int(self.first_chunks[-1])

    def documents_of(self, chunks: np.ndarray) -> np.ndarray:
        """int64: the document of each chunk."""
        return np.searchsorted(self.first_chunks, chunks, side="right") - 1

    def read(self, document: int, first: int, end: int, fill: int) -> np.ndarray:
        """int32 [end - first]: a document's tokens at these places, and `fill` beyond its end."""
        begin, own = self.first_token(document), int(self.own_lengths[document])
        out = np.full(end - first, fill, np.int32)
        there = self.tokens[begin + min(first, own) : begin + min(end, own)]
        out[: len(there)] = there
        return out

    def chunks(self, numbers: np.ndarray, size: int, fill: int) -> np.ndarray:
        """int32 [n, size]: the tokens from each chunk on, and `fill` beyond its document's end."""
        documents = self.documents_of(numbers)
        first = (numbers - self.first_chunks[documents]) * self.chunk
        places = first[:, None] + np.arange(size)
        begins = self.offsets[documents, None] // self.dtype.itemsize
        there = places < self.own_lengths[documents, None]
        read = self.tokens[np.where(there, begins + places, 0)]
        return np.where(there, read, fill).astype(np.int32)

    def to_train_on(self, split: str) -> tuple[int, int]:
        """(first, end) of the chunks of the documents that `split` gives to train."""
        first, end = split_range(parse_split(split), "train", len(self))
        return int(self.first_chunks[first]), int(self.first_chunks[end])

    @property
    def fingerprint(self) -> dict:
        """What a file of neighbours is checked against."""
        return {
            "chunks": self.chunk_count, "tokens": len(self.tokens),
            "lengths": hash_of_array(self.own_lengths),
        }  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


def paths_of(prefix: str) -> tuple[Path, Path]:
    """(the array's path, the description's path)"""
    return Path(f"{prefix}.neighbours.npy"), Path(f"{prefix}.neighbours.json")


def write_neighbours(dataset: ChunkedDataset, found: np.ndarray, made: dict) -> None:
    """Writes `found` [chunks, k], numbers of chunks; made: by what. UserError if writing fails."""
    array, description = paths_of(dataset.prefix)
    kind = np.int32 if dataset.chunk_count < 2**31 else np.int64
    said = {
        "version": _VERSION, "chunk": dataset.chunk, "neighbours": found.shape[1], **made,
        "dataset": dataset.fingerprint,
    }  # fmt: skip
    with replacing(description) as written:
        with replacing(array) as path, open(path, "wb") as file:
            np.save(file, found.astype(kind))
        written.write_text(json.dumps(said, indent=1) + "\n")


def read_neighbours(
    dataset: ChunkedDataset, *, neighbours: int, split: str | None = None
) -> np.ndarray:
    """[chunks, k], memory-mapped. UserError if there are none, or if they are of another dataset,
    of other chunks, of documents that `split` holds out, or fewer than `neighbours`."""
    array, description = paths_of(dataset.prefix)
    again = f"mtx data neighbours {dataset.prefix} --chunk {dataset.chunk}"
    if not description.exists():
        raise UserError(f"{dataset.prefix} has no neighbours ({description}); make them: {again}")
    said = read_json(description)
    if not isinstance(said, dict) or said.get("version") != _VERSION:
        raise UserError(f"{description} is of another version; make it again: {again}")
    for name, kind in _SAID.items():
        if type(said.get(name)) is not kind:
            raise UserError(
                f"{description} is damaged: {name}={shown(said.get(name))}; make it again: {again}"
            )
    if said["dataset"] != dataset.fingerprint:
        same = said["chunk"] == dataset.chunk
        what = "another dataset" if same else f"chunks of {said['chunk']}, not {dataset.chunk}"
        raise UserError(f"{description} is of {what}; make it again: {again}")
    if said["neighbours"] < neighbours:
        raise UserError(
            f"{array} has {said['neighbours']} neighbours of a chunk, and the model reads "
            f"{neighbours}; make it again: {again} --neighbours {neighbours}"
        )
    if split is not None and parse_split(said["split"]) != parse_split(split):
        raise UserError(
            f"{array} holds chunks that split={said['split']} trains on, and this run has split="
            f"{split}, which may hold them out; make it again: {again} --split {split}"
        )
    try:
        found = read_array(array)
    except UserError as error:
        raise UserError(f"{error}; make it again: {again}") from None
    if found.shape != (dataset.chunk_count, said["neighbours"]) or found.dtype.kind != "i":
        raise UserError(
            f"{array} is damaged: {found.dtype} {list(found.shape)}; make it again: {again}"
        )
    return found


# -- samples ---------------------------------------------------------------------------------------


class NeighbourSample(NamedTuple):
    """A sample of a text, with its chunks' neighbours."""

    tokens: np.ndarray  # int32 [S + 1]
    real: np.ndarray  # bool [S + 1]: tokens of a document, not padding of its last chunk
    neighbours: np.ndarray  # int32 [N]


class NeighbourSamples:
    """The samples of one part of a dataset, epoch after epoch."""

    unit = "tokens"

    def __init__(
        self, prefix: str, *, model: Retro, config: DataConfig, part: str, vocab: int,
        eod: int, cache: Any = None,
    ):  # fmt: skip
        """Raises UserError as `read_neighbours` does, and for a dataset with too few documents to
        keep them whole in the parts of a split."""
        self._model, self._eod, self._vocab = model, eod, vocab
        self.data = ChunkedDataset(prefix, model.chunk)
        self._found = read_neighbours(self.data, neighbours=model.neighbours, split=config.split)
        self._texts = GPTDataset(
            self.data, sequence=model.sequence, seed=config.seed, endless=True, part=part,
            split=config.split, split_by=config.split_by, cache=cache,
        )  # fmt: skip
        self.cut = self._texts.cut
        if self.cut:
            raise UserError(
                f"split={config.split} would cut each of the {len(self.data):,} documents of "
                f"{prefix}, and chunks with neighbours are of whole ones; use split_by=documents, "
                "with more documents or a shorter sequence"
            )
        self.sequence, self.part_tokens = self._texts.sequence, self._texts.part_tokens
        self.distinct = self._texts.distinct

    def __str__(self) -> str:
        return self.data.prefix

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> NeighbourSample:
        data, chunk, tokens, real, chunks = self.data, self.data.chunk, [], [], []
        for document, first, end in self._texts.places(index):
            tokens.append(data.read(document, first, end, self._eod))
            real.append(np.arange(first, end) < data.own_lengths[document])
            chunks.append(data.first_chunks[document] + np.arange(first, end, chunk) // chunk)
        # The last token, which is only a target, may begin another chunk.
        numbers = np.concatenate(chunks)[: self.sequence // chunk]
        sample = NeighbourSample(
            np.concatenate(tokens), np.concatenate(real), self._retrieved(numbers)
        )
        for what in (sample.tokens, sample.neighbours):
            require_tokens(what, self._vocab, f"{data.prefix}: sample {index}")
        return sample

    def _retrieved(self, numbers: np.ndarray) -> np.ndarray:
        """int32 [N]: the tokens of these chunks' neighbours."""
        found = self._found[numbers, : self._model.neighbours].reshape(-1)
        wrong = found[(found < 0) | (found >= self.data.chunk_count)]
        if wrong.size:
            raise UserError(
                f"{paths_of(self.data.prefix)[0]} is damaged: it names chunk {wrong[0]} of "
                f"{self.data.chunk_count:,}; make it again"
            )
        return self.data.chunks(found, self._model.retrieved, self._eod).reshape(-1)


def make_neighbour_batch(
    source: Any,
    consumed: int,
    rows: int,
    *,
    local: Rows | None = None,
    filled: int | None = None,
    width: int,
) -> Batch:
    """Like `make_batch`, and neighbours int32 [B, N], N = width: see `mtx.layers.retrieval`. A
    target that pads a document's last chunk has weight 0."""
    shape = rows, source.sequence
    batch = {
        "tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32), "neighbours": np.zeros((rows, width), np.int32),
    }  # fmt: skip
    for row in rows_to_read(consumed, rows, local, filled):
        sample = source[consumed + row]
        batch["tokens"][row], batch["targets"][row] = sample.tokens[:-1], sample.tokens[1:]
        batch["weights"][row] = sample.real[1:]
        batch["neighbours"][row] = sample.neighbours
    return batch


def neighbour_batch_maker(model: ModelConfig) -> Callable[..., Batch]:
    """`make_neighbour_batch` for a model."""
    assert isinstance(model, Retro)
    return functools.partial(make_neighbour_batch, width=model.retrieved_tokens)


def check_neighbours(run: RunConfig, prefixes: list[str]) -> None:
    """Raises those UserErrors of `open_with_neighbours` that can be found at once."""
    assert isinstance(run.model, Retro)
    for prefix in prefixes:
        dataset = ChunkedDataset(prefix, run.model.chunk)
        read_neighbours(dataset, neighbours=run.model.neighbours, split=run.data.split)
        for part in ("train", "valid"):
            divide_tokens(
                dataset, part, split=run.data.split, by=run.data.split_by,
                sequence=run.model.sequence,
            )  # fmt: skip


def open_with_neighbours(
    run: RunConfig, prefixes: list[str], weights: list[float] | None, tokenizer: Tokenizer, *,
    part: str, samples: int | None, cache: Any,
) -> NeighbourSamples | BlendedDataset:  # fmt: skip
    """One part of datasets with their neighbours. UserError for a tokenizer without an
    end-of-document token, which pads chunks."""
    assert isinstance(run.model, Retro)
    if tokenizer.eod is None:
        raise UserError(
            f"{prefixes[0]} was made without an end-of-document token, which chunks are filled up "
            "with; build it again with one"
        )
    parts = [
        NeighbourSamples(
            prefix, model=run.model, config=run.data, part=part, vocab=tokenizer.vocab,
            eod=tokenizer.eod, cache=cache,
        )
        for prefix in prefixes
    ]  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    return BlendedDataset(parts, weights, samples=samples, cache=cache)
