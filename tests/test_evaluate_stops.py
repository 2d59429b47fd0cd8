"""Strings that end a text are found with their last token, wherever tokens are split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.evaluation.stops import Stops

TEXTS = ["Once upon a time, 時間。 there was\n\nan é: Größe and größer 🙂 and so on\n"] * 3


@pytest.fixture(scope="module")
def tokenizers():
    return ByteTokenizer(), train_bpe(TEXTS, vocab=300)


def first_found(stops, ids, tokenizer):
    """The number of tokens after which a string may be complete; None if it never is."""
    return next((n for n in range(1, len(ids) + 1) if stops.may_stand_in(ids[:n], tokenizer)), None)


@pytest.mark.parametrize("stop", ["\n\n", "é", "。", "🙂", "a time, 時", "größer", "never"])
def test_a_string_is_found_with_the_token_that_completes_it(tokenizers, stop):
    for tokenizer in tokenizers:
        stops = Stops.of((stop,), tokenizer)
        ids = tokenizer.encode(TEXTS[0] * 5).tolist()
        complete = (n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
        assert first_found(stops, ids, tokenizer) == next(complete, None)


@given(begin=st.integers(0, 150), length=st.integers(1, 20))
def test_any_part_of_a_text_is_found(tokenizers, begin, length):
    text = TEXTS[0] * 3
    stop = text[begin : begin + length]
    for tokenizer in tokenizers:
        stops = Stops.of((stop,), tokenizer)
        found = first_found(stops, tokenizer.encode(text).tolist(), tokenizer)
        assert found is not None
        before, which = stops.cut(tokenizer.decode(tokenizer.encode(text)[:found]))
        assert before == text[: text.index(stop)] and which == stop


def test_the_first_of_several_ends_the_text():
    stops = Stops.of(("cd", "b", "bc", 7), ByteTokenizer())
    assert stops.cut("abcd") == ("a", "bc") and stops.cut("xcdb") == ("x", "cd")
    assert stops.cut("none") == ("none", None)
    assert stops.tokens == {7} and stops.strings == ("cd", "b", "bc")


def test_without_strings_no_text_is_decoded():
    assert not Stops.of((1, 2), ByteTokenizer()).may_stand_in([400], ByteTokenizer())
