"""BERT's batches, from text and from datasets of sentences; its tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from errors import names

from mtx.cli import main
from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.bert import make_bert_batch
from mtx.data.build import Recipe, build_dataset
from mtx.data.corpus import load_text
from mtx.data.indexed import IndexedDataset, IndexedWriter
from mtx.data.special_tokens import NAMES, find_bert_vocab, find_special_tokens
from mtx.data.tokenizer import ByteTokenizer, train_bpe, train_wordpiece
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError

WORDS = "the small house stands unfortunately beside another; greatest houses stand outside".split()
S = 32


def story(seed: int, sentences: int = 12) -> str:
    random = np.random.default_rng(seed)
    lines = (random.choice(WORDS, random.integers(3, 9)) for _ in range(sentences))
    return "\n".join(" ".join(line).capitalize() + "." for line in lines)


STORIES = [story(seed) for seed in range(30)]


@pytest.fixture(scope="module")
def wordpiece():
    return train_wordpiece(STORIES, vocab=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, wordpiece):
    """texts/, a tokenizer.json, and two datasets of sentences made with it: a and b."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "texts").mkdir()
    for place, text in enumerate(STORIES):
        (folder / "texts" / f"{place:02}.txt").write_text(text)
    (folder / "tokenizer.json").write_text(json.dumps(wordpiece.to_dict()["model"]))
    recipe = Recipe(tokenizer=str(folder / "tokenizer.json"), level="sentence")
    for name, part in (("a", "texts/0*"), ("b", "texts/1*")):
        files = sorted(str(path) for path in folder.glob(part))
        build_dataset(files, str(folder / name), recipe, processes=1)
    return folder


def run_of(folder, *path: str, **changes) -> RunConfig:
    data = DataConfig(
        path=tuple(str(folder / name) if name[0].isalpha() else name for name in path),
        tokenizer=str(folder / "tokenizer.json"), **changes,
        **({} if path == ("texts",) else {"split": "7,3"}),
    )  # fmt: skip
    model = ModelConfig(family="bert", layers=1, hidden=8, heads=1, sequence=S, vocab=100)
    return RunConfig(model=model, data=data, global_batch=4, steps=10, eval_batches=2)


def check(batch, corpus, vocab) -> None:
    """Check what holds for every batch."""
    tokens, targets, text = batch["tokens"], batch["targets"], batch["segments"] == 1
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32", "targets": "int32", "weights": "float32", "types": "int32",
        "segments": "int32", "order": "int32",
    }  # fmt: skip
    special = vocab.special
    assert (tokens[~text] == special.pad).all() and not batch["types"][~text].any()
    assert not batch["weights"][~text].any()
    assert (targets[:, 0] == special.cls).all()
    np.testing.assert_array_equal((targets == special.sep).sum(axis=1), 2)
    lengths = text.sum(axis=1)
    assert (np.diff(batch["segments"]) <= 0).all(), "text first, then padding"
    assert (targets[np.arange(len(targets)), lengths - 1] == special.sep).all()
    for row, types in zip(targets, batch["types"]):
        cut = np.flatnonzero(row == special.sep)[0] + 1
        assert (
            not types[:cut].any() and types[cut : np.flatnonzero(row == special.sep)[1] + 1].all()
        )
    np.testing.assert_array_equal(tokens[batch["weights"] == 0], targets[batch["weights"] == 0])
    assert not vocab.is_special[targets[batch["weights"] > 0]].any()
    assert set(batch["order"].tolist()) <= {0, 1}
    assert tokens.max() < corpus.vocab


def test_batches_of_text(folder):
    corpus = load_data(run_of(folder, "texts"))
    vocab = find_bert_vocab(corpus.tokenizer)
    masked = tokens = 0
    for step in range(20):
        batch = corpus.batch(16 * step, 16)
        check(batch, corpus, vocab)
        masked, tokens = masked + batch["weights"].sum(), tokens + batch["segments"].sum()
    assert 0.11 < masked / (tokens - 3 * 320) < 0.16
    assert "tokenizer.json tokenizer, vocab 88" in corpus.describe()
    assert "30 files from" in corpus.describe() and "held out" in corpus.describe()


