"""From text files to datasets: what is read, how it is encoded, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from errors import names
from tokenizers import models, normalizers, pre_tokenizers, trainers

from mtx.data import sources, subwords
from mtx.data.build import Recipe, build_dataset, split_sentences
from mtx.data.indexed import IndexedDataset
from mtx.data.sources import Reading, find_files
from mtx.errors import UserError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def model():
    """A small BPE like GPT-2's."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator([topics["assert"]], trainer)
    return model


@pytest.fixture
def tokenizer(tmp_path, model) -> str:
    """`model` as a file."""
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """Writes {relative path: text or bytes} below a folder and returns the folder."""

    def write(files: dict[str, str | bytes]):
        for name, content in files.items():
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / "in"

    return write


def build(inputs, out, **options) -> IndexedDataset:
    reading = Reading(**{key: options.pop(key) for key in list(options) if key in READING})
    processes = options.pop("processes", 1)
    build_dataset(
        [str(path) for path in inputs], str(out), Recipe(reading=reading, **options),
        processes=processes,
    )  # fmt: skip
    return IndexedDataset(out)


READING = ("field", "lines", "most_line_bytes")


def texts(dataset: IndexedDataset) -> list[str]:
    """The documents of a dataset of bytes, each of which must end with NUL."""
    read = [bytes(dataset.document(i).tolist()) for i in range(dataset.document_count)]
    assert all(text.endswith(b"\0") for text in read)
    return [text[:-1].decode() for text in read]


def refusal(inputs, tmp_path, **options) -> str:
    """The message; checks that no files are left."""
    with pytest.raises(UserError) as caught:
        build(inputs, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))
    return str(caught.value)


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# --- what is read ---------------------------------------------------------------------------------


def test_json_lines_plain_and_packed_give_the_same(folder, tmp_path):
    some = lines(*({"text": f"document {i} " * i, "id": i} for i in range(1, 40)))
    half = len(some) // 2
    root = folder({
        "a.jsonl": some,
        "b.jsonl.gz": gzip.compress(some.encode()),
        # Two members, as `cat` makes them, and zeros of a tape at the end.
        "c.jsonl.gz": gzip.compress(some[:half].encode()) + gzip.compress(some[half:].encode())
        + b"\0" * 512,
        "d.json": some.removesuffix("\n").replace("\n", "\r\n\r\n"),
        "e.ndjson": "\ufeff" + some,
    })  # fmt: skip
    expected = [f"document {i} " * i for i in range(1, 40)]
    for path in root.iterdir():
        assert texts(build([path], tmp_path / path.name)) == expected, path


