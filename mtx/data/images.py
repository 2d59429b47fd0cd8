"""Images and texts about them to samples and batches: what a LLaVA trains on.

A placeholder stands at each place of an image's N patches. What is learned is the caption, or what
the assistant says, with the end of a document behind it: nothing of the images, nor of the user. A
row is one sample, filled up with what counts for nothing.

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

_HELD_OUT = 10  # what random numbers are for
_SYSTEM = (  # of Vicuna, as LLaVA 1.5 has it
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


class ImageVocab(NamedTuple):
    """The tokens that such samples need beside those of the text."""

    placeholder: int
    first: tuple[int, ...]  # what a sample begins with, where the tokenizer has it
    end: int


def find_image_vocab(tokenizer: Tokenizer, model: Llava) -> ImageVocab:
    """UserError where the model's placeholder is a token of texts, or lies beyond its vocabulary,
    and for a tokenizer without an end-of-document token."""
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
    """As Vicuna's, which LLaVA 1.5 was trained on; behind what is learned its end belongs."""
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
    """UserError where images and their places are not as many."""
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
    """int32 like tokens [B, S]: which of a row's patches stands there, -1 for tokens."""
    are = tokens == placeholder
    return np.where(are, np.cumsum(are, axis=-1) - 1, -1).astype(np.int32)


# -- prompts ---------------------------------------------------------------------------------------


class ImagePrompt(NamedTuple):
    """What a text begins with."""

    ids: list[int]  # with all patches
    pixels: np.ndarray  # uint8 [images, side, side, 3]


def image_prompt(
    text: str, pictures: Sequence[Picture], tokenizer: Tokenizer, model: Llava, *, chat: bool
) -> ImagePrompt:
    """A text with pictures where it says so, or before it. chat: it is a user's, and what comes
    behind it the assistant's. UserError where there are more pictures than the model takes, or not
    as many as their places."""
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
    """A tokenizer in whose texts placeholders vanish."""

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
    """At most S + 1 tokens."""

    tokens: Tokens  # with all patches
    pixels: np.ndarray  # uint8 [images, side, side, 3]


class ImageSamples:
    """Samples by their number, epoch after epoch."""

    def __init__(
        self, records: Sequence[tuple[tuple[Picture, ...], Tokens]], model: Llava,
        seed: int | None,
    ):  # fmt: skip
        """seed: of the order of each epoch; None: as they are."""
        self._records, self._seed, self.model = records, seed, model
        self.sequence, self.distinct = model.sequence, len(records)
        self.part_tokens = sum(
            len(tokens.ids) + len(pictures) * (model.patches - 1) for pictures, tokens in records
        )
        # The running epoch and the next, which a batch may straddle.
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
    """How many places each token takes: a placeholder N."""
    return np.where(ids == model.placeholder, model.patches, 1)


def _pixels(pictures: Sequence[Picture], model: Llava) -> np.ndarray:
    """uint8 [images, side, side, 3]"""
    side = model.image_size
    found = [read_picture(each, side) for each in pictures]
    return np.stack(found) if found else np.empty((0, side, side, 3), np.uint8)


def make_image_batch(
    source: Any, consumed: int, rows: int, *, local: Rows | None = None, filled: int | None = None
) -> Batch:
    """As `make_batch`: tokens and targets int32 [B, S], weights float32 [B, S] (1 where the target
    is learned), patches int32 [B, S] (see `patch_places`) and pixels uint8 [B, I, side, side, 3]
    (zeros where a row has fewer images)."""
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
    """What a run trains on and is evaluated on. Records are held out whole, `eval_fraction` of
    them; one that is longer than a row is cut at its end, and left out where nothing to learn, or
    not all of an image, remains."""
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
    """Whether a row holds its images, and something that is learned."""
    images, ends = tokens.ids == model.placeholder, np.cumsum(_times(tokens.ids, model))
    inside = ends <= model.sequence
    return bool((inside | ~images).all() and (tokens.learned & (ends <= model.sequence + 1)).any())
