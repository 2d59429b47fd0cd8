"""The files of tokenizers. SentencePiece's tokens of the texts are recorded here."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from errors import names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models

from mtx.data.tokenizer import tokenizer_from_dict, train_bpe
from mtx.data.tokenizer_files import load_tokenizer, write_tokenizer
from mtx.errors import UserError

# --- SentencePiece's files, written by hand -------------------------------------------------------


def varint(value: int) -> bytes:
    low, value = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(value) if value else bytes([low])


def message(*fields: tuple[int, int | float | bytes | str]) -> bytes:
    """A protocol buffer: whole numbers, floats of four bytes, and bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value % 2**64)
        else:
            raw = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(raw)) + raw
    return out


def table(replaced: dict[str, str]) -> bytes:
    """A table of characters as SentencePiece compiles it: a double array, node after node."""
    texts, starts = b"", {}
    for key, to in replaced.items():
        starts[key.encode()] = len(texts)
        texts += to.encode() + b"\0"
    units: dict[int, int] = {}
    open_nodes, free = [(0, b"")], 1
    while open_nodes:
        place, prefix = open_nodes.pop(0)
        labels = sorted({key[len(prefix)] for key in starts if key[: len(prefix)] == prefix != key})
        base = -(-free // 256) * 256  # a separate block for each node
        free = base + 256
        unit = units.get(place, 0) | (place ^ base) << 10
        if prefix in starts:
            unit |= 1 << 8
            units[base] = 1 << 31 | starts[prefix]
        units[place] = unit
        for label in labels:
            units[base ^ label] = label
            open_nodes.append((base ^ label, prefix + bytes([label])))
    array = struct.pack(f"<{free}I", *(units.get(place, 0) for place in range(free)))
    return struct.pack("<I", len(array)) + array + texts


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
REPLACED = {
    "\t": " ", "\n": " ", "\ufb01": "fi", "e\u0301": "\xe9", "e\u0301\u0323": "E", "\x01": "",
}  # fmt: skip
PIECES = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
WORDS = [
    "\u2581t", "he", "in", "\u2581the", "\u2581a", "er", "re", "\u2581in", "th", "and", "\u2581and",
    "\u2581\u2581", "\u2581\u2581\u2581", "fi", "aa", "aaa",
]  # fmt: skip
LETTERS = [*"\u2581abdefhinrst2\xe9E<>/s0x41.,"]


def pieces(kind: str, extra: list) -> list[bytes]:
    words = [
        (text, -float(rank) if kind == "bpe" else -2.0 - rank / 8, NORMAL)
        for rank, text in enumerate(WORDS)
    ]
    letters = [
        (text, -float(len(WORDS) + rank) if kind == "bpe" else -6.0 - rank / 8, NORMAL)
        for rank, text in enumerate(dict.fromkeys(LETTERS))
    ]
    return [
        message((1, text), (2, score), (3, form)) for text, score, form in
        [*PIECES, *extra, *words, *letters]
    ]  # fmt: skip


def model_file(
    kind: str, *, prefix: bool = True, remove: bool = True, extra: list = (),
    replaced: dict | None = None, fallback: bool = False, end: int = 2, **trainer: int,
) -> bytes:  # fmt: skip
    spec = message((3, {"unigram": 1, "bpe": 2}[kind]), (35, int(fallback)), (40, 0), (42, end))
    spec += message(*((int(number[1:]), value) for number, value in trainer.items()))
    normalizer = [(1, "x"), (3, int(prefix)), (4, int(remove)), (5, 1)]
    if replaced:
        normalizer.append((2, table(replaced)))
    body = [(1, piece) for piece in pieces(kind, list(extra))]
    return message(*body, (2, spec), (3, message(*normalizer)))


HEX = [(f"<0x{value:02X}>", 0.0, BYTE) for value in range(256)]
DEFINED = [(text, 0.0, USER_DEFINED) for text in ("<t>", "\u2581\u2581\u2581\u2581", "n.", "\n")]
MODELS = {
    "bpe, as Llama 2's": model_file("bpe", remove=False, extra=HEX, fallback=True),
    "bpe, replacing": model_file("bpe", replaced=REPLACED),
    "bpe, no prefix": model_file("bpe", prefix=False, remove=False, replaced=REPLACED),
    "unigram, as T5's": model_file("unigram", replaced=REPLACED),
    "bpe, the user's": model_file(
        "bpe", prefix=False, remove=False, extra=DEFINED, replaced=REPLACED
    ),
    "unigram, the user's": model_file("unigram", extra=DEFINED, replaced=REPLACED),
    "unigram, bytes": model_file("unigram", remove=False, extra=HEX, fallback=True),
}
TEXTS = [
    "the air and their thin aaaaa.", "  the   end  ", "\u4e00 the\u4e8c\u4e09", "2<s></s>, <0x41>",
    "\ufb01re\tin\nthere e\u0301 e\u0301\u0323", "", " ", "\u2581the\u2581",
    "a<t> <t>the     in.",
]  # fmt: skip
EXPECTED = {  # by sentencepiece 0.2.3
    "bpe, as Llama 2's": [
        "262 263 282 284 263 283 278 262 282 284 259 281 261 263 273 273 297",
        "270 262 271 279 283 278 270",
        "275 231 187 131 262 231 189 143 231 187 140",
        "275 287 290 285 291 290 292 285 291 298 275 290 293 294 295 296 291",
        "275 242 175 132 265 12 261 13 286 260 265 275 279 207 132 275 279 207 132 207 166",
        "",
        "270",
        "275 262 275",
        "263 290 286 291 275 290 286 291 286 260 270 270 266 297",
    ],
    "bpe, replacing": [
        "6 7 26 28 7 27 22 6 26 28 3 25 5 7 17 17 41",
        "6 19 23 27 22",
        "19 0 6 0",
        "19 31 34 29 35 34 36 29 35 42 19 34 37 38 39 40 35",
        "19 16 9 10 6 9 19 32 19 33",
        "",
        "",
        "19 6",
        "7 34 30 35 19 34 30 35 30 4 10 41",
    ],
    "bpe, no prefix": [
        "30 4 7 26 28 7 27 22 6 26 28 3 25 5 7 17 17 41",
        "19 6 15 23 27 22 14",
        "0 6 0",
        "31 34 29 35 34 36 29 35 42 19 34 37 38 39 40 35",
        "16 9 10 6 9 19 32 19 33",
        "",
        "19",
        "6 19",
        "20 34 30 35 19 34 30 35 30 4 14 14 10 41",
    ],
    "unigram, as T5's": [
        "6 7 26 28 13 6 26 28 3 25 5 7 17 17 41",
        "6 19 23 27 22",
        "19 0 6 0",
        "19 31 34 29 35 34 36 29 35 42 19 34 37 38 39 40 35",
        "19 16 9 10 6 9 19 32 19 33",
        "",
        "",
        "19 6",
        "7 34 30 35 19 34 30 35 30 4 10 41",
    ],
    "bpe, the user's": [
        "34 8 11 30 32 11 31 26 10 30 32 7 29 9 11 21 21 45",
        "23 10 19 27 31 26 18",
        "0 10 0",
        "35 38 33 39 38 40 33 39 46 23 38 41 42 43 44 39",
        "20 13 14 6 34 8 13 23 36 23 37",
        "",
        "23",
        "10 23",
        "24 3 23 3 34 8 4 23 30 5",
    ],
    "unigram, the user's": [
        "10 11 30 32 17 10 30 32 7 29 9 11 21 21 45",
        "10 23 27 31 26",
        "23 0 10 0",
        "23 35 38 33 39 38 40 33 39 46 23 38 41 42 43 44 39",
        "23 20 13 14 6 15 12 27 23 36 23 37",
        "",
        "",
        "23 10",
        "11 3 23 3 34 8 14 45",
    ],
    "unigram, bytes": [
        "262 263 282 284 269 262 282 284 259 281 261 263 273 273 297",
        "270 262 271 279 283 278 270",
        "275 231 187 131 262 231 189 143 231 187 140",
        "275 287 290 285 291 290 292 285 291 298 275 290 293 294 295 296 291",
        "275 242 175 132 265 12 261 13 267 264 279 275 279 207 132 275 279 207 132 207 166",
        "",
        "270",
        "275 262 275",
        "263 290 286 291 275 290 286 291 286 260 270 271 261 297",
    ],
}


@pytest.fixture
def load(tmp_path):
    pytest.importorskip("sentencepiece")

    def load(data: bytes, **options):
        path = tmp_path / "tokenizer.model"
        path.write_bytes(data)
        return load_tokenizer(str(path), **options)

    return load


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_gives_the_tokens_of_its_own_program(load, name):
    tokenizer = load(MODELS[name])
    found = [" ".join(map(str, ids.tolist())) for ids in tokenizer.encode_all(TEXTS)]
    assert found == EXPECTED[name]
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.identity == tokenizer.identity
    for text in TEXTS:
        np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


@pytest.mark.parametrize(
    "options, cut",
    [
        ({}, True),
        ({"replaced": REPLACED}, True),
        ({"remove": False}, False),
        ({"prefix": False}, False),
        ({"prefix": False, "remove": False}, True),
        ({"prefix": False, "remove": False, "replaced": REPLACED}, False),
        ({"extra": DEFINED}, False),  # they are cut out first
    ],
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("a the\u2581\n\ufb01\u4e00", max_size=20))
def test_texts_of_sentencepiece_are_cut_where_it_changes_nothing(load, options, cut, text):
    tokenizer = load(model_file("bpe", **options))
    assert (tokenizer.cuts is not None) == cut
    if cut:
        parts = tokenizer.encode_all(tokenizer.cuts.split(text))
        assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


def test_sentencepiece_gives_the_text_back(load):
    tokenizer = load(MODELS["bpe, as Llama 2's"])
    for text in TEXTS:
        if "\u2581" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    plain = load(MODELS["bpe, replacing"])
    assert plain.decode(plain.encode("  the\tend \n in ")) == "the end in"
    assert plain.decode([19, 0, 6]) == " \u2047  the"  # as the library shows unknown tokens


def test_the_end_of_document_of_sentencepiece_is_its_end_of_sequence(load):
    """And a number is never confused with the token that has its spelling: "2" is token 31."""
    tokenizer = load(MODELS["bpe, replacing"])
    assert (tokenizer.eod, tokenizer.vocab) == (2, 43)
    assert tokenizer.name == "tokenizer.model"
    assert load(MODELS["bpe, replacing"], eod=2).eod == 2
    assert load(MODELS["bpe, replacing"], eod="2").eod == 31
    assert load(MODELS["bpe, replacing"], eod="<s>").eod == 1
    assert load(MODELS["bpe, replacing"], eod=None).eod is None
    assert load(model_file("bpe", end=-1)).eod == 2  # by its usual name
    ids = [*tokenizer.encode("2"), 2, *tokenizer.encode("the")]
    assert tokenizer.decode(ids) == "2 the"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"no model at all", MODELS["bpe, replacing"][:-300], message((1, 7)),
        message((1, message((1, "a"), (3, NORMAL)))),
        message((1, message((1, b"\xff"), (3, UNKNOWN)))),
    ],
)  # fmt: skip
def test_a_file_that_is_no_sentencepiece_model_is_refused(load, data):
    with pytest.raises(UserError) as error:
        load(data)
    assert names(error, "tokenizer.model")


