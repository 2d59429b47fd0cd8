"""Perplexity of texts by overlapping windows, as Megatron-LM measures it on WikiText-103.

Shoeybi et al. 2019, appendix E, and its published code. S sequence · T tokens of a text ·
T_o its blank-separated words before it is detokenised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtx.data import Tokenizer
from mtx.errors import UserError
from mtx.evaluation.score import Report, Row, score_rows
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

_LARGEST_EXPONENT = 20.0  # the published code's: for an untrained model it prints e^20


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The perplexity of one or several texts; losses in nats."""

    tokens: int  # T
    original_tokens: int | None  # T_o, of WikiText; None for plain text
    targets: int  # tokens that were predicted: all but the first of each text
    windows: int
    stride: int
    wikitext: bool  # whether the texts were detokenised
    loss: float  # mean over the targets
    perplexity: float  # exp(loss), at most e^20
    token_ratio: float | None  # (T - 1) / (T_o - 1); None if T_o is None or 1
    adjusted_perplexity: float | None  # exp(loss * token_ratio), at most e^20: per WikiText word
    # loss / ln(2) * T / bytes of the detokenised texts in UTF-8: as if a text's first token cost as
    # much as the others do on average
    bits_per_byte: float


def perplexity(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    stride: int = 32,
    wikitext: bool = False,
    report: Report | None = None,
) -> Perplexity:
    """The perplexity of `texts`, each read from its beginning to its end.

    The first window of a text scores all of its S targets; each later one starts `stride` tokens
    further on and scores its last `stride`, so that every target is scored once and sees at least
    S - stride tokens before it. With stride = S, the windows are side by side.
    `wikitext`: the texts are WikiText's and are detokenised first, and `adjusted_perplexity` is the
    number that papers report for WikiText-103: per word, as words were cut there. Plain text does
    not say how to cut its words, so it has none; models with different tokenizers are compared by
    `bits_per_byte`, as on the Pile (Gao et al. 2020, section 3.1): the mean over the targets, times
    all tokens over all bytes. So the bytes of the first tokens, which are not predicted and may be
    parts of characters, need not be known.
    Raises UserError for a text of fewer than two tokens, and a stride that is not within 1 and S.
    """
    sequence = trainer.run.model.sequence
    if not 1 <= stride <= sequence:
        raise UserError(f"stride={stride} must be between 1 and sequence={sequence}")
    if not texts:
        raise UserError("texts is empty; name at least one text to take the perplexity of")
    rows: list[Row] = []
    tokens = original = targets = original_targets = text_bytes = 0
    for place, text in enumerate(texts, start=1):
        words = count_words(text)
        if wikitext:
            text = detokenise_wikitext(text)
        ids = tokenizer.encode(text)
        if len(ids) < 2:
            raise UserError(
                f"text {place} of {len(texts)} has {len(ids)} token{'s' * (len(ids) != 1)}; a "
                "perplexity needs at least 2, the first of which is not predicted"
            )
        rows += window_rows(ids, sequence=sequence, stride=stride)
        tokens, targets = tokens + len(ids), targets + len(ids) - 1
        original, original_targets = original + words, original_targets + words - 1
        text_bytes += len(text.encode())
    scores = score_rows(trainer, state, rows, report=report)
    loss = -math.fsum(score.log_likelihood for score in scores) / targets
    ratio = targets / original_targets if wikitext and original_targets else None
    return Perplexity(
        tokens=tokens, original_tokens=original if wikitext else None, targets=targets,
        windows=len(rows), stride=stride, wikitext=wikitext, loss=loss,
        perplexity=_bounded_exp(loss), token_ratio=ratio,
        adjusted_perplexity=None if ratio is None else _bounded_exp(loss * ratio),
        bits_per_byte=loss / math.log(2) * tokens / text_bytes,
    )  # fmt: skip


def window_rows(ids: np.ndarray, *, sequence: int, stride: int) -> list[Row]:
    """The windows of a text of at least two tokens, as views of `ids`; see `perplexity`."""
    targets = len(ids) - 1
    rows = [Row(ids[: sequence + 1], min(sequence, targets))]
    for scored in range(sequence, targets, stride):  # targets scored before this window
        start = scored + stride - sequence
        rows.append(Row(ids[start : start + sequence + 1], min(stride, targets - scored)))
    return rows


def count_words(text: str) -> int:
    """T_o: how many words single blanks separate, as the published code counts. The line ends of
    WikiText stand between blanks, and count as words."""
    return len(text.strip().split(" "))


def is_wikitext(text: str) -> bool:
    """Whether a text has WikiText's marks of separated numbers and compounds."""
    return re.search(" @[-,.]@ ", text) is not None


def detokenise_wikitext(text: str) -> str:
    """WikiText as it was before it was cut into words, by the published code's rules, in its order.

    They are rough: in "Bob 's and Ann 's", the apostrophes are taken for a pair of quotes.
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opens, closes in ("()", "[]", "{}", '""', "''"):
        inner = rf"{re.escape(opens)}\s*([^{re.escape(closes)}]*?)\s*{re.escape(closes)}"
        text = re.sub(inner, rf"{opens}\1{closes}", text)
    for heading in ("= = = =", "= = =", "= ="):
        text = text.replace(heading, heading.replace(" ", ""))
    for there, then in (
        (" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
    ):  # fmt: skip
        text = text.replace(there, then)
    return text


def _bounded_exp(value: float) -> float:
    return math.exp(min(_LARGEST_EXPONENT, value))
