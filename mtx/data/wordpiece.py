"""WordPiece as BERT has it, trained on one's own text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mtx.data.subwords import SubwordTokenizer, cut_text
from mtx.data.tokenizer import BETWEEN_WORDS
from mtx.fields import checked
from mtx.sizes import TrainedVocab

WORDPIECE = "wordpiece"  # its name, as DataConfig.tokenizer
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PREFIX = "##"
_MOST_LETTERS = 1000  # others are unknown, as in BERT's own vocabulary
_PART_CHARACTERS = 2**16


def train_wordpiece(texts: Iterable[str], *, vocab: int) -> SubwordTokenizer:
    """A lower-case WordPiece of at most `vocab` tokens, BERT's marks first among them.

    `texts` are gone through twice. The same texts give the same tokenizer. A text too small for so
    many tokens gives fewer: read the result's `vocab`. Raises UserError for a vocabulary too small
    to hold letters.
    """
    checked("vocab", vocab, TrainedVocab)
    trained = _untrained(models.WordPiece(unk_token="[UNK]"))
    letters = _letters(texts, trained, most=min(_MOST_LETTERS, vocab // 4))
    # The trainer numbers "##a" when it comes upon it, in an order that changes from run to run. It
    # keeps the numbers of special tokens: all that decides the order stands among these.
    first = [*_MARKS, *letters, *(f"{_PREFIX}{a}" for a in letters if _goes_on(a, trained))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=first, continuing_subword_prefix=_PREFIX,
        limit_alphabet=len(letters), show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(_parts(texts), trainer)
    model = _untrained(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    model.add_special_tokens(list(_MARKS))
    return SubwordTokenizer(json.loads(model.to_str()), name=WORDPIECE, eod="none")


def _untrained(model: models.WordPiece) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    return tokenizer


def _parts(texts: Iterable[str]) -> Iterator[str]:
    """`tokenizers` takes about 150 bytes a character for the text it has at hand."""
    for text in texts:
        yield from cut_text(text, BETWEEN_WORDS, _PART_CHARACTERS)


def _letters(texts: Iterable[str], tokenizer: tokenizers.Tokenizer, *, most: int) -> list[str]:
    """The `most` frequent characters of `texts`, in order."""
    counts = Counter()
    for part in _parts(texts):
        counts.update(tokenizer.normalizer.normalize_str(part))
    found = sorted((-count, a) for a, count in counts.items() if not a.isspace())
    return sorted(a for _, a in found[:most])


def _goes_on(letter: str, tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a word can go on with it: punctuation and Chinese are words of their own."""
    text = tokenizer.normalizer.normalize_str(f"a{letter}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1
