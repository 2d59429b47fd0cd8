"""Which chunks of a dataset are similar: their embeddings, and the nearest chunks of each.

The embedding that needs no model counts runs of one, two and three tokens: each run is hashed to
one of the dims and a sign (Weinberger et al. 2009), and weighted by ln(chunks / chunks with its
bucket), so that runs that occur everywhere count for nothing; the vector is then scaled to length
1. It depends on tokens alone. Better embeddings come from a model (`mtx.train.embedding`), as the
paper's come from BERT.

The nearest chunks are those with the largest inner product, found by an index of faiss (Johnson et
al. 2017); equal ones are in the order of their numbers.

n chunks · M tokens of one · d dims
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from mtx.data.neighbours import ChunkedDataset
from mtx.errors import UserError

HASHED_DIMS = 512
_RUNS = (1, 2, 3)
_BUCKETS = 2**18
_BLOCK = 4096  # chunks at a time
_MORE = 16  # neighbours asked for beyond those wanted, at first

Report = Callable[[str, int, int], None]  # (what is done, how many are done, of how many)


class Embedding(Protocol):
    """Makes vectors of chunks."""

    @property
    def described(self) -> dict:
        """What the vectors depend on, for the file of neighbours."""
        ...

    def __call__(self, tokens_nM: np.ndarray) -> np.ndarray:
        """float32 [n, d] of length 1."""
        ...


class HashedEmbedding:
    """An embedding by hashed runs of tokens."""

    def __init__(self, blocks: Callable[[], Iterator[np.ndarray]], dims: int = HASHED_DIMS):
        """blocks: the chunks that runs are counted in, [n, M] at a time."""
        self._dims, chunks = dims, 0
        holding = np.zeros(_BUCKETS, np.int64)
        for tokens_nM in blocks():
            chunks += len(tokens_nM)
            buckets = np.sort((_runs_of(tokens_nM) % np.uint64(_BUCKETS)).astype(np.int64))
            is_new = np.diff(buckets, prepend=-1) > 0
            holding += np.bincount(buckets[is_new], minlength=_BUCKETS)
        self._weights = np.log(max(chunks, 1) / np.maximum(holding, 1)).astype(np.float32)

    @property
    def described(self) -> dict:
        return {"kind": "hashed runs of tokens", "runs": list(_RUNS), "dims": self._dims}

    def __call__(self, tokens_nM: np.ndarray) -> np.ndarray:
        hashes = _runs_of(tokens_nM)
        weights = self._weights[(hashes % np.uint64(_BUCKETS)).astype(np.int64)]
        signs = 1 - 2 * (hashes >> np.uint64(63)).astype(np.float32)
        dims = (hashes >> np.uint64(20)) % np.uint64(self._dims)
        flat = dims.astype(np.int64) + self._dims * np.arange(len(hashes))[:, None]
        size = len(hashes) * self._dims
        sums = np.bincount(flat.ravel(), (signs * weights).ravel(), minlength=size)
        return unit_length(sums.reshape(-1, self._dims))


def unit_length(vectors_nd: np.ndarray) -> np.ndarray:
    """The vectors scaled to length 1, float32 [n, d]; a vector of zeros stays zero."""
    lengths = np.linalg.norm(vectors_nd.astype(np.float64), axis=1, keepdims=True)
    return (vectors_nd / np.maximum(lengths, 1e-12)).astype(np.float32)


def _runs_of(tokens_nM: np.ndarray) -> np.ndarray:
    """uint64 [n, runs]: a hash of each run of tokens."""
    tokens = _mixed(tokens_nM.astype(np.uint64))
    found, run = [], np.zeros_like(tokens)
    for length in range(1, max(_RUNS) + 1):
        run = _mixed(run[:, : tokens.shape[1] - length + 1] + tokens[:, length - 1 :])
        if length in _RUNS:
            found.append(run)
    return np.concatenate(found, axis=1)


def _mixed(a: np.ndarray) -> np.ndarray:
    """Bits that look random (Steele et al. 2014, SplitMix64)."""
    a = a + np.uint64(0x9E3779B97F4A7C15)
    a = (a ^ (a >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    a = (a ^ (a >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return a ^ (a >> np.uint64(31))


def blocks_of(
    dataset: ChunkedDataset, first: int, end: int, fill: int
) -> Callable[[], Iterator[np.ndarray]]:
    """A function whose every call gives these chunks' tokens, int32 [n, M] at a time."""

    def blocks():
        for start in range(first, end, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, end))
            yield dataset.chunks(numbers, dataset.chunk, fill)

    return blocks


def find_neighbours(
    dataset: ChunkedDataset, embed: Embedding, *, neighbours: int, split: str, fill: int,
    index: str = "Flat", report: Report = lambda *_: None,
) -> np.ndarray:  # fmt: skip
    """int64 [chunks, neighbours]: for each chunk the nearest ones of other documents, among those
    that `split` trains on. index: a string for faiss's index_factory.

    UserError if a chunk has fewer than these."""
    first, end = dataset.to_train_on(split)
    found = np.empty((dataset.chunk_count, neighbours), np.int64)
    made = _make_index(dataset, embed, first, end, fill, index, report)
    for start in range(0, dataset.chunk_count, _BLOCK):
        stop = min(start + _BLOCK, dataset.chunk_count)
        numbers = np.arange(start, stop)
        vectors = embed(dataset.chunks(numbers, dataset.chunk, fill))
        found[start:stop] = _search(dataset, made, vectors, numbers, first, neighbours)
        report("searched", stop, dataset.chunk_count)
    return found


def _make_index(dataset, embed, first: int, end: int, fill: int, factory: str, report) -> Any:
    try:
        faiss = importlib.import_module("faiss")
    except ImportError:
        raise UserError("an index needs the library faiss; pip install 'mtx[retro]'") from None
    if first == end:
        raise UserError(f"{dataset.prefix}: the split leaves no document to look for neighbours in")
    vectors = []
    for block in blocks_of(dataset, first, end, fill)():
        vectors.append(embed(block))
        report("embedded", sum(map(len, vectors)), end - first)
    vectors = np.concatenate(vectors)
    try:
        made = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        made.train(vectors)
        made.add(vectors)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[-1][:200]
        raise UserError(
            f"index={factory!r} cannot be made of {len(vectors):,} chunks: {said}; use Flat, or "
            "another string of faiss's index_factory"
        ) from None
    return made


def _search(
    dataset: ChunkedDataset, made: Any, vectors, numbers, first: int, neighbours: int
) -> np.ndarray:
    """int64 [n, neighbours]: asks for more until enough are of other documents."""
    found = np.full((len(numbers), neighbours), -1)
    documents, rows, asked = dataset.documents_of(numbers), np.arange(len(numbers)), neighbours
    while len(rows):
        asked = min(asked + _MORE, made.ntotal)
        scores, places = made.search(vectors[rows], asked)
        left = []
        for row, score, place in zip(rows.tolist(), scores, places):
            others = (place >= 0) & (dataset.documents_of(place + first) != documents[row])
            best = np.lexsort((place[others], -score[others]))[:neighbours]
            if len(best) == neighbours:
                found[row] = place[others][best] + first
            else:
                left.append(row)
        if left and asked == made.ntotal:
            raise UserError(
                f"{dataset.prefix}: for chunk {numbers[left[0]]} of document "
                f"{documents[left[0]]} fewer than neighbours={neighbours} chunks of other documents"
                " are found; use more documents, fewer neighbours, or index=Flat"
            )
        rows, asked = np.array(left, np.int64), 4 * asked
    return found
