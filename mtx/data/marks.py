"""What BERT's samples need of a tokenizer: its marks, and which tokens go on with a word."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mtx.data.tokenizer import Tokenizer
from mtx.errors import UserError


class Marks(NamedTuple):
    """The ids of a BERT's own tokens."""

    begin: int  # [CLS]
    end: int  # [SEP]
    mask: int  # [MASK]
    pad: int  # [PAD]


NAMES = Marks("[CLS]", "[SEP]", "[MASK]", "[PAD]")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """A vocabulary as masking sees it. V tokens."""

    marks: Marks
    continues: np.ndarray  # bool [V], whether a token goes on with the word before it
    others: np.ndarray  # int32, the tokens that may take the place of another: all but the marks

    @property
    def vocab(self) -> int:
        return len(self.continues)

    @cached_property
    def is_mark(self) -> np.ndarray:
        """bool [V]"""
        return np.isin(np.arange(self.vocab), self.marks)


def find_marks(tokenizer: Tokenizer) -> Marks:
    """The marks of a tokenizer. Raises UserError where it has not all of them."""
    known = _vocabulary(tokenizer)
    missing = [name for name in NAMES if name not in known]
    if missing:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no {' and no '.join(missing)}, which a BERT "
            "needs; use a BERT's tokenizer.json, or wordpiece, which is trained on the text"
        )
    return Marks(*(known[name] for name in NAMES))


def find_pieces(tokenizer: Tokenizer) -> Pieces:
    """A tokenizer's vocabulary for masking. Raises UserError as `find_marks` does.

    A token that begins with WordPiece's "##" goes on with a word; where no token does, as in other
    kinds of tokenizers, each is a word of its own.
    """
    marks, known = find_marks(tokenizer), _vocabulary(tokenizer)
    continues = np.zeros(tokenizer.vocab, bool)
    continues[[place for piece, place in known.items() if piece.startswith("##")]] = True
    others = np.setdiff1d(np.arange(tokenizer.vocab), marks).astype(np.int32)
    return Pieces(marks=marks, continues=continues, others=others)


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids by their spelling; empty where tokens have none, as bytes."""
    described = tokenizer.to_dict().get("model")
    if described is None:
        return {}
    known = described["model"].get("vocab", {})
    if not isinstance(known, dict):  # Unigram's: a list of [piece, likelihood]
        known = {piece: place for place, (piece, _) in enumerate(known)}
    return known | {token["content"]: token["id"] for token in described["added_tokens"]}
