"""Examples to fine-tune a BERT on: labelled texts, pairs of texts, and multiple choice.

G rows of a batch · S sequence. A row is [CLS] A [SEP], or [CLS] A [SEP] B [SEP] for a pair; an
example of multiple choice has a row for each option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mtx.data import Tokenizer
from mtx.data.samples import shuffled
from mtx.data.special_tokens import SpecialTokens, find_special_tokens
from mtx.errors import UserError
from mtx.evaluation.choice import Question
from mtx.evaluation.files import read_records, text_field

_DROPOUT = 6  # in the key of a step's rng


class Row(NamedTuple):
    """A text or a pair between its special tokens."""

    tokens: np.ndarray  # int32 [at most S]
    second: int  # where B begins; len(tokens) if there is none


class Example(NamedTuple):
    """One example: its rows and the right answer."""

    rows: tuple[Row, ...]  # one for each option
    label: int  # the index of the class, or of the right option


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the examples of a fine-tuning have in common."""

    labels: tuple[str, ...] = ()  # the classes; none for multiple choice
    options: int = 1  # of an example of multiple choice
    special: SpecialTokens
    sequence: int  # S

    def __post_init__(self):
        if self.sequence < 5:
            raise UserError(
                f"sequence={self.sequence} must hold two texts and special tokens; use 5 or more"
            )

    @property
    def kind(self) -> Literal["classes", "race"]:
        """The task's name on the command line."""
        return "classes" if self.labels else "race"

    @property
    def outputs(self) -> int:
        """The number of outputs of the head."""
        return len(self.labels) or 1

    @property
    def answers(self) -> int:
        """The number of answers to choose from."""
        return len(self.labels) or self.options


class Labelled(NamedTuple):
    """A text, or a pair, and its class."""

    text: str
    other: str | None
    label: str
    where: str  # for messages


def read_labelled(names: Sequence[str]) -> list[Labelled]:
    """Reads JSON lines {"text": ..., "label": ...}, with a "text_pair" for pairs. A label is a text
    or a whole number. Raises UserError as `read_records` does, and for a record of another form."""
    found = []
    for where, record in read_records(names):
        label = record.get("label")
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise UserError(f"{where}: 'label' must be a text or a whole number, not {label!r}")
        text, pair = text_field(record, "text", where), "text_pair" in record
        other = text_field(record, "text_pair", where) if pair else None
        found.append(Labelled(text, other, str(label), where))
    return found


def classes_of(records: Sequence[Labelled]) -> tuple[str, ...]:
    """The labels in order, by number if all are numbers. Raises UserError if there is only one."""
    labels = {record.label for record in records}
    if len(labels) < 2:
        raise UserError(f"all examples have the label {labels.pop()!r}; two classes are needed")
    numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    return tuple(sorted(labels, key=int if numbers else str))


def multiple_choice(tokenizer: Tokenizer, questions: Sequence[Question], *, sequence: int) -> Task:
    """The task of these questions. Raises UserError if their numbers of options differ."""
    counts = {len(question.options): question.where for question in reversed(questions)}
    if len(counts) > 1:
        said = ", ".join(f"{count} ({where})" for count, where in counts.items())
        raise UserError(f"questions must have as many options each, not {said}")
    options = next(iter(counts))
    return Task(options=options, special=find_special_tokens(tokenizer), sequence=sequence)


def encode(task: Task, tokenizer: Tokenizer, records: Sequence[Any]) -> list[Example]:
    """Examples from labelled texts, or from questions if the task is multiple choice."""
    return (encode_labelled if task.labels else encode_questions)(task, tokenizer, records)


def encode_labelled(task: Task, tokenizer: Tokenizer, records: Sequence[Labelled]) -> list[Example]:
    """Examples from labelled texts. Raises UserError for a label that is not among the task's."""
    examples = []
    for record in records:
        if record.label not in task.labels:
            known = ", ".join(task.labels)
            raise UserError(f"{record.where}: the label {record.label!r} must be one of {known}")
        row = make_row(task, *_ids(tokenizer, record.text, record.other))
        examples.append(Example((row,), task.labels.index(record.label)))
    return examples


def encode_questions(
    task: Task, tokenizer: Tokenizer, questions: Sequence[Question]
) -> list[Example]:
    """Examples from questions. A is the question with an option, put into its blank "_" if it has
    one and after it if not; B is the article."""
    examples = []
    for question in questions:
        if len(question.options) != task.options:
            count = len(question.options)
            raise UserError(f"{question.where} has {count} options, the others {task.options}")
        article = tokenizer.encode(question.article)
        asked = [ask(question.question, option) for option in question.options]
        rows = tuple(make_row(task, tokenizer.encode(text), article) for text in asked)
        examples.append(Example(rows, question.answer))
    return examples


def ask(question: str, option: str) -> str:
    """A question and an option as one text."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def make_row(task: Task, first: np.ndarray, second: np.ndarray | None = None) -> Row:
    """A text or a pair between special tokens. If too long, the longer text loses its end."""
    begin, end = [task.special.cls], [task.special.sep]
    if second is None:
        tokens = np.concatenate([begin, first[: task.sequence - 2], end]).astype(np.int32)
        return Row(tokens, len(tokens))
    room = task.sequence - 3
    first = first[: max(room - len(second), room - room // 2)]
    second = second[: room - len(first)]
    tokens = np.concatenate([begin, first, end, second, end]).astype(np.int32)
    return Row(tokens, len(first) + 2)


def _ids(tokenizer: Tokenizer, text: str, other: str | None) -> tuple[np.ndarray, ...]:
    return tuple(tokenizer.encode(part) for part in (text, other) if part is not None)


def make_batch(
    task: Task, examples: Sequence[Example], count: int, *, rng: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """A batch of `count` examples, G = count * options rows, as the model reads it: see
    `mtx.layers.bert.Classes`. Missing examples are padding, of weight 0. rng int32 [G]: for
    dropout."""
    shape = count * task.options, task.sequence
    batch = {
        "tokens": np.full(shape, task.special.pad, np.int32),
        "types": np.zeros(shape, np.int32),
        "segments": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
        "labels": np.zeros(shape[0], np.int32),
    }
    for place, example in enumerate(examples):
        first = place * task.options
        batch["weights"][first, 0] = 1
        batch["labels"][first if task.labels else first + example.label] = (
            example.label if task.labels else 1
        )
        for g, row in enumerate(example.rows, start=first):
            batch["tokens"][g, : len(row.tokens)] = row.tokens
            batch["types"][g, row.second : len(row.tokens)] = 1
            batch["segments"][g, : len(row.tokens)] = 1
    return batch if rng is None else batch | {"rng": rng}


def training_batch(
    task: Task, examples: Sequence[Example], *, step: int, count: int, seed: int
) -> dict[str, np.ndarray]:
    """The batch of a step: a pure function of the arguments. Every epoch has its own order; a step
    may finish one epoch and begin the next."""
    epochs, places = np.divmod(step * count + np.arange(count), len(examples))
    orders = {epoch: shuffled(len(examples), seed, int(epoch), _DROPOUT) for epoch in set(epochs)}
    some = [examples[int(orders[epoch][place])] for epoch, place in zip(epochs, places)]
    bits = np.random.PCG64(np.random.SeedSequence((seed, step, _DROPOUT)))
    rng = (bits.random_raw(count * task.options) >> np.uint64(33)).astype(np.int32)
    return make_batch(task, some, count, rng=rng)
