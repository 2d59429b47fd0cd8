"""SentencePiece's `.model` as a model of the `tokenizers` library.

The file is a protocol buffer (sentencepiece_model.proto of its sources), of which a few fields
matter, so it is read here by its wire format:

    1  pieces, each {1: text, 2: score, 3: type}
    2  trainer_spec {3: model type, 24: blanks as suffixes, 35: byte fallback, 40: unk, 42: eos}
    3  normalizer_spec {2: table of characters, 3: dummy prefix, 4: remove blanks, 5: escape blanks}
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from mtx.data.pieces import BLANK, PieceTokenizer, TextForm
from mtx.data.subwords import Eod
from mtx.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_MODELS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """What decides the tokens of a text."""

    pieces: list[_Piece]
    kind: int  # _UNIGRAM or _BPE
    unknown: int
    end: int  # -1 where there is none
    byte_fallback: bool
    characters: bytes  # the normalization, compiled
    dummy_prefix: bool  # a blank before the text
    remove_blanks: bool  # at both ends, and all but one of several

    @property
    def defined(self) -> list[str]:
        """The user's symbols, the longest first."""
        texts = [piece.text for piece in self.pieces if piece.kind == USER_DEFINED]
        return sorted(texts, key=len, reverse=True)

    @property
    def cut_out(self) -> list[str]:
        """Those of them that are cut out before the model sees the text: no merges lead there."""
        return self.defined if self.kind == _BPE else []


def read_sentencepiece(data: bytes, *, name: str, eod: Eod) -> PieceTokenizer:
    """The tokenizer of a SentencePiece model, `data`; eod "auto" is its end-of-sequence token.

    Its unigram and BPE models are known. Symbols that its user defined are found in a text, control
    symbols never.
    Raises UserError for a file that is no such model, or that asks for what is not made here.
    """
    try:
        spec = _read(data)
    except (ValueError, struct.error) as error:  # wrong UTF-8 is the first of them
        raise UserError(f"{name} is no SentencePiece model: {error}") from None
    except _NotMade as error:
        raise UserError(f"{name} is a SentencePiece model {error}; make a tokenizer.json") from None
    inside = re.compile(f"[^{BLANK}]{BLANK}")
    form = TextForm(
        characters=base64.b64encode(spec.characters).decode(),
        kept=tuple(spec.defined),
        dummy_prefix=spec.dummy_prefix,
        remove_blanks=spec.remove_blanks,
        # No piece goes on from one word to the next, and none is to be found before all others.
        words=not spec.cut_out and not any(inside.search(piece.text) for piece in spec.pieces),
    )
    model = tokenizers.Tokenizer(_unigram(spec) if spec.kind == _UNIGRAM else _bpe(spec))
    if spec.cut_out:
        symbols = Regex("|".join(map(re.escape, spec.cut_out)))
        model.pre_tokenizer = pre_tokenizers.Split(symbols, "isolated")
    model.decoder = decoders.Sequence([
        decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if spec.dummy_prefix else []),
    ])  # fmt: skip
    if eod == "auto" and 0 <= spec.end < len(spec.pieces):
        eod = spec.end
    digest = hashlib.sha256(data).hexdigest()
    return PieceTokenizer(
        json.loads(model.to_str()), form, name=Path(name).name, eod=eod, sha256=digest
    )


# --- the file -------------------------------------------------------------------------------------


class _NotMade(Exception):
    """The model asks for something that `tokenizers` has not."""


