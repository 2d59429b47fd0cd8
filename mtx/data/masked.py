"""Masked tokens as in Megatron-LM's BERT: whole words, runs of up to three, 80 / 10 / 10.

A fraction of a row's tokens is to be predicted. They are chosen word by word (a token that begins
with "##" belongs to the word before it), in runs of 1, 2 or 3 words; a run of n words is drawn with
a weight of 1/n. A token to be predicted becomes [MASK] in 8 of 10 cases, stays the same in one, and
becomes any other token in one (Devlin et al. 2019, §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtx.data.samples import Rng
from mtx.data.special_tokens import BertVocab
from mtx.errors import UserError
from mtx.fields import resolve_types
from mtx.sizes import Tokens, Width

_MASKED, _KEPT = 0.8, 0.1  # of the tokens that are to be predicted; the rest are replaced


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How many tokens are to be predicted, and in what runs."""

    fraction: float = 0.15  # of a row's tokens, except special tokens
    run: Width = 3  # words, at most
    most: Tokens | None = None  # tokens of a row

    def __post_init__(self):
        resolve_types(self, prefix="mask_")
        if not 0.0 < self.fraction < 1.0:
            raise UserError(f"mask_fraction={self.fraction} must lie between 0 and 1")

    def wanted(self, tokens: int) -> int:
        """How many tokens of a row of `tokens` tokens are to be predicted, at least one."""
        wanted = max(1, round(self.fraction * tokens))
        return wanted if self.most is None else min(wanted, self.most)


def mask_words(
    tokens: np.ndarray, vocab: BertVocab, rng: Rng, masking: Masking
) -> tuple[np.ndarray, np.ndarray]:
    """(`tokens` with some masked, their places): int32 [n], and places in ascending order.

    tokens [n]: text between special tokens, which no run of words crosses. If words do not fit into
    the wanted number, fewer tokens are masked, but never none: the shortest word is masked then.
    """
    begins, ends, words_left = _words(tokens, vocab)
    if not len(begins):
        return tokens.astype(np.int32), np.empty(0, np.int64)
    wanted = masking.wanted(int((ends - begins).sum()))
    chosen = _choose(begins, ends, words_left, wanted, rng, masking.run)
    if not chosen:
        shortest = int(np.argmin(ends - begins))
        chosen = [(begins[shortest], ends[shortest])]
    places = np.array([place for run in sorted(chosen) for place in range(*run)])
    kind, masked = rng.uniform(len(places)), tokens.astype(np.int32)
    other = vocab.others[(rng.uniform(len(places)) * len(vocab.others)).astype(np.int64)]
    kept = np.where(kind < _MASKED + _KEPT, masked[places], other)
    masked[places] = np.where(kind < _MASKED, vocab.special.mask, kept)
    return masked, places


def _words(tokens: np.ndarray, vocab: BertVocab) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, end, words from here to the next special token) of each word, int64 [words]."""
    special = vocab.is_special[tokens]
    after_special = np.ones(len(tokens), bool)
    after_special[1:] = special[:-1]
    begin = ~special & (~vocab.continues[tokens] | after_special)
    begins = np.flatnonzero(begin)
    # A word ends where the next one or a special token begins.
    stops = np.append(np.flatnonzero(begin | special), len(tokens))
    ends = stops[np.searchsorted(stops, begins, side="right")]
    texts = np.cumsum(special)[begins]  # one number for all words between two special tokens
    words_left = np.searchsorted(texts, texts, side="right") - np.arange(len(begins))
    return begins, ends, words_left


def _choose(begins, ends, words_left, wanted: int, rng: Rng, run: int) -> list[tuple[int, int]]:
    """(begin, end) of runs of words that do not overlap: `wanted` tokens, or a few fewer."""
    order, sizes = rng.permutation(len(begins)), rng.uniform(len(begins)).tolist()
    shares = np.cumsum(1 / np.arange(1, run + 1)).tolist()  # of runs up to each length
    begins, ends, words_left = begins.tolist(), ends.tolist(), words_left.tolist()
    covered, chosen, left = bytearray(len(begins)), [], wanted
    for word in order.tolist():
        if not left:
            break
        most = min(run, words_left[word])
        size, drawn = 1, sizes[word] * shares[most - 1]
        while drawn >= shares[size - 1]:
            size += 1
        while size and ends[word + size - 1] - begins[word] > left:
            size -= 1
        if not size or any(covered[word : word + size]):
            continue
        covered[word : word + size] = b"\1" * size
        chosen.append((begins[word], ends[word + size - 1]))
        left -= ends[word + size - 1] - begins[word]
    return chosen
