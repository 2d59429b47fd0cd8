"""Tokenizers of the `tokenizers` library: fast, and in bounded memory.

`tokenizers` takes about 150 bytes a character for the text it has at hand, so long texts go to it
in parts, cut where the tokens do not change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from mtx.data.indexed import TokenizerIdentity
from mtx.data.words import WordTable, is_plain, word_table
from mtx.errors import UserError

MOST_CHARACTERS = 2**22  # of one part: about 600 MB inside of `tokenizers`
# An end-of-document token: its number, which may be the first beyond the vocabulary; its name in
# the vocabulary, or else its number in digits; "auto"; None or "none" where there is to be none.
Eod = str | int | None
_PART_CHARACTERS = 2**16
_MIXED_CHARACTERS = 2**8  # parts of a text of which some are plain and some are not
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eod>", "<|eod|>", "</s>", "<eos>")

# Where a text may be cut: before a single blank between words, and after a single line's end.
# Both keep the words of GPT-2's, GPT-4's and Llama 3's expressions, and of BERT's rules.
_CUTS = (r"(?<=\S)(?= \S)", r"(?<=\S\n)(?=\S)")
_CUT_PROBES = (
    "One two: 3 four, (five) \u00e9t\u00e9 \u4e00\u4e8c \u4e09. 'Six' -7 I 'll _x",
    "One\ntwo.\nThree:\n4\n(five)\n\u00e9t\u00e9\n\u4e00\u3002\n\u4e8c\n'six'\n-7\n'll",
)


class SubwordTokenizer:
    """A model of the `tokenizers` library, with its padding and truncation off."""

    kind = "subwords"

    def __init__(self, described: dict, *, name: str, eod: Eod, sha256: str | None = None):
        """described: what a `tokenizer.json` holds. eod: see Eod; "auto" is the one of the usual
        names that the vocabulary has.
        sha256: of what decides the tokens, where that is not `described`.

        Raises UserError for what is no tokenizer, and an end-of-document token that is not there.
        """
        self.described = {**described, "truncation": None, "padding": None}
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(self.described))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{name} is no tokenizer.json: {error}") from None
        self._model.encode_special_tokens = True  # as text
        known = self._model.get_vocab(with_added_tokens=True)
        end = _end_of_document(known, name=name, eod=eod)
        most = max([*known.values(), -1 if end is None else end])
        self.identity = TokenizerIdentity(
            name=name, sha256=sha256 or hash_of(self.described), vocab=most + 1, eod=end
        )
        self._table = self._make_table()
        self.cuts = None
        self.cuts = self._find_cuts()

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
        """As `Tokenizer.encode`. Special tokens that are spelled out in a text are text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. Raises UserError for one that is too long and cannot be cut."""
        parts = [list(self._parts(text)) for text in texts]
        ids = iter(self._encode(list(itertools.chain.from_iterable(parts))))
        return [_join([next(ids) for _ in some]) for some in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokenizer.decode`. Special tokens but the end-of-document token are shown."""
        kept = without_eod(ids, vocab=self.vocab, eod=self.eod)
        return self._model.decode(kept.tolist(), skip_special_tokens=False)

    def to_dict(self) -> dict:
        identity = self.identity
        return {
            "kind": self.kind, "name": identity.name, "sha256": identity.sha256,
            "eod": identity.eod, "model": self.described,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict) -> SubwordTokenizer:
        """The inverse of `to_dict`."""
        names = ("name", "eod", "sha256")
        return cls(values["model"], **{name: values[name] for name in names})

    def _make_table(self) -> WordTable | None:
        return word_table(self._model)

    def _encode(self, parts: list[str]) -> list[np.ndarray]:
        ids = [self._table.encode(part) if self._table else None for part in parts]
        left = [place for place, found in enumerate(ids) if found is None]
        for some in _batches(left, lambda place: len(parts[place])):
            encodings = self._model.encode_batch_fast(
                [parts[place] for place in some], add_special_tokens=False
            )
            for place, encoding in zip(some, encodings, strict=True):
                ids[place] = np.array(encoding.ids, np.int32)
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        """`text` cut so that each part is plain or not, and none is longer than it must be."""
        mixed = bool(self._table) and not is_plain(text)
        size = _MIXED_CHARACTERS if mixed else _PART_CHARACTERS
        for plain, parts in itertools.groupby(cut_text(text, self.cuts, size), is_plain):
            for some in _batches(parts, len) if mixed else ([part] for part in parts):
                part = "".join(some)
                if len(part) > MOST_CHARACTERS and not (plain and self._table):
                    raise UserError(
                        f"a text of {len(part):,} characters cannot be cut for this tokenizer, "
                        f"which takes at most {MOST_CHARACTERS:,} at once; cut it before"
                    )
                yield part

    def _find_cuts(self) -> re.Pattern | None:
        """The cuts of _CUTS that do not change the tokens of a probe. A tokenizer that puts a
        mark at the beginning of every text, as SentencePiece's do, has none."""
        kept = []
        for cut in _CUTS:
            for probe in _CUT_PROBES:
                encoded = self.encode_all([probe, *re.split(cut, probe)])
                whole, *parts = (ids.tolist() for ids in encoded)
                if whole != list(itertools.chain.from_iterable(parts)):
                    break
            else:
                kept.append(cut)
        return re.compile("|".join(kept)) if kept else None


def cut_text(text: str, cuts: re.Pattern | None, size: int) -> Iterator[str]:
    """`text` in parts of at least `size` characters, up to the next place where it may be cut."""
    start = 0
    while start < len(text):
        place = cuts.search(text, start + size) if cuts else None
        end = place.start() if place else len(text)
        yield text[start:end]
        start = end


def _batches(items: Iterable, length) -> Iterator[list]:
    """`items` in lists whose lengths add up to _PART_CHARACTERS or a little more."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += length(item)
        if total >= _PART_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)


def _end_of_document(known: dict[str, int], *, name: str, eod: Eod) -> int | None:
    if eod is None or eod == "none":
        return None
    if eod == "auto":
        found = [end for name in _END_NAMES for end in (name, f" {name}") if end in known]
        if found:
            return known[found[0]]
        raise UserError(
            f"{name} has none of the usual end-of-document tokens ({', '.join(_END_NAMES)}); name "
            f"its own with eod, a number such as {max(known.values(), default=-1) + 1}, or none"
        )
    for spelled in (eod, f" {eod}"):  # the second is SentencePiece's
        if spelled in known:  # "2" may be a token, too
            return known[spelled]
    next_id = max(known.values(), default=-1) + 1
    if isinstance(eod, int) or eod.isdecimal():
        if 0 <= int(eod) <= next_id:
            return int(eod)
    raise UserError(
        f"eod={eod!r} is no token of {name}; name one that is, a number up to {next_id}, or none"
    )


def without_eod(ids: Sequence[int], *, vocab: int, eod: int | None) -> np.ndarray:
    """`ids` but for `eod`, int64; ValueError for one outside of the vocabulary."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise ValueError(f"token {wrong[0]} lies outside the vocabulary of {vocab}")
    return ids if eod is None else ids[ids != eod]


def hash_of(described: object) -> str:
    """Of what is described, not of how the file is laid out."""
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