def test_without_its_library_a_model_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "t.model").write_bytes(b"")
    with pytest.raises(UserError) as error:
        load_tokenizer(str(tmp_path / "t.model"))
    assert names(error, "sentencepiece", "mtx[data]")


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_the_first_format_gives_the_same_tokens(load, name):
    """Its document described the model for `tokenizers` (recorded by the last such commit)."""
    recorded = Path(__file__).parent / "data" / "sentencepiece_0.1.json.gz"
    written = json.loads(gzip.decompress(recorded.read_bytes()))[name]
    tokenizer = load(MODELS[name])
    again = tokenizer_from_dict(written)
    assert again.identity == tokenizer.identity
    for text in TEXTS:
        np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_models_are_refused_or_read(data):
    """Never another exception, whatever the bytes."""
    pytest.importorskip("sentencepiece")
    raw = bytearray(MODELS["unigram, as T5's"][:9000] + MODELS["unigram, as T5's"][-200:])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_file", lambda path: True)
        patch.setattr(Path, "read_bytes", lambda path: bytes(raw))
        try:
            load_tokenizer("x.model", eod=None).encode("the end")
        except UserError as error:
            assert "x.model" in str(error)


# --- other files ----------------------------------------------------------------------------------

GPT2 = {"<|endoftext|>": 5, "a": 0, "b": 1, "ab": 2, "\u0120": 3, "\u0120ab": 4}


