"""Tokenizers: round trips, the end-of-document token, and the same result everywhere."""

import json

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data import tokenizer as module
from mtx.data.subwords import SubwordTokenizer
from mtx.data.tokenizer import ByteTokenizer, tokenizer_from_dict, train_bpe
from mtx.errors import UserError

PROSE = [
    "The pipeline has p stages, and each of them holds v chunks of the model.\n" * 20,
    "A microbatch goes forward through all,\n\tthen backward; \u00e9t\u00e9, \u732b, \U0001f600.\n"
    * 20,
]
TRAINED = train_bpe(PROSE, vocab=320)
untimed = settings(deadline=None)  # examples must not fail because the machine is busy
characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
blanks = st.sampled_from(
    [" ", "\n", "\r\n", "\t", "\u2003", "\x1c", "\x85", "'s", "!", "word", "7"]
)
texts = st.one_of(st.text(characters), st.lists(blanks).map("".join))
either = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])


@either
@untimed
@given(text=texts)
def test_decode_gives_back_what_encode_took(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert ((ids >= 0) & (ids < tokenizer.vocab) & (ids != tokenizer.eod)).all()
    assert tokenizer.decode(ids) == text


@either
def test_json_gives_back_the_same_tokenizer(tokenizer):
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.identity == tokenizer.identity
    assert (again.vocab, again.eod) == (tokenizer.vocab, tokenizer.eod)
    text = PROSE[1] + "words that it was not trained on: \u00fc"
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))
    assert again.decode(again.encode(text)) == text


@either
def test_end_of_document_has_no_text(tokenizer):
    ids = [tokenizer.eod, *tokenizer.encode("ab"), tokenizer.eod, *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(["x"], vocab=257)])
def test_broken_utf8_becomes_the_replacement_character(tokenizer):
    first_of_two, second_of_two = tokenizer.encode("\u00fc")
    assert tokenizer.decode([first_of_two, *tokenizer.encode("a")]) == "\ufffda"
    assert tokenizer.decode([*tokenizer.encode("a"), second_of_two]) == "a\ufffd"


@either
def test_an_id_outside_the_vocabulary_is_refused(tokenizer):
    for wrong in (-1, tokenizer.vocab):
        with pytest.raises(ValueError) as error:
            tokenizer.decode([1, wrong])
        assert names(error, f"token {wrong}", tokenizer.vocab)


def test_bytes_are_numbered_as_they_are():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab, tokenizer.eod) == (256, 0)
    assert tokenizer.encode("A\u00fc\n").tolist() == [65, 0xC3, 0xBC, 10]
    with pytest.raises(UserError) as error:
        tokenizer.encode("ab\0c")
    assert names(error, "NUL", 2)


def test_bpe_reaches_the_vocabulary_asked_for_and_ends_it_with_end_of_document():
    assert (TRAINED.vocab, TRAINED.eod) == (320, 319)
    assert len(TRAINED.encode(PROSE[0])) < len(PROSE[0]) / 2


@pytest.mark.parametrize(("text", "vocab"), [("ab", 258), ("a", 257), ("", 257)])
def test_bpe_of_a_small_text_says_how_few_ids_it_has(text, vocab):
    tokenizer = train_bpe([text], vocab=1000)
    assert (tokenizer.vocab, tokenizer.eod) == (vocab, vocab - 1)
    assert tokenizer.decode(tokenizer.encode("caf\u00e9")) == "caf\u00e9"


@untimed
@given(st.lists(texts, max_size=8), st.integers(257, 300))
def test_bpe_training_is_deterministic(documents, vocab):
    first, second = (train_bpe(documents, vocab=vocab) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert 257 <= first.vocab <= vocab


@untimed
@given(text=texts, size=st.integers(1, 8), vocab=st.just(300))
def test_training_in_blocks_changes_nothing(text, size, vocab):
    whole = train_bpe([text], vocab=vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_CHARACTERS", size)
        assert "".join(module.blocks([text])) == text
        assert train_bpe([text], vocab=vocab).to_dict() == whole.to_dict()


def test_a_long_text_is_cut_into_blocks():
    blocks = list(module.blocks([PROSE[0] * 200]))
    assert len(blocks) > 3
    size = module._BLOCK_CHARACTERS
    assert all(size <= len(block) < size + 100 for block in blocks[:-1])


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UserError) as error:
        tokenizer_from_dict({"kind": "byte"})
    assert names(error, "'byte'", "'bytes'")
    assert isinstance(tokenizer_from_dict(TRAINED.to_dict()), SubwordTokenizer)