def _read(data: bytes) -> _Spec:
    fields = _fields(data)
    pieces = [_piece(_message_of(raw)) for raw in fields.get(1, [])]
    trainer, normalizer = (_message(fields, number) for number in (2, 3))
    if not pieces:
        raise ValueError("it holds no pieces")
    kind = _number(trainer, 3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise _NotMade(f"of type {_MODELS.get(kind, kind)}, and only unigram and bpe are known")
    if _number(trainer, 24, 0):
        raise _NotMade("that writes blanks behind words")
    if not _number(normalizer, 5, 1):
        raise _NotMade("that does not escape blanks")
    unknown = [index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"{len(unknown)} of its pieces stand for the unknown, and one is to")
    end = _number(trainer, 42, 2)
    return _Spec(
        pieces=pieces, kind=kind, unknown=unknown[0],
        end=end - 2**64 if end >= 2**63 else end,  # -1 is written so
        byte_fallback=bool(_number(trainer, 35, 0)),
        characters=_last(normalizer, 2, b""),
        dummy_prefix=bool(_number(normalizer, 3, 1)),
        remove_blanks=bool(_number(normalizer, 4, 1)),
    )  # fmt: skip


def _piece(fields: Fields) -> _Piece:
    raw = _last(fields, 2, struct.pack("<f", 0.0))
    return _Piece(
        text=_last(fields, 1, b"").decode("utf-8"),
        score=struct.unpack("<f", raw)[0],
        kind=_number(fields, 3, NORMAL),
    )


def _fields(data: bytes) -> Fields:
    """The fields of a message: whole numbers, and bytes for the rest."""
    fields: Fields = defaultdict(list)
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, form = key >> 3, key & 7
        if form == _VARINT:
            value, place = _varint(data, place)
        elif form in (_FIXED64, _FIXED32, _BYTES):
            size = {_FIXED64: 8, _FIXED32: 4}.get(form)
            if size is None:
                size, place = _varint(data, place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise ValueError(f"field {number} goes beyond its end; it is cut short")
        else:
            raise ValueError(f"field {number} is of an unknown form, {form}")
        fields[number].append(value)
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("a number goes beyond its end; it is cut short")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _last(fields: Fields, number: int, default: bytes) -> bytes:
    value = fields[number][-1] if number in fields else default
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number, and bytes are to be there")
    return value


def _number(fields: Fields, number: int, default: int) -> int:
    value = fields[number][-1] if number in fields else default
    if not isinstance(value, int):
        raise ValueError(f"field {number} holds bytes, and a number is to be there")
    return value


def _message(fields: Fields, number: int) -> Fields:
    return _message_of(_last(fields, number, b""))


def _message_of(value: int | bytes) -> Fields:
    if not isinstance(value, bytes):
        raise ValueError("a number is where a message is to be")
    return _fields(value)


# --- the model ------------------------------------------------------------------------------------


def _unigram(spec: _Spec) -> models.Unigram:
    """`tokenizers` would find every piece in a text, bytes by their names too. These must stay, so
    they cost more than the names' characters."""
    normal = [piece.score for piece in spec.pieces if piece.kind == NORMAL]
    scored, least = [], min([*normal, -1.0])
    for piece in spec.pieces:
        score = piece.score
        if piece.kind == BYTE:
            score = 7 * least
        elif piece.kind == USER_DEFINED:  # as SentencePiece has it
            score = -0.1
        scored.append((_spelled(piece), score))
    return models.Unigram(scored, unk_id=spec.unknown, byte_fallback=spec.byte_fallback)


def _bpe(spec: _Spec) -> models.BPE:
    """Any two neighbours that make up a piece are merged, the piece of the highest score first."""
    reached: dict[str, int] = {}  # the pieces that merges lead to
    merges = []
    normal = [(piece.text, n) for n, piece in enumerate(spec.pieces) if piece.kind == NORMAL]
    for text, number in sorted(normal, key=lambda item: len(item[0])):
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = [(left, right) for left, right in pairs if left in reached and right in reached]
        if pairs or len(text) == 1:
            reached[text] = number
        score = spec.pieces[number].score
        merges += [(-score, number, reached[left], reached[right]) for left, right in pairs]
    vocab: dict[str, int] = {}
    for number, piece in enumerate(spec.pieces):
        lost = piece.kind == NORMAL and piece.text not in reached
        vocab.setdefault(f" {piece.text}" if lost else _spelled(piece), number)
    texts = [piece.text for piece in spec.pieces]
    return models.BPE(
        vocab=vocab,
        merges=[(texts[left], texts[right]) for *_, left, right in sorted(merges)],
        unk_token=_spelled(spec.pieces[spec.unknown]),
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
        ignore_merges=bool(spec.cut_out),
    )


def _spelled(piece: _Piece) -> str:
    """What SentencePiece does not look for in a text gets a blank, which no text has there."""
    return f" {piece.text}" if piece.kind in (UNKNOWN, CONTROL, UNUSED) else piece.text
