"""How a corpus is split: by whole documents as in Megatron-LM, or by a share of each if there are
too few documents; then one book is enough, from the command line to the first batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st

from mtx.cli import main
from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.bert import divide_documents
from mtx.data.blend import BlendedDataset
from mtx.data.corpus import check_data
from mtx.data.gpt import GPTDataset
from mtx.data.indexed import IndexedDataset, IndexedWriter
from mtx.data.merge import merge_datasets, split_dataset
from mtx.data.split import PARTS, divide, foresee, parse_split, split_range
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError

S = 8
BYTES = ByteTokenizer().identity


@pytest.fixture
def write(tmp_path):
    """Writes documents of these sizes; tokens are numbered from 1 across them, the last is 0."""

    def write(*sizes, name="c", identity=BYTES):
        prefix, start = str(tmp_path / name), 1
        with IndexedWriter(prefix, np.int32, identity=identity) as writer:
            for size in sizes:
                writer.add(np.append(np.arange(start, start + size - 1), 0))
                start += size
        return prefix

    return write


def tokens_of(dataset) -> set[int]:
    return {token for i in range(len(dataset)) for token in dataset[i].tolist()}


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20), st.sampled_from(PARTS))
def test_cut_texts_are_given_to_the_parts_once_and_in_order(counts, part):
    counts = np.array(counts, np.int32)
    found = [divide(counts, "7,2,1", name, by="tokens", serves=len) for name in PARTS]
    ends = np.zeros(len(counts), np.int64)
    for division in found:
        first, end = division.spans(counts)
        np.testing.assert_array_equal(first, ends)
        np.testing.assert_array_equal(division.sizes(counts), end - first)
        ends = end
    np.testing.assert_array_equal(ends, counts)
    share = parse_split("7,2,1")[PARTS.index(part)]
    size = found[PARTS.index(part)].sizes(counts)
    assert (abs(size - share * counts) <= 1).all()
    for index, count in enumerate(counts.tolist()):
        first, end = found[PARTS.index(part)].within(count)
        assert end - first == size[index]


def test_documents_stay_whole_where_each_part_has_a_sample(write):
    """As in Megatron-LM; and the two parts never disagree on this."""
    prefix = write(*[20] * 10)
    train = GPTDataset(prefix, sequence=S, split="8,2")
    same = GPTDataset(prefix, sequence=S, split="8,2", split_by="documents")
    assert not train.cut
    assert [train[i].tolist() for i in range(len(train))] == [
        same[i].tolist() for i in range(len(same))
    ]
    held_out = {part: GPTDataset(prefix, sequence=30, split="8,2", part=part) for part in PARTS[:2]}
    assert not held_out["valid"].cut and held_out["valid"].part_tokens == 40
    for part in PARTS[:2]:  # one sample of 41 tokens needs more than two whole documents
        assert GPTDataset(prefix, sequence=39, split="8,2", part=part).cut is False
        assert GPTDataset(prefix, sequence=35, split="85,15", part=part).cut is False
    with pytest.raises(UserError) as error:
        GPTDataset(prefix, sequence=40, split="8,2", part="valid")
    assert names(error, "'valid'", 40, 200, "sequence=39")


@pytest.mark.parametrize("sizes", [(400,), (300, 500), (3, 400, 2, 700)])
def test_few_large_documents_are_cut(write, sizes):
    prefix = write(*sizes)
    parts = {part: GPTDataset(prefix, sequence=S, split="90,9,1", part=part) for part in PARTS[:2]}
    assert all(part.cut for part in parts.values())
    train, valid = (tokens_of(parts[part]) - {0} for part in PARTS[:2])
    assert not train & valid
    total = sum(sizes)
    assert abs(parts["train"].part_tokens - 0.9 * total) <= len(sizes)
    assert abs(parts["valid"].part_tokens - 0.09 * total) <= len(sizes)
    starts = np.cumsum([1, *sizes])
    for start, size in zip(starts, sizes, strict=False):
        if size > 100:  # both have something of each book, the held-out part near its end
            assert start + 3 * S in train
            assert start + round(0.94 * size) in valid


def test_a_piece_ends_as_a_document_does(tmp_path):
    """Otherwise two packed books would see each other; text files are cut in the same way."""
    prefix, books = str(tmp_path / "books"), (7, 9)
    with IndexedWriter(prefix, np.uint16, identity=BYTES) as writer:
        for book in books:
            writer.add(np.append(np.full(396, book), 0))
    plain = GPTDataset(prefix, sequence=S, split="9,1")
    ended = GPTDataset(prefix, sequence=S, split="9,1", eod=0)
    assert 0 not in tokens_of(plain) and 0 in tokens_of(ended)
    data, meeting = load_data(run_of(prefix, packed=True, split="9,1")), 0
    batch = data.batch(0, len(data.train))
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        meeting += len(set(tokens.tolist()) & set(books)) == 2
        for segment in range(segments.max() + 1):
            assert len(set(tokens[segments == segment].tolist()) & set(books)) <= 1
    assert meeting == 1


def run_of(*path: str, sequence=S, **changes) -> RunConfig:
    model = ModelConfig(
        layers=1, hidden=8, heads=1, sequence=sequence, vocab=4096, compute_dtype="float32"
    )
    return RunConfig(model=model, data=DataConfig(path=path, **changes), global_batch=4)


def test_a_blend_cuts_those_that_are_too_few(write):
    many, book = write(*[20] * 100, name="many"), write(2000, name="book")
    data = load_data(run_of("0.5", many, "0.5", book))
    assert f"split 969,30,1 of each document's tokens in {book}; " in data.describe()
    data = load_data(run_of(book))
    assert "split 969,30,1 of each document's tokens; 1,938 tokens to train" in data.describe()
    alone = [GPTDataset(p, sequence=S, endless=True, eod=0).cut for p in (many, book)]
    assert alone == [False, True]
    assert isinstance(load_data(run_of(many, book)).train, BlendedDataset)


def test_either_way_can_be_asked_for(write):
    prefix = write(*[20] * 10, 900)  # what Megatron-LM holds out is the book
    assert load_data(run_of(prefix, split="9,1")).held_out.part_tokens == 900
    data = load_data(run_of(prefix, split="9,1", split_by="tokens"))
    assert data.held_out.part_tokens == 110 and data.train.part_tokens == 990
    book = write(2000, name="book")
    with pytest.raises(UserError) as error:
        load_data(run_of(book, split_by="documents"))
    assert names(error, 0, "2,000", "split_by=tokens")
    with pytest.raises(UserError) as error:
        DataConfig(split_by="words")
    assert names(error, "'words'")


def test_a_book_of_sentences_is_cut_between_sentences(tmp_path):
    prefix = str(tmp_path / "book")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add(np.arange(300), np.full(100, 3), np.array([100]))
    dataset, config = IndexedDataset(prefix), DataConfig(split="8,2")
    parts = [divide_documents(dataset, config, part) for part in PARTS[:2]]
    assert [part.within(100) for part in parts] == [(0, 80), (80, 100)]
    nsp = DataConfig(split="8,2", order="nsp", split_by="documents")
    assert divide_documents(dataset, nsp, "valid").cut is None


def test_a_book_is_split_into_files_that_hold_all_of_it(write, tmp_path):
    prefix = write(400, 600)
    parts = split_dataset(prefix, "9,1", str(tmp_path / "part"))
    data = IndexedDataset(prefix)
    assert {name: part.lengths.tolist() for name, part in parts.items()} == {
        "train": [361, 541], "valid": [40, 60],
    }  # fmt: skip
    for document in (0, 1):
        pieces = [parts[part].document(document) for part in PARTS[:2]]
        assert pieces[0][-1] == pieces[1][-1] == BYTES.eod
        whole = np.concatenate([pieces[0][:-1], pieces[1]])
        np.testing.assert_array_equal(whole, data.document(document))
    with pytest.raises(UserError):
        split_dataset(prefix, "969,30", str(tmp_path / "x"), by="documents")
    many = [f"{tmp_path}/part_{name}" for name in parts]
    assert merge_datasets(many, str(tmp_path / "again")).document_count == 4


def test_sentences_are_split_into_files_whole(tmp_path):
    prefix = str(tmp_path / "book")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add(np.arange(300), np.full(100, 3), np.array([100]))
    parts = split_dataset(prefix, "8,2", prefix)
    assert [part.lengths.tolist() for part in parts.values()] == [[3] * 80, [3] * 20]
    assert parts["valid"].tokens.tolist() == list(range(240, 300))


# --- from the command line ------------------------------------------------------------------------


@pytest.fixture
def books(tmp_path, monkeypatch):
    """A folder with a book and a folder of notes."""
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    Path("my_book.txt").write_text("Once upon a time there was a long book.\n" * 2000)
    Path("notes/one.md").write_text("What was noted, and noted again.\n" * 1500)
    return tmp_path


def test_a_book_and_notes_are_built_and_trained_on(books, capsys):
    """The README's recipe, up to the first batch."""
    assert main(["data", "tokenizer", "my_book.txt", "notes/", "--vocab", "300", "--out", "t"]) == 0
    Path("t").rename("tokenizer.json")
    build = ["data", "build", "my_book.txt", "notes/", "--tokenizer", "tokenizer.json"]
    assert main([*build, "--out", "corpus", "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "documents  2\n" in said and "held out: the end of each document" in said
    run = run_of("corpus_text_document", sequence=64, tokenizer="tokenizer.json")
    check_data(run)
    data = load_data(run)
    trained, held_out = data.train.part_tokens, data.held_out.part_tokens
    assert data.held_out.distinct >= 1 and 0.02 < held_out / trained < 0.04
    inspect = ["data", "inspect", "corpus_text_document", "--json"]
    assert main(inspect) == 0
    total = json.loads(capsys.readouterr().out)["tokens"]
    assert 0 <= total - trained - held_out <= total // 500  # test: 1 of 1,000


@pytest.mark.parametrize("path", ["my_book.txt", "notes", "."])
def test_text_files_need_no_dataset(books, path):
    run = run_of(path, sequence=64)
    check_data(run)
    data = load_data(run)
    trained, held_out = data.train.part_tokens, data.held_out.part_tokens
    assert 0.04 < held_out / (trained + held_out) < 0.06
    assert "the tail of" in data.describe()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data.path", "short_text_document"], "part 'valid' of split='969,30,1' has "),
        (["--data.path", "short.txt"], "the held-out text has "),
        (["--data.path", "gone.txt"], "data path 'gone.txt' does not exist"),
        (["--data.path", "short_text_document", "--data.tokenizer", "t.json"], "the tokenizer t"),
        (["--data.path", "short_text_document", "--model.vocab", "99"], "more than model.vocab=99"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_devices_start(
    books, capsys, monkeypatch, arguments, said
):
    Path("short.txt").write_text("few words " * 100)
    build = ["data", "build", "short.txt", "--out", "short", "--processes", "1"]
    assert main(build) == 0
    capsys.readouterr()
    monkeypatch.setattr("mtx.cli.train.start_devices", None)  # it must not be called
    assert main(["train", "miniature", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtx: ") and error.count("\n") == 1 and said in error
    assert not Path("runs").exists()


def test_what_is_foreseen(write):
    many = foresee(np.full(1000, 50))
    assert (many.by, many.documents, many.held_out_documents) == ("documents", 969, 30)
    assert many.held_out_tokens == 1500 and not many.lopsided
    book = foresee(np.array([100_000]))
    assert (book.by, book.held_out_documents, book.held_out_tokens) == ("tokens", 1, 3000)
    first, end = split_range(parse_split("969,30,1"), "valid", 20)
    assert (first, end) == (19, 20) and foresee(np.array([*[5] * 19, 5000])).lopsided
