"""Text generated from prompts, token by token, by a trained model.

Read with it: `decoder` (a pass over the devices), `sampling` (a token from logits), `stops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mtx.config import ModelConfig
from mtx.data import Tokenizer
from mtx.data.images import ImagePrompt, ImageTokenizer
from mtx.data.spans import SpanTokenizer
from mtx.errors import UserError
from mtx.evaluation.decoder import Choices, Decoder, check_generates
from mtx.evaluation.sampling import Sampling
from mtx.evaluation.stops import Stops
from mtx.families.llava import Llava
from mtx.fields import checked
from mtx.sizes import Seed, Sequences, Tokens
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

Prompt = str | Sequence[int] | ImagePrompt
Ended = Literal["eod", "stop", "length"]
_NOTHING = Choices(None, np.empty(0, np.float32))  # follows a text that has ended
_NO_IMAGES = np.empty(0, np.uint8)
_MOST_CANDIDATES = 1024  # sorting more on the devices costs more than bringing all to the host


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a generation is, in tokens."""

    drawn: int
    done: int  # a text that has ended early counts as if it had not
    most: int  # of all texts, if none ends early


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The continuation of one prompt."""

    prompt: str  # as the model has read it, from its tokens; an encoder's is on its own line
    text: str  # what comes after it, without the stop that ended it
    tokens: list[int]  # all drawn, an end-of-document token and a stop string's included
    ended: Ended  # by end-of-document, by a stop, or at the number of tokens that was asked for


class Generator:
    """A model with its tokenizer, ready to generate: parameters gathered, programs compiled once.

    It uses the parameters that `state` has now, `batch` prompts at once. Raises UserError
    for a model that does not predict the next token, and a batch below 1.
    """

    def __init__(
        self, trainer: Trainer, state: TrainState, tokenizer: Tokenizer, *, batch: int = 64
    ):
        check_asked(trainer.run.model, batch=batch)
        if trainer.run.model.objective == "spans":
            tokenizer = SpanTokenizer(tokenizer)
        elif isinstance(model := trainer.run.model, Llava):
            tokenizer = ImageTokenizer(tokenizer, model.placeholder)
        self._decoder = Decoder(trainer, state, vocab=tokenizer.vocab)
        self._model, self._tokenizer, self._batch = trainer.run.model, tokenizer, batch

    def complete(
        self,
        prompts: Sequence[Prompt],
        *,
        tokens: int = 200,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        stop: Sequence[str | int] = (),
        seed: int = 0,
        report: Report | None = None,
    ) -> list[Completion]:
        """Continues each prompt (a text, its tokens, or these with images) by at most `tokens`
        tokens, as `generate` describes."""
        check_asked(self._model, tokens=tokens, seed=seed)
        stops = Stops.of(stop, self._tokenizer)
        job = _Job(self._decoder, self._tokenizer, tokens, sampling, stops)
        texts = [self._text(i, prompt, seed, tokens) for i, prompt in enumerate(prompts)]
        by_length = sorted(texts, key=lambda text: len(text.prompt))  # less padding
        for first in range(0, len(texts), self._batch):
            for _ in job.write(by_length[first : first + self._batch]):
                if report is not None:
                    report(_progress(texts, tokens))
        self._decoder.forget()
        return [job.completion(text) for text in texts]

    def _text(self, i: int, prompt: Prompt, seed: int, tokens: int) -> _Text:
        tokenizer, vocab, pixels = self._tokenizer, self._model.vocab, None
        if isinstance(prompt, ImagePrompt):
            prompt, pixels = prompt
            if len(prompt) + tokens > self._model.sequence and len(pixels):
                raise UserError(
                    f"prompt {i + 1} has {len(prompt)} tokens with its images, and {tokens} more "
                    f"are beyond sequence={self._model.sequence}; ask for fewer"
                )
        ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else list(prompt)
        if not ids:
            if tokenizer.eod is None:
                raise UserError(
                    f"prompt {i + 1} is empty, and the tokenizer has no end-of-document token to "
                    "begin a text with; write a prompt"
                )
            ids = [tokenizer.eod]
        if max(ids) >= vocab:
            raise UserError(
                f"prompt {i + 1} has the token {max(ids)}, and the model's vocabulary is {vocab}; "
                "use the tokenizer that it was trained with"
            )
        stream = np.random.default_rng((seed, i))
        if not isinstance(tokenizer, SpanTokenizer):
            return _Text(prompt=ids, stream=stream, pixels=pixels)
        ids, longest = [*ids, tokenizer.special.end], self._decoder.encoder_sequence
        if len(ids) > longest:
            raise UserError(
                f"prompt {i + 1} has {len(ids)} tokens with its end, and encoder_sequence={longest}"
                "; use a shorter one"
            )
        return _Text(prompt=[tokenizer.special.pad], stream=stream, inputs=ids)


def check_asked(model: ModelConfig, *, tokens: int = 1, seed: int = 0, batch: int = 1) -> None:
    """Raises UserError, before anything is computed, for what a `Generator` would refuse."""
    check_generates(model)
    checked("tokens", tokens, Tokens)
    checked("seed", seed, Seed)
    checked("batch", batch, Sequences)


def generate(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str | int] = (),
    seed: int = 0,
) -> list[str]:
    """Each prompt followed by at most `tokens` sampled tokens, on the layout of `trainer`.

    `temperature` 0 takes the most likely token; `top_k` and `top_p` leave only the likeliest ones
    (see `Sampling`). A text ends early at an end-of-document token, and before any of `stop`:
    strings, wherever they occur in the generated text, or token ids. Prompt i draws from its own
    stream, (seed, i), on the host: its text is the same on every layout and with any other prompts,
    up to rounding. An empty prompt begins a document.

    Keys and values are kept, so a token is a pass over one position per text. In float32 the
    choices are the same as when the whole text is read again for every token. In 16 bits the two
    round differently: of 944 choices of a GPT with random weights 3 differed in bfloat16, between
    tokens whose logits are less than 0.007 apart, while all have a deviation of 1.1.

    Of a text longer than S, the model sees the last S tokens; all their positions change with every
    token, so each token is then a pass over all S. Use a `Generator` to generate more than once.
    Raises UserError for a value outside its range, a prompt that the model has no tokens for,
    and a model that does not predict the next token.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    generator = Generator(trainer, state, tokenizer)
    completions = generator.complete(
        prompts, tokens=tokens, sampling=sampling, stop=stop, seed=seed
    )
    return [completion.prompt + completion.text for completion in completions]


