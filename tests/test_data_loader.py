"""From datasets to batches, the same for any reader, parts, starting point and reading ahead."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from errors import names

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import load_data, read_ahead
from mtx.data.batches import make_batch, pack_documents
from mtx.data.blend import read_blend
from mtx.data.corpus import default_cache
from mtx.data.gpt import GPTDataset, open_part
from mtx.data.indexed import IndexedWriter, TokenizerIdentity
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.errors import UserError

S = 8
BYTES = ByteTokenizer().identity


@pytest.fixture
def write(tmp_path):
    """Writes a dataset of documents that end with 0; other tokens begin at `start`."""

    def write(name="c", *, documents=30, start=1, identity=BYTES, dtype=np.uint16, length=13):
        prefix = str(tmp_path / "data" / name)
        with IndexedWriter(prefix, dtype, identity=identity) as writer:
            for index in range(documents):
                size = length + index % 5
                tokens = start + (np.arange(size) + 7 * index) % 90
                writer.add(np.append(tokens, 0))
        return prefix

    return write


def run_of(*path: str, **changes) -> RunConfig:
    model = ModelConfig(layers=1, hidden=8, heads=1, sequence=S, vocab=260, compute_dtype="float32")
    data = DataConfig(path=path, **{"split": "8,2", **changes})
    return RunConfig(model=model, data=data, global_batch=4, steps=10, eval_batches=2)


def refusal(action, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def rows_of(corpus, consumed: int, rows: int) -> list[list[int]]:
    return corpus.batch(consumed, rows)["tokens"].tolist()


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_depends_on_what_was_consumed_only(write):
    corpus = load_data(run_of(write()))
    whole = corpus.batch(0, 120)  # three epochs
    for size in (4, 6, 15):
        parts = [corpus.batch(consumed, size) for consumed in range(0, 120, size)]
        assert_equal(whole, {name: np.concatenate([p[name] for p in parts]) for name in whole})
    assert (whole["tokens"][:, 1:] == whole["targets"][:, :-1]).all()
    assert whole["tokens"].dtype == whole["targets"].dtype == np.int32
    assert (whole["weights"] == 1).all() and whole["weights"].dtype == np.float32


def test_a_process_reads_only_its_rows(write):
    corpus = load_data(run_of(write(), packed=True))
    whole = corpus.batch(16, 8)
    asked = []
    source = corpus.train

    class Watched:
        sequence = S

        def __getitem__(self, index):
            asked.append(index)
            return source[index]

    parts = [
        replace(corpus, train=Watched()).batch(16, 8, local=local) for local in ([0, 1, 5], [3, 7])
    ]
    assert asked == [16, 17, 21, 19, 23]
    for local, part in zip(([0, 1, 5], [3, 7]), parts, strict=True):
        assert_equal(
            {k: v[local] for k, v in whole.items()}, {k: v[local] for k, v in part.items()}
        )
        others = np.delete(part["weights"], local, axis=0)
        assert not others.any()


def test_packed_documents_have_segments_and_positions_of_their_own(write):
    segments, positions = pack_documents(
        np.array([[5, 0, 6, 7, 0, 0, 8], [0, 1, 1, 1, 1, 1, 0]]), 0
    )
    assert segments.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    corpus = load_data(run_of(write(), packed=True))
    plain = load_data(run_of(write("same")))
    for batch, same in [
        (corpus.batch(0, 40), plain.batch(0, 40)),
        (next(corpus.eval_batches(1, 4)), next(plain.eval_batches(1, 4))),
    ]:
        packed = pack_documents(batch["tokens"], 0)
        np.testing.assert_array_equal(batch["segments"], packed[0])
        np.testing.assert_array_equal(batch["positions"], packed[1])
        assert_equal(same, {name: batch[name] for name in same})
    assert corpus.describe().endswith("bytes tokenizer, vocab 256; documents packed")


def test_text_is_packed_too(tmp_path):
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text("many words " * (3 + index))
    run = run_of(str(tmp_path), packed=True, eval_fraction=0.2, split=DataConfig().split)
    corpus = load_data(run)
    batch = corpus.batch(0, 130)
    assert_equal(
        {"segments": batch["segments"], "positions": batch["positions"]},
        dict(zip(("segments", "positions"), pack_documents(batch["tokens"], 0), strict=True)),
    )
    assert batch["segments"].any()


def test_held_out_batches_hold_each_sample_once_and_pad_with_weight_zero(write):
    corpus = load_data(run_of(write()))
    count = corpus.held_out.distinct
    batches = list(corpus.eval_batches(100, 5))
    assert len(batches) == -(-count // 5) and count % 5
    assert all(batch["tokens"].shape == (5, S) for batch in batches)
    assert sum(batch["weights"].sum() for batch in batches) == count * S
    held_out = GPTDataset(corpus.held_out.data.prefix, sequence=S, split="8,2", part="valid")
    rows = np.concatenate([batch["tokens"] for batch in batches])[:count]
    assert rows.tolist() == [held_out[i][:-1].tolist() for i in range(count)]
    first = list(corpus.eval_batches(1, 4, local=[1]))
    assert len(first) == 1 and first[0]["weights"].sum(axis=1).tolist() == [0, S, 0, 0]


# --- without an end -------------------------------------------------------------------------------


def test_the_first_epoch_is_megatrons_and_each_later_one_is_another_order(write):
    prefix = write()
    plain = GPTDataset(prefix, sequence=S, seed=5, split="1")
    endless = GPTDataset(prefix, sequence=S, seed=5, split="1", endless=True)
    count = len(plain)
    assert len(endless) == endless.distinct == count
    epochs = [[endless[e * count + i].tolist() for i in range(count)] for e in range(4)]
    assert epochs[0] == [plain[i].tolist() for i in range(count)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4
    again = pickle.loads(pickle.dumps(endless))
    assert again[3 * count + 2].tolist() == epochs[3][2]
    with pytest.raises(IndexError) as error:
        endless[-1]
    assert names(error, -1)
    with pytest.raises(IndexError):
        plain[count]


def test_a_blend_is_the_same_however_far_it_reaches(write):
    """A run that is extended has the same batches as before."""
    one, two = write("one"), write("two", documents=9, start=100)
    options = {"sequence": S, "weights": (1, 3), "split": "1", "endless": True}
    short, long = (open_part([one, two], samples=samples, **options) for samples in (50, 400))
    rows = [long[i].tolist() for i in range(400)]
    assert [short[i].tolist() for i in range(50)] == rows[:50]
    of_two = [row for row in rows if max(row) >= 100]
    assert len(of_two) == 300 and len(short) == 50
    distinct = long.distinct
    assert distinct == int(len(long.datasets[1]) / 0.75) < 50
    assert len({str(row) for row in of_two}) == len(long.datasets[1])
    with pytest.raises(IndexError) as error:
        long[400]
    assert names(error, 400)


def test_a_blend_of_all_samples_goes_on_with_the_next_epoch(write):
    one, two = write("one"), write("two", documents=9, start=100)
    blend = open_part([one, two], sequence=S, split="1", endless=True)
    count = len(blend)
    assert count == sum(map(len, blend.datasets)) == blend.distinct
    epochs = [[blend[e * count + i].tolist() for i in range(count)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


# --- the loader -----------------------------------------------------------------------------------


@pytest.mark.parametrize("consumed", [0, 28, 1000])
def test_what_is_read_ahead_is_what_would_be_read(write, consumed):
    corpus = load_data(run_of(write()))
    with read_ahead(corpus, consumed, 4, threads=3) as batches:
        read = [next(batches) for _ in range(20)]
    for step, batch in enumerate(read):
        assert_equal(batch, corpus.batch(consumed + 4 * step, 4))


def test_another_batch_size_goes_on_from_what_was_consumed(write):
    corpus = load_data(run_of(write()))
    with read_ahead(corpus, 0, 4) as batches:
        first = [next(batches) for _ in range(3)]
    with read_ahead(corpus, 12, 6) as batches:
        second = [next(batches) for _ in range(2)]
    rows = [row for batch in first + second for row in batch["tokens"].tolist()]
    assert rows == rows_of(corpus, 0, 24)


def test_what_goes_wrong_while_reading_is_said(write, tmp_path):
    prefix = write(identity=None, start=170)
    corpus = load_data(run_of(prefix))
    with read_ahead(corpus, 0, 4) as batches:
        message = refusal(lambda: [next(batches) for _ in range(9)])
    assert "outside of the vocabulary of 256; use the tokenizer that made the dataset" in message


# --- the corpus -----------------------------------------------------------------------------------


def test_a_corpus_of_datasets(write):
    prefix = write()
    corpus = load_data(run_of(prefix + ".bin"))
    assert corpus.describe() == (
        f"dataset {prefix}.bin, split 8,2; 382 tokens to train on, 98 held out; bytes tokenizer, "
        "vocab 256"
    )
    assert corpus.train.part_tokens + corpus.held_out.part_tokens == 30 * 16
    one, two = prefix, write("two", start=100)
    blended = load_data(run_of("3", one, "1", two))
    assert f"2 datasets, 75.0% {one}, 25.0% {two}, split 8,2; " in blended.describe()
    assert sum(max(row) >= 100 for row in rows_of(blended, 0, 40)) == 10
    everything = load_data(run_of(one, two))
    assert "2 datasets, all samples, split" in everything.describe()
    assert len(everything.train) == len(corpus.train) * 2


def test_indices_are_cached_beside_the_data_and_found_again(write, monkeypatch):
    prefix = write()
    corpus = load_data(run_of(prefix))
    entries = list(default_cache(prefix).iterdir())
    assert len(entries) == 2  # train and valid
    monkeypatch.setattr("mtx.data.gpt.build_indices", None)  # it must not be called again
    longer = replace(run_of(prefix), steps=999, global_batch=64)
    assert_equal(load_data(longer).batch(0, 9), corpus.batch(0, 9))
    assert list(default_cache(prefix).iterdir()) == entries


def test_a_cache_that_cannot_be_written(write, tmp_path):
    prefix = write()
    default_cache(prefix).write_text("a file, where a folder is to be")
    corpus = load_data(run_of(prefix))
    assert f"indices in memory since {default_cache(prefix)} cannot be written" in corpus.describe()
    plain = GPTDataset(prefix, sequence=S, split="8,2")
    assert rows_of(corpus, 0, 5) == [plain[i][:-1].tolist() for i in range(5)]
    other = load_data(run_of(prefix, cache=str(tmp_path / "cache")))
    assert rows_of(other, 0, 5) == rows_of(corpus, 0, 5)
    assert "in memory" not in other.describe()
    message = refusal(load_data, run_of(prefix, cache=str(default_cache(prefix) / "in")))
    assert "cannot write the index cache" in message


def test_a_dataset_names_the_end_of_its_documents(write, tmp_path):
    """The run's tokenizer need not name it again; for foreign datasets the config names it."""
    bpe = train_bpe(["to be or not to be"] * 9, vocab=260, end="<end>")
    (tmp_path / "t.json").write_text(json.dumps(bpe.to_dict()["model"]))
    known = replace(bpe.identity, name="t.json")
    for name, identity in (("ours", known), ("none", replace(known, eod=None)), ("foreign", None)):
        write(name, identity=identity)
    folder = tmp_path / "data"

    def corpus(name, **changes):
        return load_data(run_of(f"{folder}/{name}", tokenizer=str(tmp_path / "t.json"), **changes))

    assert corpus("ours").tokenizer.eod == 259
    assert corpus("ours").tokenizer.identity == known
    assert corpus("none").tokenizer.eod is None
    assert corpus("foreign", eod="<end>").tokenizer.eod == 259
    assert "made without an end-of-document" in refusal(corpus, "none", packed=True)
    assert "was made with t.json (sha256" in refusal(corpus, "ours", eod="97")