def test_zst_is_read(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    frames = [
        pyarrow.compress(lines({"text": f"{i} " * 9999}).encode(), codec="zstd", asbytes=True)
        for i in range(3)
    ]
    root = folder({"a.jsonl.zst": b"".join(frames), "cut.jsonl.zst": frames[0][:-9]})
    expected = [f"{i} " * 9999 for i in range(3)]
    assert texts(build([root / "a.jsonl.zst"], tmp_path / "a")) == expected
    assert "cut.jsonl.zst" in refusal([root / "cut.jsonl.zst"], tmp_path)


def test_parquet_is_read(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = folder({"broken.parquet": b"PAR1 not"})
    column = [f"row {i} é" for i in range(500)] + [None]
    sentences = [["One.", "Two."], ["Three."]]
    parquet.write_table(
        pyarrow.table({"text": column, "n": list(range(501))}), root / "a.parquet",
        row_group_size=100,
    )  # fmt: skip
    parquet.write_table(pyarrow.table({"text": sentences}), root / "b.parquet")
    assert texts(build([root / "a.parquet"], tmp_path / "a")) == column[:-1]
    dataset = build([root / "b.parquet"], tmp_path / "b", level="sentence")
    assert dataset.documents.tolist() == [0, 2, 3]
    assert "has no column 'body', but text, n" in refusal(
        [root / "a.parquet"], tmp_path, field="body"
    )
    assert "column 'n' holds int64" in refusal([root / "a.parquet"], tmp_path, field="n")
    assert f"cannot read {root}/broken.parquet" in refusal([root / "broken.parquet"], tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_package_that_is_missing_is_named(folder, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = refusal([folder({name: b"xxxx"}) / name], tmp_path)
    assert "pyarrow" in message and "mtx[data]" in message


def test_a_text_file_is_a_document_or_its_lines_are(folder, tmp_path):
    root = folder(
        {"b.txt": "one\n\ntwo\r\n", "a/c.md": "\ufeffthree", ".git/d.txt": "no", "x.py": ""}
    )
    assert texts(build([root], tmp_path / "a")) == ["three", "one\n\ntwo\r\n"]
    assert texts(build([root], tmp_path / "b", lines=True)) == ["three", "one", "two"]


def test_files_come_in_the_order_of_their_names(folder):
    root = folder({"b.txt": "", "a.jsonl.gz": b"", "sub/c.parquet": b"", "z.bin": b""})
    assert [path.name for path in find_files([str(root)])] == ["a.jsonl.gz", "b.txt", "c.parquet"]
    hidden = root / ".hidden"
    hidden.mkdir()
    (hidden / "a.txt").write_text("")
    assert [path.name for path in find_files([str(hidden)])] == ["a.txt"]  # it was named


def test_empty_documents_are_left_out(folder, tmp_path):
    root = folder({"a.jsonl": lines({"text": ""}, {"text": "x"}, {"text": []}), "b.txt": ""})
    built = build_dataset([str(root)], str(tmp_path / "a"), Recipe(), processes=1)
    assert (built.dataset.document_count, built.empty, len(built.dataset.tokens)) == (1, 3, 2)
    assert texts(IndexedDataset(tmp_path / "a")) == ["x"]


def test_sentences_are_sequences(folder, tmp_path):
    root = folder({
        "a.jsonl": lines({"text": "It rained. Dr. Who left!\nThen: 3.5."}, {"text": ["A.", "C"]}),
        "b.txt": "One line\nand two.",
    })  # fmt: skip
    dataset = build([root], tmp_path / "a", level="sentence", eod="none", tokenizer="bytes")
    read = [bytes(dataset.text(i, i + 1).tolist()).decode() for i in range(len(dataset))]
    assert read == [
        "It rained.",
        "Dr. Who left!",
        "Then: 3.5.",
        "A.",
        "C",
        "One line",
        "and two.",
    ]
    assert dataset.documents.tolist() == [0, 3, 5, 7] and dataset.identity.eod is None


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("", []),
        ("No end", ["No end"]),
        ('He said "Go!" She went.', ['He said "Go!"', "She went."]),
        ("J. R. R. Tolkien wrote. e.g. This", ["J. R. R. Tolkien wrote. e.g. This"]),
        ("Really?! Yes... \u201cMaybe.\u201d", ["Really?!", "Yes...", "\u201cMaybe.\u201d"]),
        ("\u4e00\u3002\u4e8c\uff01", ["\u4e00\u3002", "\u4e8c\uff01"]),
        ("a.b at 3.14, v. 2 is it", ["a.b at 3.14, v.", "2 is it"]),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(text, sentences):
    assert split_sentences(text) == sentences


def test_a_list_of_texts_is_one_document_joined_by_blanks(folder, tmp_path):
    root = folder({"a.jsonl": lines({"text": ["One.", "Two."]})})
    assert texts(build([root], tmp_path / "a")) == ["One. Two."]


# --- processes ------------------------------------------------------------------------------------


def test_the_dataset_is_the_same_whatever_the_processes(folder, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 20_000)
    names = sorted(topics)
    root = folder({
        "a.jsonl": lines(*({"text": topics[name]} for name in names[:20])),
        "b.txt": "".join(topics[name] for name in names[20:40]),
        "c.txt": "",
        "d.md": "short",
    })  # fmt: skip
    reports = []
    one = build([root], tmp_path / "one", tokenizer=tokenizer)
    built = build_dataset(
        [str(root)], str(tmp_path / "two"), Recipe(tokenizer=tokenizer), processes=2,
        report=reports.append,
    )  # fmt: skip
    for suffix in (".bin", ".idx", ".json"):
        pair = [(tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two")]
        assert pair[0] == pair[1]
    two = built.dataset
    assert (two.document_count, built.empty, two.dtype) == (22, 1, np.uint16)
    assert len(reports) > 10 and reports[-1].tokens == len(two.tokens) == len(one.tokens)
    assert reports[-1].read_bytes == reports[-1].total_bytes
    model = tokenizers.Tokenizer.from_file(tokenizer)
    whole = model.encode("".join(topics[name] for name in names[20:40]))
    assert one.document(20).tolist() == [*whole.ids, model.token_to_id(END)]


def test_a_mistake_in_a_worker_is_one_line(folder, tmp_path):
    root = folder({"a.jsonl": lines({"text": "good"}, {"text": 3})})
    message = refusal([root], tmp_path, processes=2)
    assert message == (f"{root}/a.jsonl, line 2: field 'text' holds int, not text")
    assert "processes=0 must be at least 1" in refusal([root], tmp_path, processes=0)


# --- what is refused ------------------------------------------------------------------------------


def test_a_text_that_cannot_be_cut_has_a_limit(folder, tmp_path, model, monkeypatch):
    for module in (subwords, sys.modules["mtx.data.build"]):
        monkeypatch.setattr(module, "MOST_CHARACTERS", 5000)
    marking = tokenizers.Tokenizer.from_str(model.to_str())
    marking.normalizer = normalizers.Prepend("_")  # at the beginning of every text
    marking.save(str(tmp_path / "tokenizer.json"))
    root = folder({"a.txt": "word " * 2000, "b.jsonl": lines({"text": "word " * 2000})})
    message = refusal([root / "a.txt"], tmp_path, tokenizer=str(tmp_path))
    assert f"{root}/a.txt has more than 5,000 characters in which it cannot be cut" in message
    message = refusal([root / "b.jsonl"], tmp_path, tokenizer=str(tmp_path))
    assert f"{root}/b.jsonl, from line 1: a text of 10,000 characters cannot be cut" in message


@pytest.mark.parametrize(
    "content, said",
    [
        (
            b'{"text": "a"}\n{"text": "caf\xe9"}\n',
            "line 2: byte 14 of the line, 0xe9, is not UTF-8",
        ),
        (b'{"text": "a"}\n\n{"text": \n', "line 3 is not JSON: "),
        (b'{"text": "a"}\n"b"\n', "line 2 has no field 'text', but str"),
        (b'{"title": "a", "body": ""}', "line 1 has no field 'text', but title, body"),
        (b'{"text": null}', "line 1: field 'text' holds NoneType"),
        (b'{"text": ["a", 1]}', "line 1: field 'text' holds int"),
        (b'{"text": "a\\ud800b"}', "line 1: field 'text' has half of a surrogate pair, \\ud800"),
        (b"[" * 100_000, "line 1 is not JSON: "),
        (b'{"text": "a\\u0000b"}', "text has a NUL at character 1"),
    ],
)
def test_a_bad_line_is_named(folder, tmp_path, content, said):
    path = folder({"a.jsonl": content}) / "a.jsonl"
    message = refusal([path], tmp_path)
    assert message.startswith(str(path)) and said in message


@pytest.mark.parametrize(
    "content, said",
    [
        (b"caf\xe9 au lait", "is not UTF-8 text: byte 0xe9 at byte offset 3"),
        (b"a" * 50 + b"\xc3\xa9" * 40 + b"\xc3", "is not UTF-8 text: byte 0xc3 at byte offset 130"),
        ("text".encode("utf-16-le"), "is not text: NUL at byte offset 1"),
    ],
)
def test_bytes_that_are_no_text_are_named_with_their_offset(
    folder, tmp_path, content, said, monkeypatch
):
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 7)  # characters cross blocks
    path = folder({"a.txt": content}) / "a.txt"
    assert refusal([path], tmp_path).startswith(f"{path} {said}")


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed[:-9],
        lambda packed: packed[:20] + b"\xff\xff\xff" + packed[23:],
        lambda packed: packed + b"rest",
        lambda packed: b"not gzip",
    ],
)
def test_damaged_gz_is_refused(folder, tmp_path, change):
    packed = gzip.compress(lines(*({"text": os.urandom(9).hex()} for _ in range(99))).encode())
    path = folder({"a.jsonl.gz": change(packed)}) / "a.jsonl.gz"
    assert refusal([path], tmp_path).startswith(f"cannot read {path}: ")


def test_inputs_that_hold_nothing_are_refused(folder, tmp_path):
    root = folder({"x.py": "", "empty.jsonl": "\n\n", "a.txt": ""})
    assert "there is nothing to write" in refusal([root], tmp_path)
    assert "x.py must end in one of .txt" in refusal([root / "x.py"], tmp_path)
    assert "gone.txt" in refusal([root / "gone.txt"], tmp_path)
    (tmp_path / "none").mkdir()
    assert f"{tmp_path}/none holds no file" in refusal([tmp_path / "none"], tmp_path)


def test_a_name_that_is_taken_is_refused_before_anything_is_read(folder, tmp_path):
    root = folder({"a.txt": "a", "bad.txt": b"\xff"})
    build([root / "a.txt"], tmp_path / "a")
    with pytest.raises(UserError) as error:
        build([root / "bad.txt"], tmp_path / "a")
    assert names(error, "a.idx")


@pytest.mark.parametrize("name, said", [
    ("huge.jsonl", "huge.jsonl, line 1 has more than 67,108,864 bytes; cut it"),
    ("huge.txt", "huge.txt is not text: NUL at byte offset 0"),
])  # fmt: skip
def test_a_line_of_5_gb_is_refused_in_little_memory(folder, tmp_path, name, said):
    path = folder({name: b""}) / name
    os.truncate(path, 5 * 2**30)  # zeros without a newline, which take no room on the disk
    tracemalloc.start()
    try:
        message = refusal([path], tmp_path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in message
    assert peak_bytes < 2 * 2**26


def test_a_packed_line_of_zeros_is_refused_in_little_memory(folder, tmp_path):
    path = folder({"a.jsonl.gz": gzip.compress(bytes(2**26))}) / "a.jsonl.gz"
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        message = refusal([path], tmp_path, most_line_bytes=2**20)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "line 1 has more than 1,048,576 bytes" in message
    assert peak_bytes < 2**28


def test_a_large_document_is_streamed(folder, tmp_path, monkeypatch):
    """In parts: the memory used does not grow with the file."""
    monkeypatch.setattr(sources, "_CHUNK_BYTES", 2**14)
    content = b"".join(b"line %d of a long book\n" % i for i in range(60_000))
    path = folder({"book.txt": content}) / "book.txt"
    tracemalloc.start()
    try:
        dataset = build([path], tmp_path / "out")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert dataset.tokens.astype(np.uint8).tobytes() == content + b"\0"
    assert len(dataset) == 1
    assert peak_bytes < len(content)
