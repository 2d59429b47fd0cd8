"""Pairs of texts from a corpus of sentences, as in Megatron-LM's BERT dataset.

Consecutive sentences of a document are taken until they fill the room of a sample, which is a
random shorter one for a few samples; a random sentence begins B, and those before it are A. Then,
in half of the cases and with label 1,

    sop   A and B are swapped (sentence order)
    nsp   B is of another document (next sentence, as in Devlin et al. 2019)
    none  there is no B, and no label

A pair that is too long loses tokens at random ends of the longer text.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from mtx.config.data import Order
from mtx.data.cache import Arrays, cached_arrays, hash_of_array
from mtx.data.samples import Rng, place_in_epoch, shuffled
from mtx.data.split import Division
from mtx.errors import UserError
from mtx.files import Name

_SPANS, _SAMPLE = 2, 3  # purposes of random numbers, in their keys


class Sentences(Protocol):
    """Documents of sentences: an `IndexedDataset`, or a `SentenceList`."""

    tokens: np.ndarray  # of all sentences, one after the other
    lengths: np.ndarray  # int32 [sentences]
    documents: np.ndarray  # int64 [documents + 1], the sentences up to each document's end

    def text(self, first: int, end: int) -> np.ndarray:
        """The tokens of sentences `first` to `end`, exclusive."""
        ...


class SentenceList:
    """Sentences in memory."""

    def __init__(self, documents: list[list[np.ndarray]], dtype: np.dtype):
        sentences = [sentence for document in documents for sentence in document]
        self.tokens = np.concatenate([np.empty(0, dtype), *sentences]).astype(dtype)
        self.lengths = np.array([len(sentence) for sentence in sentences], np.int32)
        self.documents = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        self._begins = np.cumsum([0, *self.lengths], dtype=np.int64).tolist()

    def text(self, first: int, end: int) -> np.ndarray:
        return self.tokens[self._begins[first] : self._begins[end]]


class Pair(NamedTuple):
    """Two texts; `second` is empty and `order` -1 if there is only one."""

    first: np.ndarray
    second: np.ndarray
    order: int  # 1: swapped, or of another document; 0: in their order


class Pairs:
    """The endless pairs of some documents of a corpus: each epoch goes through the same sentences
    in an order of its own, cut and swapped anew."""

    def __init__(
        self,
        source: Sentences,
        *,
        part: Division,
        room: int,
        order: Order = "sop",
        short_fraction: float = 0.1,
        seed: int = 0,
        cache: Name | None = None,
        name: str = "the text",
    ):
        """part: the documents, and which sentences of each. room: tokens of a pair, at most.
        short_fraction: the share of samples with a random room of 2 or more. cache: see
        `cached_arrays`; name: of the source, for messages. Raises UserError if no pair exists."""
        if room < 2:
            raise UserError(f"room={room} must hold 2 tokens of text; use a longer sequence")
        if not 0.0 <= short_fraction <= 1.0:
            raise UserError(f"short_fraction={short_fraction} must lie between 0 and 1")
        self._source, self._order, self._seed = source, order, seed
        bounds = np.asarray(source.documents[part.first : part.end + 1], np.int64)
        begin, stop = part.spans(np.diff(source.documents))
        self._begin, self._stop = bounds[:-1] + begin, bounds[:-1] + stop  # of each, in sentences
        least = least_sentences(order)
        lengths = source.lengths[bounds[0] : bounds[-1]]
        self.tokens = int(lengths.sum(dtype=np.int64))
        if part.cut is not None:
            places = zip(self._begin.tolist(), self._stop.tolist(), strict=True)
            self.tokens = sum(len(source.text(*place)) for place in places)

        options = {"room": room, "least": least, "seed": seed, "short_fraction": short_fraction}
        description = options | {
            "kind": "spans of sentences", "lengths": hash_of_array(lengths),
            "documents": hash_of_array(np.stack([self._begin, self._stop])),
        }  # fmt: skip
        self._spans = cached_arrays(cache, description, lambda: _build_spans(
            lengths, self._begin, self._stop, base=int(bounds[0]), **options
        ))  # fmt: skip
        self._full = np.flatnonzero(self._stop - self._begin)  # documents of at least one sentence
        if not len(self):
            raise UserError(
                f"{name}: none of {len(begin):,} documents has {least} sentences to make a sample "
                "of; give more text, another split, or a dataset built with --level sentence"
            )
        if order == "nsp" and len(self._full) < 2:
            raise UserError(
                f"{name}: order='nsp' takes every other second text from another document, and "
                "there is only one; give more, or use order='sop'"
            )

    def __len__(self) -> int:
        return len(self._spans["first"])

    def pair(self, index: int, rng: Rng) -> Pair:
        """The pair of request `index`; its random choices are drawn from `rng`."""
        span = self._spans["visit"][place_in_epoch(index, len(self), self._seed)]
        first, end, room = (int(self._spans[name][span]) for name in ("first", "end", "room"))
        if self._order == "none":
            whole, nothing = self._source.text(first, end), self._source.text(end, end)
            return Pair(*_truncated(whole, nothing, room, rng), -1)
        cut = first + 1 + rng.below(end - first - 1)
        a, b = self._source.text(first, cut), self._source.text(cut, end)
        changed = rng.uniform(1)[0] < 0.5
        if changed and self._order == "sop":
            a, b = b, a
        elif changed:
            b = self._elsewhere(first, room - len(a), rng)
        return Pair(*_truncated(a, b, room, rng), int(changed))

    def _elsewhere(self, sentence: int, wanted: int, rng: Rng) -> np.ndarray:
        """About `wanted` tokens of a document other than this sentence's, at least one sentence."""
        own = np.searchsorted(self._begin, sentence, side="right") - 1
        other = rng.below(len(self._full) - 1)
        other += other >= np.searchsorted(self._full, own)
        document = self._full[other]
        begin, stop = int(self._begin[document]), int(self._stop[document])
        first = end = begin + rng.below(stop - begin)
        tokens = 0
        while end < stop and (end == first or tokens < wanted):
            tokens += int(self._source.lengths[end])
            end += 1
        return self._source.text(first, end)


