"""Images and texts about them to samples and batches: what a LLaVA trains on.

Each of an image's N patches takes one place, which holds a placeholder. What is learned is the
caption, or what the assistant says, followed by the end-of-document token; the images and the
user's messages are not. A row is one sample, padded with tokens of weight 0.

B batch rows · S sequence · I images of a row · N patches of an image. A sample is a pure function
of the files, the seed and its number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mtx.config import RunConfig
from mtx.data.batches import Batch, Corpus, Rows, rows_to_read
from mtx.data.chat import Conversation, Message, Part
from mtx.data.documents import listed
from mtx.data.image_records import MARK, Record, read_image_records
from mtx.data.pixels import Picture, read_picture
from mtx.data.samples import shuffled
from mtx.data.shapes import COUNT, SOURCE, draw
from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError
from mtx.families.llava import Llava

_HELD_OUT = 10  # purpose of random numbers, in their keys
_SYSTEM = (  # Vicuna's, as in LLaVA 1.5
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


class ImageVocab(NamedTuple):
    """The tokens that these samples need besides those of the text."""

    placeholder: int
    first: tuple[int, ...]  # what a sample begins with, if the tokenizer has it
    end: int


def find_image_vocab(tokenizer: Tokenizer, model: Llava) -> ImageVocab:
    """The tokens for samples of a model. UserError if the model's placeholder is a token of texts,
    or lies beyond its vocabulary, and for a tokenizer without an end-of-document token."""
    placeholder, known = model.placeholder, tokenizer.special_tokens()
    if placeholder < tokenizer.vocab and known.get(MARK) != placeholder:
        raise UserError(
            f"model.image_token={placeholder} is a token of texts, of which the {tokenizer.name} "
            f"tokenizer has {tokenizer.vocab:,}; use model.vocab={tokenizer.vocab + 1:,} or more, "
            "and no image_token, or another"
        )
    if placeholder >= model.vocab:
        raise UserError(
            f"model.image_token={placeholder} must be below model.vocab={model.vocab:,}; use "
            "another of the two"
        )
    if tokenizer.eod is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no end-of-document token, which ends captions and "
            "answers; use eod=auto, or a token"
        )
    first = (known["<s>"],) if "<s>" in known else ()
    return ImageVocab(placeholder, first, tokenizer.eod)


# -- texts as tokens -------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """A sample's text, with one placeholder for each image. n tokens."""

    ids: np.ndarray  # int32 [n]
    learned: np.ndarray  # bool [n]


def parts_of(conversation: Conversation) -> list[Part]:
    """A conversation in Vicuna's format, which LLaVA 1.5 was trained on. What ends a learned part
    is not included: `encode_parts` adds it."""
    said = list(conversation)
    system = said.pop(0).content if said[0].role == "system" else _SYSTEM
    found = [Part(system, False)]
    for role, content in said:
        if role == "assistant":
            found += [Part(" ASSISTANT:", False), Part(f" {content}", True)]
        else:
            found.append(Part(f" USER: {content}", False))
    return found


def encode_parts(parts: Sequence[Part], tokenizer: Tokenizer, vocab: ImageVocab) -> Tokens:
    ids, learned = list(vocab.first), [False] * len(vocab.first)
    for part in parts:
        for number, piece in enumerate(part.text.split(MARK)):
            own = [vocab.placeholder] if number else []
            own += tokenizer.encode(piece).tolist() if piece else []
            ids += own
            learned += [part.learned] * len(own)
        if part.learned:
            ids.append(vocab.end)
            learned.append(True)
    return Tokens(np.array(ids, np.int32), np.array(learned, bool))


def encode_record(record: Record, tokenizer: Tokenizer, vocab: ImageVocab) -> Tokens:
    """The tokens of a record. UserError if its images are not as many as the places for them."""
    count = len(record.pictures)
    if isinstance(record.said, str):
        if MARK in record.said:
            raise UserError(f"{record.where}: a caption has no {MARK}, which stands before it")
        return encode_parts(
            [Part(MARK * count, False), Part(record.said, True)], tokenizer, vocab
        )  # fmt: skip
    said = list(record.said)
    places = sum(each.content.count(MARK) for each in said)
    if places == 0 and count:
        first = next(n for n, each in enumerate(said) if each.role == "user")
        said[first] = Message("user", f"{MARK}\n" * count + said[first].content)
    elif places != count:
        raise UserError(f"{record.where} has {count} images and {places} places for them, {MARK}")
    return encode_parts(parts_of(said), tokenizer, vocab)


