"""Samples to batches, and a corpus: what a run trains on, what it is judged on, whose tokens.

B batch rows · S sequence. A batch is a pure function of the samples and the number of those that
were consumed before it; that number is all the state there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtx.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


class SampleSource(Protocol):
    """Samples of `sequence` + 1 tokens by their number."""

    sequence: int

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [sequence + 1]"""


class Corpus(Protocol):
    """What a training run knows of its data."""

    tokenizer: Tokenizer

    def describe(self) -> str:
        """One line: where from, how many tokens on each side, and the tokenizer."""

    def batch(self, consumed: int, rows: int, local: Sequence[int] | None = None) -> Batch:
        """The training batch after the first `consumed` samples; see `make_batch`."""

    def eval_batches(
        self, count: int, rows: int, local: Sequence[int] | None = None
    ) -> Iterable[Batch]:
        """At most `count` held-out batches, always the same ones. Where what is held out ends
        sooner, there are fewer, the last filled up with rows of weight 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCorpus:
    """A corpus of tokens that are to be predicted one after the other."""

    tokenizer: Tokenizer
    train: SampleSource  # without an end: epoch after epoch
    held_out: SampleSource
    held_out_samples: int  # of these, each is another
    train_tokens: int
    eval_tokens: int
    source: str  # for people: where it comes from, and what is held out of it
    packed: bool = False

    @property
    def vocab(self) -> int:
        """Every token is below it."""
        return self.tokenizer.vocab

    def describe(self) -> str:
        """See `Corpus`."""
        packed = "; documents packed" if self.packed else ""
        return (
            f"{self.source}; {self.train_tokens:,} tokens to train on, {self.eval_tokens:,} held "
            f"out; {self.tokenizer.name} tokenizer, vocab {self.vocab:,}{packed}"
        )

    def batch(self, consumed: int, rows: int, local: Sequence[int] | None = None) -> Batch:
        """See `make_batch`."""
        return make_batch(self.train, consumed, rows, local=local, packed_at=self._packed_at)

    def eval_batches(
        self, count: int, rows: int, local: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """See `Corpus`. Each is read when it is asked for."""
        last = min(count * rows, self.held_out_samples)
        for first in range(0, last, rows):
            yield make_batch(
                self.held_out, first, rows, local=local, packed_at=self._packed_at,
                filled=min(rows, last - first),
            )  # fmt: skip

    @property
    def _packed_at(self) -> int | None:
        return self.tokenizer.eod if self.packed else None


def make_batch(
    source: SampleSource,
    consumed: int,
    rows: int,
    *,
    local: Sequence[int] | None = None,
    filled: int | None = None,
    packed_at: int | None = None,
) -> Batch:
    """The `rows` (B) samples after the first `consumed`.

    tokens int32 [B, S], targets int32 [B, S] (the tokens one place on) and weights float32 [B, S],
    each target's weight in the loss, here 1. With `packed_at`, the end-of-document token, also
    segments and positions of `pack_documents`.
    local: the rows to read, where this process needs no others; filled: those that there are. The
    others are zero, with weight 0, and cost nothing: their memory is never touched.
    """
    if consumed < 0 or rows < 1:
        raise ValueError(f"{consumed=} must be at least 0 and {rows=} at least 1")
    filled = rows if filled is None else filled
    shape = (rows, source.sequence)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }
    wanted = np.arange(rows) if local is None else np.asarray(local)
    wanted = wanted[wanted < filled]
    for row in wanted.tolist():
        sample = source[consumed + row]
        batch["tokens"][row], batch["targets"][row] = sample[:-1], sample[1:]
        batch["weights"][row] = 1
    if packed_at is not None:
        for name in ("segments", "positions"):
            batch[name] = np.zeros(shape, np.int32)
        packed = pack_documents(batch["tokens"][wanted], packed_at)
        batch["segments"][wanted], batch["positions"][wanted] = packed
    return batch


def pack_documents(tokens: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), int32 [B, S]: which of the row's documents a token of `tokens` [B, S]
    belongs to, from 0, and its place therein. A document ends with the token `eod`.

    As Megatron-LM's reset of attention mask and positions: attention is to stay in a segment.
    """
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int32), (places - starts).astype(np.int32)
