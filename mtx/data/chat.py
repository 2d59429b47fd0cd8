"""Conversations as tokens: a chat template, which tokens are the assistant's, and rows that several
conversations share without seeing each other.

A template is ChatML, or the model's own in Jinja. A conversation is rendered message by message:
the text that an assistant's message adds, including its end of turn, is what is learned. Each part
is encoded by itself, so that a prompt has the same tokens in generation as it had in training. A
mark such as <|im_start|> is one token if the tokenizer has it as a special token, and plain text
otherwise; a message that contains a mark is refused.

S sequence · G rows.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mtx.data.batches import Batch
from mtx.data.samples import shuffled
from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError, reason

ROLES = ("system", "user", "assistant")
_PACKING, _ORDER = 7, 8  # purposes of random numbers, in their keys


class Message(NamedTuple):
    role: str  # of ROLES
    content: str


class Part(NamedTuple):
    """Part of a rendered conversation."""

    text: str
    learned: bool  # whether it is the assistant's


Conversation = Sequence[Message]


class Template(Protocol):
    """How conversations are written."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings that no message may contain."""
        ...

    @property
    def end(self) -> str:
        """The string that ends an assistant's message."""
        ...

    def parts(self, conversation: Conversation) -> list[Part]:
        """The parts of a whole conversation. UserError if it cannot be written in this template."""
        ...

    def prompt(self, conversation: Conversation) -> list[str]:
        """The parts of a conversation that the assistant is to continue."""
        ...


@dataclass(frozen=True)
class ChatML:
    """<|im_start|>role, a newline, the message, <|im_end|>, a newline."""

    marks = ("<|im_start|>", "<|im_end|>")
    end = "<|im_end|>"

    def parts(self, conversation: Conversation) -> list[Part]:
        found = []
        for role, content in conversation:
            learned = role == "assistant"
            found += [Part(f"<|im_start|>{role}\n", False), Part(f"{content}{self.end}", learned)]
            found.append(Part("\n", False))
        return found

    def prompt(self, conversation: Conversation) -> list[str]:
        return [*(part.text for part in self.parts(conversation)), "<|im_start|>assistant\n"]


