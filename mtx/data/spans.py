"""Span corruption, what a T5 trains on (Raffel et al. 2020, section 3.1.4).

A fraction of a text of R tokens is left out, in spans of a mean length. The encoder reads the text
with a sentinel in place of each span; the decoder writes each sentinel and its span after it:

    text     Thank you for inviting me to your party
    inputs   Thank you <extra_id_0> me to your <extra_id_1> </s>
    targets  <extra_id_0> for inviting <extra_id_1> party </s>

How many tokens and spans are left out depends on R alone, as in T5's own code, and R is the longest
whose inputs and targets fit: only the rest of the shorter side is padding.

B batch rows · E the encoder's sequence · S the decoder's. A sample is a pure function of the text,
the seed and its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mtx.config import DataConfig, ModelConfig
from mtx.data.batches import Batch, Rows, SampleSource, rows_to_read
from mtx.data.pairs import rng_of
from mtx.data.samples import Rng
from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError

_SENTINELS = 100  # as in T5
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanVocab:
    """The tokens that span corruption needs besides those of the text."""

    pad: int  # fills rows, and is the decoder's first token
    end: int
    sentinels: np.ndarray  # int32, in the order in which they are used
    size: int  # all tokens are below it


def find_span_vocab(tokenizer: Tokenizer) -> SpanVocab:
    """A T5's own tokens <pad> and <extra_id_0> to <extra_id_99>; if a tokenizer lacks them, as many
    after its vocabulary. UserError for one without an end-of-document token."""
    if tokenizer.eod is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token, which a T5 needs; use "
            "eod=auto, or a token"
        )
    known, first = tokenizer.vocabulary(), tokenizer.vocab
    numbered = [known.get(f"<extra_id_{number}>") for number in range(_SENTINELS)]
    sentinels = [each for each in numbered if each is not None]
    if len(sentinels) < _SENTINELS:
        sentinels = list(range(first, first + _SENTINELS))
    pad = known.get("<pad>", max(first, *(each + 1 for each in sentinels)))
    return SpanVocab(
        pad=pad, end=tokenizer.eod, sentinels=np.array(sentinels, np.int32),
        size=max(first, pad + 1, *(each + 1 for each in sentinels)),
    )  # fmt: skip


class SpanTokenizer(Tokenizer):
    """A tokenizer that reads and writes sentinels by name, and leaves out padding."""

    def __init__(self, tokenizer: Tokenizer):
        self._text, self.special = tokenizer, find_span_vocab(tokenizer)
        self.kind, self.identity, self.cuts = tokenizer.kind, tokenizer.identity, None
        self._names = {int(id): n for n, id in enumerate(self.special.sentinels)}

    @property
    def vocab(self) -> int:
        return self.special.size

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        parts = [np.empty(0, np.int32)]
        for place, part in enumerate(_SENTINEL.split(text)):
            if place % 2 and int(part) < _SENTINELS:
                parts.append(self.special.sentinels[int(part)][None])
            elif part:
                parts.append(self._text.encode(f"<extra_id_{part}>" if place % 2 else part))
        return np.concatenate(parts).astype(np.int32)

    def _decode(self, ids: np.ndarray) -> str:
        written, plain = [], []
        for id in [*ids.tolist(), None]:
            if id is not None and id not in self._names and id < self._text.vocab:
                plain += [id] if id != self.special.pad else []
                continue
            written.append(self._text.decode(plain) if plain else "")
            plain = []
            if id in self._names:
                written.append(f"<extra_id_{self._names[id]}>")
        return "".join(written)

    def vocabulary(self) -> dict[str, int]:
        return self._text.vocabulary()

    def to_dict(self) -> dict:
        return self._text.to_dict()


# -- lengths ---------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """The sizes of a sample: tokens, and the number of spans."""

    text: int  # R
    left_out: int
    spans: int

    @property
    def inputs(self) -> int:
        return self.text - self.left_out + self.spans + 1

    @property
    def targets(self) -> int:
        return self.left_out + self.spans + 1


def _lengths(text: int, config: DataConfig) -> Lengths:
    left_out = min(max(round(text * config.mask_fraction), 1), text - 1)
    spans = min(max(round(left_out / config.mean_span), 1), left_out, text - left_out)
    return Lengths(text, left_out, spans)


def sample_lengths(model: ModelConfig, config: DataConfig) -> Lengths:
    """The sizes for the longest text whose inputs fit into encoder_sequence=E and whose targets fit
    into sequence=S. UserError if none does, and if there are more spans than sentinels."""
    inputs, targets = model.sequences["encoder_sequence"], model.sequence
    longest = min(inputs / (1 - config.mask_fraction), targets / config.mask_fraction)
    for text in range(int(longest) + 2, 1, -1):
        found = _lengths(text, config)
        if found.inputs <= inputs and found.targets <= targets:
            if found.spans > _SENTINELS:
                raise UserError(
                    f"encoder_sequence={inputs} and sequence={targets} make {found.spans} spans of "
                    f"a sample, and there are {_SENTINELS} sentinels; use a larger data mean_span="
                    f"{config.mean_span}, or shorter sequences"
                )
            return found
    raise UserError(
        f"encoder_sequence={inputs} and sequence={targets} must hold a sentinel, a token and the "
        "end of a text; use 3 or more"
    )


# -- samples ---------------------------------------------------------------------------------------


class SpanSample(NamedTuple):
    """int32, each with the end-of-document token."""

    inputs: np.ndarray
    targets: np.ndarray


class SpanSamples:
    """Samples made from a source of texts of R tokens."""

    def __init__(
        self, source: SampleSource, vocab: SpanVocab, *, model: ModelConfig, config: DataConfig
    ):
        self._source, self._vocab, self._seed = source, vocab, config.seed
        self._lengths = sample_lengths(model, config)
        self.sequence = model.sequence
        self.encoder_sequence = model.sequences["encoder_sequence"]
        self.distinct, self.part_tokens = source.distinct, source.part_tokens

    def __getitem__(self, index: int) -> SpanSample:
        """Sample `index`. Each epoch has the same texts, but with other spans."""
        return corrupt(
            self._source[index], self._vocab, self._lengths.left_out, self._lengths.spans,
            rng_of(self._seed, index),
        )  # fmt: skip


def corrupt(
    tokens: np.ndarray, vocab: SpanVocab, left_out: int, spans: int, rng: Rng
) -> SpanSample:
    """The tokens without `spans` spans, of `left_out` tokens together; the first token stays."""
    stay, leave = _cut(len(tokens) - left_out, spans, rng), _cut(left_out, spans, rng)
    inputs, targets, place = [], [], 0
    for kept, gone, sentinel in zip(stay, leave, vocab.sentinels[:spans, None]):
        inputs += [tokens[place : place + kept], sentinel]
        place += kept + gone
        targets += [sentinel, tokens[place - gone : place]]
    end = np.array([vocab.end])
    joined = (np.concatenate([*parts, end]).astype(np.int32) for parts in (inputs, targets))
    return SpanSample(*joined)


def _cut(count: int, parts: int, rng: Rng) -> list[int]:
    """The sizes of `parts` parts of `count` things; all ways to cut them are equally likely."""
    cuts = np.sort(rng.permutation(count - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=count).tolist()


def make_span_batch(
    source: Any,
    consumed: int,
    rows: int,
    *,
    local: Rows | None = None,
    filled: int | None = None,
    vocab: SpanVocab,
) -> Batch:
    """Like `make_batch`: inputs int32 [B, E], segments int32 [B, E] (0 for padding, 1 for the
    rest), tokens int32 [B, S] (`pad`, then the targets except the last), targets int32 [B, S] and
    weights float32 [B, S] (0 for padding, 1 for the rest)."""
    inputs, targets = (rows, source.encoder_sequence), (rows, source.sequence)
    batch = {
        "inputs": np.full(inputs, vocab.pad, np.int32), "segments": np.zeros(inputs, np.int32),
        "tokens": np.full(targets, vocab.pad, np.int32),
        "targets": np.full(targets, vocab.pad, np.int32), "weights": np.zeros(targets, np.float32),
    }  # fmt: skip
    for row in rows_to_read(consumed, rows, local, filled):
        sample = source[consumed + row]
        read, written = len(sample.inputs), len(sample.targets)
        batch["inputs"][row, :read], batch["segments"][row, :read] = sample.inputs, 1
        batch["targets"][row, :written], batch["weights"][row, :written] = sample.targets, 1
        batch["tokens"][row, 1:written] = sample.targets[:-1]
    return batch
