"""The text of a run: documents read, split, tokenized and joined, all in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtx.config import DataConfig
from mtx.data.batches import Corpus, SampleSource
from mtx.data.bert import BertSamples, batch_maker
from mtx.data.build import split_sentences
from mtx.data.documents import hold_out, read_documents
from mtx.data.indexed import token_type
from mtx.data.pairs import SentenceList
from mtx.data.samples import Samples
from mtx.data.special_tokens import find_bert_vocab, find_special_tokens
from mtx.data.tokenizer import WORDPIECE, ByteTokenizer, Tokenizer, train_bpe, train_wordpiece
from mtx.data.tokenizer_base import Eod, TokenizerIdentity
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError


def load_text(config: DataConfig, *, sequence: int, bert: bool = False) -> Corpus:
    """Reads, splits and tokenizes what `config` names, for samples of `sequence` tokens (S).

    The split comes first: a vocabulary is trained on the training text alone. Each document is
    followed by the tokenizer's end-of-document token, on both sides; a BERT's is cut into sentences
    instead (see `split_sentences`).
    Raises UserError for text that cannot be read (see `read_documents`), that has not one sample on
    either side, and for a tokenizer without an end-of-document or, for a BERT, special tokens.
    """
    documents = read_documents(config.path)
    split = hold_out(documents.texts, fraction=config.eval_fraction, seed=config.seed)
    if config.tokenizer == (WORDPIECE if bert else "bpe"):
        train = train_wordpiece if bert else train_bpe
        tokenizer = train(split.train, vocab=config.bpe_vocab)
    else:
        tokenizer = named_tokenizer(config, bert=bert)
    if tokenizer.eod is None and not bert:
        raise UserError(
            f"eod={config.eod!r} leaves documents of text without an end; use auto, or a token"
        )
    vocab = find_bert_vocab(tokenizer) if bert else None

    def samples(side: str, texts: Sequence[str], remedy: str, seed: int | None) -> SampleSource:
        if vocab is not None:
            sentences = _encode(texts, tokenizer)
            return BertSamples(sentences, vocab, sequence=sequence, config=config, name=side)
        tokens = _join(texts, tokenizer)
        if len(tokens) > sequence:
            return Samples(tokens, sequence=sequence, seed=seed)
        shorter = f" or use sequence={len(tokens) - 1} or less" if len(tokens) > 1 else ""
        raise UserError(
            f"{side} has {len(tokens)} tokens, but one sample needs sequence+1={sequence + 1}; "
            f"give more text{remedy}{shorter}"
        )

    more = f", raise eval_fraction={config.eval_fraction}"
    return Corpus(
        tokenizer=tokenizer, packed=config.packed,
        make=batch_maker(tokenizer, vocab, packed=config.packed),
        train=samples("the training text", split.train, "", config.seed),
        held_out=samples("the held-out text", split.held_out, more, None),
        source=f"{documents.source}, {split.describe()}",
    )  # fmt: skip


def named_tokenizer(
    config: DataConfig, *, bert: bool, made: TokenizerIdentity | None = None
) -> Tokenizer:
    """The tokenizer that `config` names; where eod is "auto", with the end-of-document token of the
    one that `made` the datasets, or else none for a BERT. UserError for one that is trained on the
    text, and for a BERT's without special tokens."""
    if config.tokenizer == (WORDPIECE if bert else "bpe"):
        raise UserError(
            f"data tokenizer={config.tokenizer!r} is trained on text, and here is none (the data "
            "path names datasets, perhaps); name the tokenizer that made them, or the model's own"
        )
    if bert and config.tokenizer in (ByteTokenizer.kind, "bpe"):
        raise UserError(
            f"tokenizer={config.tokenizer!r} has no [MASK] and the like, which a BERT needs; use "
            "its tokenizer.json or vocab.txt, or wordpiece, trained on the text"
        )
    eod: Eod = config.eod
    if eod == "auto" and (made or bert):
        eod = made.eod if made else None
    tokenizer = load_tokenizer(config.tokenizer, eod=eod)
    if bert:
        find_special_tokens(tokenizer)
    return tokenizer


def _join(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """One flat array, each text followed by end-of-document, in the narrowest type that fits."""
    kind = np.min_scalar_type(tokenizer.vocab - 1)
    parts = [np.empty(0, kind)]
    for text in texts:
        parts += [tokenizer.encode(text).astype(kind), np.array([tokenizer.eod], kind)]
    return np.concatenate(parts)


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> SentenceList:
    sentences = [split_sentences(text) for text in texts]
    ids = iter(tokenizer.encode_all([one for some in sentences for one in some]))
    encoded = [[next(ids) for _ in some] for some in sentences]
    kept = [[one for one in some if len(one)] for some in encoded]
    return SentenceList(kept, token_type(tokenizer.vocab))
