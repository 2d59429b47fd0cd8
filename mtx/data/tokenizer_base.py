"""What every tokenizer is, whichever library runs it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtx.errors import UserError
from mtx.fields import resolve_types

# An end-of-document token: its number, which may be the first beyond the vocabulary; its name in
# the vocabulary, or else its number in digits; "auto"; None or "none" for no such token.
Eod = str | int | None
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eod>", "<|eod|>", "</s>", "<eos>")


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Which tokenizer made the tokens. Two are the same if their `sha256` and `eod` are."""

    name: str  # for people: "bytes", "bpe", or the name of a file
    sha256: str  # of what determines the tokens
    vocab: int  # every token is below it
    eod: int | None  # the end-of-document token, if one was written

    def __post_init__(self):
        resolve_types(self)

    def __str__(self) -> str:
        end = "no end-of-document token" if self.eod is None else f"end-of-document {self.eod}"
        return f"{self.name} (sha256 {self.sha256[:12]}, {end})"

    def same_as(self, other: TokenizerIdentity) -> bool:
        """Whether the two give the same tokens, whatever their files are called."""
        return (self.sha256, self.eod) == (other.sha256, other.eod)


class Tokenizer:
    """Text to token ids and back."""

    kind: str
    identity: TokenizerIdentity
    cuts: re.Pattern | None  # its empty matches are where a text may be cut; None: nowhere

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def vocab(self) -> int:
        return self.identity.vocab

    @property
    def eod(self) -> int | None:
        return self.identity.eod

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without an end-of-document token. Special tokens that
        are spelled out in a text are encoded as text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. UserError for a text that cannot be encoded."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, without end-of-document tokens; broken UTF-8 becomes U+FFFD.
        ValueError for an id outside the vocabulary."""
        given = np.asarray(ids, np.int64).reshape(-1)
        wrong = given[(given < 0) | (given >= self.vocab)]
        if wrong.size:
            raise ValueError(f"token {wrong[0]} lies outside the vocabulary of {self.vocab}")
        return self._decode(given if self.eod is None else given[given != self.eod])

    def _decode(self, ids: np.ndarray) -> str:
        raise NotImplementedError

    def vocabulary(self) -> dict[str, int]:
        """Ids by their spelling; empty if tokens have none, such as bytes."""
        return {}

    def special_tokens(self) -> dict[str, int]:
        """Tokens of the vocabulary that no text is encoded to, except a template's marks."""
        return {}

    def to_dict(self) -> dict:
        """Plain values for JSON, from which `tokenizer_from_dict` makes the same tokenizer."""
        one = self.identity
        return {"kind": self.kind, "name": one.name, "sha256": one.sha256, "eod": one.eod}


def find_eod(known: dict[str, int], *, name: str, eod: Eod) -> int | None:
    """The end-of-document token of a vocabulary; UserError if it has no such token."""
    if eod is None or eod == "none":
        return None
    next_id = max(known.values(), default=-1) + 1
    if eod == "auto":
        if usual := [known[name] for name in _EOD_NAMES if name in known]:
            return usual[0]
        raise UserError(
            f"{name} has none of the usual end-of-document tokens ({', '.join(_EOD_NAMES)}); name "
            f"its own with eod, a number such as {next_id}, or none"
        )
    if eod in known:  # "2" may be a token, too
        return known[eod]
    if (isinstance(eod, int) or eod.isdecimal()) and 0 <= int(eod) <= next_id:
        return int(eod)
    raise UserError(f"eod={eod!r} must be a token of {name}, a number up to {next_id}, or none")


def hash_of(described: object) -> str:
    """The hash of what is described, not of how the file is laid out."""
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
