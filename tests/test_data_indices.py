"""Samples of indexed datasets: Megatron-LM's index arrays, blends and the cache."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data import blend
from mtx.data.blend import blend_all, blend_by_weights, normalize_weights, request_samples
from mtx.data.cache import cached_arrays, hash_of
from mtx.data.gpt import GPTDataset, open_part
from mtx.data.indexed import IndexedDataset, IndexedWriter, TokenizerIdentity
from mtx.data.indices import build_indices, count_epochs
from mtx.data.split import parse_split, split_range
from mtx.errors import UserError

ROOT = Path(__file__).parent.parent


def refusal(action, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the oracle: Megatron-LM's algorithm as loops, slowly -----------------------------------------


def slow_sample_index(sizes, order, sequence: int, total: int) -> list[list[int]]:
    """Walk through the documents one token at a time."""
    stream = [(place, at) for place, size_of in enumerate(order) for at in range(sizes[size_of])]
    return [[0, 0]] + [list(stream[i * sequence]) for i in range(1, total + 1)]


def slow_indices(sizes, first: int, sequence: int, samples: int | None, seed: int):
    """Documents, samples and order as in Megatron-LM's GPTDataset, with its branches."""
    tokens, epochs = sum(sizes), 1
    while samples is not None and epochs * tokens < samples * sequence + 1:
        epochs += 1
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // sequence
        separate = samples - before < int(0.8 * ((tokens - 1) // sequence))
    random = np.random.RandomState(seed)

    def shuffled(values) -> list[int]:
        array = np.array(values, np.int64)
        random.shuffle(array)
        return array.tolist()

    places = list(range(len(sizes)))
    if separate:
        order = shuffled(places * (epochs - 1)) + shuffled(places)
    else:
        order = shuffled(places * epochs)
    total = (epochs * tokens - 1) // sequence
    sample = slow_sample_index(sizes, order, sequence, total)
    if separate:
        shuffle = shuffled(range(before)) + shuffled(range(before, total))
    else:
        shuffle = shuffled(range(total))
    return [first + place for place in order], sample, shuffle


def slow_blend(weights, samples: int, sizes=None) -> tuple[list[int], list[int]]:
    counts, datasets, places = [0] * len(weights), [], []
    for step in range(samples):
        best, most = None, -float("inf")
        for index, weight in enumerate(weights):
            behind = weight * max(float(step), 1.0) - counts[index]
            if behind > most and (sizes is None or counts[index] < sizes[index]):
                best, most = index, behind
        datasets.append(best)
        places.append(counts[best])
        counts[best] += 1
    return datasets, places


# --- index arrays ---------------------------------------------------------------------------------


def sample_index(sizes, order, *, sequence: int) -> list[list[int]]:
    from mtx.data.indices import _sample_index

    lengths, document = np.array(sizes), np.array(order)
    total = (int(lengths[document].sum()) - 1) // sequence
    return _sample_index(lengths, document, sequence=sequence, total=total).tolist()


def test_the_published_sample_indices():
    """As Megatron-LM's helper gives them."""
    assert sample_index([5, 3, 7, 4], range(4), sequence=4) == [
        [0, 0], [0, 4], [2, 0], [2, 4], [3, 1],
    ]  # fmt: skip
    order = [2, 1, 2, 0, 0, 1, 3, 4, 3, 4]
    assert sample_index([6, 10, 3, 1, 8], order, sequence=8) == [
        [0, 0], [1, 5], [3, 0], [4, 2], [5, 4], [7, 1], [9, 0],
    ]  # fmt: skip


def test_the_published_order_of_two_epochs():
    """RandomState(1234): four documents twice, then six samples from the same stream."""
    indices = build_indices(np.array([5, 5, 5, 5]), sequence=6, samples=6, seed=1234)
    assert indices.document.tolist() == [2, 1, 2, 0, 0, 1, 3, 3]
    assert indices.shuffle.tolist() == [0, 4, 3, 2, 5, 1]
    kinds = (indices.document.dtype, indices.sample.dtype, indices.shuffle.dtype)
    assert kinds == (np.int32, np.int32, np.uint32)


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    first=st.integers(0, 5),
    sequence=st.integers(1, 40),
    samples=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_indices_are_those_of_the_loops(sizes, first, sequence, samples, seed):
    indices = build_indices(
        np.array(sizes, np.int32), first=first, sequence=sequence, samples=samples, seed=seed
    )
    document, sample, shuffle = slow_indices(sizes, first, sequence, samples, seed)
    assert indices.document.tolist() == document
    assert indices.sample.tolist() == sample
    assert indices.shuffle.tolist() == shuffle
    assert samples is None or len(shuffle) >= samples


def test_the_last_epoch_is_shuffled_by_itself_where_little_of_it_is_wanted():
    """100 tokens hold 9 samples of 10 (80 % of them: 7); two epochs hold 19."""
    for samples, alone in ((15, True), (16, False), (19, False), (25, True)):
        indices = build_indices(np.full(10, 10), sequence=10, samples=samples, seed=3)
        epochs = count_epochs(100, sequence=10, samples=samples)
        before = ((epochs - 1) * 100 - 1) // 10
        kept = sorted(indices.shuffle[:before].tolist()) == list(range(before))
        last = sorted(indices.document[-10:].tolist()) == list(range(10))
        assert (kept and last) == alone, samples


def test_large_indices_are_placed_block_by_block(monkeypatch):
    sizes = np.random.default_rng(0).integers(0, 50, 300).astype(np.int32)
    whole = build_indices(sizes, sequence=7, samples=2000, seed=5)
    monkeypatch.setattr("mtx.data.indices._BLOCK", 64)
    assert (build_indices(sizes, sequence=7, samples=2000, seed=5).sample == whole.sample).all()


# --- splits ---------------------------------------------------------------------------------------


def test_a_split_is_cut_at_rounded_bookends():
    split = parse_split("969,30,1")
    assert [split_range(split, part, 1000) for part in ("train", "valid", "test")] == [
        (0, 969), (969, 999), (999, 1000),
    ]  # fmt: skip
    assert [split_range(parse_split("1,1"), part, 5) for part in ("train", "valid", "test")] == [
        (0, 2), (2, 5), (5, 5),
    ]  # fmt: skip
    assert parse_split(" 98.5, 1.5 ") == (0.985, 0.015, 0.0) and parse_split("7") == (1, 0, 0)


@given(
    ratios=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any),
    count=st.integers(0, 10**12),
)
def test_the_parts_of_a_split_meet(ratios, count):
    split = parse_split(",".join(f"{ratio:.6f}" for ratio in [*ratios[:-1], ratios[-1] + 1]))
    (zero, a), (b, c), (d, end) = [split_range(split, p, count) for p in ("train", "valid", "test")]
    assert (zero, a, c, end) == (0, b, d, count)
    assert 0 <= a <= c <= count


@pytest.mark.parametrize("ratios", ["", "a,b", "1,2,3,4", "-1,2", "1,,2", "nan", "1e3", "0,0"])
def test_a_split_that_cannot_be_is_refused(ratios):
    assert refusal(parse_split, ratios).startswith(f"split={ratios!r} ")


# --- blends ---------------------------------------------------------------------------------------


def test_the_published_blend():
    dataset, sample = blend_by_weights([0.5, 0.3, 0.2], 10)
    assert dataset.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert sample.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert (dataset.dtype, sample.dtype) == (np.int16, np.int64)


# With very different shares, a walk takes long to forget where it began.
shares_of_datasets = st.lists(
    st.floats(1e-4, 1) | st.sampled_from([1.0, 0.5, 1e-6, 1 / 3]), min_size=1, max_size=8
)


@pytest.fixture
def short_walks(monkeypatch):
    """Short walks, so that a few thousand samples need many of them at once."""
    monkeypatch.setattr(blend, "_WALK", 50)
    monkeypatch.setattr(blend, "_LEAD", 20)


@pytest.mark.usefixtures("short_walks")
@settings(max_examples=60)
@given(weights=shares_of_datasets, samples=st.integers(0, 1500))
def test_a_blend_is_that_of_the_loop(weights, samples):
    found = blend_by_weights(weights, samples)
    assert [array.tolist() for array in found] == [
        *slow_blend(normalize_weights(weights).tolist(), samples)
    ]


@pytest.mark.usefixtures("short_walks")
@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_an_exhaustive_blend_is_that_of_the_loop(sizes):
    dataset, sample = blend_all(sizes)
    total = sum(sizes)
    expected = slow_blend([size / total for size in sizes], total, sizes)
    assert (dataset.tolist(), sample.tolist()) == expected
    for index, size in enumerate(sizes):
        assert sample[dataset == index].tolist() == list(range(size))


def test_what_a_blend_asks_for_is_enough():
    assert [request_samples(1000, weight) for weight in (0.5, 0.3001, 1e-9)] == [503, 303, 2]


@pytest.mark.parametrize(
    "weights, said",
    [
        ((0.0, 0.0), "weights=(0.0, 0.0) sum to zero"),
        ((1.0, -1.0), "must be numbers of at least 0"),
        ((1.0, float("nan")), "must be numbers of at least 0"),
        ((), "must be numbers of at least 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, said):
    assert said in refusal(normalize_weights, weights)


# --- the cache ------------------------------------------------------------------------------------


def test_arrays_are_built_once_and_mapped(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return {"a": np.arange(6).reshape(2, 3), "b": np.array([1.5])}

    for _ in range(2):
        arrays = cached_arrays(tmp_path / "cache", {"of": 1}, build)
        assert arrays["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and arrays["b"].tolist() == [1.5]
        with pytest.raises(ValueError):
            arrays["a"][0] = 1
    assert len(calls) == 1
    cached_arrays(tmp_path / "cache", {"of": 2}, build)
    cached_arrays(None, {"of": 1}, build)
    assert len(calls) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 2  # nothing half-written is left


def test_a_failure_while_building_leaves_nothing(tmp_path):
    def build():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cached_arrays(tmp_path, {}, build)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_is_kept(tmp_path):
    def slower():
        cached_arrays(tmp_path, {}, lambda: {"a": np.array([1])})
        return {"a": np.array([1])}

    assert cached_arrays(tmp_path, {}, slower)["a"].tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == [hash_of({})]


@pytest.mark.parametrize("how", ["cut", "gone", "other"])
def test_a_damaged_entry_is_named(tmp_path, how):
    cached_arrays(tmp_path, {}, lambda: {"a": np.arange(100)})
    (file,) = tmp_path.glob("*/a.npy")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif how == "gone":
        file.unlink()
    else:
        np.save(file, np.arange(3))
    message = refusal(cached_arrays, tmp_path, {}, dict)
    assert message == f"the index cache {file.parent} is damaged; remove that folder"


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(cached_arrays, tmp_path / "file", {}, lambda: {"a": np.arange(3)})
    assert message.startswith(f"cannot write the index cache {tmp_path}/file: ")


# --- datasets -------------------------------------------------------------------------------------

BYTES = TokenizerIdentity(name="bytes", sha256="ab", vocab=256, eod=0)


@pytest.fixture
def corpus(tmp_path):
    """Writes documents of these sizes; every token of the corpus is a different number."""

    def write(sizes, name: str = "corpus", start: int = 0, **options) -> str:
        with IndexedWriter(tmp_path / name, np.uint16, **options) as writer:
            for size in sizes:
                writer.add(np.arange(start, start + size))
                start += size
        return str(tmp_path / name)

    return write


def test_samples_are_windows_of_the_stream_of_documents(corpus):
    sizes = [5, 1, 0, 17, 3, 9, 2]
    prefix = corpus(sizes)
    dataset = GPTDataset(prefix, sequence=6, samples=14, seed=7, split="1")
    data, indices = IndexedDataset(prefix), dataset.indices
    stream = np.concatenate([data.text(i, i + 1) for i in indices.document])
    assert len(dataset) == (3 * 37 - 1) // 6 and len(stream) == 3 * 37
    for index in range(len(dataset)):
        sample = int(indices.shuffle[index])
        assert dataset[index].dtype == np.int32
        assert dataset[index].tolist() == stream[sample * 6 : sample * 6 + 7].tolist()


def test_parts_share_no_token(corpus):
    prefix = corpus([7] * 20)
    parts = {
        part: GPTDataset(prefix, sequence=3, split="6,3,1", part=part)
        for part in ("train", "valid", "test")
    }
    tokens = {
        part: {token for i in range(len(dataset)) for token in dataset[i].tolist()}
        for part, dataset in parts.items()
    }
    assert max(tokens["train"]) < 84 <= min(tokens["valid"])
    assert max(tokens["valid"]) < 126 <= min(tokens["test"])


def test_the_cache_changes_nothing_and_belongs_to_the_content(corpus, tmp_path):
    one, same = corpus([9] * 9, "one"), corpus([9] * 9, "same")
    options = dict(sequence=5, samples=40, seed=2, split="1")
    plain = GPTDataset(one, **options)
    for prefix in (one, same, one):
        cached = GPTDataset(prefix, cache=tmp_path / "cache", **options)
        assert all((cached[i] == plain[i]).all() for i in range(len(plain)))
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the files' names do not matter
    GPTDataset(one, cache=tmp_path / "cache", **{**options, "seed": 3})
    GPTDataset(corpus([9] * 8 + [10], "other"), cache=tmp_path / "cache", **options)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_many_processes_build_one_cache_at_once(corpus, tmp_path):
    prefix = corpus(np.random.default_rng(0).integers(0, 99, 600))
    code = (
        "import hashlib, sys\nfrom mtx.data.gpt import GPTDataset\n"
        "d = GPTDataset(sys.argv[1], sequence=8, samples=50_000, seed=1, cache=sys.argv[2])\n"
        "print(hashlib.sha256(b''.join(d[i].tobytes() for i in range(2000))).hexdigest())"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, prefix, str(tmp_path / "cache")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in running]
    assert {error for _, error in said} == {""} and len({out for out, _ in said}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def blended_of(prefixes, **options):
    return open_part(prefixes, endless=False, **options)


def test_datasets_can_be_pickled(corpus, tmp_path):
    one, two = corpus([40] * 5, "one"), corpus([30] * 5, "two", start=1000)
    options = dict(sequence=4, split="1", cache=tmp_path / "cache")
    made = blended_of([one, two], weights=(3, 1), samples=400, **options)
    again = pickle.loads(pickle.dumps(made))
    assert all((again[i] == made[i]).all() for i in range(0, len(made), 37))


def test_a_blend_takes_from_each_dataset_in_its_order(corpus):
    one, two = corpus([40] * 5, "one"), corpus([30] * 5, "two", start=1000)
    blended = blended_of([one, two], sequence=4, weights=(3, 1), samples=200, split="1", seed=5)
    assert len(blended) == 200
    of_two = [i for i in range(200) if blended[i].min() >= 1000]
    assert len(of_two) == 50
    alone = GPTDataset(two, sequence=4, samples=request_samples(200, 0.25), split="1", seed=5)
    assert all((blended[i] == alone[k]).all() for k, i in enumerate(of_two))


def test_an_exhaustive_blend_has_every_sample_once(corpus):
    one, two = corpus([40] * 5, "one"), corpus([30] * 2, "two", start=1000)
    blended = blended_of([one, two], sequence=4, split="1")
    parts = [GPTDataset(prefix, sequence=4, split="1") for prefix in (one, two)]
    expected = sorted(part[i].tolist() for part in parts for i in range(len(part)))
    assert sorted(blended[i].tolist() for i in range(len(blended))) == expected


# --- what is refused ------------------------------------------------------------------------------


def test_too_little_text_is_said_with_the_numbers(corpus):
    prefix = corpus([4, 4])
    message = refusal(GPTDataset, prefix, sequence=8, split="1")
    assert "has 8 of 8 tokens in 2 sequences, but one sample needs sequence+1=9; use seq" in message
    message = refusal(GPTDataset, prefix, sequence=2, samples=5, part="valid")
    assert "part 'valid' of split='969,30,1' has 0 of 8 tokens in 2 sequences" in message
    assert "0 of 0 tokens" in refusal(GPTDataset, corpus([], "empty"), sequence=2, samples=5)
    assert "unknown part 'held'" in refusal(GPTDataset, prefix, sequence=2, part="held")
    for wrong in ({"sequence": 0}, {"samples": 0}, {"seed": -1}, {"seed": 2**32}):
        (name, value), *_ = wrong.items()
        assert f"{name}={value} must " in refusal(GPTDataset, prefix, **{"sequence": 2, **wrong})


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_met(corpus):
    dataset = GPTDataset(corpus([20]), sequence=19, split="1", vocab=19)
    message = refusal(dataset.__getitem__, 0)
    assert "sample 0 holds token 19, outside of the vocabulary of 19" in message
    assert GPTDataset(corpus([20], "b"), sequence=19, split="1", vocab=20)[0].max() == 19


def test_a_sample_past_the_end_is_an_index_error(corpus):
    dataset = GPTDataset(corpus([21]), sequence=10, split="1")
    for index in (2, -1):
        with pytest.raises(IndexError) as error:
            dataset[index]
        assert names(error, f"{index}", 2)


def test_a_blend_that_cannot_be_is_refused(corpus):
    one, two = corpus([40], "one", identity=BYTES), corpus([40], "two")
    other = TokenizerIdentity(name="x.json", sha256="cd", vocab=256, eod=0)
    three = corpus([40], "three", identity=other)
    options = dict(sequence=4, samples=5, split="1")
    assert "2 weights are not one for each of 1 datasets" in refusal(
        blended_of, [one], weights=(1, 2), **options
    )
    assert f"{two} has weight 0; leave it out" in refusal(
        blended_of, [one, two], weights=(1, 0), **options
    )
    assert "sum to zero" in refusal(blended_of, [one, two], weights=(0, 0), **options)
    assert "weights and samples together" in refusal(blended_of, [one, two], **options)
    assert "was made with x.json" in refusal(
        blended_of, [one, two, three], weights=(1, 1, 1), **options
    )
    blended_of([one, two], weights=(1, 1), **options)  # a foreign dataset names no tokenizer