@dataclass(frozen=True)
class Jinja:
    """A model's own template, as in Hugging Face's tokenizer_config.json."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()  # such as ("bos_token", "<s>"); it may write them
    marks: tuple[str, ...] = ()  # the tokenizer's special tokens

    @functools.cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(
                "the model's chat template needs jinja2; pip install 'mtx[chat]', or use "
                "--template chatml"
            ) from None

        def refuse(message: str):
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise UserError(
                f"the model's chat template cannot be read: {reason(error)}; use --template chatml"
            ) from None

    def _rendered(self, conversation: Conversation, *, answer: bool) -> str:
        template, messages = self._template, [each._asdict() for each in conversation]
        try:
            return template.render(
                messages=messages, add_generation_prompt=answer, **dict(self.tokens)
            )
        except Exception as error:  # the template's own code may raise anything
            raise UserError(
                f"the model's chat template refuses it: {reason(error)}; change the messages, or "
                "use --template chatml"
            ) from None

    @property
    def end(self) -> str:
        asked, answered = Message("user", "Why?"), Message("assistant", "Because.")
        *_, last = (part for part in self.parts([asked, answered]) if part.learned)
        return last.text.rpartition("Because.")[2].strip()

    def parts(self, conversation: Conversation) -> list[Part]:
        whole, found, done = self._rendered(conversation, answer=False), [], 0
        for place, message in enumerate(conversation):
            if message.role != "assistant":
                continue
            before = self._rendered(conversation[:place], answer=True)
            after = self._rendered(conversation[: place + 1], answer=False)
            follows = after.startswith(before) and whole.startswith(after)
            if not follows or message.content.strip() not in after[len(before) :]:
                raise UserError(
                    f"the model's chat template does not write message {place + 1}, the "
                    "assistant's, behind those before it; use --template chatml"
                )
            found += [Part(whole[done : len(before)], False), Part(after[len(before) :], True)]
            done = len(after)
        return [part for part in (*found, Part(whole[done:], False)) if part.text]

    def prompt(self, conversation: Conversation) -> list[str]:
        whole = self._rendered(conversation, answer=True)
        answers = [n for n, each in enumerate(conversation, 1) if each.role == "assistant"]
        parts = self.parts(conversation[: answers[-1]]) if answers else []
        before = "".join(part.text for part in parts)
        if not whole.startswith(before):
            raise UserError(
                "the model's chat template does not write a question behind an answer; use "
                "--template chatml"
            )
        return [*(part.text for part in parts), whole[len(before) :]]


class Tokens(NamedTuple):
    """A conversation of n tokens."""

    ids: np.ndarray  # int32 [n]
    learned: np.ndarray  # bool [n]


def encode_text(tokenizer: Tokenizer, template: Template, text: str) -> np.ndarray:
    """int32 [tokens] of text that a template has written. Each of its marks is one token if it is a
    special token."""
    known = tokenizer.special_tokens()
    marks = [re.escape(mark) for mark in template.marks if mark in known]
    pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
    ids = [
        np.array([known[piece]], np.int32) if number % 2 else tokenizer.encode(piece)
        for number, piece in enumerate(pieces)
        if piece
    ]
    return np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32)


def encode_chat(tokenizer: Tokenizer, template: Template, conversation: Conversation) -> Tokens:
    """The tokens of a conversation. UserError if a message holds a mark, or if the template refuses
    the conversation."""
    _refuse_marks(template, conversation)
    parts = template.parts(conversation)
    ids = [encode_text(tokenizer, template, part.text) for part in parts]
    learned = [np.full(len(some), part.learned) for some, part in zip(ids, parts, strict=True)]
    return Tokens(np.concatenate(ids), np.concatenate(learned))


def encode_prompt(
    tokenizer: Tokenizer, template: Template, conversation: Conversation
) -> tuple[list[int], tuple[str | int, ...]]:
    """(the tokens before the assistant's answer, what ends it). UserError as for `encode_chat`."""
    _refuse_marks(template, conversation)
    parts = template.prompt(conversation)
    ids = np.concatenate([encode_text(tokenizer, template, part) for part in parts]).tolist()
    end, known = template.end, tokenizer.special_tokens()
    return ids, (known.get(end, end),) if end else ()


def _refuse_marks(template: Template, conversation: Conversation) -> None:
    for place, message in enumerate(conversation, 1):
        for mark in template.marks:
            if mark in message.content:
                raise UserError(f"message {place} holds {mark!r}, a mark of the template; omit it")


# -- rows ------------------------------------------------------------------------------------------


def pack(lengths: Sequence[int], room: int, seed: int) -> list[list[int]]:
    """Which conversations of these `lengths` share each row of `room` places: the longest first,
    each into the row that it fills best; `seed` orders those of equal length. None may be longer
    than a whole row."""
    order = shuffled(len(lengths), seed, _PACKING)
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (free places, row), sorted
    for number in sorted(order.tolist(), key=lambda n: -lengths[n]):
        at = bisect.bisect_left(left, (lengths[number], -1))
        if at < len(left):
            free, row = left.pop(at)
        else:
            free, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        bisect.insort(left, (free - lengths[number], row))
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatRows:
    """Conversations packed into rows. A row holds the first n - 1 tokens of a conversation of n
    tokens; the targets are its last n - 1."""

    conversations: Sequence[Tokens]  # of at most S + 1 tokens
    sequence: int  # S
    seed: int

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        lengths = [len(each.ids) - 1 for each in self.conversations]
        return pack(lengths, self.sequence, self.seed)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def learned(self) -> int:
        """How many of the targets are the assistant's."""
        return sum(int(each.learned[1:].sum()) for each in self.conversations)

    def batch(self, numbers: Sequence[int], count: int) -> Batch:
        """G = count rows: those with these numbers, then empty ones. tokens, targets, segments and
        positions int32 [G, S], weights float32 [G, S]: 1 where the target is the assistant's."""
        batch: Batch = {
            name: np.zeros((count, self.sequence), np.int32)
            for name in ("tokens", "targets", "segments", "positions")
        }
        batch["weights"] = np.zeros((count, self.sequence), np.float32)
        for row, number in enumerate(numbers):
            start = 0
            for segment, each in enumerate(self.conversations[n] for n in self.rows[number]):
                end = start + len(each.ids) - 1
                batch["tokens"][row, start:end] = each.ids[:-1]
                batch["targets"][row, start:end] = each.ids[1:]
                batch["weights"][row, start:end] = each.learned[1:]
                batch["segments"][row, start:end] = segment
                batch["positions"][row, start:end] = np.arange(end - start)
                start = end
            batch["segments"][row, start:] = len(self.rows[number])  # padding
        return batch

    def training_batch(self, step: int, count: int) -> Batch:
        """The batch of a step. Epochs differ in order; a step may end one and begin the next."""
        epochs, places = np.divmod(step * count + np.arange(count), len(self))
        orders = {
            epoch: shuffled(len(self), self.seed, int(epoch), _ORDER) for epoch in set(epochs)
        }
        numbers = [int(orders[epoch][place]) for epoch, place in zip(epochs, places)]
        return self.batch(numbers, count)
