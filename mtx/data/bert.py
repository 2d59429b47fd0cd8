"""What a BERT trains on: [CLS] A [SEP] B [SEP] with masked tokens, from text or indexed datasets.

B batch rows · S sequence. A sample is a pure function of the sentences, the seed and its number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from mtx.config import DataConfig
from mtx.data.batches import Batch
from mtx.data.blend import blend_all, blend_by_weights, normalize_weights
from mtx.data.build import split_sentences
from mtx.data.cache import CacheError
from mtx.data.documents import hold_out, read_documents
from mtx.data.indexed import IndexedDataset, token_type
from mtx.data.masked import Masking, mask_words
from mtx.data.pairs import Pairs, SentenceList, Sentences, least_sentences, rng_of
from mtx.data.special_tokens import BertVocab, find_bert_vocab
from mtx.data.split import Division, divide
from mtx.data.tokenizer import ByteTokenizer, Tokenizer
from mtx.data.tokenizer_files import load_tokenizer
from mtx.data.wordpiece import WORDPIECE, train_wordpiece
from mtx.errors import UserError


class BertSample(NamedTuple):
    """n of S places are taken."""

    tokens: np.ndarray  # int32 [n], some of them masked
    targets: np.ndarray  # int32 [n], as they were
    places: np.ndarray  # of those that are to be predicted, in rising order
    second: int  # where the second text begins; n where there is none
    order: int  # see `Pair`


class SampleSource(Protocol):
    """Samples by their number, without an end."""

    vocab: BertVocab
    sequence: int

    def __getitem__(self, index: int) -> BertSample: ...


class BertSamples:
    """The samples of some documents of a corpus."""

    def __init__(
        self,
        source: Sentences,
        vocab: BertVocab,
        *,
        sequence: int,
        config: DataConfig,
        part: Division | None = None,
        cache: str | None = None,
        name: str = "the text",
    ):
        """part: of the documents, by default all. Raises UserError as `Pairs` does."""
        self.vocab, self.sequence, self._name = vocab, sequence, name
        self._masking = Masking(fraction=config.mask_fraction, run=config.mask_run)
        self._seed = config.seed
        special = 2 if config.order == "none" else 3
        self._pairs = Pairs(
            source, part=part or Division(first=0, end=len(source.documents) - 1),
            room=sequence - special, order=config.order, short_fraction=config.short_fraction,
            seed=config.seed, cache=cache, name=name,
        )  # fmt: skip

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._pairs)

    @property
    def distinct(self) -> int:
        """The samples before a pair is given twice."""
        return len(self)

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return self._pairs.tokens

    def __getitem__(self, index: int) -> BertSample:
        """Sample `index`: the same pair as one epoch before, cut and masked in another way."""
        rng, special = rng_of(self._seed, index), self.vocab.special
        first, second, order = self._pairs.pair(index, rng)
        parts = [[special.cls], first, [special.sep]]
        if order >= 0:
            parts += [second, [special.sep]]
        targets = np.concatenate(parts).astype(np.int32)
        if targets.max() >= self.vocab.size or targets.min() < 0:
            wrong = targets[(targets >= self.vocab.size) | (targets < 0)][0]
            raise UserError(
                f"{self._name}: sample {index} holds token {wrong}, outside of the vocabulary of "
                f"{self.vocab.size:,}; use the tokenizer that made the dataset"
            )
        tokens, places = mask_words(targets, self.vocab, rng, self._masking)
        return BertSample(tokens, targets, places, 2 + len(first), order)


@dataclass(frozen=True, kw_only=True, eq=False)
class BertCorpus:
    """Training and held-out samples: a `Corpus`."""

    tokenizer: Tokenizer
    train: SampleSource
    held_out: SampleSource
    held_out_samples: int  # of these, each is another
    train_tokens: int
    eval_tokens: int
    source: str  # for people: where it comes from, and what is held out of it

    @property
    def vocab(self) -> int:
        """Every token is below it."""
        return self.tokenizer.vocab

    def describe(self) -> str:
        return (
            f"{self.source}; {self.train_tokens:,} tokens to train on, {self.eval_tokens:,} held "
            f"out; {self.tokenizer.name} tokenizer, vocab {self.vocab:,}"
        )

    def batch(self, consumed: int, rows: int, local: Sequence[int] | None = None) -> Batch:
        """See `make_bert_batch`."""
        return make_bert_batch(self.train, consumed, rows, local=local)

    def eval_batches(
        self, count: int, rows: int, local: Sequence[int] | None = None
    ) -> list[Batch]:
        """See `Corpus`."""
        last = min(count * rows, self.held_out_samples)
        return [
            make_bert_batch(
                self.held_out, first, rows, local=local, filled=min(rows, last - first)
            )
            for first in range(0, last, rows)
        ]  # fmt: skip


def make_bert_batch(
    source: SampleSource,
    consumed: int,
    rows: int,
    *,
    local: Sequence[int] | None = None,
    filled: int | None = None,
) -> Batch:
    """The `rows` (B) samples after the first `consumed`.

    tokens int32 [B, S], targets int32 [B, S], weights float32 [B, S] (1 where a token is to be
    predicted), types int32 [B, S] (1 in the second text and at its end), segments int32 [B, S] (0
    for padding, 1 for the rest) and order int32 [B].
    local: the rows to read, where this process needs no others; filled: those that there are. The
    others are padding with weight 0 and order -1.
    """
    if consumed < 0 or rows < 1:
        raise ValueError(f"{consumed=} must be at least 0 and {rows=} at least 1")
    shape = rows, source.sequence
    batch = {
        "tokens": np.full(shape, source.vocab.special.pad, np.int32),
        "targets": np.full(shape, source.vocab.special.pad, np.int32),
        "weights": np.zeros(shape, np.float32),
        "types": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32),
        "order": np.full(rows, -1, np.int32),
    }
    wanted = range(rows) if local is None else (int(row) for row in local)
    for row in wanted:
        if filled is not None and row >= filled:
            continue
        sample = source[consumed + row]
        length = len(sample.tokens)
        batch["tokens"][row, :length] = sample.tokens
        batch["targets"][row, :length] = sample.targets
        batch["weights"][row, sample.places] = 1
        batch["types"][row, sample.second : length] = 1
        batch["segments"][row, :length] = 1
        batch["order"][row] = sample.order
    return batch


def load_sentences(config: DataConfig, *, sequence: int) -> BertCorpus:
    """Reads, splits and tokenizes the text that `config` names, for samples of S tokens.

    The split into training and held-out text comes first; then documents are cut into sentences
    (see `split_sentences`). Raises UserError for text that cannot be read, that makes no sample on
    either side, and for a tokenizer without BERT's special tokens.
    """
    documents = read_documents(config.path)
    split = hold_out(documents.texts, fraction=config.eval_fraction, seed=config.seed)
    if config.tokenizer == WORDPIECE:
        tokenizer = train_wordpiece(split.train, vocab=config.bpe_vocab)
    else:
        tokenizer = load_bert_tokenizer(config)
    vocab, sides = find_bert_vocab(tokenizer), {}
    for name, texts in (("training text", split.train), ("held-out text", split.held_out)):
        sides[name] = BertSamples(
            _encode(texts, tokenizer), vocab, sequence=sequence, config=config, name=f"the {name}"
        )
    train, held_out = sides.values()
    return BertCorpus(
        tokenizer=tokenizer, train=train, held_out=held_out, held_out_samples=held_out.distinct,
        train_tokens=train.tokens, eval_tokens=held_out.tokens,
        source=f"{documents.source}, {split.describe()}",
    )  # fmt: skip


def load_bert_tokenizer(config: DataConfig, *, eod: int | None = None) -> Tokenizer:
    """The tokenizer that `config` names; eod: its end-of-document token, if that is "auto"."""
    if config.tokenizer == WORDPIECE:
        raise UserError(
            "tokenizer='wordpiece' is trained on text, and the data path names datasets; name the "
            "tokenizer that made them"
        )
    if config.tokenizer in (ByteTokenizer.kind, "bpe"):
        raise UserError(
            f"tokenizer={config.tokenizer!r} has no [MASK] and the like, which a "
            "BERT needs; use its tokenizer.json or vocab.txt, or wordpiece, trained on the text"
        )
    return load_tokenizer(config.tokenizer, eod=eod if config.eod == "auto" else config.eod)


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> SentenceList:
    sentences = [split_sentences(text) for text in texts]
    ids = iter(tokenizer.encode_all([one for some in sentences for one in some]))
    encoded = [[next(ids) for _ in some] for some in sentences]
    kept = [[one for one in some if len(one)] for some in encoded]
    return SentenceList(kept, token_type(tokenizer.vocab))


# --- indexed datasets -----------------------------------------------------------------------------


def open_sentences(
    config: DataConfig,
    prefixes: Sequence[str],
    weights: Sequence[float] | None,
    *,
    sequence: int,
    samples: int,
    eval_samples: int,
    cache: str | os.PathLike,
    source: str,
) -> BertCorpus:
    """The train and valid parts of datasets whose sequences are sentences, split by documents.

    cache: the folder of indices, which is done without where it cannot be written, unless `config`
    names it. Raises UserError as `load_sentences`, `IndexedDataset` and `Pairs` do.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    made = next((dataset.identity for dataset in datasets if dataset.identity), None)
    tokenizer = load_bert_tokenizer(config, eod=made and made.eod)
    vocab = find_bert_vocab(tokenizer)
    for dataset in datasets:
        dataset.require_tokenizer(tokenizer.identity)

    def open_part(part: str, samples: int, cache) -> BertSamples | BertBlend:
        parts = [
            BertSamples(
                dataset, vocab, sequence=sequence, config=config, cache=cache,
                part=divide_documents(dataset, config, part),
                name=f"{dataset.prefix}, part {part!r} of split={config.split!r}",
            )
            for dataset in datasets
        ]  # fmt: skip
        return parts[0] if len(parts) == 1 else BertBlend(parts, weights, samples)

    def open_parts(cache):
        return open_part("train", samples, cache), open_part("valid", eval_samples, cache)

    cut = any(divide_documents(dataset, config, "train").cut for dataset in datasets)
    each = " of each document's sentences" if cut else ""
    try:
        train, held_out = open_parts(cache)
    except CacheError:
        if config.cache:
            raise
        source += f", indices in memory since {cache} cannot be written"
        train, held_out = open_parts(None)
    return BertCorpus(
        tokenizer=tokenizer, train=train, held_out=held_out, held_out_samples=held_out.distinct,
        train_tokens=train.tokens, eval_tokens=held_out.tokens,
        source=f"{source}, split {config.split}{each}",
    )  # fmt: skip


