"""Images with captions or conversations: files to records, records to rows, pixels."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from errors import names

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.image_records import read_image_records
from mtx.data.images import find_image_vocab, image_prompt
from mtx.data.pixels import read_picture
from mtx.data.shapes import COLOURS, draw
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError

MODEL = ModelConfig(
    family="llava", layers=6, vision_layers=2, hidden=32, heads=4, sequence=300, vocab=257,
    image_size=8, patch_size=4, images=2,
)  # fmt: skip
IMAGE = MODEL.placeholder


def arrays(tmp_path, count=3):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        np.save(tmp_path / f"{number}.npy", each)
    return pixels


def lines(tmp_path, *records):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


def run_of(path, model=MODEL, **data):
    return RunConfig(model=model, data=DataConfig(path=(path,), **data), global_batch=2)


def row_of(path, caption):
    """(tokens, targets, weights, patches, pixels) of the record with this caption in any part."""
    corpus = load_data(run_of(path, eval_fraction=0.3))
    for part in (corpus.train, corpus.held_out):
        batch = corpus.make(part, 0, part.distinct)
        for row, targets in enumerate(batch["targets"]):
            learned = targets[batch["weights"][row] > 0]
            if corpus.tokenizer.decode(learned) == caption:
                return [
                    batch[n][row] for n in ("tokens", "targets", "weights", "patches", "pixels")
                ]
    raise AssertionError(caption)


def test_a_caption_comes_behind_its_image_and_is_learned(tmp_path):
    pixels = arrays(tmp_path)
    path = lines(
        tmp_path, {"image": "0.npy", "text": "cat"}, {"images": ["1.npy", "2.npy"], "text": "two"},
        {"text": "none"},
    )  # fmt: skip
    tokens, targets, weights, patches, seen = row_of(path, "two")
    eod = ByteTokenizer().eod
    assert tokens[:11].tolist() == [IMAGE] * 8 + [*b"two"]
    assert targets[8:11].tolist() == [*b"wo", eod] and weights[:7].sum() == 0
    assert weights.sum() == 4 and targets[7] == ord("t")
    assert patches[:9].tolist() == [*range(8), -1] and (patches[9:] == -1).all()
    assert np.array_equal(seen, pixels[1:])
    tokens, _, weights, patches, seen = row_of(path, "one")  # nothing precedes the first
    assert tokens[:4].tolist() == [*b"none"] and not seen.any() and (patches == -1).all()


def test_of_a_conversation_the_assistants_words_are_learned(tmp_path):
    arrays(tmp_path)
    theirs = [
        {"from": "human", "value": "What is <image>?"}, {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."},
    ]  # fmt: skip
    ours = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hm"},
            {"role": "assistant", "content": "So."}]  # fmt: skip
    path = lines(
        tmp_path, {"image": "0.npy", "conversations": theirs},
        {"image": "1.npy", "messages": ours}, {"text": "more"},
    )  # fmt: skip
    tokens, targets, weights, patches, _ = row_of(path, " A cat. Yes.")
    text = ByteTokenizer().decode(tokens[tokens != IMAGE])
    assert "USER: What is ? ASSISTANT: A cat. USER: Sure? ASSISTANT: Yes." in text
    assert (patches >= 0).sum() == 4 and (weights[patches >= 0] == 0).all()
    tokens, *_ = row_of(path, " So.")
    first = tokens.tolist().index(IMAGE)
    assert bytes(tokens[:first].tolist()) == b"S USER: " and tokens[first + 4] == ord("\n")
    chat = image_prompt(
        "What is <image>?", [np.zeros((8, 8, 3), np.uint8)], ByteTokenizer(), MODEL, chat=True
    )
    row, *_ = row_of(path, " A cat. Yes.")
    assert chat.ids == row[: len(chat.ids)].tolist(), "as in training"


def test_a_batch_follows_from_data_seed_and_number(tmp_path):
    run = replace(run_of("x"), data=DataConfig(), model=replace(MODEL, vocab=300))
    one, other = load_data(run), load_data(run)
    epoch = one.train.distinct
    for consumed in (0, 5, epoch - 1):
        batch, again = one.batch(consumed, 4), other.batch(consumed, 4)
        assert all(np.array_equal(batch[name], again[name]) for name in batch)
        local = one.batch(consumed, 4, [2])
        assert (
            np.array_equal(local["pixels"][2], batch["pixels"][2]) and not local["tokens"][1].any()
        )
    captions = [[bytes(one.train[n].tokens.ids[4:-1].tolist()) for n in range(k, k + epoch)]
                for k in (0, epoch)]  # fmt: skip
    assert sorted(captions[0]) == sorted(captions[1]) and captions[0] != captions[1]


def test_folders_arrays_and_lists_of_json_hold_the_same(tmp_path):
    pixels = arrays(tmp_path, 2)
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"picture {number}\n")
    made = [{"image": f"{n}.npy", "text": f"picture {n}"} for n in range(2)]
    (tmp_path / "list.json").write_text(json.dumps(made))
    np.savez(tmp_path / "all.npz", images=pixels, texts=np.array([each["text"] for each in made]))
    for path in (tmp_path, tmp_path / "list.json", tmp_path / "all.npz"):
        records = read_image_records([str(path)])
        assert [each.said for each in records] == ["picture 0", "picture 1"]
        for record, want in zip(records, pixels):
            assert np.array_equal(read_picture(record.pictures[0], 8), want)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"image": "9.npy", "text": "x"}, ("line 1", "9.npy")),
        ({"image": "0.npy"}, ("line 1", '"messages"')),
        ({"image": 3, "text": "x"}, ("line 1", "images=3")),
        ({"image": "0.npy", "text": "a <image>"}, ("line 1", "<image>")),
        ({"images": ["0.npy"] * 3, "text": "x"}, ("3 images", "images=2")),
        ({"image": "0.npy", "messages": [{"role": "user", "content": "x"}]}, ("assistant",)),
        ({"image": "0.npy", "messages": [{"role": "cat", "content": "x"}]}, ("role='cat'",)),
        (
            {"image": "0.npy", "messages": [{"role": "user", "content": "<image><image>"},
                                            {"role": "assistant", "content": "x"}]},
            ("1 images", "2 places"),
        ),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_refused_with_its_line(tmp_path, record, said):
    arrays(tmp_path, 1)
    path = lines(tmp_path, record, {"text": "one"}, {"text": "two"})
    with pytest.raises(UserError) as error:
        load_data(run_of(path))
    assert names(error, *said)


def test_what_does_not_fit_is_cut_or_left_out_and_said(tmp_path):
    arrays(tmp_path, 1)
    before = {"role": "user", "content": "x" * 400 + "<image>"}
    answer = {"role": "assistant", "content": "y"}
    path = lines(
        tmp_path, {"text": "long " * 100}, {"image": "0.npy", "messages": [before, answer]},
        {"text": "one"}, {"text": "two"},
    )  # fmt: skip
    corpus = load_data(run_of(path))
    assert "1 cut at their end" in corpus.source and "1 left out" in corpus.source
    assert corpus.train.distinct + corpus.held_out.distinct == 3


ROW = np.zeros((2, 8, 8, 3), np.uint8)
ENDLESS = b"\x93NUMPY\x01\x00\x76\x00" + (  # a header that asks for a terabyte
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 8, 3), }"
).ljust(118)


@pytest.mark.parametrize(
    ("name", "held", "said"),
    [
        ("a.npz", ROW, "images and texts"),  # an .npy with this name
        ("a.npz", {"images": ROW, "texts": np.array([b"a", b"b"])}, "|S1 [2]"),
        ("a.npz", {"images": ROW, "texts": np.array(["a", "\ud800"])}, "surrogate"),
        ("a.npz", {"images": ROW}, "texts"),
        ("a.npy", ENDLESS, "a.npy is no array"),
        ("a.npy", b"", "a.npy is no array"),
        ("a.npy", np.array([{}]), "a.npy is no array"),
        ("a.npy", np.zeros((1, 10**5, 3), np.uint8), "1 x 100000 pixels"),
    ],
)  # fmt: skip
def test_a_file_of_arrays_that_is_none_is_refused(tmp_path, name, held, said):
    path = tmp_path / name
    if isinstance(held, dict):
        np.savez(path, **held)
    else:
        with open(path, "wb") as file:
            file.write(held) if isinstance(held, bytes) else np.save(file, held)
    with pytest.raises(UserError) as error:
        read_picture(path, 8) if name == "a.npy" else read_image_records([str(path)])
    assert names(error, "a.np", said)


def test_tokens_and_pictures_that_cannot_be_are_refused(tmp_path, monkeypatch):
    for changes, said in (
        ({"image_token": 65}, ("image_token=65", "vocab=257")),
        ({"image_token": 300}, ("image_token=300", "vocab=257")),
    ):
        with pytest.raises(UserError) as error:
            find_image_vocab(ByteTokenizer(), replace(MODEL, **changes))
        assert names(error, *said)
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(UserError) as error:
        read_picture(tmp_path / "a.png", 8)
    assert names(error, "a.png")
    with pytest.raises(UserError) as error:
        read_picture(np.zeros((8, 8), np.uint8), 8)
    assert names(error, "uint8 [8, 8]")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError) as error:
        read_picture(np.zeros((9, 8, 3), np.uint8), 8)
    assert names(error, "mtx[images]", "9 x 8")
    assert read_picture(np.zeros((8, 8, 3), np.uint8), 8).shape == (8, 8, 3)


def test_drawings_show_what_their_captions_say():
    for number in range(20):
        pixels, caption = draw(number, 24, 0)
        _, colour, shape, _, ground = caption.split()
        found = {tuple(each) for each in pixels.reshape(-1, 3).tolist()}
        assert found == {COLOURS[colour], COLOURS[ground]}
        inside = (pixels == COLOURS[colour]).all(-1)
        across = inside.any(0).sum() * inside.any(1).sum()
        share = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}[shape]
        assert abs(inside.sum() / across - share) < 0.1