# --- what is refused ------------------------------------------------------------------------------


def test_a_field_that_is_for_text_is_refused_for_datasets(write):
    assert refusal(load_data, run_of(write(), eval_fraction=0.2)) == (
        "data eval_fraction=0.2 is for text; datasets are divided by split; leave it out"
    )


@pytest.mark.parametrize(
    "path, said",
    [
        (("0", "{c}", "0", "{d}"), "weights=(0.0, 0.0) sum to zero"),
        (("0", "{c}", "1", "{d}"), "{c} has weight 0; leave it out"),
        (("-1", "{c}", "1", "{d}"), "weights=(-1.0, 1.0) must be numbers of at least 0"),
        (("nan", "{c}", "1", "{d}"), "weights=(nan, 1.0) must be numbers"),
        (("0.5", "{c}", "{d}"), "weights and datasets must take turns"),
        (("{c}", "0.5"), "weights and datasets must take turns"),
        (("{c}", "{text}"), "{c} is a dataset and {text} is not"),
        (("0.5", "{text}"), "weights are for datasets, and {text}.idx does not exist"),
        (("{half}",), "{half}.idx does not exist"),
        (("{cut}",), "{cut}.bin has 479 bytes, but {cut}.idx describes 960: it is cut short"),
        (("{wrong}",), "{wrong}.idx must be"),
        (("{gone}",), "{gone}' does not exist or cannot be reached"),
        (("{other}",), "{other} was made with o.json (sha256 f00, end-of-document 7), not with b"),
        (("{c}", "{other}"), "{other} was made with o.json"),
        (("{small}",), "part 'valid' of split='8,2' has 6 of 29 tokens in 2 sequences"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(write, tmp_path, path, said):
    names = {name: write(name) for name in ("c", "d", "cut", "half", "wrong")}
    names["gone"] = str(tmp_path / "gone")
    names["text"] = str(tmp_path / "text.txt")
    names["small"] = write("small", documents=2)
    names["other"] = write(
        "other", identity=TokenizerIdentity(name="o.json", sha256="f00", vocab=256, eod=7)
    )
    (tmp_path / "text.txt").write_text("words " * 100)
    (tmp_path / "data" / "half.idx").unlink()
    (tmp_path / "data" / "wrong.idx").write_bytes(b"WRONG" * 30)
    cut = tmp_path / "data" / "cut.bin"
    cut.write_bytes(cut.read_bytes()[:479])
    message = refusal(load_data, run_of(*(part.format(**names) for part in path)))
    assert said.format(**names) in message


def test_other_mistakes(write):
    prefix = write()
    assert "is trained on text" in refusal(load_data, run_of(prefix, tokenizer="bpe"))
    assert "cannot read the tokenizer x.json" in refusal(
        load_data, run_of(prefix, tokenizer="x.json")
    )
    run = run_of(prefix)
    run = replace(run, data=replace(run.data, split="1"))
    assert "part 'valid' of split='1' has 0 of 480 tokens" in refusal(load_data, run)
    with pytest.raises(UserError) as error:
        DataConfig(tokenizer="")
    assert names(error, "tokenizer=''")


def test_weights_are_told_from_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024").write_text("a text with a number for its name")
    assert read_blend(("2024",)) == (["2024"], None)
    assert read_blend(("0.5", "a", "1e-1", "b")) == (["a", "b"], [0.5, 0.1])
    assert read_blend(("1", "2024")) == (["2024"], [1.0])
    assert read_blend(()) == ([], None)


def test_a_batch_is_filled_as_far_as_there_are_samples(write):
    source = GPTDataset(write(), sequence=S, split="1")
    batch = make_batch(source, len(source) - 2, 5, filled=2, packed_at=0)
    assert batch["weights"].sum(axis=1).tolist() == [S, S, 0, 0, 0]
    assert not batch["tokens"][2:].any() and not batch["segments"][2:].any()
