"""WordPiece as BERT has it, trained on one's own text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mtx.data.special_tokens import BERT_TOKENS
from mtx.data.subwords import SubwordTokenizer
from mtx.data.tokenizer import blocks
from mtx.fields import checked
from mtx.sizes import TrainedVocab

WORDPIECE = "wordpiece"  # its name, as DataConfig.tokenizer
_MOST_CHARACTERS = 1000  # in the vocabulary; others are unknown, as in BERT's own


def train_wordpiece(texts: Iterable[str], *, vocab: int) -> SubwordTokenizer:
    """A lower-case WordPiece of at most `vocab` tokens, BERT's special tokens first among them.

    `texts` are gone through twice. The same texts give the same tokenizer. A text too small for so
    many tokens gives fewer: read the result's `vocab`. Raises UserError for a vocabulary too small
    to hold letters.
    """
    checked("vocab", vocab, TrainedVocab)
    trained = bert_model(models.WordPiece(unk_token="[UNK]"), lower=True)
    counts = Counter()
    for block in blocks(texts):
        counts.update(trained.normalizer.normalize_str(block))
    found = sorted((-count, a) for a, count in counts.items() if not a.isspace())
    alphabet = sorted(a for _, a in found[: min(_MOST_CHARACTERS, vocab // 4)])
    # The trainer numbers "##a" when it comes upon it, in an order that changes from run to run. It
    # keeps the numbers of special tokens: all that decides the order stands among these.
    first = [*BERT_TOKENS, *alphabet, *(f"##{a}" for a in alphabet if _goes_on(a, trained))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=first, limit_alphabet=len(alphabet), show_progress=False
    )
    trained.train_from_iterator(blocks(texts), trainer)
    model = bert_model(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"), lower=True)
    model.add_special_tokens(list(BERT_TOKENS))
    return SubwordTokenizer(json.loads(model.to_str()), name=WORDPIECE, eod="none")


def bert_model(model: models.WordPiece, *, lower: bool) -> tokenizers.Tokenizer:
    """`model` with BERT's way of cutting text into words."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _goes_on(character: str, tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a word can go on with it: punctuation and Chinese are words of their own."""
    text = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1