def folder_of(path: Path, files: dict[str, object]) -> str:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("g-vocab.json", "g-merges.txt")])
def test_gpt_2s_two_files(tmp_path, names):
    merges = "#version: 0.2\na b\n\u0120 ab\n\n"
    folder = folder_of(tmp_path, dict(zip(names, (GPT2, merges), strict=True)))
    tokenizer = load_tokenizer(f"{folder}/{names[0]}")
    assert tokenizer.encode("ab abba").tolist() == [2, 4, 1, 0]
    assert tokenizer.decode([2, 5, 4, 1, 0]) == "ab abba"
    assert (tokenizer.eod, tokenizer.vocab) == (5, 6)
    assert load_tokenizer(f"{folder}/{names[1]}").identity == tokenizer.identity
    if names[0] == "vocab.json":
        assert load_tokenizer(folder).identity == tokenizer.identity
    again = tokenizer_from_dict(tokenizer.to_dict())
    assert again.encode("ab abba").tolist() == [2, 4, 1, 0]
    prefixed = folder_of(tmp_path, {"tokenizer_config.json": {"add_prefix_space": True}})
    other = load_tokenizer(f"{prefixed}/{names[0]}")
    assert other.encode("ab").tolist() == [4]
    assert not other.identity.same_as(tokenizer.identity)