@dataclass(kw_only=True)
class _Text:
    """A text while it is written."""

    prompt: list[int]
    stream: np.random.Generator
    inputs: list[int] = field(default_factory=list)  # what an encoder reads
    pixels: np.ndarray | None = None  # of its images, uint8 [n, side, side, 3]
    drawn: list[int] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.drawn

    def __len__(self) -> int:
        return len(self.prompt) + len(self.drawn)


@dataclass(frozen=True)
class _Job:
    """What to generate, except for the texts."""

    decoder: Decoder
    tokenizer: Tokenizer
    tokens: int
    sampling: Sampling
    stops: Stops

    @property
    def count(self) -> int:
        """How many of the likeliest tokens a draw needs to see; 0: all."""
        top = 1 if self.sampling.greedy else self.sampling.top_k
        return 1 << (top - 1).bit_length() if 0 < top <= _MOST_CANDIDATES else 0

    def write(self, texts: Sequence[_Text]) -> Iterator[None]:
        """Draws until each text of this batch has ended; yields after each round."""
        room = min(self.decoder.sequence, max(map(len, texts)) + self.tokens)
        inputs = [text.inputs for text in texts if text.inputs]
        ids = [text.ids for text in texts]
        pixels = [_NO_IMAGES if text.pixels is None else text.pixels for text in texts]
        choices = self.decoder.begin(ids, room, count=self.count, inputs=inputs, pixels=pixels)
        while True:
            for text, choice in zip(texts, choices, strict=True):
                if text.ended is None:
                    self._draw(text, choice)
            yield
            if all(text.ended for text in texts):
                return
            choices = self._next(texts)

    def _next(self, texts: Sequence[_Text]) -> list[Choices]:
        """The choices after each text that has not ended; for the others, anything or nothing."""
        sequence = self.decoder.sequence
        far = [text.ended is None and len(text) > sequence for text in texts]
        choices = [_NOTHING] * len(texts)
        if any(text.ended is None and len(text) <= sequence for text in texts):
            newest = [(text.drawn or text.prompt)[-1] for text in texts]
            places = [min(len(text), sequence) - 1 for text in texts]
            choices = self.decoder.extend(newest, places, count=self.count)
        if any(far):
            windows = [text.ids for text, is_far in zip(texts, far) if is_far]
            read = iter(self.decoder.read(windows, count=self.count))
            choices = [next(read) if is_far else c for c, is_far in zip(choices, far)]
        return choices

    def _draw(self, text: _Text, choices: Choices) -> None:
        place = self.sampling.draw(choices.logits, text.stream)
        token = place if choices.ids is None else int(choices.ids[place])
        if token in self.stops.tokens:
            text.ended = "stop"
            return
        text.drawn.append(token)
        if token == self.tokenizer.eod:
            text.ended = "eod"
        elif self.stops.may_stand_in(text.drawn, self.tokenizer) and self._cut(text)[2]:
            text.ended = "stop"
        elif len(text.drawn) == self.tokens:
            text.ended = "length"

    def _cut(self, text: _Text) -> tuple[str, str, str | None]:
        """(the prompt, what comes after it up to a stop, that stop)"""
        prompt, whole = map(self.tokenizer.decode, (text.prompt, text.ids))
        if whole.startswith(prompt):
            return prompt, *self.stops.cut(whole[len(prompt) :])
        return prompt, *self.stops.cut(self.tokenizer.decode(text.drawn))  # perhaps a blank moved

    def completion(self, text: _Text) -> Completion:
        prompt, after, _ = self._cut(text)
        prompt = self.tokenizer.decode(text.inputs) + "\n" if text.inputs else prompt
        assert text.ended is not None  # `write` goes on until it has
        return Completion(prompt=prompt, text=after, tokens=text.drawn, ended=text.ended)


def _progress(texts: Sequence[_Text], tokens: int) -> Progress:
    drawn = [len(text.drawn) for text in texts]
    done = [tokens if text.ended else count for text, count in zip(texts, drawn)]
    return Progress(drawn=sum(drawn), done=sum(done), most=tokens * len(texts))
