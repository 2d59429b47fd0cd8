"""SentencePiece's tokenizers, their models run by `tokenizers`."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mtx.data.characters import CharacterTable
from mtx.data.subwords import MOST_CHARACTERS, Eod, SubwordTokenizer
from mtx.data.words import WordTable
from mtx.errors import UserError

BLANK = "\u2581"  # what SentencePiece writes for a blank
WORDS = f"{BLANK}+[^{BLANK}]*|[^{BLANK}]+"
_BLANKS = re.compile(" {2,}")
_CUT = rf"(?<=[^\s{BLANK}])(?= [^\s{BLANK}])"


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """How a text is written before pieces are looked for in it."""

    characters: str  # the compiled table of characters in base64, or ""
    kept: tuple[str, ...]  # the user's symbols, which that table leaves alone
    dummy_prefix: bool  # a blank before the text
    remove_blanks: bool  # at both ends, and all but one of several
    words: bool  # whether words, that is WORDS, are encoded one by one


class PieceTokenizer(SubwordTokenizer):
    """A model of SentencePiece's, which gives its tokens."""

    kind = "sentencepiece"

    def __init__(
        self, described: dict, form: TextForm, *, name: str, eod: Eod, sha256: str | None = None
    ):
        """described: what a `tokenizer.json` would hold of it, which normalizes nothing. The others
        are those of SubwordTokenizer. Raises UserError as that does."""
        self._form, self._characters = form, None
        if form.characters:
            try:
                compiled = base64.b64decode(form.characters)
                self._characters = CharacterTable(compiled, kept=form.kept)
            except (ValueError, IndexError) as error:
                raise UserError(f"{name} is no SentencePiece model: {error}") from None
        super().__init__(described, name=name, eod=eod, sha256=sha256)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As SubwordTokenizer.encode_all."""
        texts = [self._write(text) for text in texts]
        longest = max(map(len, texts), default=0)
        if not self._table and longest > MOST_CHARACTERS:
            raise UserError(
                f"a text of {longest:,} characters cannot be cut for this tokenizer, which takes "
                f"at most {MOST_CHARACTERS:,} at once; cut it before"
            )
        return self._encode(texts)

    def to_dict(self) -> dict:
        return {**super().to_dict(), "form": asdict(self._form)}

    @classmethod
    def from_dict(cls, values: dict) -> PieceTokenizer:
        """The inverse of `to_dict`."""
        form = TextForm(**{**values["form"], "kept": tuple(values["form"]["kept"])})
        names = ("name", "eod", "sha256")
        return cls(values["model"], form, **{name: values[name] for name in names})

    def _make_table(self) -> WordTable | None:
        return WordTable(self._model.model, re.compile(WORDS)) if self._form.words else None

    def _find_cuts(self) -> re.Pattern | None:
        """Before a single blank, where the form of both parts is that of the whole."""
        form = self._form
        trimmed = form.dummy_prefix and form.remove_blanks  # the blank becomes the prefix
        kept = not (form.dummy_prefix or form.remove_blanks or form.characters)
        return re.compile(_CUT) if form.words and (trimmed or kept) else None

    def _write(self, text: str) -> str:
        """`text` in its form. What is empty stays so."""
        form = self._form
        if self._characters:
            text = self._characters.apply(text)
        if form.remove_blanks:
            text = _BLANKS.sub(" ", text.lstrip(" "))
        if text and form.dummy_prefix:
            text = BLANK + text
        text = text.replace(" ", BLANK)
        return text.rstrip(BLANK) if form.remove_blanks else text
