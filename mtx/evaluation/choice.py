"""Multiple choice for a model that continues text: the likeliest answer is its choice.

In the form of RACE (Lai et al. 2017): an article, questions on it, four options each. How an
answer is asked for and likelihoods are normalised follows Brown et al. 2020, §2.4.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mtx.data import Tokenizer
from mtx.data.sources import require_text
from mtx.errors import UserError
from mtx.evaluation.files import read_records, text_field
from mtx.evaluation.score import Report, Row, continuation_row, score_rows
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

PROMPT = "Article: {article}\n\nQuestion: {question}\nAnswer:"  # and a blank before each answer


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question on an article, with its options."""

    article: str
    question: str
    options: tuple[str, ...]
    answer: int  # the right option's index, from 0
    where: str  # the question is; for messages

    @property
    def prompt(self) -> str:
        return PROMPT.format(article=self.article, question=self.question)


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """How many questions were answered correctly, an option's score being its log-likelihood ..."""

    questions: int
    accuracy: float  # as it is: for options of equal length, since longer ones are less likely
    accuracy_per_token: float  # ... over its number of tokens
    accuracy_per_byte: float  # ... over its length in UTF-8
    chance: float  # the accuracy of guessing
    mean_loss: float  # -log-likelihood of a right answer, nats


def read_race(names: Sequence[str]) -> list[Question]:
    """The questions of RACE's files: one JSON object each, or JSON lines of them.

    An object is {"article", "questions", "options", "answers"}, the last three being lists and an
    answer a letter; or {"article", "question", "options", "answer"} for one question. Raises
    UserError as `read_records` does, and for an object of another form.
    """
    return [
        question for where, record in read_records(names) for question in _questions(where, record)
    ]


def choice(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    report: Report | None = None,
) -> ChoiceScores:
    """How often the model finds the right option of a question most likely after PROMPT.

    Of options that are equally likely, the first is chosen. An article too long for the model
    loses its beginning; each option of one question sees the same text. Raises UserError for an
    option of no tokens or more than S.
    """
    if not questions:
        raise UserError("questions is empty; name at least one question to answer")
    rows = [row for question in questions for row in _rows(question, tokenizer, trainer)]
    scores = score_rows(trainer, state, rows, report=report)
    right = np.zeros(3)
    right_loss = 0.0
    for question in questions:
        likelihoods, tokens, sizes = np.array([
            (score.log_likelihood, len(score.losses), len(option.encode()))
            for option, score in zip(question.options, scores)
        ]).T  # fmt: skip
        right_loss -= likelihoods[question.answer]
        for way, values in enumerate((likelihoods, likelihoods / tokens, likelihoods / sizes)):
            right[way] += int(values.argmax()) == question.answer
    plain, per_token, per_byte = (right / len(questions)).tolist()
    return ChoiceScores(
        questions=len(questions), mean_loss=float(right_loss / len(questions)),
        accuracy=plain, accuracy_per_token=per_token, accuracy_per_byte=per_byte,
        chance=float(np.mean([1 / len(question.options) for question in questions])),
    )  # fmt: skip


def _rows(question: Question, tokenizer: Tokenizer, trainer: Trainer) -> Iterator[Row]:
    sequence = trainer.run.model.sequence
    context = tokenizer.encode(question.prompt)
    targets = [tokenizer.encode(f" {option}") for option in question.options]
    room = max(sequence + 1 - max(map(len, targets)), 1)  # what all options can see
    for number, target in enumerate(targets):
        what = f"{question.where}: option {string.ascii_uppercase[number]}"
        yield continuation_row(
            context[-room:], target, eod=tokenizer.eod, sequence=sequence, what=what
        )


def _questions(where: str, record: dict) -> Iterator[Question]:
    article = text_field(record, "article", where)
    if "questions" not in record:
        record = {
            "questions": [record.get("question")],
            "options": [record.get("options")],
            "answers": [record.get("answer")],
        }
    lists: dict[str, list] = {}
    for name in ("questions", "options", "answers"):
        if not isinstance(values := record.get(name), list):
            raise UserError(f"{where}: {name!r} is {type(values).__name__}, not a list")
        lists[name] = values
    counts = {name: len(values) for name, values in lists.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{where} has {said}; it must have as many of each")
    for number, (question, options, answer) in enumerate(zip(*lists.values()), start=1):
        place = f"{where}, question {number}" if len(lists["questions"]) > 1 else where
        if not isinstance(options, list) or not 2 <= len(options) <= 26:
            raise UserError(f"{place}: the options must be a list of 2 to 26 texts, not {options}")
        letters = string.ascii_uppercase[: len(options)]
        if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
            known = ", ".join(letters)
            raise UserError(f"{place}: the answer must be one of {known}, not {answer!r}")
        for letter, option in zip(letters, options):
            if not require_text(option, f"{place}: option {letter}").strip():
                raise UserError(f"{place}: option {letter} is blank")
        yield Question(
            article=article,
            question=require_text(question, f"{place}: the question"),
            options=tuple(options),
            answer=letters.index(answer),
            where=place,
        )