def patch_places(tokens: np.ndarray, placeholder: int) -> np.ndarray:
    """int32 [B, S], like tokens: which of its row's patches is at each place, -1 for text."""
    are = tokens == placeholder
    return np.where(are, np.cumsum(are, axis=-1) - 1, -1).astype(np.int32)


# -- prompts ---------------------------------------------------------------------------------------


class ImagePrompt(NamedTuple):
    """The prompt from which a text is generated."""

    ids: list[int]  # with all patches
    pixels: np.ndarray  # uint8 [images, side, side, 3]


def image_prompt(
    text: str, pictures: Sequence[Picture], tokenizer: Tokenizer, model: Llava, *, chat: bool
) -> ImagePrompt:
    """A prompt with pictures at the places that its text names, or before the text. chat: the text
    is a user's message, to be followed by the assistant's. UserError if there are more pictures
    than the model takes, or not as many as the places named."""
    count, places = len(pictures), text.count(MARK)
    if places not in (0, count) or count > model.images:
        raise UserError(
            f"a prompt has {count} images and {places} places for them, {MARK}, and model.images="
            f"{model.images}; give as many, or no place"
        )
    vocab, pixels = find_image_vocab(tokenizer, model), _pixels(pictures, model)
    if count and not places:
        text = (f"{MARK}\n" if chat else MARK) * count + text
    parts = [Part(text, False)]
    if chat:
        parts = [*parts_of([Message("user", text)]), Part(" ASSISTANT:", False)]
    ids = encode_parts(parts, tokenizer, vocab).ids
    return ImagePrompt(np.repeat(ids, _times(ids, model)).tolist(), pixels)


class ImageTokenizer(Tokenizer):
    """A tokenizer that leaves placeholders out of the text that it decodes."""

    def __init__(self, tokenizer: Tokenizer, placeholder: int):
        self._text, self._placeholder = tokenizer, placeholder
        self.kind, self.identity, self.cuts = tokenizer.kind, tokenizer.identity, tokenizer.cuts

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._text.encode_all(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        given = np.asarray(ids, np.int64).reshape(-1)
        return self._text.decode(given[given != self._placeholder])

    def vocabulary(self) -> dict[str, int]:
        return self._text.vocabulary()

    def special_tokens(self) -> dict[str, int]:
        return self._text.special_tokens()

    def to_dict(self) -> dict:
        return self._text.to_dict()


# -- samples ---------------------------------------------------------------------------------------


class ImageSample(NamedTuple):
    """A sample of at most S + 1 tokens."""

    tokens: Tokens  # with all patches
    pixels: np.ndarray  # uint8 [images, side, side, 3]


class ImageSamples:
    """Samples by their number, epoch after epoch."""

    def __init__(
        self, records: Sequence[tuple[tuple[Picture, ...], Tokens]], model: Llava,
        seed: int | None,
    ):  # fmt: skip
        """seed: for the order of each epoch; None: the order of `records`."""
        self._records, self._seed, self.model = records, seed, model
        self.sequence, self.distinct = model.sequence, len(records)
        self.part_tokens = sum(
            len(tokens.ids) + len(pictures) * (model.patches - 1) for pictures, tokens in records
        )
        # The current epoch and the next: a batch may straddle them.
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def __getitem__(self, index: int) -> ImageSample:
        epoch, place = divmod(index, self.distinct)
        pictures, (ids, learned) = self._records[self._order(epoch)[place]]
        times, room = _times(ids, self.model), self.sequence + 1
        tokens = Tokens(np.repeat(ids, times)[:room], np.repeat(learned, times)[:room])
        return ImageSample(tokens, _pixels(pictures, self.model))

    def _shuffle(self, epoch: int) -> np.ndarray:
        count = self.distinct
        return np.arange(count) if self._seed is None else shuffled(count, self._seed, epoch)


def _times(ids: np.ndarray, model: Llava) -> np.ndarray:
    """How many places each token takes: N for a placeholder, 1 for others."""
    return np.where(ids == model.placeholder, model.patches, 1)


def _pixels(pictures: Sequence[Picture], model: Llava) -> np.ndarray:
    """uint8 [images, side, side, 3]"""
    side = model.image_size
    found = [read_picture(each, side) for each in pictures]
    return np.stack(found) if found else np.empty((0, side, side, 3), np.uint8)


def make_image_batch(
    source: Any, consumed: int, rows: int, *, local: Rows | None = None, filled: int | None = None
) -> Batch:
    """Like `make_batch`: tokens and targets int32 [B, S], weights float32 [B, S] (1 where the
    target is learned), patches int32 [B, S] (see `patch_places`) and pixels uint8
    [B, I, side, side, 3] (zeros if a row has fewer images)."""
    model, shape = source.model, (rows, source.sequence)
    side = model.image_size
    batch: Batch = {
        "tokens": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32), "patches": np.full(shape, -1, np.int32),
        "pixels": np.zeros((rows, model.images, side, side, 3), np.uint8),
    }  # fmt: skip
    for row in rows_to_read(consumed, rows, local, filled):
        (ids, learned), pixels = source[consumed + row]
        size = len(ids) - 1
        batch["tokens"][row, :size], batch["targets"][row, :size] = ids[:-1], ids[1:]
        batch["weights"][row, :size] = learned[1:]
        batch["patches"][row, :size] = patch_places(ids[:-1], model.placeholder)
        batch["pixels"][row, : len(pixels)] = pixels
    return batch