def rng_of(seed: int, index: int) -> Rng:
    """The random numbers of sample `index`."""
    return Rng(seed, index, _SAMPLE)


def least_sentences(order: Order) -> int:
    """The fewest sentences of a sample."""
    return 1 if order == "none" else 2


def _build_spans(
    lengths: np.ndarray,
    begin: np.ndarray,
    stop: np.ndarray,
    *,
    base: int,
    room: int,
    least: int,
    short_fraction: float,
    seed: int,
) -> Arrays:
    """The sentences that make up each sample, from sentences `begin` to `stop` [documents] of each
    document; `lengths` are those of all sentences from `base` on. int64 [samples] each: the `first`
    and the `end`, the `room` for tokens of both texts, and the order in which to `visit` samples.

    All documents advance at once, by a sample each. A span has `least` sentences or more; it also
    takes the last ones of its document if they are fewer than that.
    """
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens up to each sentence
    place, stop = begin - base, stop - base
    rng, rounds = Rng(seed, _SPANS), [np.empty((3, 0), np.int64)]
    while True:
        going = stop - place >= least
        place, stop = place[going], stop[going]
        if not len(place):
            break
        short = rng.uniform(len(place)) < short_fraction
        shorter = 2 + (rng.uniform(len(place)) * (room - 1)).astype(np.int64)
        rooms = np.where(short, shorter, room)
        end = np.searchsorted(ends, ends[place] + rooms)
        end = np.maximum(end, place + least)
        end = np.where(stop - end < least, stop, end)
        rounds.append(np.stack([place, end, rooms]))
        place = end
    first, end, rooms = np.concatenate(rounds, axis=1)
    used = ends[end] - ends[first] >= least
    by_place = np.flatnonzero(used)[np.argsort(first[used], kind="stable")]
    first, end, rooms = (a[by_place] for a in (first + base, end + base, rooms))
    visit = shuffled(len(first), seed, _SPANS)
    return {"first": first, "end": end, "room": rooms, "visit": visit}


def _truncated(a, b, room: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """`a` and `b` without what exceeds `room`: token by token, the longer one (`b` if they are
    equal) loses one at a random end."""
    left_a = min(len(a), max(room - room // 2, room - len(b)))

    def shortened(text: np.ndarray, left: int) -> np.ndarray:
        lost = max(len(text) - left, 0)
        begin = int((rng.uniform(lost) < 0.5).sum()) if lost else 0
        return text[begin : begin + left]

    return shortened(a, left_a), shortened(b, room - left_a)
