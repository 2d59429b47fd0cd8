"""What BERT's samples need from a tokenizer: special tokens, and which tokens continue a word."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT's vocabularies


class SpecialTokens(NamedTuple):
    """The ids of a BERT's own tokens."""

    cls: int
    sep: int
    mask: int
    pad: int


NAMES = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")  # of `SpecialTokens`


@dataclass(frozen=True, kw_only=True, eq=False)
class BertVocab:
    """A vocabulary as masking sees it. V tokens."""

    special: SpecialTokens
    continues: np.ndarray  # bool [V], whether a token continues the word before it
    others: np.ndarray  # int32, the tokens that may replace another: all except special ones

    @property
    def size(self) -> int:
        return len(self.continues)

    @cached_property
    def is_special(self) -> np.ndarray:
        """bool [V]"""
        return np.isin(np.arange(self.size), self.special)


def find_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens of a tokenizer. Raises UserError if it lacks any of them."""
    known = tokenizer.vocabulary()
    if missing := [name for name in NAMES if name not in known]:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no {' and no '.join(missing)}, which a BERT "
            "needs; use a BERT's tokenizer.json, or wordpiece, which is trained on the text"
        )
    return SpecialTokens(*(known[name] for name in NAMES))


def find_bert_vocab(tokenizer: Tokenizer) -> BertVocab:
    """A tokenizer's vocabulary for masking. Raises UserError as `find_special_tokens` does.

    A token that begins with WordPiece's "##" continues a word; if no token does, as in other kinds
    of tokenizers, each is a word of its own.
    """
    special, continues = find_special_tokens(tokenizer), np.zeros(tokenizer.vocab, bool)
    continues[[n for token, n in tokenizer.vocabulary().items() if token.startswith("##")]] = True
    others = np.setdiff1d(np.arange(tokenizer.vocab), special).astype(np.int32)
    return BertVocab(special=special, continues=continues, others=others)
