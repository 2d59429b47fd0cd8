"""Bytes as token ids, and BPE and BERT's WordPiece trained on one's own text.

No text encodes to the end-of-document token of bytes or of a BPE trained here: it is written only
where documents are joined.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mtx.data.sentencepiece import SentencePieceTokenizer
from mtx.data.special_tokens import BERT_TOKENS
from mtx.data.subwords import SubwordTokenizer, cut_text
from mtx.data.tokenizer_base import Tokenizer, TokenizerIdentity, hash_of
from mtx.errors import UserError, unknown_name
from mtx.fields import checked
from mtx.sizes import TrainedBytes, TrainedVocab

END_OF_TEXT = "<|endoftext|>"
WORDPIECE = "wordpiece"  # its name in DataConfig.tokenizer
_MOST_CHARACTERS = 1000  # in WordPiece's vocabulary; others are unknown, as in BERT's own
_BLOCK_CHARACTERS = 2**16
# No word of GPT-2's pattern reaches across such a place, and cutting there changes no word: the
# last of a run of blanks begins a word of its own or the next word.
BETWEEN_WORDS = re.compile(r"(?=[ \t\r\n]\S)")


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8. NUL, which occurs in no text, ends a document, so there are no more
    than 256 tokens."""

    kind = "bytes"
    cuts = re.compile("")

    def __init__(self, *, eod: int | None = 0):
        """eod None: nothing ends a document."""
        sha256 = hash_of({"kind": self.kind})
        self.identity = TokenizerIdentity(name=self.kind, sha256=sha256, vocab=256, eod=eod)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See Tokenizer; UserError for a text with a NUL."""
        for text in texts:
            if "\0" in text:
                raise UserError(
                    f"text has a NUL at character {text.index(chr(0))}, which is the "
                    "end-of-document token here; remove it"
                )
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _decode(self, ids: np.ndarray) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def to_dict(self) -> dict:
        return {"kind": self.kind, "eod": self.eod}

    @classmethod
    def from_dict(cls, values: dict) -> ByteTokenizer:
        return cls(eod=values.get("eod", 0))


def train_bpe(texts: Iterable[str], *, vocab: int, end: str | None = None) -> SubwordTokenizer:
    """A byte-level BPE of at most `vocab` ids with GPT-2's way of cutting text into words (Radford
    et al. 2019, §2.2): 256 bytes, the merges, and end-of-document as the last id, as in GPT-2.

    end: how the end-of-document token is spelled, for a tokenizer that is to be a file; None: it
    has no spelling. The same texts give the same tokenizer, whatever the number of threads. A text
    too small for that many merges gives fewer ids: read the result's `vocab`.
    """
    checked("vocab", vocab, TrainedBytes)
    model = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    model.train_from_iterator(blocks(texts), trainer)
    eod = model.get_vocab_size()
    if end is not None:
        model.add_special_tokens([end])
    return SubwordTokenizer(json.loads(model.to_str()), name="bpe", eod=eod)


def byte_level(model: models.BPE, *, prefix: bool = False) -> tokenizers.Tokenizer:
    """`model` with GPT-2's way of cutting text into words. prefix: a blank before each text."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_wordpiece(texts: Iterable[str], *, vocab: int) -> SubwordTokenizer:
    """A lower-case WordPiece of at most `vocab` tokens, BERT's special tokens first among them.

    `texts` are gone through twice. Otherwise as `train_bpe`.
    """
    checked("vocab", vocab, TrainedVocab)
    trained = bert_model(models.WordPiece(unk_token="[UNK]"), lower=True)
    counts = Counter()
    for block in blocks(texts):
        counts.update(trained.normalizer.normalize_str(block))
    found = sorted((-count, a) for a, count in counts.items() if not a.isspace())
    alphabet = sorted(a for _, a in found[: min(_MOST_CHARACTERS, vocab // 4)])
    # The trainer numbers "##a" when it comes upon it, in an order that changes from run to run. It
    # keeps the numbers of special tokens, so all tokens that decide the order are among these.
    first = [*BERT_TOKENS, *alphabet, *(f"##{a}" for a in alphabet if _goes_on(a, trained))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=first, limit_alphabet=len(alphabet), show_progress=False
    )
    trained.train_from_iterator(blocks(texts), trainer)
    model = bert_model(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"), lower=True)
    model.add_special_tokens(list(BERT_TOKENS))
    return SubwordTokenizer(json.loads(model.to_str()), name=WORDPIECE, eod="none")


def bert_model(model: models.WordPiece, *, lower: bool) -> tokenizers.Tokenizer:
    """`model` with BERT's way of cutting text into words."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _goes_on(character: str, tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a word can go on with `character`: punctuation and Chinese are words by
    themselves."""
    text = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1


def tokenizer_from_dict(values: dict) -> Tokenizer:
    """The inverse of `Tokenizer.to_dict`; UserError for an unknown kind."""
    known = {one.kind: one for one in (ByteTokenizer, SubwordTokenizer, SentencePieceTokenizer)}
    kind = values.get("kind")
    if kind in known:
        return known[kind].from_dict(values)
    if kind == "none":  # of a model that came from elsewhere without one
        raise UserError(
            "this model was converted without a tokenizer; convert it again, with --data.tokenizer "
            "FILE, or bytes"
        )
    raise unknown_name("tokenizer", str(kind), known)


def blocks(texts: Iterable[str]) -> Iterator[str]:
    """The texts in blocks from which a tokenizer learns the same as from the whole.

    `tokenizers` takes about 150 bytes per character, so a large file cannot be given to it whole.
    """
    for text in texts:
        yield from cut_text(text, BETWEEN_WORDS, _BLOCK_CHARACTERS)