def test_what_was_masked_can_be_read(folder):
    corpus = load_data(run_of(folder, "texts", mask_run=1))
    sample = next(s for s in map(corpus.train.__getitem__, range(100)) if s.order == 1)
    text = corpus.tokenizer.decode(sample.targets)
    assert text.startswith("[CLS] the ") or text[6:].split()[0].strip("#;") in " ".join(WORDS)
    assert text.count("[SEP]") == 2 and "[MASK]" not in text


def test_a_batch_does_not_depend_on_who_reads_it(folder):
    corpus = load_data(run_of(folder, "texts"))
    whole = corpus.batch(20, 8)
    part = corpus.batch(20, 8, local=[5, 2])
    for name, array in whole.items():
        np.testing.assert_array_equal(part[name][[2, 5]], array[[2, 5]])
        np.testing.assert_array_equal(array[4:], corpus.batch(24, 4)[name])
    assert not part["weights"][[0, 1, 3, 4, 6, 7]].any() and (part["order"][[0, 1]] == -1).all()
    with pytest.raises(ValueError) as error:
        make_bert_batch(corpus.train, -1, 4, pad=0)
    assert names(error, "consumed=-1")


def test_what_is_held_out_is_always_the_same(folder):
    corpus = load_data(run_of(folder, "texts", eval_fraction=0.2))
    rows = len(corpus.held_out) - 1
    batches, again = (list(corpus.eval_batches(100, rows)) for _ in range(2))
    assert [(batch["weights"].sum(axis=1) > 0).sum() for batch in batches] == [rows, 1]
    for one, two in zip(batches, again, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert (batches[1]["order"][1:] == -1).all() and not batches[1]["segments"][1:].any()
    held_out = {tuple(row[1:8]) for batch in batches for row in batch["targets"]}
    trained = {tuple(corpus.train[index].targets[1:8]) for index in range(300)}
    assert not held_out & trained


def test_a_dataset_of_sentences_is_split_by_documents(folder):
    corpus = load_data(run_of(folder, "a", "b"))
    vocab = find_bert_vocab(corpus.tokenizer)
    check(corpus.batch(3, 16), corpus, vocab)
    alone, dataset = load_data(run_of(folder, "a")), IndexedDataset(folder / "a")
    assert (folder / "index_cache").is_dir() and dataset.document_count == 10
    documents = [dataset.document(place).astype(np.int32).tobytes() for place in range(10)]
    for source, own in ((alone.train, documents[:7]), (alone.held_out, documents[7:])):
        for index in range(2 * len(source)):
            sample = source[index]
            first, second = np.split(sample.targets, [sample.second])
            texts = [text.tobytes() for text in (first[1:-1], second[:-1])]
            assert any(texts[0] in document and texts[1] in document for document in own)


def test_a_blend_takes_its_shares(folder):
    one, two, both = (load_data(run_of(folder, *path)) for path in (
        ("a",), ("b",), ("0.75", "a", "0.25", "b"),
    ))  # fmt: skip
    given = [both.train[index].targets.tolist() for index in range(40)]
    of_one = {tuple(one.train[index].targets) for index in range(31)}
    of_two = {tuple(two.train[index].targets) for index in range(11)}
    assert sum(tuple(row) in of_one for row in given) == 30
    assert sum(tuple(row) in of_two for row in given) == 10
    with pytest.raises(IndexError) as error:
        both.train[40]
    assert names(error, 40, 40)
    every = load_data(run_of(folder, "a", "b"))
    epoch = len(one.train) + len(two.train)
    spans = [every.train[index] for index in range(2 * epoch)]
    assert every.train.distinct == epoch and len(spans) == 2 * epoch


@pytest.mark.parametrize("order", ["nsp", "none"])
def test_other_orders(folder, order):
    corpus = load_data(run_of(folder, "texts", order=order))
    batch = corpus.batch(0, 64)
    ends = (batch["targets"] == find_special_tokens(corpus.tokenizer).sep).sum(axis=1)
    if order == "none":
        assert (batch["order"] == -1).all() and (ends == 1).all() and not batch["types"].any()
    else:
        check(batch, corpus, find_bert_vocab(corpus.tokenizer))
        assert 0.2 < batch["order"].mean() < 0.8


def test_mistakes_are_named(folder, tmp_path):
    run = run_of(folder, "a")

    def refusal(**changes) -> str:
        with pytest.raises(UserError) as caught:
            load_data(replace(run, data=replace(run.data, **changes)))
        return str(caught.value)

    assert "tokenizer='bytes' has no [MASK]" in refusal(tokenizer="bytes")
    assert "tokenizer='bpe' has no [MASK]" in refusal(tokenizer="bpe")
    said = refusal(tokenizer="wordpiece", path=(str(folder / "a"),))
    assert "tokenizer='wordpiece' is trained on text" in said
    assert "mask_fraction=1.5 must lie" in refusal(mask_fraction=1.5)
    bpe = tmp_path / "tokenizer.json"
    bpe.write_text(json.dumps(train_bpe(["some text"], vocab=270).to_dict()["model"]))
    assert "no [CLS] and no [SEP] and no [MASK] and no [PAD]" in refusal(tokenizer=str(bpe))
    documents = str(tmp_path / "documents")
    recipe = Recipe(tokenizer=run.data.tokenizer, eod="none")
    build_dataset([str(folder / "texts")], documents, recipe, processes=1)
    said = refusal(path=(documents,))
    assert "part 'train' of split='7,3': none of 30 documents has 2 sentences" in said
    assert "--level sentence" in said
    said = refusal(path=(str(folder / "a"),), split="1")
    assert "part 'valid' of split='1': none of 0 documents" in said
    wrong = str(tmp_path / "wrong")
    with IndexedWriter(wrong, np.uint16) as writer:
        for _ in range(4):
            writer.add(np.full(40, 120), np.full(4, 10), np.array([4]))
    with pytest.raises(UserError) as error:
        load_data(replace(run, data=replace(run.data, path=(wrong,)))).batch(0, 1)
    assert names(error, 0, 120)
    with pytest.raises(UserError) as error:
        replace(run, data=replace(run.data, packed=True))
    assert names(error, "packed=True", "family='bert'")
    with pytest.raises(UserError) as error:
        RunConfig(data=DataConfig(mask_run=1))
    assert names(error, "mask_run=1", "'gpt'")
    with pytest.raises(UserError) as error:
        RunConfig(data=DataConfig(tokenizer="wordpiece"))
    assert names(error, "tokenizer='wordpiece'", "'gpt'")
    with pytest.raises(UserError):
        find_special_tokens(ByteTokenizer())


# --- WordPiece ------------------------------------------------------------------------------------


def test_a_wordpiece_has_the_special_tokens_first_and_covers_its_text(wordpiece):
    assert wordpiece.vocab <= 100 and wordpiece.eod is None
    vocab = find_bert_vocab(wordpiece)
    assert sorted(vocab.special) == [0, 2, 3, 4] and vocab.size == wordpiece.vocab
    ids = wordpiece.encode("The houses stand, [MASK] \u4e2d")
    assert not vocab.is_special[ids].any(), "special tokens that are spelled out are text"
    assert 1 in ids and wordpiece.decode(wordpiece.encode("Small House")) == "small house"
    assert vocab.continues.sum() > 10 and set(NAMES) <= set(
        token["content"] for token in wordpiece.to_dict()["model"]["added_tokens"]
    )
    with pytest.raises(UserError) as error:
        train_wordpiece(STORIES, vocab=20)
    assert names(error, "vocab=20", 64)


def test_the_command_writes_the_same_wordpiece(folder, tmp_path, capsys):
    out = str(tmp_path / "tokenizer.json")
    command = ["data", "tokenizer", str(folder / "texts"), "--kind", "wordpiece", "--vocab", "100"]
    assert main([*command, "--out", out]) == 0
    assert "end of document none" in capsys.readouterr().out
    assert load_tokenizer(out, eod=None).identity.same_as(
        train_wordpiece(STORIES, vocab=100).identity
    )


HASH = """
import hashlib, sys
from mtx.config import DataConfig
from mtx.data.corpus import load_text
config = DataConfig(path=(sys.argv[1],), tokenizer="wordpiece", bpe_vocab=300)
corpus = load_text(config, sequence=32, bert=True)
batch = corpus.batch(123, 32)
print(hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest())
"""


def test_another_process_trains_the_same_wordpiece_and_sees_the_same_batch(folder):
    config = DataConfig(path=(str(folder / "texts"),), tokenizer="wordpiece", bpe_vocab=300)
    batch = load_text(config, sequence=32, bert=True).batch(123, 32)
    here = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
    there = subprocess.run(
        [sys.executable, "-c", HASH, str(folder / "texts")], capture_output=True, text=True,
        env=os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "123"}, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == here
