"""Pairs of texts: which sentences make up a sample, how they are cut, swapped and shortened."""

from __future__ import annotations

import numpy as np
import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st

from mtx.data.pairs import Pairs, SentenceList, _truncated, rng_of
from mtx.data.samples import Rng
from mtx.data.split import Division
from mtx.errors import UserError

corpora = st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=6)


def corpus_of(sizes: list[list[int]]) -> SentenceList:
    """Documents of sentences of these lengths; all tokens are different."""
    count, documents = 0, []
    for document in sizes:
        documents.append([])
        for size in document:
            documents[-1].append(np.arange(count, count + size))
            count += size
    return SentenceList(documents, np.int32)


def pairs_of(sizes, *, room=20, documents=None, cut=None, **options) -> Pairs:
    first, end = documents or (0, len(sizes))
    part = Division(first=first, end=end, cut=cut)
    return Pairs(corpus_of(sizes), part=part, room=room, **options)


def slow_spans(sizes, *, room: int, least: int) -> list[tuple[int, int]]:
    """[(first, end)] of the sentences of each sample, found one sentence after the other."""
    spans, before = [], 0
    for document in sizes:
        first = tokens = 0
        for place, size in enumerate(document, start=1):
            tokens += size
            enough = tokens >= room and place - first >= least and len(document) - place >= least
            if enough or place == len(document):
                if place - first >= least and tokens >= least:
                    spans.append((before + first, before + place))
                first, tokens = place, 0
        before += len(document)
    return spans


def spans_of(pairs: Pairs) -> list[tuple[int, int]]:
    return sorted(zip(pairs._spans["first"].tolist(), pairs._spans["end"].tolist(), strict=True))


@given(corpora, st.integers(2, 40), st.sampled_from(["sop", "none"]))
def test_sentences_are_filled_up_to_the_room(sizes, room, order):
    spans = slow_spans(sizes, room=room, least=1 if order == "none" else 2)
    if not spans:
        with pytest.raises(UserError):
            pairs_of(sizes, room=room, order=order, short_fraction=0.0)
        return
    pairs = pairs_of(sizes, room=room, order=order, short_fraction=0.0)
    assert spans_of(pairs) == spans
    assert pairs.tokens == sum(map(sum, sizes))


def test_a_part_has_its_own_documents():
    sizes = [[5, 5, 5], [4, 4], [3, 3, 3, 3], [2, 2]]
    pairs = pairs_of(sizes, documents=(1, 3), room=100)
    assert spans_of(pairs) == [(3, 5), (5, 9)] and pairs.tokens == 20


def test_a_few_samples_have_a_shorter_room():
    pairs = pairs_of([[4] * 5000], room=61, short_fraction=0.1)
    rooms = pairs._spans["room"]
    short = rooms < 61
    assert 0.05 < short.mean() < 0.35  # a tenth by number, but they are shorter
    assert rooms.min() >= 2 and len(set(rooms[short].tolist())) > 15
    first, end = pairs._spans["first"], pairs._spans["end"]
    assert ((end - first) * 4 < rooms + 2 * 4).all()
    assert np.array_equal(np.sort(np.concatenate([first, [5000]])), np.sort([0, *end]))