@pytest.mark.parametrize(
    "files, said",
    [
        ({"vocab.json": GPT2, "merges.txt": "a c\n"}, ("merges.txt", "line 1", "'a c'")),
        ({"vocab.json": GPT2, "merges.txt": "#version\na b c\n"}, ("line 2", "'a b c'")),
        ({"vocab.json": GPT2}, ("merges.txt",)),
        ({"vocab.json": ["a"], "merges.txt": ""}, ("vocab.json",)),
        ({"vocab.json": "{", "merges.txt": ""}, ("vocab.json", "JSON")),
        ({"vocab.txt": "a\na\n"}, ("vocab.txt",)),
        ({}, ("tokenizer.json", "vocab.json", "tokenizer.model")),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path, files, said):
    with pytest.raises(UserError) as error:
        load_tokenizer(folder_of(tmp_path, files))
    assert names(error, *said)


def test_berts_vocabulary(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "end", "##s", ".", "\xe9"]
    folder = folder_of(tmp_path, {"vocab.txt": "\n".join(tokens) + "\n"})
    tokenizer = load_tokenizer(folder, eod=None)
    assert tokenizer.encode("The ENDS. x").tolist() == [5, 6, 7, 8, 1]
    assert tokenizer.encode("\xe9 [SEP]").tolist() == [1, 1, 1, 1]  # spelled out, it is text
    assert tokenizer.decode([2, 5, 6, 7, 8]) == "[CLS] the ends."
    cased = folder_of(tmp_path, {"tokenizer_config.json": {"do_lower_case": False}})
    assert load_tokenizer(cased, eod=None).encode("The end").tolist() == [1, 6]
    assert load_tokenizer(cased, eod="[SEP]").eod == 3


def test_a_folder_names_the_end_of_its_sequences(tmp_path):
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1, "<stop>": 2}, "a"))
    folder = folder_of(tmp_path, {"tokenizer.json": model.to_str()})
    assert load_tokenizer(folder).eod == 1
    folder_of(tmp_path, {"special_tokens_map.json": {"eos_token": {"content": "<stop>"}}})
    assert load_tokenizer(folder).eod == load_tokenizer(f"{folder}/tokenizer.json").eod == 2
    folder_of(tmp_path, {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}})
    assert load_tokenizer(folder).eod == 1
    assert load_tokenizer(folder, eod="<stop>").eod == 2


def test_a_tokenizer_of_ones_own_is_written_once(tmp_path):
    trained = train_bpe(["to be or not to be"] * 9, vocab=270, end="<|endoftext|>")
    path = write_tokenizer(trained, tmp_path / "new" / "t.json")
    read = load_tokenizer(str(path))
    assert read.identity.same_as(trained.identity) and read.name == "t.json"
    assert read.eod == trained.eod == trained.vocab - 1
    assert [entry.name for entry in path.parent.iterdir()] == ["t.json"]
    with pytest.raises(UserError) as error:
        write_tokenizer(trained, path)
    assert names(error, "t.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        write_tokenizer(trained, tmp_path / "file" / "t.json")
    assert names(error, "/file/t.json")
