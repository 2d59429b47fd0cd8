"""Indexed datasets: Megatron-LM's bytes, views of mapped files, and what is refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data.indexed import (
    HEADER,
    MAGIC,
    IndexedDataset,
    IndexedWriter,
    TokenizerIdentity,
    is_dataset,
    token_type,
)
from mtx.data.merge import merge_datasets, split_dataset
from mtx.errors import UserError

# Written by Megatron-LM's own writer: lengths 3, 2, 1; documents of two sequences and of one.
IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000200000001000000"
    "000000000000000006000000000000000a00000000000000000000000000000002000000000000000300000000000000"
)
IDX_SHA256 = "47c7544db60cc5df37c4dd3c3d059ff1564b0f593e82d269f91b2e1f93e340cb"
BIN = bytes.fromhex("010002000300040005000600")
GPT2 = TokenizerIdentity(name="gpt2.json", sha256="ab" * 32, vocab=50257, eod=50256)

Documents = list[list[list[int]]]  # documents of sequences of tokens
documents_of_tokens = st.lists(
    st.lists(st.lists(st.integers(0, 65499), max_size=5), max_size=4), max_size=6
)


def write(prefix, documents: Documents, dtype=np.uint16, **options) -> str:
    with IndexedWriter(prefix, dtype, **options) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            writer.add(np.array(tokens, np.int64), list(map(len, document)))
    return str(prefix)


def expected_index(documents: Documents, *, code: int, size: int) -> bytes:
    """The index, field by field, as the table of the format describes it."""
    lengths = [len(sequence) for document in documents for sequence in document]
    offsets = [size * sum(lengths[:i]) for i in range(len(lengths))]
    ends = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    parts = [b"MMIDIDX\0\0", struct.pack("<Q", 1), struct.pack("<B", code)]
    parts += [struct.pack("<Q", len(lengths)), struct.pack("<Q", len(ends))]
    parts += [struct.pack("<i", length) for length in lengths]
    parts += [struct.pack("<q", number) for number in [*offsets, *ends]]
    return b"".join(parts)


def refusal(action, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def example(tmp_path):
    (tmp_path / "a.idx").write_bytes(IDX)
    (tmp_path / "a.bin").write_bytes(BIN)
    return tmp_path / "a"


# --- bytes ----------------------------------------------------------------------------------------


def test_the_bytes_are_those_of_megatrons_writer(tmp_path):
    write(tmp_path / "a", [[[1, 2, 3], [4, 5]], [[6]]])
    assert hashlib.sha256(IDX).hexdigest() == IDX_SHA256
    assert (tmp_path / "a.idx").read_bytes() == IDX
    assert (tmp_path / "a.bin").read_bytes() == BIN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_megatrons_file_is_read(example):
    dataset = IndexedDataset(example)
    assert (len(dataset), dataset.document_count, dataset.dtype) == (3, 2, np.uint16)
    assert dataset.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert [dataset.text(i, i + 1).tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6]]
    assert [dataset.document(i).tolist() for i in range(2)] == [[1, 2, 3, 4, 5], [6]]
    assert dataset.documents.tolist() == [0, 2, 3] and dataset.modes is None
    assert dataset.identity is None


@settings(max_examples=60)
@given(documents=documents_of_tokens, wide=st.booleans())
def test_any_dataset_is_written_as_the_table_says_and_read_back(tmp_path_factory, documents, wide):
    dtype, code = (np.int32, 4) if wide else (np.uint16, 8)
    prefix = write(tmp_path_factory.mktemp("d") / "a", documents, dtype)
    with open(prefix + ".idx", "rb") as file:
        assert file.read() == expected_index(documents, code=code, size=np.dtype(dtype).itemsize)
    dataset = IndexedDataset(prefix)
    sequences = [sequence for document in documents for sequence in document]
    assert [dataset.text(i, i + 1).tolist() for i in range(len(dataset))] == sequences
    flat = [[token for part in document for token in part] for document in documents]
    assert [dataset.document(i).tolist() for i in range(dataset.document_count)] == flat


@pytest.mark.parametrize(
    "code, name", {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()
)
def test_every_type_of_whole_numbers_is_read(tmp_path, code, name):
    tokens = np.array([1, 2, 100], name)
    prefix = write(tmp_path / "a", [[[1, 2, 100]]], name)
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert (tmp_path / "a.bin").read_bytes() == tokens.tobytes()
    assert IndexedDataset(prefix).tokens.dtype == name


def test_the_vocabulary_decides_the_type():
    assert [token_type(vocab).str for vocab in (256, 65_499, 65_500, 128_256)] == [
        "<u2", "<u2", "<i4", "<i4",
    ]  # fmt: skip


def test_modes_stand_at_the_end(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add(np.array([1, 2, 3]), [2, 1], modes=[0, 1])
    expected = expected_index([[[1, 2], [3]]], code=8, size=2) + b"\0\1"
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert IndexedDataset(tmp_path / "a").modes.tolist() == [0, 1]


def test_a_sequence_can_be_written_in_parts(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.begin(np.array([1, 2]))
        writer.begin(np.array([3]))
        writer.add(np.array([4, 5]), [1, 1], [1, 1])
        writer.add(np.array([6]))
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset.text(i, i + 1).tolist() for i in range(3)] == [[1, 2, 3, 4], [5], [6]]
    assert dataset.documents.tolist() == [0, 1, 2, 3]


def test_what_is_given_are_views_that_cannot_be_written(example):
    dataset = IndexedDataset(example)
    for view in (dataset.text(1, 2), dataset.document(0), dataset.tokens[2:]):
        assert np.shares_memory(view, dataset.tokens)
        with pytest.raises(ValueError):
            view[0] = 1


def test_a_pickled_dataset_maps_the_files_again(example):
    text = pickle.dumps(IndexedDataset(example))
    assert len(text) < 300
    assert pickle.loads(text).tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_either_file_names_the_dataset(example):
    for name in (f"{example}.idx", f"{example}.bin", str(example)):
        assert is_dataset(name) and len(IndexedDataset(name)) == 3
    assert not is_dataset(f"{example}b")


# --- what is refused ------------------------------------------------------------------------------


def damaged(place: int, value: bytes) -> bytes:
    return IDX[:place] + value + IDX[place + len(value) :]


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


@pytest.mark.parametrize(
    "index, said",
    [
        (b"", "begins with b''"),
        (b"PK\3\4" + IDX[4:], "begins with b'PK"),
        (b"TNTIDX\0\0" + IDX[8:], "TNTIDX"),
        (IDX[:20], "ends inside its header, at 20 bytes"),
        (damaged(9, u64(2)), "version 2"),
        (damaged(17, b"\6"), "type code 6"),
        (damaged(17, b"\x09"), "type code 9"),
        (damaged(18, u64(4)), "4 sequences and 3 document indices take 106: it is cut short"),
        (damaged(18, u64(2**64 - 1)), "18,446,744,073,709,551,615 sequences"),
        (damaged(26, u64(2**63)), "it is cut short or damaged"),
        (IDX[:-1], "has 93 bytes, but 3 sequences and 3 document indices take 94"),
        (IDX + b"\0", "has 95 bytes, but"),
        (damaged(34, struct.pack("<i", -3)), "sequence 0 of -3 tokens"),
        (damaged(54, u64(2**40)), "sequence 1 of 2 tokens is said to begin at byte 1099511627776"),
        (damaged(54, u64(2**64 - 8)), "sequence 1 of 2 tokens is said to begin at byte -8"),
        (damaged(70, u64(1)), "document indices do not rise from 0 to 3"),
        (damaged(78, u64(9)), "document indices do not rise from 0 to 3"),
        (damaged(86, u64(2)), "document indices do not rise from 0 to 3"),
        (MAGIC + u64(1) + b"\x08" + u64(0) + u64(0), "0 document indices"),
        (damaged(17, b"\x04"), "sequence 1 of 2 tokens is said to begin at byte 6"),
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused_in_one_line(example, index, said):
    example.with_suffix(".idx").write_bytes(index)
    message = refusal(IndexedDataset, example)
    assert f"{example}.idx" in message and said in message


@pytest.mark.parametrize(
    "data, said",
    [(BIN[:-1], "cut short"), (b"", "cut short"), (BIN + b"\0\0", "do not belong together")],
)
def test_data_of_another_size_are_refused(example, data, said):
    example.with_suffix(".bin").write_bytes(data)
    message = refusal(IndexedDataset, example)
    assert f"has {len(data)} bytes, but {example}.idx describes 12: " in message and said in message


def test_missing_files_are_named(example, tmp_path):
    assert refusal(IndexedDataset, tmp_path / "b").startswith(f"{tmp_path}/b.idx does not exist")
    example.with_suffix(".bin").unlink()
    assert refusal(IndexedDataset, example).startswith(f"{example}.bin does not exist")
    os.mkfifo(f"{example}.bin")  # nobody writes to it: a reader would wait forever
    assert f"{example}.bin" in refusal(IndexedDataset, example)


@settings(max_examples=300)
@given(data=st.data())
def test_a_fuzzed_index_is_refused_or_read_within_the_files(tmp_path_factory, data):
    prefix = tmp_path_factory.getbasetemp() / "fuzz"
    index = bytearray(IDX)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(index) - 1))
        index[place] = data.draw(st.sampled_from([0, 1, 2, 3, 8, 127, 128, 255]))
    index = index[: data.draw(st.sampled_from([len(index)] * 3 + [20, 33, 34, 60, 93]))]
    prefix.with_suffix(".idx").write_bytes(bytes(index))
    prefix.with_suffix(".bin").write_bytes(BIN)
    try:
        dataset = IndexedDataset(prefix)
    except UserError as error:
        assert "\n" not in str(error)
        return
    read = [dataset.text(i, i + 1) for i in range(len(dataset))]
    assert b"".join(view.tobytes() for view in read) == BIN
    assert b"".join(dataset.document(i).tobytes() for i in range(dataset.document_count)) == BIN


@settings(max_examples=40)
@given(header=st.binary(max_size=80))
def test_a_header_of_random_bytes_is_refused(tmp_path_factory, header):
    prefix = tmp_path_factory.getbasetemp() / "noise"
    for start in (b"", MAGIC, MAGIC + u64(1), MAGIC + u64(1) + b"\x08"):
        prefix.with_suffix(".idx").write_bytes(start + header)
        prefix.with_suffix(".bin").write_bytes(BIN)
        assert str(prefix) in refusal(IndexedDataset, prefix)


def test_an_empty_dataset_is_read(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", []))
    assert (tmp_path / "a.idx").stat().st_size == HEADER.size + 8
    assert (len(dataset), dataset.document_count, len(dataset.tokens)) == (0, 0, 0)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(example):
    dataset = IndexedDataset(example)
    dataset.require_vocab(7)
    message = refusal(dataset.require_vocab, 5)
    assert "holds token 5, outside of the vocabulary of 5" in message


# --- the writer -----------------------------------------------------------------------------------


def test_nothing_is_left_where_writing_fails(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add(np.array([1, 2]))
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        assert not is_dataset(tmp_path / "a")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_is_not_overwritten(example):
    message = refusal(write, example, [[[1]]])
    assert message == f"{example}.idx exists; remove it, or choose another name"
    assert example.with_suffix(".idx").read_bytes() == IDX


def test_a_dataset_that_another_process_wrote_meanwhile_is_kept(tmp_path):
    def both() -> None:
        with IndexedWriter(tmp_path / "a", np.uint16) as late:
            late.add(np.array([7]))
            write(tmp_path / "a", [[[1]]])

    assert "a.idx exists" in refusal(both)
    assert IndexedDataset(tmp_path / "a").tokens.tolist() == [1]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(write, tmp_path / "file" / "a", [[[1]]])
    assert message.startswith(f"cannot write {tmp_path}/file/a: ")


@pytest.mark.parametrize(
    "tokens, lengths, said",
    [
        ([1, 65536], None, (1, 65536, "uint16")),
        ([-1, 2], None, (-1, 2, "uint16")),
        ([1, 2], [1], ([1], 2)),
        ([1, 2], [3, -1], ([3, -1], 2)),
    ],
)
def test_tokens_that_cannot_be_stored_are_refused(tmp_path, tokens, lengths, said):
    with pytest.raises(ValueError) as error, IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add(np.array(tokens), lengths)
    assert names(error, *said)
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_without_an_end_is_refused(tmp_path):
    with pytest.raises(ValueError), IndexedWriter(tmp_path / "a", "u2") as writer:
        writer.begin(np.array([1]))
    assert list(tmp_path.iterdir()) == []


# --- the tokenizer's identity ---------------------------------------------------------------------


def test_the_tokenizer_is_named_beside_the_dataset(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[[1]]], identity=GPT2))
    assert dataset.identity == GPT2
    dataset.require_tokenizer(GPT2)
    other = TokenizerIdentity(name="bytes", sha256="cd" * 32, vocab=256, eod=0)
    assert refusal(dataset.require_tokenizer, other) == (
        f"{tmp_path}/a was made with gpt2.json (sha256 abababababab, end-of-document 50256), not "
        "with bytes (sha256 cdcdcdcdcdcd, end-of-document 0); use that tokenizer, or build the "
        "dataset again"
    )


def test_the_end_of_document_is_part_of_the_identity(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[[1]]], identity=GPT2))
    none = TokenizerIdentity(name="gpt2.json", sha256="ab" * 32, vocab=50257, eod=None)
    assert "no end-of-document token" in refusal(dataset.require_tokenizer, none)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tokenizer": {"name": 1}}', "\udcff"])
def test_another_file_in_the_place_of_the_identity_is_refused(example, text):
    example.with_suffix(".json").write_bytes(text.encode(errors="surrogateescape"))
    assert f"{example}.json" in refusal(IndexedDataset, example)


# --- merge and split ------------------------------------------------------------------------------


@settings(max_examples=30)
@given(parts=st.lists(documents_of_tokens, min_size=1, max_size=3))
def test_merged_datasets_are_those_of_all_documents(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("m")
    prefixes = [write(folder / str(i), documents) for i, documents in enumerate(parts)]
    merge_datasets(prefixes, str(folder / "all"))
    whole = write(folder / "whole", [document for part in parts for document in part])
    for suffix in (".idx", ".bin"):
        with open(f"{folder}/all{suffix}", "rb") as one, open(whole + suffix, "rb") as two:
            assert one.read() == two.read()


def test_what_does_not_match_is_not_merged(tmp_path):
    one = write(tmp_path / "one", [[[1]]])
    wide = write(tmp_path / "wide", [[[1]]], np.int32)
    named = write(tmp_path / "named", [[[1]]], identity=GPT2)
    other = write(
        tmp_path / "other", [[[1]]],
        identity=TokenizerIdentity(name="x", sha256="0", vocab=9, eod=None),
    )  # fmt: skip
    out = str(tmp_path / "out")
    message = refusal(merge_datasets, [one, wide], out)
    assert "uint16" in message and "int32" in message
    assert "no tokenizer's identity" in refusal(merge_datasets, [one, named], out)
    assert "was made with x" in refusal(merge_datasets, [named, other], out)
    assert "no datasets" in refusal(merge_datasets, [], out)
    assert not list(tmp_path.glob("out*"))
    assert merge_datasets([named, named], out).identity == GPT2


def test_a_split_has_whole_documents_at_the_rounded_bookends(tmp_path):
    documents = [[[i], [i, i]] for i in range(10)]
    prefix = write(tmp_path / "a", documents, identity=GPT2)
    parts = split_dataset(prefix, "8,1,1", prefix)
    assert {name: part.document_count for name, part in parts.items()} == {
        "train": 8, "valid": 1, "test": 1,
    }  # fmt: skip
    assert parts["valid"].prefix == f"{prefix}_valid" and parts["valid"].identity == GPT2
    assert parts["valid"].document(0).tolist() == [8, 8, 8]
    merge_datasets([part.prefix for part in parts.values()], f"{prefix}_again")
    for suffix in (".idx", ".bin", ".json"):
        assert (tmp_path / f"a_again{suffix}").read_bytes() == (
            tmp_path / f"a{suffix}"
        ).read_bytes()


def test_a_part_without_documents_is_refused_and_one_of_ratio_0_left_out(tmp_path):
    prefix = write(tmp_path / "a", [[[1]], [[2]]])
    assert "gives none to valid" in refusal(split_dataset, prefix, "969,30,1", prefix)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert list(split_dataset(prefix, "1,1", prefix)) == ["train", "valid"]
