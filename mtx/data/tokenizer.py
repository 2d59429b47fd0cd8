"""Text to token ids and back: bytes as they are, or a byte-level BPE trained on the spot.

Both cover every text (there is no unknown token), and in both no text encodes to the
end-of-document token: only the joining of documents writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtx.errors import UserError, unknown_name

_BLOCK_CHARACTERS = 2**16
_BLOCKS_AT_ONCE = 32
# No word of GPT-2's pattern starts left of such a place and ends right of it, and cutting there
# changes no word: of a run of blanks, the last one opens a word of its own or the next word.
_BETWEEN_WORDS = re.compile(r"(?=[ \t\r\n]\S)")


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    kind: str  # as in DataConfig.tokenizer

    @property
    def vocab(self) -> int:
        """Number of ids, the end-of-document token included: every id is below it."""

    @property
    def eod(self) -> int:
        """The end-of-document token."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without an end-of-document token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: end-of-document tokens vanish, broken UTF-8 becomes U+FFFD."""

    def to_dict(self) -> dict:
        """Plain values for JSON, from which `tokenizer_from_dict` makes the same tokenizer."""


class ByteTokenizer:
    """The 256 bytes of UTF-8. NUL, which stands in no text, ends a document: the vocabulary
    stays at 256."""

    kind = "bytes"
    vocab = 256
    eod = 0

    def encode(self, text: str) -> np.ndarray:
        if "\0" in text:
            raise UserError(
                f"text has a NUL at character {text.index(chr(0))}, which is the end-of-document "
                "token here; remove it"
            )
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        kept = _without_eod(ids, self)
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_dict(self) -> dict:
        return {"kind": self.kind}


class BpeTokenizer:
    """Byte-level BPE with GPT-2's way of cutting text into words (Radford et al. 2019, §2.2).

    As in GPT-2 the end-of-document token is the last id; it has no spelling in text.
    """

    kind = "bpe"

    def __init__(self, model: tokenizers.Tokenizer):
        self._model = model

    @property
    def vocab(self) -> int:
        return self.eod + 1

    @property
    def eod(self) -> int:
        return self._model.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        blocks = _blocks(text)
        ids = [np.empty(0, np.int32)]
        while some := list(islice(blocks, _BLOCKS_AT_ONCE)):
            encodings = self._model.encode_batch_fast(some)  # in parallel
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return np.concatenate(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(_without_eod(ids, self).tolist())

    def to_dict(self) -> dict:
        return {"kind": self.kind, "model": json.loads(self._model.to_str())}


def train_bpe(texts: Iterable[str], *, vocab: int) -> BpeTokenizer:
    """A BPE tokenizer of at most `vocab` ids: 256 bytes, the merges, and end-of-document.

    The same texts give the same tokenizer, whatever the number of threads. A text too small for
    so many merges gives fewer ids: read the result's `vocab`.
    """
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((block for text in texts for block in _blocks(text)), trainer)
    return BpeTokenizer(model)


def tokenizer_from_dict(values: dict) -> Tokenizer:
    """The inverse of `Tokenizer.to_dict`; UserError for a kind that is not known."""
    match values.get("kind"):
        case ByteTokenizer.kind:
            return ByteTokenizer()
        case BpeTokenizer.kind:
            return BpeTokenizer(tokenizers.Tokenizer.from_str(json.dumps(values["model"])))
        case other:
            raise unknown_name("tokenizer", str(other), (ByteTokenizer.kind, BpeTokenizer.kind))


def _blocks(text: str) -> Iterator[str]:
    """`text` in blocks that encode one by one to what the whole would.

    `tokenizers` takes about 150 bytes a character for the text it has at hand (measured: 1.2 GB
    for 9.3 MB), so a large file cannot be given to it whole.
    """
    start = 0
    while start < len(text):
        cut = _BETWEEN_WORDS.search(text, start + _BLOCK_CHARACTERS)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def _without_eod(ids: Sequence[int], tokenizer: Tokenizer) -> np.ndarray:
    ids = np.asarray(ids, np.int64).reshape(-1)
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab)]
    if wrong.size:
        raise ValueError(f"token {wrong[0]} lies outside the vocabulary of {tokenizer.vocab}")
    return ids[ids != tokenizer.eod]
