"""Samples: which tokens stand in which row of which step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data.samples import Samples, shuffled

untimed = settings(deadline=None)  # examples must not fail because the machine is busy
sizes = st.integers(1, 60)
seeds = st.integers(0, 2**40)


def counting(tokens: int, *, sequence: int, seed: int = 0) -> Samples:
    """Samples of 0, 1, 2, …: a token is its own position in the text."""
    return Samples(np.arange(tokens, dtype=np.uint16), sequence=sequence, seed=seed)


def indices(samples: Samples, steps: range, global_batch: int, sequence: int) -> list[int]:
    """The samples that `steps` visit, told by the first token of each row."""
    batches = [samples.batch(step, global_batch)["tokens"] for step in steps]
    return (np.concatenate(batches)[:, 0] // sequence).tolist()


@untimed
@given(tokens=st.integers(2, 400), sequence=st.integers(1, 40))
def test_neighbours_share_one_token_and_every_token_but_the_first_is_a_target(tokens, sequence):
    if tokens <= sequence:
        return
    samples = counting(tokens, sequence=sequence)
    assert len(samples) == (tokens - 1) // sequence
    batch = samples.take(np.arange(len(samples)))
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
@given(samples=sizes, step=st.integers(0, 10**12), global_batch=st.integers(1, 30), seed=seeds)
def test_a_batch_is_a_pure_function_of_seed_and_step(samples, step, global_batch, seed):
    fresh = counting(2 * samples + 1, sequence=2, seed=seed)
    used = counting(2 * samples + 1, sequence=2, seed=seed)
    for other in (0, step + 1, step // 2):
        used.batch(other, global_batch)
    for name, values in fresh.batch(step, global_batch).items():
        np.testing.assert_array_equal(used.batch(step, global_batch)[name], values)


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
    batch = counting(1000, sequence=10).batch(3, 4)
    assert {name: (v.dtype, v.shape) for name, v in batch.items()} == {
        "tokens": (np.int32, (4, 10)),
        "targets": (np.int32, (4, 10)),
        "weights": (np.float32, (4, 10)),
    }
    assert (batch["weights"] == 1).all()


@untimed
@given(samples=sizes, count=st.integers(1, 6), global_batch=st.integers(1, 20))
def test_first_batches_hold_each_sample_once_and_pad_with_weight_zero(samples, count, global_batch):
    batches = counting(2 * samples + 1, sequence=2).first_batches(count, global_batch)
    asked = min(samples, count * global_batch)
    assert len(batches) == -(-asked // global_batch)
    rows = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    assert all(len(b["tokens"]) == global_batch for b in batches)
    assert (rows["tokens"][:asked, 0] // 2).tolist() == list(range(asked))
    assert (rows["weights"][:asked] == 1).all()
    assert (rows["weights"][asked:] == 0).all() and rows["weights"].dtype == np.float32
    assert (rows["tokens"][asked:] == 0).all() and (rows["targets"][asked:] == 0).all()


@pytest.mark.parametrize(("step", "global_batch"), [(-1, 4), (0, 0)])
def test_a_step_or_batch_out_of_range_is_refused(step, global_batch):
    with pytest.raises(ValueError, match=f"step={step} .* global_batch={global_batch} "):
        counting(10, sequence=2).batch(step, global_batch)
