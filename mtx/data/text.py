"""The text of a run: documents read, split, tokenized, joined, and served as batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtx.config import DataConfig
from mtx.data.documents import hold_out, read_documents
from mtx.data.samples import Samples
from mtx.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class TextData:
    """Training and held-out text as samples of a fixed length. G global batch, S sequence."""

    tokenizer: Tokenizer
    train: Samples
    held_out: Samples
    source: str  # for people: where the text comes from, and what is held out of it

    @property
    def vocab(self) -> int:
        """Every token is below it."""
        return self.tokenizer.vocab

    @property
    def train_tokens(self) -> int:
        return len(self.train.tokens)

    @property
    def eval_tokens(self) -> int:
        return len(self.held_out.tokens)

    def describe(self) -> str:
        """One line: where from, how many tokens on each side, and the tokenizer."""
        return (
            f"{self.source}; {self.train_tokens:,} tokens to train on, {self.eval_tokens:,} held "
            f"out; {self.tokenizer.kind} tokenizer, vocab {self.vocab:,}"
        )

    def batch(self, step: int, global_batch: int) -> dict[str, np.ndarray]:
        """The training batch of `step`: tokens int32 [G, S], targets int32 [G, S] and weights
        float32 [G, S]. A pure function of the data, its seed, `step` and `global_batch`."""
        return self.train.batch(step, global_batch)

    def eval_batches(self, count: int, global_batch: int) -> list[dict[str, np.ndarray]]:
        """At most `count` held-out batches as in `batch`, always the same ones. Where the
        held-out text ends sooner, there are fewer, the last filled up with rows of weight 0."""
        return self.held_out.first_batches(count, global_batch)


def load_text(config: DataConfig, *, sequence: int) -> TextData:
    """Reads, splits and tokenizes what `config` names, for samples of `sequence` tokens (S).

    The split comes first: a BPE vocabulary is trained on the training text alone. Each document
    is followed by the tokenizer's end-of-document token, on both sides.
    Raises UserError for text that cannot be read (see `read_documents`) or that is shorter, on
    either side, than one sample of S + 1 tokens.
    """
    if config.seed < 0:
        raise UserError(f"data seed={config.seed} must be at least 0")
    documents = read_documents(config.path)
    split = hold_out(documents.texts, fraction=config.eval_fraction, seed=config.seed)
    if config.tokenizer == "bpe":
        tokenizer = train_bpe(split.train, vocab=config.bpe_vocab)
    else:
        tokenizer = ByteTokenizer()
    train, held_out = _join(split.train, tokenizer), _join(split.held_out, tokenizer)
    _require_sample("training text", train, sequence, "give more text")
    remedy = f"give more text, raise eval_fraction={config.eval_fraction}"
    _require_sample("held-out text", held_out, sequence, remedy)
    return TextData(
        tokenizer=tokenizer,
        train=Samples(train, sequence=sequence, seed=config.seed),
        held_out=Samples(held_out, sequence=sequence, seed=config.seed),
        source=f"{documents.source}, {split.describe()}",
    )


def _require_sample(side: str, tokens: np.ndarray, sequence: int, remedy: str) -> None:
    if len(tokens) <= sequence:
        shorter = f" or use sequence={len(tokens) - 1} or less" if len(tokens) > 1 else ""
        raise UserError(
            f"the {side} has {len(tokens)} tokens, but one sample needs sequence+1={sequence + 1}; "
            f"{remedy}{shorter}"
        )


def _join(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """One flat array, each text followed by end-of-document, in the narrowest type that fits."""
    kind = np.min_scalar_type(tokenizer.vocab - 1)
    end = np.array([tokenizer.eod], kind)
    pieces = [np.empty(0, kind)]
    for text in texts:
        pieces += [tokenizer.encode(text).astype(kind), end]
    return np.concatenate(pieces)
