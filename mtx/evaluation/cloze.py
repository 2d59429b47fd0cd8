"""LAMBADA's cloze test: is the last word of a passage the one that the model would write?

Paperno et al. 2016; as Megatron-LM does it (Shoeybi et al. 2019, appendix E).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtx.data import Tokenizer
from mtx.errors import UserError
from mtx.evaluation.files import read_records, text_field
from mtx.evaluation.score import Report, Row, continuation_row, score_rows
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ClozeScores:
    """How many passages were finished correctly."""

    texts: int
    strict: bool
    correct: int
    accuracy: float  # correct / texts
    target_tokens: int  # of all texts together
    target_perplexity: float  # exp of the mean over texts of a target's -ln probability


def read_passages(names: Sequence[str]) -> list[str]:
    """The texts of JSON lines {"text": ...}. Raises UserError as `read_records` does, and for a
    text without a word."""
    texts = []
    for where, record in read_records(names):
        text = text_field(record, "text", where)
        if not text.strip():
            raise UserError(f"{where}: the text is blank; give it at least one word")
        texts.append(text)
    return texts


def cloze(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    strict: bool = True,
    report: Report | None = None,
) -> ClozeScores:
    """How often the end of a text is what the model finds most likely, token by token, each token
    given the right ones before it.

    strict: the end is the last word, with the punctuation attached to it. Otherwise it is the last
    token, which may be a part of a word. Of a text longer than S + 1 tokens, only the last ones
    count; a text that is nothing but its end is put after an end-of-document token.
    Raises UserError for a text without a word, or a last word of more than S tokens.
    """
    if not texts:
        raise UserError("texts is empty; name at least one text to finish")
    rows = [
        _row(text, tokenizer, strict, trainer.run.model.sequence, f"text {place}")
        for place, text in enumerate(texts, start=1)
    ]
    scores = list(score_rows(trainer, state, rows, report=report))
    correct = sum(score.greedy for score in scores)
    loss = -math.fsum(score.log_likelihood for score in scores) / len(rows)
    return ClozeScores(
        texts=len(rows), strict=strict, correct=correct, accuracy=correct / len(rows),
        target_tokens=sum(row.scored for row in rows), target_perplexity=float(np.exp(loss)),
    )  # fmt: skip


def split_passage(text: str, tokenizer: Tokenizer, *, strict: bool) -> tuple[np.ndarray, ...]:
    """(ids of the context, ids of the end to be found), int32; the context may be empty."""
    if not strict:
        ids = tokenizer.encode(text)
        return ids[:-1], ids[-1:]
    word = text.split()[-1]
    context = text[: text.rindex(word)].strip()
    return tokenizer.encode(context), tokenizer.encode(f" {word}")


def _row(text: str, tokenizer: Tokenizer, strict: bool, sequence: int, what: str) -> Row:
    if not text.strip():
        raise UserError(f"{what} is blank; give it at least one word")
    context, target = split_passage(text, tokenizer, strict=strict)
    what = f"the end of {what}"
    return continuation_row(context, target, eod=tokenizer.eod, sequence=sequence, what=what)