# -- a corpus --------------------------------------------------------------------------------------


def load_images(run: RunConfig, tokenizer: Tokenizer) -> Corpus:
    """The corpus that a run trains on and is evaluated on. `eval_fraction` of the records are held
    out, each one whole. A record that is longer than a row is cut at its end; it is left out if
    nothing to learn, or not all of its images, would remain."""
    config, model = run.data, run.model
    assert isinstance(model, Llava)
    vocab = find_image_vocab(tokenizer, model)
    kept, long, left_out = [], 0, 0
    records = read_image_records(config.path) if config.path else _drawn(model, config.seed)
    for record in records:
        if len(record.pictures) > model.images:
            raise UserError(
                f"{record.where} has {len(record.pictures)} images, and model.images="
                f"{model.images}; use a larger one"
            )
        tokens = encode_record(record, tokenizer, vocab)
        if not _fits(tokens, model):
            left_out += 1
            continue
        size = len(tokens.ids) + len(record.pictures) * (model.patches - 1)
        long += size > model.sequence + 1
        kept.append((record.pictures, tokens))
    held = max(1, round(config.eval_fraction * len(kept)))
    if held >= len(kept):
        raise UserError(
            f"eval_fraction={config.eval_fraction} of {len(kept)} records that fit into sequence="
            f"{model.sequence} leaves none to train on; give more, or use a longer sequence"
        )
    order = shuffled(len(kept), config.seed, _HELD_OUT)
    said = [f"{long:,} cut at their end"] * bool(long) + [f"{left_out:,} left out"] * bool(left_out)
    return Corpus(
        tokenizer=tokenizer, make=make_image_batch,
        train=ImageSamples([kept[n] for n in order[held:]], model, config.seed),
        held_out=ImageSamples([kept[n] for n in order[:held]], model, None),
        source=f"{_source(config.path, len(records))}, {held:,} held out"
        + "".join(f", {each} (sequence={model.sequence})" for each in said),
    )  # fmt: skip


def _drawn(model: Llava, seed: int) -> list[Record]:
    drawings = (draw(number, model.image_size, seed) for number in range(COUNT))
    return [Record((each.pixels,), each.caption, SOURCE) for each in drawings]


def _source(paths: Sequence[str], records: int) -> str:
    return f"{records:,} records from {listed(paths)}" if paths else SOURCE


def _fits(tokens: Tokens, model: Llava) -> bool:
    """Whether a row holds all of its images, and something to learn."""
    images, ends = tokens.ids == model.placeholder, np.cumsum(_times(tokens.ids, model))
    inside = ends <= model.sequence
    return bool((inside | ~images).all() and (tokens.learned & (ends <= model.sequence + 1)).any())