def divide_documents(dataset: IndexedDataset, config: DataConfig, part: str) -> Division:
    """What a part has of the documents: whole ones where those make samples, or else sentences."""
    least, documents = least_sentences(config.order), 2 if config.order == "nsp" else 1
    return divide(
        np.diff(dataset.documents), config.split, part, by=config.split_by,
        serves=lambda counts: np.count_nonzero(counts >= least) >= documents,
    )  # fmt: skip


class BertBlend:
    """Samples of several datasets by their weights, or all of them, epoch after epoch."""

    def __init__(self, parts: Sequence[BertSamples], weights: Sequence[float] | None, samples: int):
        """weights: their first `samples` in that proportion, of which the first are the same
        whatever `samples` is. None: every sample of each, in proportion throughout."""
        self._parts, sizes = parts, [len(part) for part in parts]
        self.vocab, self.sequence = parts[0].vocab, parts[0].sequence
        self.tokens = sum(part.tokens for part in parts)
        self._epochs = weights is None
        if weights is None:
            self._part, self._sample = blend_all(sizes)
            self.distinct = len(self._part)
        else:
            shares = normalize_weights(weights)
            self._part, self._sample = blend_by_weights(shares, samples)
            counts = zip(sizes, shares.tolist(), strict=True)
            self.distinct = min(samples, *(int(n / share) for n, share in counts if share))

    def __getitem__(self, index: int) -> BertSample:
        epoch, place = divmod(index, len(self._part)) if self._epochs else (0, index)
        if place >= len(self._part):
            raise IndexError(f"sample {index} of a blend of {len(self._part):,}; ask for more")
        part = self._parts[self._part[place]]
        return part[int(self._sample[place]) + epoch * len(part)]
