"""SentencePiece's tokenizers, by its own library, which the extra `data` installs."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtx.data.tokenizer_base import Eod, Tokenizer, TokenizerIdentity, find_eod
from mtx.errors import UserError, reason

BLANK = "\u2581"  # what SentencePiece writes for a blank
_CUTS = re.compile(rf"(?<=[^\s{BLANK}])(?= [^\s{BLANK}])")  # before a single blank between words


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Control symbols are never found in a text."""

    kind = "sentencepiece"

    def __init__(self, data: bytes, *, name: str, eod: Eod, sha256: str | None = None):
        """data: the content of a `.model`. eod "auto" is its end-of-sequence token. sha256: of the
        file that the model was read from, if that is not `data`. Raises UserError for data that are
        not such a model, and if the library is not installed."""
        library, messages = _library()
        self._data, self._processor = data, library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
            count = self._processor.vocab_size()
            self._vocabulary = {self._processor.id_to_piece(n): n for n in range(count)}
            model = messages.ModelProto.FromString(data)
        except (RuntimeError, UnicodeDecodeError, ValueError) as error:
            raise UserError(f"{name} must be a SentencePiece model: {reason(error)}") from None
        if eod == "auto" and self._processor.eos_id() >= 0:
            eod = self._processor.eos_id()
        eod = find_eod(self._vocabulary, name=name, eod=eod)
        self.identity = TokenizerIdentity(
            name=Path(name).name, sha256=sha256 or hashlib.sha256(data).hexdigest(),
            vocab=max(count, -1 if eod is None else eod + 1), eod=eod,
        )  # fmt: skip
        self.cuts = _CUTS if _encodes_words(model) else None

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._processor.encode(text), np.int32) for text in texts]

    def _decode(self, ids: np.ndarray) -> str:
        return self._processor.decode(ids[ids < self._processor.vocab_size()].tolist())

    def vocabulary(self) -> dict[str, int]:
        return self._vocabulary

    def special_tokens(self) -> dict[str, int]:
        is_control = self._processor.is_control
        return {piece: n for piece, n in self._vocabulary.items() if is_control(n)}

    def to_dict(self) -> dict:
        return super().to_dict() | {"file": base64.b64encode(self._data).decode()}

    @classmethod
    def from_dict(cls, values: dict) -> SentencePieceTokenizer:
        """The inverse of `to_dict`; also reads what mtx 0.1 wrote."""
        data = base64.b64decode(values["file"]) if "file" in values else _first_format(values)
        return cls(data, **{name: values[name] for name in ("name", "eod", "sha256")})


def _encodes_words(model: Any) -> bool:
    """Whether words are encoded one by one, and the parts before and after _CUTS are normalized as
    in the whole text: the blank becomes the second part's prefix, or no text is changed at all."""
    form, kinds = model.normalizer_spec, type(model).SentencePiece
    trimmed = form.add_dummy_prefix and form.remove_extra_whitespaces
    kept = not (form.add_dummy_prefix or form.remove_extra_whitespaces or form.precompiled_charsmap)
    defined = any(token.type == kinds.USER_DEFINED for token in model.pieces)
    inside = re.compile(f"[^{BLANK}]{BLANK}")
    return (
        (trimmed or kept)
        and form.escape_whitespaces
        and not model.trainer_spec.treat_whitespace_as_suffix
        # In BPE, user-defined symbols are found before all others.
        and not (defined and model.trainer_spec.model_type == model.trainer_spec.BPE)
        and not any(inside.search(token.piece) for token in model.pieces)
    )


def _first_format(values: dict) -> bytes:
    """The model in a checkpoint's document by mtx 0.1: a description for `tokenizers`, in which a
    token that is not looked for in a text is spelled with a blank before it."""
    _, messages = _library()
    described, form, model = values["model"]["model"], values["form"], messages.ModelProto()
    unigram, kinds = described["type"] == "Unigram", model.SentencePiece
    if unigram:
        tokens, unknown = described["vocab"], described["unk_id"]
    else:  # the earlier a merge, the higher the score of its result
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in described["merges"])
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(pairs):
            ranks.setdefault("".join(pair), rank)
        by_id = sorted(described["vocab"].items(), key=lambda item: item[1])
        tokens = [(token, -float(ranks.get(token, len(ranks)))) for token, _ in by_id]
        unknown = described["vocab"][described["unk_token"]]
    for number, (token, score) in enumerate(tokens):
        kind = kinds.CONTROL if token.startswith(" ") else kinds.NORMAL
        if described["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kind = kinds.BYTE
        if token in form["kept"]:
            kind = kinds.USER_DEFINED
        if number == unknown:
            kind = kinds.UNKNOWN
        model.pieces.add(piece=token.removeprefix(" "), score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = trainer.UNIGRAM if unigram else trainer.BPE
    trainer.byte_fallback = described["byte_fallback"]
    trainer.unk_piece = model.pieces[unknown].piece
    normalizer.precompiled_charsmap = base64.b64decode(form["characters"])
    normalizer.add_dummy_prefix = form["dummy_prefix"]
    normalizer.remove_extra_whitespaces = form["remove_blanks"]
    return model.SerializeToString()


def _library() -> tuple[Any, Any]:
    """The library, and the messages that make up its files."""
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise UserError(
            "a SentencePiece .model needs the library sentencepiece; pip install 'mtx[data]'"
        ) from None
    return sentencepiece, sentencepiece_model_pb2
