"""Masked tokens: which ones are masked, whole words in runs, and what replaces them."""

from __future__ import annotations

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data.masked import Masking, mask_words
from mtx.data.samples import Rng
from mtx.data.special_tokens import BertVocab, SpecialTokens
from mtx.errors import UserError

SPECIAL = SpecialTokens(cls=0, sep=1, mask=2, pad=3)
VOCAB = BertVocab(  # 4 to 49 begin a word, 50 to 99 continue one
    special=SPECIAL, continues=np.arange(100) >= 50, others=np.arange(4, 100, dtype=np.int32)
)


def row_of(*texts: list[int]) -> np.ndarray:
    """[CLS] A [SEP] B [SEP]"""
    return np.array([0, *(token for text in texts for token in (*text, 1))])


def words_of(row) -> list[range]:
    """The words one by one. A word begins with any token, except special ones, that does not
    continue a word or that follows a special token."""
    words, open_word = [], None
    for place, token in enumerate([*row, 0]):
        mark = token < 4
        if open_word is not None and (mark or token < 50):
            words.append(range(open_word, place))
            open_word = None
        if not mark and open_word is None:
            open_word = place
    return words


texts = st.lists(st.integers(4, 99), min_size=1, max_size=40)
maskings = st.builds(
    Masking,
    fraction=st.floats(0.01, 0.9),
    run=st.integers(1, 5),
    most=st.one_of(st.none(), st.integers(1, 12)),
)


@given(texts, texts, maskings, st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_whole_words_are_masked_and_nothing_else_changes(first, second, masking, seed):
    row = row_of(first, second)
    masked, places = mask_words(row, VOCAB, Rng(seed), masking)
    assert masked.dtype == np.int32 and len(masked) == len(row)
    assert places.tolist() == sorted(set(places.tolist()))
    chosen, words = set(places.tolist()), words_of(row)
    taken = [word for word in words if chosen & set(word)]
    assert chosen == {place for word in taken for place in word}, "a word, or nothing of it"
    wanted = masking.wanted(len(first) + len(second))
    assert len(places) <= wanted or len(taken) == 1 == sum(len(w) <= len(taken[0]) for w in taken)
    assert len(places) > 0
    others = np.setdiff1d(np.arange(len(row)), places)
    np.testing.assert_array_equal(masked[others], row[others])
    assert not np.isin(row[places], SPECIAL).any()
    assert not np.isin(masked[places], (SPECIAL.cls, SPECIAL.sep, SPECIAL.pad)).any()
    again, same = mask_words(row, VOCAB, Rng(seed), masking)
    np.testing.assert_array_equal((again[places], places), (masked[places], same))


def test_the_share_is_fifteen_percent():
    random = np.random.default_rng(0)
    for seed in range(50):
        row = row_of(random.integers(4, 50, 250), random.integers(4, 50, 259))  # words of one token
        assert len(mask_words(row, VOCAB, Rng(seed), Masking())[1]) == round(0.15 * 509)
        row = row_of(random.integers(4, 100, 250), random.integers(4, 100, 259))
        assert 74 <= len(mask_words(row, VOCAB, Rng(seed), Masking())[1]) <= 76
    assert len(mask_words(row, VOCAB, Rng(0), Masking(most=20))[1]) <= 20


def test_of_ten_tokens_eight_are_hidden_one_stays_and_one_is_another():
    row = row_of([10] * 509)
    found = []
    for seed in range(150):
        masked, places = mask_words(row, VOCAB, Rng(seed), Masking())
        found.append(masked[places])
    found = np.concatenate(found)
    count = len(found)
    assert count == 150 * 76
    others = found[(found != SPECIAL.mask) & (found != 10)]
    for got, share in (
        ((found == SPECIAL.mask).sum(), 0.8),
        ((found == 10).sum(), 0.1 + 0.1 / 96),
        (len(others), 0.1 * 95 / 96),
    ):
        assert abs(got - share * count) < 4 * np.sqrt(share * (1 - share) * count)
    assert set(others.tolist()) == set(range(4, 100)) - {10}, "any token but special ones"


def test_runs_of_n_words_come_up_with_a_weight_of_one_over_n():
    row, lengths = row_of([10] * 3000), []
    for seed in range(60):
        _, places = mask_words(row, VOCAB, Rng(seed), Masking(fraction=0.01))
        breaks = np.flatnonzero(np.diff(places) > 1)
        lengths += np.diff([0, *(breaks + 1), len(places)]).tolist()
    counts = np.bincount(lengths)[1:4]
    # Runs rarely touch; the last one of a row is cut to the number still wanted.
    np.testing.assert_allclose(counts / counts.sum(), np.array([6, 3, 2]) / 11, atol=0.05)
    alone = mask_words(row, VOCAB, Rng(0), Masking(fraction=0.01, run=1))[1]
    assert (np.diff(alone) > 1).mean() > 0.9


def test_every_word_is_masked_as_often_as_another():
    """Except words near a special token, which fewer runs reach."""
    row, counts = row_of([10] * 40, [10] * 40), np.zeros(83)
    for seed in range(2000):
        counts[mask_words(row, VOCAB, Rng(seed), Masking())[1]] += 1
    inner = [*range(4, 38), *range(45, 79)]
    assert counts[[0, 41, 82]].tolist() == [0, 0, 0]
    assert abs(counts[inner] / 2000 - 0.155).max() < 0.04
    assert counts[1] < counts[inner].min() and counts[42] < counts[inner].min()


def test_a_sample_is_the_same_for_ever():
    """With any numpy version, machine and process: a resumed run must read the same."""
    row = row_of([10, 60, 11, 12, 61, 62, 13], [14, 15, 63, 16, 17, 18])
    masked, places = mask_words(row, VOCAB, Rng(7, 2**40), Masking(fraction=0.5))
    assert places.tolist() == [1, 2, 3, 4, 5, 6]
    assert masked.tolist() == [0, 2, 2, 11, 12, 18, 2, 13, 1, 14, 15, 63, 16, 17, 18, 1]
    rng = Rng(1, 2)
    assert (rng.below(1000), int(rng.uniform(1)[0] * 1000)) == (620, 66)
    assert rng.permutation(5).tolist() == [3, 1, 2, 4, 0]


def test_a_row_of_special_tokens_alone_has_nothing_to_mask():
    masked, places = mask_words(row_of([], []), VOCAB, Rng(0), Masking())
    assert masked.tolist() == [0, 1, 1] and len(places) == 0


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"fraction": 0.0}, "mask_fraction=0.0"),
        ({"fraction": 1.0}, "mask_fraction=1.0"),
        ({"run": 0}, "mask_run=0"),
        ({"most": 0}, "most=0"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(UserError) as error:
        Masking(**changes)
    assert names(error, said)
