"""Texts to tokens for datasets: any `tokenizer.json`, or bytes; fast, and in bounded memory.

`tokenizers` takes about 150 bytes a character for the text it has at hand, so long texts go to it
in parts, cut where the tokens do not change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from mtx.data.indexed import TokenizerIdentity
from mtx.data.tokenizer import ByteTokenizer
from mtx.data.words import is_plain, word_table
from mtx.errors import UserError

MOST_CHARACTERS = 2**22  # of one part: about 600 MB inside of `tokenizers`
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


class Encoder(Protocol):
    """What the building of a dataset knows of a tokenizer."""

    identity: TokenizerIdentity
    cuts: re.Pattern | None  # its empty matches are where a text may be cut; None: nowhere

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without an end-of-document token. Special tokens that are spelled
        out in a text are text."""


class ByteEncoder:
    """UTF-8's bytes, with NUL at a document's end, or nothing there."""

    cuts = re.compile("")

    def __init__(self, *, eod: int | None = ByteTokenizer.eod):
        self._tokenizer = ByteTokenizer()
        described = _hash(self._tokenizer.to_dict())
        self.identity = TokenizerIdentity(name="bytes", sha256=described, vocab=256, eod=eod)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._tokenizer.encode(text) for text in texts]


class FileEncoder:
    """A `tokenizer.json` of the `tokenizers` library, with its padding and truncation off."""

    def __init__(self, described: dict, *, name: str, eod: str):
        """eod: the end-of-document token by name or number, "auto" or "none"."""
        described = {**described, "truncation": None, "padding": None}
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(described))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{name} is no tokenizer.json: {error}") from None
        self._model.encode_special_tokens = True  # as text
        known = self._model.get_vocab(with_added_tokens=True)
        end = _end_of_document(known, name=name, eod=eod)
        most = max([*known.values(), -1 if end is None else end])
        self.identity = TokenizerIdentity(
            name=name, sha256=_hash(described), vocab=most + 1, eod=end
        )
        self._table = word_table(self._model)
        self.cuts = self._find_cuts()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Raises UserError for a text that is too long and cannot be cut."""
        parts = [list(self._parts(text)) for text in texts]
        ids = iter(self._encode(list(itertools.chain.from_iterable(parts))))
        return [_join([next(ids) for _ in some]) for some in parts]

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
                encoded = self._model.encode_batch_fast(
                    [probe, *re.split(cut, probe)], add_special_tokens=False
                )
                whole, *parts = (encoding.ids for encoding in encoded)
                if whole != list(itertools.chain.from_iterable(parts)):
                    break
            else:
                kept.append(cut)
        return re.compile("|".join(kept)) if kept else None


def load_encoder(name: str, *, eod: str = "auto") -> Encoder:
    """The encoder of a tokenizer: "bytes", a `tokenizer.json`, or a folder that holds one.

    eod is the end-of-document token: by its name in the vocabulary or its number (which may be
    the first beyond it), "none", or "auto" for the one that the vocabulary is known to have.
    Raises UserError for a file that is none and for a token that is not there.
    """
    if name == "bytes":
        if eod not in ("auto", "0", "none"):
            raise UserError(f"eod={eod!r} does not go with bytes; use 0, the NUL byte, or none")
        return ByteEncoder(eod=None if eod == "none" else 0)
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error.strerror}; name a tokenizer.json, a folder "
            "that holds one, or bytes"
        ) from None
    except ValueError:
        raise UserError(f"{path} is no tokenizer.json: it is not JSON") from None
    if not isinstance(described, dict) or "model" not in described:
        raise UserError(f"{path} is no tokenizer.json: it holds no model")
    return FileEncoder(described, name=path.name, eod=eod)


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


def _end_of_document(known: dict[str, int], *, name: str, eod: str) -> int | None:
    if eod == "none":
        return None
    if eod == "auto":
        found = [end for end in _END_NAMES if end in known]
        if found:
            return known[found[0]]
        raise UserError(
            f"{name} has none of the usual end-of-document tokens ({', '.join(_END_NAMES)}); name "
            f"its own with eod, a number such as {max(known.values(), default=-1) + 1}, or none"
        )
    if eod in known:
        return known[eod]
    next_id = max(known.values(), default=-1) + 1
    if eod.isdecimal() and int(eod) <= next_id:
        return int(eod)
    raise UserError(
        f"eod={eod!r} is no token of {name}; name one that is, a number up to {next_id}, or none"
    )


def _hash(described: dict) -> str:
    """Of what is described, not of how the file is laid out."""
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
