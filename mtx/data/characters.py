"""SentencePiece's normalization of characters: a table of replacements, the longest match first.

`tokenizers` has it as well ("Precompiled"), but cuts the text into graphemes before it looks, and
of a letter with two accents keeps one. So it is done here.

The table is compiled: u32 size, a double array of u32 units (darts-clone) over the bytes of the
keys, and the replacements, each ended by a zero byte. Of a unit, bits 0-7 are the label, 8 says
that a leaf follows, 9 and 10-30 are the offset to its children, and a leaf (31) has a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

_LEAF = 1 << 31
_LONGEST_BYTES = 64  # of a key


class CharacterTable:
    """Replaces characters, and some strings of several."""

    def __init__(self, compiled: bytes, *, kept: Iterable[str] = ()):
        """kept: strings that are to stay as they are. ValueError or IndexError for bytes that are
        no table."""
        replaced = _entries(compiled) | {text: text for text in kept}
        self._single = str.maketrans({key: to for key, to in replaced.items() if len(key) == 1})
        self._several = {key: to for key, to in replaced.items() if len(key) > 1}
        self._longest = max(map(len, self._several), default=0)
        second = "".join({key[1] for key in self._several})  # accents: few, and rare in texts
        self._second = re.compile(f"[{re.escape(second)}]") if second else None
        self._accents = all(ord(character) > 127 for character in second)

    def apply(self, text: str) -> str:
        """`text`, at each place the longest string of the table replaced."""
        if self._second is None or (self._accents and text.isascii()):
            return text.translate(self._single)
        done, parts = 0, []
        for match in self._second.finditer(text):
            place = match.start() - 1
            if place < done:
                continue
            for size in range(min(self._longest, len(text) - place), 1, -1):
                to = self._several.get(text[place : place + size])
                if to is not None:
                    parts += [text[done:place].translate(self._single), to]
                    done = place + size
                    break
        return "".join([*parts, text[done:].translate(self._single)])


def _entries(compiled: bytes) -> dict[str, str]:
    """All keys and what they are replaced by: the tree, level by level."""
    size = int.from_bytes(compiled[:4], "little")
    if len(compiled) < 4 or size % 4 or size < 4 or 4 + size > len(compiled):
        raise ValueError(f"its table of characters of {len(compiled)} bytes is damaged")
    units = np.frombuffer(compiled, "<u4", size // 4, 4).astype(np.int64)
    texts = compiled[4 + size :]
    labels = units & 0xFF
    inner = np.flatnonzero((labels > 0) & (units & _LEAF == 0))
    # The children of a unit have one base in common: their place ^ their label.
    order = np.argsort(inner ^ labels[inner], kind="stable")
    children, child_bases = inner[order], (inner ^ labels[inner])[order]
    bases = np.arange(len(units)) ^ ((units >> 10 & 0x1FFFFF) << (units >> 6 & 8))
    places, keys, found = np.zeros(1, np.int64), np.zeros((1, 0), np.uint8), {}
    while len(places):
        if keys.shape[1] > _LONGEST_BYTES:
            raise ValueError("its table of characters runs in a circle")
        ended = np.flatnonzero(units[places] >> 8 & 1)
        starts = units[bases[places[ended]]] & 0x7FFFFFFF
        for key, start in zip(keys[ended], starts.tolist(), strict=True):
            found[key.tobytes().decode()] = texts[start : texts.index(b"\0", start)].decode()
        low = np.searchsorted(child_bases, bases[places], "left")
        high = np.searchsorted(child_bases, bases[places], "right")
        counts = high - low
        parents = np.repeat(np.arange(len(places)), counts)
        offsets = np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = children[low[parents] + offsets]
        keys = np.column_stack([keys[parents], labels[places].astype(np.uint8)])
    return found
