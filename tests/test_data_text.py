"""The text of a run, from files to batches."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from errors import names

from mtx.config import DataConfig
from mtx.data import load_text
from mtx.data.tokenizer import train_bpe
from mtx.errors import UserError

both = pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
NUMBERED = [f"Note {i}: the {i * 7919} words of note {i}.\n" * 5 for i in range(200)]


@pytest.fixture
def notes(tmp_path):
    for index, text in enumerate(NUMBERED):
        (tmp_path / f"{index:03}.txt").write_text(text)
    return (str(tmp_path),)


def documents(tokenizer, tokens: np.ndarray) -> list[str]:
    """Texts, each ended by an end-of-document token; the last token must be one."""
    ends = np.flatnonzero(tokens == tokenizer.eod)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(piece) for piece in np.split(tokens, ends)[:-1]]


@both
def test_each_document_stands_once_on_one_side_and_ends_with_its_token(notes, tokenizer):
    data = load_text(DataConfig(path=notes, tokenizer=tokenizer, bpe_vocab=300), sequence=16)
    train = documents(data.tokenizer, data.train.tokens)
    held_out = documents(data.tokenizer, data.held_out.tokens)
    assert sorted(train + held_out) == sorted(NUMBERED)
    assert len(held_out) == pytest.approx(10, abs=1)
    assert train != sorted(train)


@both
def test_tokens_and_counts_agree(notes, tokenizer):
    data = load_text(DataConfig(path=notes, tokenizer=tokenizer, bpe_vocab=300), sequence=16)
    assert data.vocab == data.tokenizer.vocab == {"bytes": 256, "bpe": 300}[tokenizer]
    batches = [data.batch(8 * step, 8) for step in range(20)] + list(data.eval_batches(4, 8))
    for batch in batches:
        assert batch["tokens"].max() < data.vocab and batch["tokens"].min() >= 0
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (data.train.part_tokens, data.held_out.part_tokens) == (
        len(data.train.tokens),
        len(data.held_out.tokens),
    )
    line = data.describe()
    assert "\n" not in line
    for part in (
        f"200 files from {notes[0]}",
        "whole documents held out",
        f"{data.train.part_tokens:,} tokens to train on, {data.held_out.part_tokens:,} held out",
        f"{tokenizer} tokenizer, vocab {data.vocab}",
    ):
        assert part in line


def test_the_bpe_vocabulary_is_trained_on_the_training_text_alone(tmp_path):
    text = "plain words here\n" * 300 + "zyzzyva " * 33
    path = tmp_path / "book.txt"
    path.write_text(text)
    config = DataConfig(path=(str(path),), tokenizer="bpe", bpe_vocab=1000)
    data = load_text(config, sequence=8)
    head = text[: -round(0.05 * len(text))]
    assert "zyzzyva" not in head
    assert data.tokenizer.decode(data.train.tokens) == head
    assert data.tokenizer.decode(data.held_out.tokens) == text[len(head) :]
    assert data.tokenizer.to_dict() == train_bpe([head], vocab=1000).to_dict()
    assert data.tokenizer.to_dict() != train_bpe([text], vocab=1000).to_dict()
    assert data.vocab < 300


def test_eval_batches_are_the_same_every_time_and_never_repeat(notes):
    data = load_text(DataConfig(path=notes, eval_fraction=0.1), sequence=32)
    first = list(data.eval_batches(1000, 8))
    data.batch(40, 8)
    second = list(data.eval_batches(1000, 8))
    assert sum(int(b["weights"].sum()) for b in first) == len(data.held_out) * 32
    for a, b in zip(first, second, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    stream = np.concatenate([b["targets"][b["weights"] > 0] for b in first])
    np.testing.assert_array_equal(stream, data.held_out.tokens[1 : len(stream) + 1])


@both
def test_the_default_text_is_enough_for_a_small_run(tokenizer):
    data = load_text(DataConfig(tokenizer=tokenizer), sequence=128)
    assert data.train.part_tokens > {"bytes": 340_000, "bpe": 90_000}[tokenizer]
    assert len(data.held_out) >= {"bytes": 128, "bpe": 32}[tokenizer]
    assert data.vocab == {"bytes": 256, "bpe": 2048}[tokenizer]


_DIGEST = """
import hashlib, sys
from mtx.config import DataConfig
from mtx.data import load_text
data = load_text(DataConfig(path=(sys.argv[1],), tokenizer="bpe", seed=5), sequence=16)
batch = data.batch(123 * 32, 32)
print(hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
"""


def test_another_process_with_other_threads_and_hashes_sees_the_same_batch(notes):
    data = load_text(DataConfig(path=notes, tokenizer="bpe", seed=5), sequence=16)
    batch = data.batch(123 * 32, 32)
    here = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "123"}
    there = subprocess.run(
        [sys.executable, "-c", _DIGEST, *notes],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert there.stdout.strip() == here


def test_text_shorter_than_a_sample_is_refused_with_the_numbers(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 100)
    config = DataConfig(path=(str(path),))
    with pytest.raises(UserError) as error:
        load_text(config, sequence=128)
    assert names(error, 96, "sequence+1=129", "sequence=5 ")  # 6 tokens are held out
    assert load_text(config, sequence=5).held_out.distinct == 1
    path.write_text("x" * 5)  # which holds out nothing
    with pytest.raises(UserError) as error:
        load_text(config, sequence=128)
    assert names(error, "sequence+1=129") and "sequence=" not in str(error.value)


def test_held_out_text_shorter_than_a_sample_is_refused_with_the_numbers(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    config = DataConfig(path=(str(path),))
    with pytest.raises(UserError) as caught:
        load_text(config, sequence=128)
    assert str(caught.value) == (
        "the held-out text has 51 tokens, but one sample needs sequence+1=129; "
        "give more text, raise eval_fraction=0.05 or use sequence=50 or less"
    )
    with pytest.raises(UserError) as error:
        load_text(config, sequence=51)
    assert names(error, 51, "sequence+1=52")
    data = load_text(config, sequence=50)
    assert (len(data.train), len(data.held_out)) == (19, 1)


def test_a_text_of_one_character_holds_out_nothing_and_says_so(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("x")
    with pytest.raises(UserError) as error:
        load_text(DataConfig(path=(str(path),)), sequence=1)
    assert names(error, 0, "eval_fraction=0.05")


def test_a_negative_seed_is_refused():
    with pytest.raises(UserError) as error:
        DataConfig(seed=-1)
    assert names(error, "seed=-1", 0)
