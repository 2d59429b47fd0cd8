"""Text to token ids and back: bytes as they are, or subwords; and BPE trained on one's own text.

No text encodes to the end-of-document token of bytes and of a BPE trained here: only the joining of
documents writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtx.data.indexed import TokenizerIdentity
from mtx.data.pieces import PieceTokenizer
from mtx.data.subwords import SubwordTokenizer, hash_of, without_eod
from mtx.errors import UserError, unknown_name
from mtx.fields import checked
from mtx.sizes import TrainedBytes

END_OF_TEXT = "<|endoftext|>"
_BLOCK_CHARACTERS = 2**16
# No word of GPT-2's pattern starts left of such a place and ends right of it, and cutting there
# changes no word: of a run of blanks, the last one opens a word of its own or the next word.
BETWEEN_WORDS = re.compile(r"(?=[ \t\r\n]\S)")


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    identity: TokenizerIdentity  # two tokenizers are the same where these are
    cuts: re.Pattern | None  # its empty matches are where a text may be cut; None: nowhere

    @property
    def name(self) -> str:
        """For people: "bytes", "bpe", or the name of a file."""

    @property
    def vocab(self) -> int:
        """Number of ids, the end-of-document token included: every id is below it."""

    @property
    def eod(self) -> int | None:
        """The end-of-document token, where there is one."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without an end-of-document token."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: end-of-document tokens vanish, broken UTF-8 becomes U+FFFD."""

    def to_dict(self) -> dict:
        """Plain values for JSON, from which `tokenizer_from_dict` makes the same tokenizer."""


class ByteTokenizer:
    """The 256 bytes of UTF-8. NUL, which stands in no text, ends a document: the vocabulary
    stays at 256."""

    name = kind = "bytes"
    vocab = 256
    eod: int | None = 0
    cuts = re.compile("")

    def __init__(self, *, eod: int | None = 0):
        """eod None: nothing ends a document."""
        self.eod = eod
        self.identity = TokenizerIdentity(
            name=self.name, sha256=hash_of({"kind": self.kind}), vocab=self.vocab, eod=eod
        )

    def encode(self, text: str) -> np.ndarray:
        if "\0" in text:
            raise UserError(
                f"text has a NUL at character {text.index(chr(0))}, which is the end-of-document "
                "token here; remove it"
            )
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        kept = without_eod(ids, vocab=self.vocab, eod=self.eod)
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_dict(self) -> dict:
        return {"kind": self.kind, "eod": self.eod}


def train_bpe(texts: Iterable[str], *, vocab: int, end: str | None = None) -> SubwordTokenizer:
    """A byte-level BPE of at most `vocab` ids with GPT-2's way of cutting text into words (Radford
    et al. 2019, §2.2): 256 bytes, the merges, and end-of-document as the last id, as in GPT-2.

    end: how the end-of-document token is spelled, for a tokenizer that is to be a file; None: it
    has no spelling. The same texts give the same tokenizer, whatever the number of threads. A text
    too small for so many merges gives fewer ids: read the result's `vocab`.
    """
    checked("vocab", vocab, TrainedBytes)
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((block for text in texts for block in _blocks(text)), trainer)
    eod = model.get_vocab_size()
    if end is not None:
        model.add_special_tokens([end])
    return SubwordTokenizer(json.loads(model.to_str()), name="bpe", eod=eod)


def tokenizer_from_dict(values: dict) -> Tokenizer:
    """The inverse of `Tokenizer.to_dict`; UserError for a kind that is not known."""
    match values.get("kind"):
        case ByteTokenizer.kind:
            return ByteTokenizer(eod=values.get("eod", 0))
        case SubwordTokenizer.kind:
            return SubwordTokenizer.from_dict(values)
        case PieceTokenizer.kind:
            return PieceTokenizer.from_dict(values)
        case "none":  # of a model that came from elsewhere without one
            raise UserError(
                "this model was converted without a tokenizer; convert it again, with --tokenizer "
                "FILE"
            )
        case other:
            known = (ByteTokenizer.kind, SubwordTokenizer.kind, PieceTokenizer.kind)
            raise unknown_name("tokenizer", str(other), known)


def _blocks(text: str) -> Iterator[str]:
    """`text` in blocks of which BPE learns what it would of the whole.

    `tokenizers` takes about 150 bytes a character for the text it has at hand (measured: 1.2 GB
    for 9.3 MB), so a large file cannot be given to it whole.
    """
    start = 0
    while start < len(text):
        cut = BETWEEN_WORDS.search(text, start + _BLOCK_CHARACTERS)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end