@given(corpora, st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_the_second_text_follows_the_first_or_comes_before_it(sizes, seed, index):
    if not slow_spans(sizes, room=15, least=2):
        return
    pairs = pairs_of(sizes, room=15, seed=seed)
    first, second, order = pairs.pair(index, rng_of(seed, index))
    assert order in (0, 1) and 0 < len(first) + len(second) <= 15
    for text in (first, second):
        np.testing.assert_array_equal(np.diff(text), 1)  # nothing is missing inside
    if len(first) and len(second):
        assert (first[0] < second[0]) == (order == 0)
        document = np.searchsorted(np.cumsum([sum(d) for d in sizes]), [first, second][0], "right")
        assert len(set(document.tolist())) == 1
    again = pairs.pair(index, rng_of(seed, index))
    assert [again.first.tolist(), again.second.tolist()] == [first.tolist(), second.tolist()]


@pytest.mark.parametrize("order", ["sop", "nsp"])
def test_half_of_the_pairs_are_changed(order):
    pairs = pairs_of([[3] * 40] * 20, room=30, order=order)
    orders = [pairs.pair(index, rng_of(0, index)).order for index in range(2000)]
    assert abs(np.mean(orders) - 0.5) < 4 * 0.5 / np.sqrt(2000)


def test_the_next_sentence_is_of_another_document_or_not():
    sizes = [[3] * 40, [], [5] * 10, [2, 2], [7], [4] * 30]
    pairs = pairs_of(sizes, room=30, order="nsp", short_fraction=0.0)
    ends, met = np.cumsum([sum(document) for document in sizes]), set()
    for index in range(400):
        first, second, order = pairs.pair(index, rng_of(0, index))
        a, b = (int(np.searchsorted(ends, text[0], "right")) for text in (first, second))
        assert (a != b) == (order == 1)
        assert a in (0, 2, 3, 5), "one sentence makes no pair, but may be a second text"
        met |= {b} if order else set()
        if order == 0:
            assert second[0] > first[-1]
    assert met == {0, 2, 3, 4, 5}
    with pytest.raises(UserError) as error:
        pairs_of([[3] * 40, []], order="nsp")
    assert names(error, "order='nsp'")


def test_cuts_are_anywhere_between_sentences():
    pairs = pairs_of([[1] * 10], room=10, short_fraction=0.0)
    cuts = {len(pairs.pair(index, rng_of(0, index)).first) for index in range(200)}
    assert cuts == set(range(1, 10))


def test_one_text_alone_has_no_order():
    pairs = pairs_of([[3, 3, 3], [2]], room=7, order="none", short_fraction=0.0)
    found = [pairs.pair(index, rng_of(0, index)) for index in range(len(pairs))]
    assert {pair.order for pair in found} == {-1} and not any(len(pair.second) for pair in found)
    assert sorted(len(pair.first) for pair in found) == [2, 7]


def test_every_epoch_has_each_span_once_and_its_own_cuts():
    pairs = pairs_of([[2] * 300], room=20, short_fraction=0.0)
    count = len(pairs)
    epochs = [
        [pairs.pair(index, rng_of(0, index)) for index in range(epoch * count, (epoch + 1) * count)]
        for epoch in range(3)
    ]
    texts = [[min(pair.first[0], pair.second[0]) // 20 for pair in epoch] for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(texts[2]) == list(range(count))
    assert texts[0] != texts[1] != texts[2] != texts[0]
    cuts = [{int(min(p.first[0], p.second[0])): len(p.first) for p in epoch} for epoch in epochs]
    assert cuts[0] != cuts[1]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 40), st.integers(0, 99))
def test_the_longer_text_is_shortened_token_by_token(count_a, count_b, room, seed):
    a, b = np.arange(count_a), np.arange(count_b)
    left_a, left_b = _truncated(a, b, room, Rng(seed))
    while count_a + count_b > room:  # as Megatron-LM does
        if count_a > count_b:
            count_a -= 1
        else:
            count_b -= 1
    assert (len(left_a), len(left_b)) == (count_a, count_b)
    for left in (left_a, left_b):
        np.testing.assert_array_equal(np.diff(left), 1)


def test_tokens_are_lost_at_both_ends():
    begins = [int(_truncated(np.arange(40), np.arange(3), 23, Rng(s))[0][0]) for s in range(400)]
    assert abs(np.mean(begins) - 10) < 4 * np.sqrt(20 / 4 / 400) and len(set(begins)) > 8


@pytest.mark.parametrize(
    "options, said",
    [
        ({"room": 1}, "room=1"),
        ({"short_fraction": 1.5}, "short_fraction=1.5"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(UserError) as error:
        pairs_of([[3, 3]], **options)
    assert names(error, said)
