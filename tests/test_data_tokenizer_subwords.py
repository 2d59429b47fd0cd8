"""Subwords: the tokens of `tokenizers`, by every way of computing them."""

from __future__ import annotations

import itertools
import json
import re
from pydoc_data.topics import topics

import pytest
import tokenizers
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mtx.data import subwords
from mtx.data.subwords import SubwordTokenizer, cut_text
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


def train(*, split: str | None = None, metaspace: bool = False) -> tokenizers.Tokenizer:
    """A small BPE like GPT-2's, with another expression, or like SentencePiece's."""
    model = tokenizers.Tokenizer(models.BPE(byte_fallback=metaspace))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if metaspace:
        model.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        alphabet = [chr(code) for code in range(32, 127)]
    elif split:
        model.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    else:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    text = "".join(topics[name] for name in sorted(topics))[:60_000]
    model.train_from_iterator([text[:20_000]] if metaspace else [text], trainer)
    return model


@pytest.fixture(scope="module")
def models_by_kind():
    return {"gpt2": train(), "llama3": train(split=LLAMA3), "metaspace": train(metaspace=True)}


@pytest.fixture
def tokenizer(tmp_path, models_by_kind) -> str:
    """A file of the model like GPT-2's."""
    path = tmp_path / "tokenizer.json"
    models_by_kind["gpt2"].save(str(path))
    return str(path)


# Characters that the expressions distinguish, plain and not: combining accents, numbers that are
# not digits, Unicode blanks, and letters that lower and upper case do not change.
ALPHABET = (
    "aZst'\u2019dlmvreLS019 \t\n\r.,!?_-\"()|<>\x00\x0b\x0c\x1c\x85\xa0\xad\xb2\xbc\xb5\xdf\xe9\xff"
    "\u0130\u017f\u0301\u2003\u2028\u2009\u2160\u3000\u4e00\u3042\u0661\ufeff\U0001f600"
)
odd_texts = st.text(st.sampled_from(ALPHABET), max_size=60)


def tokens_of(model: tokenizers.Tokenizer, text: str) -> list[int]:
    model.encode_special_tokens = True
    return model.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "metaspace"])
@settings(max_examples=150)
@given(texts=st.lists(odd_texts, max_size=4))
def test_it_gives_the_tokens_of_tokenizers(models_by_kind, kind, texts):
    model = models_by_kind[kind]
    ours = SubwordTokenizer(json.loads(model.to_str()), name="t", eod=END)
    with pytest.MonkeyPatch.context() as patch:  # so that short texts are cut
        patch.setattr(subwords, "_PART_CHARACTERS", 8)
        patch.setattr(subwords, "_BATCH_CHARACTERS", 20)
        found = ours.encode_all(texts)
    assert [ids.tolist() for ids in found] == [tokens_of(model, text) for text in texts]


@pytest.mark.parametrize("kind, cuts", [("gpt2", True), ("llama3", True), ("metaspace", False)])
def test_a_tokenizer_that_marks_the_beginning_is_not_cut(models_by_kind, kind, cuts):
    ours = SubwordTokenizer(json.loads(models_by_kind[kind].to_str()), name="t", eod=END)
    assert (ours.cuts is not None) == cuts


