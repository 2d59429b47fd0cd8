"""The text of a run: documents read, split, tokenized and joined, all in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtx.config import DataConfig
from mtx.data.batches import TokenCorpus
from mtx.data.documents import hold_out, read_documents
from mtx.data.samples import Samples
from mtx.data.tokenizer import Tokenizer, train_bpe
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError


def load_text(config: DataConfig, *, sequence: int) -> TokenCorpus:
    """Reads, splits and tokenizes what `config` names, for samples of `sequence` tokens (S).

    The split comes first: a BPE vocabulary is trained on the training text alone. Each document
    is followed by the tokenizer's end-of-document token, on both sides.
    Raises UserError for text that cannot be read (see `read_documents`) or that is shorter, on
    either side, than one sample of S + 1 tokens.
    """
    documents = read_documents(config.path)
    split = hold_out(documents.texts, fraction=config.eval_fraction, seed=config.seed)
    if config.tokenizer == "bpe":
        tokenizer = train_bpe(split.train, vocab=config.bpe_vocab)
    else:
        tokenizer = load_tokenizer(config.tokenizer, eod=config.eod)
    if tokenizer.eod is None:
        raise UserError(
            f"eod={config.eod!r} leaves documents of text without an end; use auto, or a token"
        )
    train, held_out = _join(split.train, tokenizer), _join(split.held_out, tokenizer)
    _require_sample("training text", train, sequence, "give more text")
    remedy = f"give more text, raise eval_fraction={config.eval_fraction}"
    _require_sample("held-out text", held_out, sequence, remedy)
    held_out_samples = Samples(held_out, sequence=sequence, seed=None)
    return TokenCorpus(
        tokenizer=tokenizer,
        train=Samples(train, sequence=sequence, seed=config.seed),
        held_out=held_out_samples,
        held_out_samples=len(held_out_samples),
        train_tokens=len(train),
        eval_tokens=len(held_out),
        source=f"{documents.source}, {split.describe()}",
        packed=config.packed,
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
