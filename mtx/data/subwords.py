"""Tokenizers of the `tokenizers` library, in bounded memory.

`tokenizers` takes about 150 bytes per character of the text that it encodes at once, so long texts
go to it in parts, cut where this does not change the tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from mtx.data.tokenizer_base import Eod, Tokenizer, TokenizerIdentity, find_eod, hash_of
from mtx.errors import UserError, reason

MOST_CHARACTERS = 2**22  # of one part: about 600 MB inside `tokenizers`
_PART_CHARACTERS = 2**13
_BATCH_CHARACTERS = 2**17  # which the library's threads share

# Where a text may be cut: before a single blank between words, and after a single line's end.
# Both keep the words of GPT-2's, GPT-4's and Llama 3's expressions, and of BERT's rules.
_CUTS = (r"(?<=\S)(?= \S)", r"(?<=\S\n)(?=\S)")
_CUT_PROBES = (
    "One two: 3 four, (five) \u00e9t\u00e9 \u4e00\u4e8c \u4e09. 'Six' -7 I 'll _x",
    "One\ntwo.\nThree:\n4\n(five)\n\u00e9t\u00e9\n\u4e00\u3002\n\u4e8c\n'six'\n-7\n'll",
)


class SubwordTokenizer(Tokenizer):
    """A model of the `tokenizers` library, with its padding and truncation off."""

    kind = "subwords"

    def __init__(self, described: dict, *, name: str, eod: Eod, sha256: str | None = None):
        """described: the content of a `tokenizer.json`. eod: see `find_eod`. sha256: of what
        determines the tokens, if that is not `described`. Raises UserError if `described` is not a
        tokenizer."""
        self.described = {**described, "truncation": None, "padding": None}
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(self.described))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{name} must be a tokenizer.json: {reason(error)}") from None
        self._model.encode_special_tokens = True  # as text
        known = self.vocabulary()
        eod = find_eod(known, name=name, eod=eod)
        most = max([*known.values(), -1 if eod is None else eod])
        self.identity = TokenizerIdentity(
            name=name, sha256=sha256 or hash_of(self.described), vocab=most + 1, eod=eod
        )
        self.cuts = None
        self.cuts = self._find_cuts()

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See Tokenizer; UserError for a text that is too long and cannot be cut."""
        parts = [list(cut_text(text, self.cuts, _PART_CHARACTERS)) for text in texts]
        ids = []
        for batch in _batches([part for some in parts for part in some]):
            if (length := max(map(len, batch))) > MOST_CHARACTERS:
                raise UserError(
                    f"a text of {length:,} characters cannot be cut for this tokenizer, which "
                    f"takes at most {MOST_CHARACTERS:,} at once; cut it before"
                )
            encoded = self._model.encode_batch_fast(batch, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encoded]
        found = iter(ids)
        return [np.concatenate([_NOTHING, *itertools.islice(found, len(some))]) for some in parts]

    def _decode(self, ids: np.ndarray) -> str:
        return self._model.decode(ids.tolist(), skip_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        return self._model.get_vocab(with_added_tokens=True)

    def special_tokens(self) -> dict[str, int]:
        added = self.described.get("added_tokens") or ()
        return {each["content"]: each["id"] for each in added if each.get("special")}

    def to_dict(self) -> dict:
        return super().to_dict() | {"model": self.described}

    @classmethod
    def from_dict(cls, values: dict) -> SubwordTokenizer:
        """The inverse of `to_dict`."""
        return cls(values["model"], **{name: values[name] for name in ("name", "eod", "sha256")})

    def _find_cuts(self) -> re.Pattern | None:
        """Those of _CUTS that do not change the tokens of a probe. A tokenizer that marks the
        beginning of every text, as SentencePiece's do, has none."""
        kept = []
        for cut in _CUTS:
            cuttings = [[probe, *re.split(cut, probe)] for probe in _CUT_PROBES]
            encoded = map(self.encode_all, cuttings)
            if all(np.array_equal(whole, np.concatenate(parts)) for whole, *parts in encoded):
                kept.append(cut)
        return re.compile("|".join(kept)) if kept else None


_NOTHING = np.empty(0, np.int32)


def cut_text(text: str, cuts: re.Pattern | None, size: int) -> Iterator[str]:
    """`text` in parts of at least `size` characters, each up to the next possible cut."""
    start = 0
    while start < len(text):
        place = cuts.search(text, start + size) if cuts else None
        end = place.start() if place else len(text)
        yield text[start:end]
        start = end


def _batches(parts: Sequence[str]) -> Iterator[list[str]]:
    """`parts` in lists of about _BATCH_CHARACTERS."""
    ends = itertools.accumulate(map(len, parts))
    numbered = zip((end // _BATCH_CHARACTERS for end in ends), parts, strict=True)
    for _, some in itertools.groupby(numbered, key=lambda pair: pair[0]):
        yield [part for _, part in some]
