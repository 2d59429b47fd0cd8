"""Samples: which tokens are in which row of which step."""

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data.batches import make_batch
from mtx.data.samples import Samples, place_in_epoch, shuffled

untimed = settings(deadline=None)  # examples must not fail because the machine is busy
sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)


def counting(tokens: int, *, sequence: int, seed: int | None = 0) -> Samples:
    """Samples of 0, 1, 2, …: a token is its own position in the text."""
    return Samples(np.arange(tokens, dtype=np.uint16), sequence=sequence, seed=seed)


def indices(samples: Samples, steps: range, global_batch: int, sequence: int) -> list[int]:
    """The samples that `steps` visit, identified by the first token of each row."""
    batches = [make_batch(samples, step * global_batch, global_batch)["tokens"] for step in steps]
    return (np.concatenate(batches)[:, 0] // sequence).tolist()


@untimed
@given(tokens=st.integers(2, 400), sequence=st.integers(1, 40))
def test_neighbours_share_one_token_and_every_token_but_the_first_is_a_target(tokens, sequence):
    if tokens <= sequence:
        return
    samples = counting(tokens, sequence=sequence, seed=None)
    assert len(samples) == (tokens - 1) // sequence
    batch = make_batch(samples, 0, len(samples))
    assert batch["tokens"].shape == (len(samples), sequence)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(
        batch["targets"].reshape(-1), np.arange(1, len(samples) * sequence + 1)
    )
    np.testing.assert_array_equal(batch["tokens"][1:, 0], batch["targets"][:-1, -1])


@untimed
@given(samples=sizes, global_batch=st.integers(1, 20), seed=seeds)
def test_each_epoch_visits_each_sample_once(samples, global_batch, seed):
    data = counting(3 * samples + 1, sequence=3, seed=seed)
    steps = range(-(-3 * samples // global_batch))
    visited = indices(data, steps, global_batch, 3)
    for epoch in range(3):
        assert sorted(visited[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@untimed
@given(samples=sizes, consumed=st.integers(0, 10**12), rows=st.integers(1, 30), seed=seeds)
def test_a_batch_is_a_pure_function_of_seed_and_consumed(samples, consumed, rows, seed):
    fresh = counting(2 * samples + 1, sequence=2, seed=seed)
    used = counting(2 * samples + 1, sequence=2, seed=seed)
    for other in (0, consumed + rows, consumed // 2):
        make_batch(used, other, rows)
    again = make_batch(used, consumed, rows)
    for name, values in make_batch(fresh, consumed, rows).items():
        np.testing.assert_array_equal(again[name], values)


@untimed
@given(samples=sizes, seed=seeds, global_batch=st.integers(1, 8), factor=st.integers(1, 6))
def test_a_larger_batch_reads_the_same_stream(samples, seed, global_batch, factor):
    data = counting(samples + 1, sequence=1, seed=seed)
    small = indices(data, range(3 * factor), global_batch, 1)
    assert indices(data, range(3), global_batch * factor, 1) == small


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        indices(counting(101, sequence=1, seed=seed), range(epoch, epoch + 1), 100, 1)
        for seed in range(3)
        for epoch in range(3)
    ]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9


def test_the_order_is_pinned():
    """A run that is resumed with another numpy must go on in the same order."""
    assert shuffled(12, 0, 0).tolist() == [11, 3, 2, 1, 8, 6, 0, 7, 4, 10, 5, 9]
    assert shuffled(12, 7, 3).tolist() == [11, 2, 10, 4, 7, 3, 5, 1, 8, 9, 0, 6]


def test_a_batch_has_the_types_and_shapes_that_the_step_expects():
    batch = make_batch(counting(1000, sequence=10), 12, 4)
    assert {name: (v.dtype, v.shape) for name, v in batch.items()} == {
        "tokens": (np.int32, (4, 10)),
        "targets": (np.int32, (4, 10)),
        "weights": (np.float32, (4, 10)),
    }
    assert (batch["weights"] == 1).all()


@untimed
@given(count=st.integers(1, 500), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**20))
def test_strides_go_once_through_an_epoch(count, seed, epoch):
    places = [place_in_epoch(epoch * count + place, count, seed) for place in range(count)]
    assert sorted(places) == list(range(count))
    assert epoch or places == list(range(count))


def test_strides_are_pinned_and_differ():
    """A run that is resumed with another numpy must go on in the same order."""
    epochs = [[place_in_epoch(10 * epoch + i, 10, 7) for i in range(10)] for epoch in range(1, 4)]
    assert epochs[0] == [7, 6, 5, 4, 3, 2, 1, 0, 9, 8]
    many = {
        tuple(place_in_epoch(1000 * e + i, 1000, s) for i in range(5))
        for e in range(1, 9)
        for s in range(8)
    }
    assert len(many) == 64


@pytest.mark.parametrize(("consumed", "rows"), [(-1, 4), (0, 0)])
def test_a_batch_out_of_range_is_refused(consumed, rows):
    with pytest.raises(ValueError) as error:
        make_batch(counting(10, sequence=2), consumed, rows)
    assert names(error, f"consumed={consumed}", f"rows={rows}")
