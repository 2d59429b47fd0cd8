"""`mtx data`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mtx.cli.data import ACTIONS, data_command
from mtx.cli.process import exit_status
from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.indexed import IndexedDataset


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    """The current folder, empty except for ten short documents."""
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"text": "word " * (i + 1)}) for i in range(10)]
    (tmp_path / "docs.jsonl").write_text("\n".join(records))
    return tmp_path


def run(*arguments: str) -> int:
    """The status as from `main`, even if tyro exits after its help."""
    try:
        return exit_status(lambda: data_command(list(arguments)))
    except SystemExit as exit:
        return exit.code


def build(*options: str) -> None:
    assert run("build", "docs.jsonl", "--out", "c", "--processes", "1", *options) == 0


def error(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mtx: ") and err.count("\n") == 1
    return err[5:-1]


def test_the_overview_lists_the_actions(capsys):
    assert run() == run("--help") == 0
    out = capsys.readouterr().out
    for name, action in ACTIONS.items():
        assert f"  {name:<10}{action.__doc__.splitlines()[0]}" in out


@pytest.mark.parametrize(
    "action, options",
    [
        ("build", ["--out STR", "{document,sentence}", "--processes INT", "--lines"]),
        ("inspect", ["--vocab INT", "--document INT"]),
        ("merge", ["--out STR"]),
        ("split", ["--ratios STR"]),
        ("index", ["--samples INT", "--eval-samples", "--data.cache STR", "--model.sequence"]),
    ],
)
def test_help_of_an_action_lists_its_options(action, options, capsys):
    assert run(action, "--help") == 0
    out = capsys.readouterr().out
    for option in options:
        assert option in out


def test_build_says_what_it_wrote(capsys):
    build()
    out, err = capsys.readouterr()
    *facts, rate = out.splitlines()
    assert err == ""
    assert facts == [
        "wrote      c_text_document.bin, .idx, .json",
        "documents  10",
        "tokens     285, uint16",
        "split      277 tokens to train on, 8 held out: the end of each document, as whole ones "
        "are too few",
        "tokenizer  bytes, vocabulary 256",
    ]
    assert rate.startswith("rate       0.0 MB of text in ") and rate.endswith(" MB/s")
    assert len(IndexedDataset("c_text_document").tokens) == 5 * 55 + 10


def test_build_gives_json(capsys):
    build("--json", "--level", "sentence")
    record = json.loads(capsys.readouterr().out)
    assert record["prefix"] == "c_text_sentence"
    assert (record["documents"], record["tokens"], record["dtype"]) == (10, 265, "uint16")
    assert record["tokenizer"]["name"] == "bytes"
    assert record["split"]["by"] == "tokens" and record["split"]["documents"] == 10


def test_inspect_says_what_a_dataset_holds(capsys):
    build()
    capsys.readouterr()
    assert run("inspect", "c_text_document.idx", "--tokenizer", "bytes", "--vocab", "256") == 0
    *facts, named = capsys.readouterr().out.splitlines()
    assert facts == [
        "dataset    c_text_document",
        "documents  10",
        "sequences  10 of 6 to 51 tokens, 28.5 on average",
        "tokens     285, uint16",
    ]
    assert named.startswith("tokenizer  bytes, vocabulary 256, end of document 0, sha256 ")
    assert run("inspect", "c_text_document", "--document", "0") == 0
    assert capsys.readouterr().out == "119 111 114 100 32 0\n"
    assert run("inspect", "c_text_document", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["sequences"], record["longest"], record["multimodal"]) == (10, 51, False)


def test_split_and_merge_give_the_same_back(capsys, corpus):
    build()
    assert run("split", "c_text_document", "--ratios", "6,3,1", "--out", "part") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("documents")][1:] == [
        "documents  6", "documents  3", "documents  1",
    ]  # fmt: skip
    parts = ["part_train", "part_valid", "part_test"]
    assert run("merge", *parts, "--out", "again", "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 10
    assert run("split", "again", "--ratios", "6,3,1", "--out", "once", "--json") == 0
    assert [part["documents"] for part in json.loads(capsys.readouterr().out)] == [6, 3, 1]
    for suffix in (".bin", ".idx", ".json"):
        again, first = corpus / f"again{suffix}", corpus / f"c_text_document{suffix}"
        assert again.read_bytes() == first.read_bytes()


def test_index_builds_what_a_run_then_finds(capsys, corpus, monkeypatch):
    build()
    capsys.readouterr()
    run_config = RunConfig(
        model=ModelConfig(sequence=16, layers=1),
        data=DataConfig(path=("c_text_document",), split="8,2", seed=3),
    )
    options = ["--model.sequence", "16", "--data.seed", "3", "--data.split", "8,2"]
    assert run("index", "c_text_document", *options) == 0
    train, valid, cache = capsys.readouterr().out.splitlines()
    assert train == "train      11 samples of 16 tokens"
    assert valid.startswith("valid      ") and cache == f"cache      {corpus}/index_cache"
    entries = sorted(corpus.glob("index_cache/*"))
    assert len(entries) == 2
    monkeypatch.setattr("mtx.data.gpt.build_indices", None)  # it must not be called again
    data = load_data(run_config)
    assert len(data.train) == 11
    moved = DataConfig(path=("c_text_document",), split="8,2", seed=3, cache="elsewhere")
    with pytest.raises(TypeError):
        load_data(replace(run_config, data=moved))
    assert sorted(corpus.glob("index_cache/*")) == entries


def test_index_builds_a_blend_that_a_run_then_finds(capsys, corpus, monkeypatch):
    build()
    capsys.readouterr()
    blend = ("0.7", "c_text_document", "0.3", "c_text_document")
    options = ["--model.sequence", "8", "--data.split", "7,3", "--data.cache", "cache"]
    wanted = ["--samples", "20", "--eval-samples", "6"]
    assert run("index", *blend, *wanted, *options) == 0
    assert capsys.readouterr().out.splitlines()[0] == "train      20 samples of 8 tokens"
    assert run("index", "c_text_document", "c_text_document", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"]["train"] == 36
    entries = sorted(corpus.glob("cache/*"))
    monkeypatch.setattr("mtx.data.gpt.build_indices", None)
    monkeypatch.setattr("mtx.data.blend.blend_by_weights", None)
    load_data(RunConfig(
        model=ModelConfig(sequence=8, layers=1), steps=10, global_batch=2, eval_batches=3,
        data=DataConfig(path=blend, split="7,3", cache="cache"),
    ))  # fmt: skip
    assert sorted(corpus.glob("cache/*")) == entries


def test_a_tokenizer_is_trained_and_used(capsys, corpus):
    assert run("tokenizer", "docs.jsonl", "--out", "t/tok.json", "--vocab", "300") == 0
    wrote, tokens, digest, _ = capsys.readouterr().out.splitlines()
    assert (wrote, tokens) == (
        "wrote      t/tok.json", "tokens     261, end of document 260 <|endoftext|>"
    )  # fmt: skip
    assert [path.name for path in (corpus / "t").iterdir()] == ["tok.json"]
    again = ["tokenizer", "docs.jsonl", "--out", "again.json", "--vocab", "300", "--json"]
    assert run(*again) == 0
    assert json.loads(capsys.readouterr().out)["vocab"] == 261
    assert (corpus / "again.json").read_bytes() == (corpus / "t" / "tok.json").read_bytes()
    build("--tokenizer", "t/tok.json")
    made = IndexedDataset("c_text_document").identity
    assert (made.eod, made.vocab) == (260, 261)
    assert digest == f"sha256     {made.sha256[:12]}"
    data = load_data(RunConfig(
        model=ModelConfig(sequence=8, layers=1, vocab=261),
        data=DataConfig(path=("c_text_document",), tokenizer="t/tok.json", split="8,2"),
    ))  # fmt: skip
    text = data.tokenizer.decode(data.batch(0, 4)["tokens"].reshape(-1))
    assert set(text) <= set("word ")


EIGHT, INTO = ("--model.sequence", "8"), ("--data.cache", "x")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["bild"], "bild | did you mean 'build'"),
        (["build"], "FILE... | the files to read"),
        (["build", "docs.jsonl"], "--out"),
        (["build", "gone.txt", "--out", "x"], "gone.txt"),
        (["build", "docs.jsonl", "--out", "x", "--level", "word"], "document"),
        (["build", "docs.jsonl", "--out", "x", "--field", "body"], "'body' | text"),
        (["build", "docs.jsonl", "--out", "x", "--max-line-mib", "0"], "max_line_mib=0"),
        (["build", "docs.jsonl", "--out", "x", "--procesess", "1"], "--procesess | --processes"),
        (["inspect", "gone"], "gone.idx"),
        (["inspect", "c_text_document", "d"], "'d' | PREFIX"),
        (["inspect", "c_text_document", "--vocab", "100"], "100"),
        (["inspect", "c_text_document", "--document", "10"], "document=10 | 0 to 9"),
        (["merge", "c_text_document"], "--out"),
        (["merge", "c_text_document", "--out", "c_text_document"], "c_text_document.idx"),
        (["split", "c_text_document", "--ratios", "0"], "split='0'"),
        (["index", "c_text_document", "--data.cache", "x"], "--model.sequence"),
        (["index", "c_text_document", *EIGHT, "--samples", "9"], "--samples | weights"),
        (["tokenizer", "docs.jsonl"], "--out"),
        (["tokenizer", "docs.jsonl", "--out", "docs.jsonl"], "docs.jsonl"),
        (["tokenizer", "docs.jsonl", "--out", "t.txt"], "t.txt must end with .json"),
        (["tokenizer", "empty.txt", "--out", "t.json"], "no text in empty.txt"),
        (["tokenizer", "docs.jsonl", "--out", "t.json", "--vocab", "200"], "vocab=200"),
        (["tokenizer", "docs.jsonl", "--out", "t.json", "--field", "x"], "'x'"),
        (["tokenizer", "docs.jsonl", "--out", "t.json", "--max-mb", "0"], "max_mb=0"),
        (["index", "c_text_document", "--model.sequence", "999", *INTO], "sequence+1=1000"),
        (
            ["index", "1", "c_text_document", *EIGHT, *INTO, "--samples", "5"],
            "--eval-samples",
        ),
        (
            ["index", "0", "c_text_document", "0", "c_text_document", *EIGHT, *INTO, "--samples",
             "5", "--eval-samples", "5"],
            "weights=(0.0, 0.0)",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(capsys, corpus, arguments, said):
    build()
    capsys.readouterr()
    (corpus / "empty.txt").write_text("\n")
    before = sorted(path.name for path in corpus.iterdir())
    assert run(*arguments, *(["--processes", "1"] if arguments[0] == "build" else [])) == 2
    line = error(capsys)
    assert not [value for value in said.split(" | ") if value not in line], line
    assert sorted(path.name for path in corpus.iterdir()) == before