@given(text=st.text(st.sampled_from("ab \n."), max_size=60), size=st.integers(1, 20))
def test_a_text_is_cut_between_words_only(text, size):
    cuts = re.compile("|".join(subwords._CUTS))
    parts = list(cut_text(text, cuts, size))
    assert "".join(parts) == text
    assert all(len(part) >= size for part in parts[:-1])
    for one, two in itertools.pairwise(parts):
        blank = not one[-1].isspace() and two[0] == " " and not two[1].isspace()
        line = one[-1] == "\n" and not one[-2].isspace() and not two[0].isspace()
        assert blank or line


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(r"\w+|[^\w]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])},
        {"pre_tokenizer": pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(r"[^[a-z]]+|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])},
    ],
)  # fmt: skip
def test_other_tokenizers_give_their_own_tokens(models_by_kind, change):
    model = tokenizers.Tokenizer.from_str(models_by_kind["gpt2"].to_str())
    for name, value in change.items():
        setattr(model, name, value)
    ours = SubwordTokenizer(json.loads(model.to_str()), name="t", eod=END)
    text = "It's a Test,\n\n of caf\xe9 99 "
    assert ours.encode_all([text])[0].tolist() == tokens_of(model, text)


def test_special_tokens_in_a_text_are_text_and_none_are_added(models_by_kind):
    model = tokenizers.Tokenizer.from_str(models_by_kind["gpt2"].to_str())
    model.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    model.enable_padding(length=50)
    model.enable_truncation(3)
    ours = SubwordTokenizer(json.loads(model.to_str()), name="t", eod="auto")
    for text in (f"one {END} two", f"one {END} \u4e00"):
        (ids,) = ours.encode_all([text])
        assert ours.identity.eod == 0 and 0 not in ids and len(ids) > 3
        assert models_by_kind["gpt2"].decode(ids.tolist()) == text


def test_the_identity_is_that_of_what_decides_the_tokens(models_by_kind, tokenizer, tmp_path):
    described = json.loads(models_by_kind["gpt2"].to_str())
    here = load_tokenizer(tokenizer).identity
    assert (here.name, here.vocab, here.eod) == ("tokenizer.json", 800, 0)
    padded = {**described, "padding": {"strategy": "BatchLongest"}, "truncation": None}
    padded = dict(reversed(padded.items()))  # another layout of the file
    padded["padding"] = None
    (tmp_path / "other.json").write_text(json.dumps(padded, indent=3))
    assert load_tokenizer(str(tmp_path / "other.json")).identity.sha256 == here.sha256
    merges = described["model"]["merges"]
    changed = {**described, "model": {**described["model"], "merges": merges[:-1]}}
    assert SubwordTokenizer(changed, name="t", eod=END).identity.sha256 != here.sha256
    assert load_tokenizer(str(tmp_path)).identity == here  # a folder
    assert load_tokenizer("bytes").identity.vocab == 256


@pytest.mark.parametrize(
    "eod, token", [("auto", 0), (END, 0), ("a", 65), ("800", 800), ("none", None)]
)
def test_the_end_of_document_is_chosen(tokenizer, eod, token):
    known = tokenizers.Tokenizer.from_file(tokenizer).get_vocab()
    identity = load_tokenizer(tokenizer, eod=eod).identity
    assert identity.eod == (known["a"] if eod == "a" else token)
    assert identity.vocab == (801 if eod == "800" else 800)


def test_an_end_of_document_that_is_not_there_is_refused(tokenizer, models_by_kind):
    with pytest.raises(UserError) as error:
        load_tokenizer(tokenizer, eod="801")
    assert names(error, "eod='801'", "tokenizer.json", 800)
    with pytest.raises(UserError) as error:
        load_tokenizer("bytes", eod="x")
    assert names(error, "eod='x'", "bytes", 0)
    described = json.loads(models_by_kind["gpt2"].to_str().replace(END, "<end of it>"))
    with pytest.raises(UserError) as error:
        SubwordTokenizer(described, name="t", eod="auto")
    assert names(error, END, 800)


@pytest.mark.parametrize(
    "text, said", [("{", "JSON"), ("[]", "model"), ('{"model": 3}', "tokenizer.json")]
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, text, said):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path / "t.json"))
    assert names(error, "t.json", said)
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path / "gone.json"))
    assert names(error, "gone.json")


def test_what_the_library_says_of_a_long_value_is_cut():
    described = {"model": {"type": "BPE", "vocab": "x" * 5000, "merges": []}}
    with pytest.raises(UserError) as error:
        SubwordTokenizer(described, name="t.json", eod="auto")
    assert names(error, "t.json") and len(str(error.value)) < 300
