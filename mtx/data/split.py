"""Which part of a corpus is trained on, and which is held out.

Megatron-LM gives each part whole sequences, in their order. If texts are few and long, that leaves
some part with nothing; each text is then cut instead, and each part has a share of every text: what
is held out lies near the end of each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mtx.config.data import SplitBy
from mtx.errors import UserError, shown

PARTS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's

Split = tuple[float, float, float]


def parse_split(ratios: str) -> Split:
    """Shares of train, valid and test that add up to 1, from "969,30,1", "9,1" or "1"."""
    parts = [part.strip() for part in ratios.split(",")]
    known = all(re.fullmatch(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", part) for part in parts)
    if not known or not 1 <= len(parts) <= len(PARTS):
        raise UserError(f"split={shown(ratios)} must be up to three ratios, such as 969,30,1")
    values = np.array([*map(float, parts), 0.0, 0.0][: len(PARTS)])
    if values.sum() == 0:
        raise UserError(f"split={shown(ratios)} gives nothing to any part; use such as 969,30,1")
    return tuple((values / values.sum()).tolist())


def split_range(split: Split, part: str, count: int) -> tuple[int, int]:
    """(first, end): which of `count` things in a row belong to `part`."""
    low, high = _shares(split, part)
    return round(low * count), round(high * count)


@dataclass(frozen=True, kw_only=True)
class Division:
    """One part's share of a list of texts: some texts whole, or a share of each text."""

    first: int  # the texts `first` to `end`, exclusive
    end: int
    cut: tuple[float, float] | None = None  # of each text, from this share of it to that; None: all

    def within(self, count: int) -> tuple[int, int]:
        """(first, end): which of the `count` things in a text belong to the part."""
        if self.cut is None:
            return 0, count
        low, high = self.cut
        return round(low * count), round(high * count)

    def spans(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`within` for each of the part's texts, int64; `counts` are those of all texts."""
        low, high = self.cut or (0.0, 1.0)
        counts = counts[self.first : self.end]
        return np.rint(low * counts).astype(np.int64), np.rint(high * counts).astype(np.int64)

    def sizes(self, counts: np.ndarray) -> np.ndarray:
        """How many things belong to the part, in each of its texts."""
        if self.cut is None:
            return counts[self.first : self.end]
        first, end = self.spans(counts)
        return end - first


def divide(
    counts: np.ndarray,
    ratios: str,
    part: str,
    *,
    by: SplitBy = "auto",
    serves: Callable[[np.ndarray], bool],
    parts: tuple[str, ...] = PARTS[:2],
) -> Division:
    """The share of `part` in texts of `counts` things each.

    by: "documents": texts stay whole; "tokens": each is cut; "auto": they stay whole if `serves`,
    which gets the counts of a part's texts, holds for all `parts` with a share above 0. The choice
    is the same for all parts, so that no part has what another has.
    """
    split = parse_split(ratios)
    whole = by == "documents" or by == "auto" and all(
        serves(counts[slice(*split_range(split, name, len(counts)))])
        for name, share in zip(PARTS, split, strict=True)
        if share and name in parts
    )  # fmt: skip
    if whole:
        first, end = split_range(split, part, len(counts))
        return Division(first=first, end=end)
    return Division(first=0, end=len(counts), cut=_shares(split, part))


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What a run would train on and hold out if its config says nothing about it."""

    by: SplitBy  # "documents" or "tokens"
    documents: int  # to train on
    held_out_documents: int
    tokens: int
    held_out_tokens: int

    @property
    def lopsided(self) -> bool:
        """Whether whole documents hold out less than half or more than twice their share."""
        _, share, _ = parse_split(DEFAULT_SPLIT)
        held_out = self.held_out_tokens / (self.tokens + self.held_out_tokens)
        return self.by == "documents" and not share / 2 <= held_out <= 2 * share


def foresee(lengths: np.ndarray) -> Foreseen:
    """The default split of documents of these `lengths` in tokens, for samples that are not longer
    than the held-out text; if they are longer, each document is cut."""
    parts = [
        divide(lengths, DEFAULT_SPLIT, part, serves=lambda some: int(some.sum(dtype=np.int64)) > 1)
        for part in PARTS[:2]
    ]
    train, held_out = (part.sizes(lengths) for part in parts)
    return Foreseen(
        by="documents" if parts[0].cut is None else "tokens",
        documents=int(np.count_nonzero(train)), held_out_documents=int(np.count_nonzero(held_out)),
        tokens=int(train.sum(dtype=np.int64)), held_out_tokens=int(held_out.sum(dtype=np.int64)),
    )  # fmt: skip


def _shares(split: Split, part: str) -> tuple[float, float]:
    """Where the part begins and ends, as shares of the whole."""
    if part not in PARTS:
        raise UserError(f"unknown part {part!r}: known are {', '.join(PARTS)}")
    *_, low, high = itertools.accumulate(split[: PARTS.index(part) + 1], initial=0.0)
    return low, high
