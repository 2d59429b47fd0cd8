"""Samples to batches, and a corpus: what a run trains and is evaluated on, and the tokenizer.

B batch rows · S sequence. A batch is a pure function of the samples and of how many of them were
consumed before it; that number is the only state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError, require_kind

Batch = dict[str, np.ndarray]
Rows = Sequence[int] | np.ndarray  # row numbers in a batch


class SampleSource(Protocol):
    """Samples by number, epoch after epoch; for GPT they are int32 [sequence + 1]."""

    sequence: int
    distinct: int  # how many samples come before one repeats
    part_tokens: int  # tokens in all of its text

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Training and held-out samples."""

    tokenizer: Tokenizer
    train: SampleSource
    held_out: SampleSource
    source: str  # for people: where the samples come from, and what is held out
    make: Callable[..., Batch]  # `make_batch` or `make_bert_batch`
    packed: bool = False

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab

    def describe(self) -> str:
        """One line: the source, the number of tokens on each side, and the tokenizer."""
        packed = "; documents packed" if self.packed else ""
        return (
            f"{self.source}; {self.train.part_tokens:,} tokens to train on, "
            f"{self.held_out.part_tokens:,} held out; {self.tokenizer.name} tokenizer, vocab "
            f"{self.vocab:,}{packed}"
        )

    def batch(self, consumed: int, rows: int, local: Rows | None = None) -> Batch:
        """The training batch after the first `consumed` samples; see `make_batch`."""
        return self.make(self.train, consumed, rows, local=local)

    def eval_batches(self, count: int, rows: int, local: Rows | None = None) -> Iterator[Batch]:
        """At most `count` held-out batches, always the same ones, each read on demand. If the
        held-out samples run out sooner, the last batch is padded with rows of weight 0."""
        last = min(count * rows, self.held_out.distinct)
        for first in range(0, last, rows):
            filled = min(rows, last - first)
            yield self.make(self.held_out, first, rows, local=local, filled=filled)


def make_batch(
    source: SampleSource,
    consumed: int,
    rows: int,
    *,
    local: Rows | None = None,
    filled: int | None = None,
    packed_at: int | None = None,
) -> Batch:
    """The `rows` (B) samples after the first `consumed`.

    tokens int32 [B, S], targets int32 [B, S] (the tokens shifted by one) and weights float32
    [B, S], each target's weight in the loss, here 1. With `packed_at`, the end-of-document token,
    also the segments and positions of `pack_documents`.
    local: the rows to read, if this process needs no others; filled: how many rows have samples.
    All other rows are zero, with weight 0, and cost nothing: their memory is never touched.
    """
    shape = (rows, source.sequence)
    wanted = rows_to_read(consumed, rows, local, filled)
    batch = {
        "tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }  # fmt: skip
    for row in wanted:
        sample = source[consumed + row]
        batch["tokens"][row], batch["targets"][row] = sample[:-1], sample[1:]
        batch["weights"][row] = 1
    if packed_at is not None:
        for name in ("segments", "positions"):
            batch[name] = np.zeros(shape, np.int32)
        packed = pack_documents(batch["tokens"][wanted], packed_at)
        batch["segments"][wanted], batch["positions"][wanted] = packed
    return batch


def rows_to_read(consumed: int, rows: int, local: Rows | None, filled: int | None) -> list[int]:
    """The rows of a batch that are wanted and have samples; see `make_batch`."""
    for name, number in (("consumed", consumed), ("rows", rows)):
        require_kind(name, number, (int, np.integer), "a whole number of samples")
    if consumed < 0 or rows < 1:
        raise UserError(f"{consumed=} must be at least 0 and {rows=} at least 1")
    wanted = range(rows) if local is None else map(int, local)
    return [row for row in wanted if filled is None or row < filled]


def pack_documents(tokens: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), int32 [B, S]: for each token of `tokens` [B, S], which of its row's
    documents it belongs to, from 0, and its place in it. A document ends with the token `eod`.

    This is Megatron-LM's reset of attention mask and positions: attention must stay in a segment.
    """
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int32), (places - starts).astype(np.int32)


@contextmanager
def read_ahead(
    corpus: Corpus,
    consumed: int,
    rows: int,
    *,
    local: Rows | None = None,
    threads: int = 2,
    ahead: int = 4,
) -> Iterator[Iterator[Batch]]:
    """An iterator over the batches of `rows` samples after the first `consumed`, in order.

    The batches are those of `corpus.batch`. Grain reads `ahead` of them in advance, with `threads`
    threads of this process: other processes would read no faster, since a sample is a copy from a
    mapped file, and would have to send it. Raises what `corpus.batch` raises.
    """
    import grain  # loads JAX, which this package does not need elsewhere

    batches = grain.MapDataset.range(2**62 // rows).map(
        lambda step: corpus.batch(consumed + int(step) * rows, rows, local)
    )
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        yield iterator
    finally:
        iterator.close()
