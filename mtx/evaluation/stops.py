"""What ends a text before its number of tokens is reached: token ids and strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtx.data import Tokenizer
from mtx.errors import UserError

# A character takes at most 4 tokens (bytes of UTF-8); a few more, because a decoder may treat
# the first token that it is given differently.
_TOKENS_A_CHARACTER, _MORE_TOKENS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Stops:
    """A text ends when one of `tokens` is drawn, or when one of `strings` occurs in what was drawn,
    wherever the borders between tokens are. The text ends before either."""

    tokens: frozenset[int]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, stop: Sequence[str | int], tokenizer: Tokenizer) -> Stops:
        """Tells strings and token ids in `stop` apart. UserError for an empty string, and for an id
        that the tokenizer does not have."""
        strings = tuple(value for value in stop if isinstance(value, str))
        ids = [int(value) for value in stop if not isinstance(value, str)]
        if "" in strings:
            raise UserError("stop='' would end every text before it begins; leave it out")
        for token in ids:
            if not 0 <= token < tokenizer.vocab:
                raise UserError(
                    f"stop={token} must be one of the tokenizer's ids, 0 to {tokenizer.vocab - 1}"
                )
        return cls(tokens=frozenset(ids), strings=strings)

    def may_stand_in(self, ids: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a string may have been completed by the last of `ids`. Looks only at as many
        of the last tokens as that takes, so its time does not grow with the text."""
        if not self.strings:
            return False
        longest = max(map(len, self.strings))
        tail = tokenizer.decode(ids[-(_TOKENS_A_CHARACTER * longest + _MORE_TOKENS) :])
        return any(string in tail for string in self.strings)

    def cut(self, text: str) -> tuple[str, str | None]:
        """(`text` up to the first of the strings, that string or None)"""
        found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        if not found:
            return text, None
        at, string = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        return text[:at], string
