"""What a BERT trains on: [CLS] A [SEP] B [SEP] with masked tokens.

B batch rows · S sequence. A sample is a pure function of the sentences, the seed and its number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mtx.config import DataConfig
from mtx.data.batches import Batch, Rows, SampleSource, make_batch, rows_to_read
from mtx.data.indexed import IndexedDataset, require_tokens
from mtx.data.masked import Masking, mask_words
from mtx.data.pairs import Pairs, Sentences, least_sentences, rng_of
from mtx.data.special_tokens import BertVocab
from mtx.data.split import Division, divide
from mtx.data.tokenizer_base import Tokenizer
from mtx.files import Name


class BertSample(NamedTuple):
    """A sample that takes n of S places."""

    tokens: np.ndarray  # int32 [n], some of them masked
    targets: np.ndarray  # int32 [n], the tokens before masking
    places: np.ndarray  # of the tokens to predict, in ascending order
    second: int  # where the second text begins; n if there is none
    order: int  # see `Pair`


class BertSamples:
    """The samples of some documents of a corpus."""

    unit = "sentences"  # what a part has a share of

    def __init__(
        self,
        source: Sentences,
        vocab: BertVocab,
        *,
        sequence: int,
        config: DataConfig,
        part: Division | None = None,
        cache: Name | None = None,
        name: str = "the text",
    ):
        """part: which documents, by default all. Raises UserError as `Pairs` does."""
        self.data, self.vocab, self.sequence, self._name = source, vocab, sequence, name
        self.cut = part is not None and part.cut is not None  # whether it has a share of each one
        self._masking = Masking(fraction=config.mask_fraction, run=config.mask_run)
        self._seed = config.seed
        special = 2 if config.order == "none" else 3
        self._pairs = Pairs(
            source, part=part or Division(first=0, end=len(source.documents) - 1),
            room=sequence - special, order=config.order, short_fraction=config.short_fraction,
            seed=config.seed, cache=cache, name=name,
        )  # fmt: skip
        self.part_tokens, self.distinct = self._pairs.tokens, len(self)

    def __str__(self) -> str:
        return self._name

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> BertSample:
        """Sample `index`. Each epoch has the same spans of sentences, but cuts and masks them
        anew."""
        rng, special = rng_of(self._seed, index), self.vocab.special
        first, second, order = self._pairs.pair(index, rng)
        parts = [[special.cls], first, [special.sep]]
        if order >= 0:
            parts += [second, [special.sep]]
        targets = np.concatenate(parts).astype(np.int32)
        require_tokens(targets, self.vocab.size, f"{self._name}: sample {index}")
        tokens, places = mask_words(targets, self.vocab, rng, self._masking)
        return BertSample(tokens, targets, places, 2 + len(first), order)


def make_bert_batch(
    source: SampleSource,
    consumed: int,
    rows: int,
    *,
    local: Rows | None = None,
    filled: int | None = None,
    pad: int,
) -> Batch:
    """Like `make_batch`: tokens int32 [B, S], targets int32 [B, S], weights float32 [B, S] (1 where
    a token is to be predicted), types int32 [B, S] (1 in the second text and its [SEP]), segments
    int32 [B, S] (0 for padding, 1 for the rest) and order int32 [B]. Rows that are not read are
    padding, the token `pad`, with weight 0 and order -1.
    """
    shape, wanted = (rows, source.sequence), rows_to_read(consumed, rows, local, filled)
    batch = {
        "tokens": np.full(shape, pad, np.int32), "targets": np.full(shape, pad, np.int32),
        "weights": np.zeros(shape, np.float32), "types": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32), "order": np.full(rows, -1, np.int32),
    }  # fmt: skip
    for row in wanted:
        sample = source[consumed + row]
        length = len(sample.tokens)
        batch["tokens"][row, :length] = sample.tokens
        batch["targets"][row, :length] = sample.targets
        batch["weights"][row, sample.places] = 1
        batch["types"][row, sample.second : length] = 1
        batch["segments"][row, :length] = 1
        batch["order"][row] = sample.order
    return batch


def batch_maker(
    tokenizer: Tokenizer, vocab: BertVocab | None, *, packed: bool
) -> Callable[..., Batch]:
    """`make_bert_batch` if there is a BERT's `vocab`, otherwise `make_batch`."""
    if vocab is not None:
        return functools.partial(make_bert_batch, pad=vocab.special.pad)
    return functools.partial(make_batch, packed_at=tokenizer.eod if packed else None)


def divide_documents(dataset: IndexedDataset, config: DataConfig, part: str) -> Division:
    """A part's share of the documents: whole ones if these make samples, otherwise sentences."""
    least, documents = least_sentences(config.order), 2 if config.order == "nsp" else 1
    return divide(
        np.diff(dataset.documents), config.split, part, by=config.split_by,
        serves=lambda counts: int(np.count_nonzero(counts >= least)) >= documents,
    )  # fmt: skip
