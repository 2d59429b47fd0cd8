"""A token from logits: which can be drawn, how often each is, and draws that can be repeated."""

from __future__ import annotations

import numpy as np
import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.evaluation.sampling import Sampling

SHARES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = np.log(SHARES).astype(np.float32) + 3


def kept(logits, **settings):
    """{id: probability}"""
    ids, probabilities = Sampling(temperature=1.0, **settings).distribution(logits)
    assert (np.diff(ids) > 0).all() and probabilities.sum() == pytest.approx(1, abs=1e-12)
    return dict(zip(ids.tolist(), probabilities, strict=True))


def test_all_tokens_have_their_probability():
    assert kept(LOGITS) == pytest.approx(dict(enumerate(SHARES)), rel=1e-6)
    ids, probabilities = Sampling(temperature=0.5).distribution(LOGITS)
    assert probabilities == pytest.approx(SHARES**2 / (SHARES**2).sum(), rel=1e-6)


@pytest.mark.parametrize(
    "top_p, ids",
    [
        (0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]),
        (0.84, [1, 3, 4]), (0.86, [1, 2, 3, 4]), (0.96, [0, 1, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_the_nucleus_is_the_smallest_that_has_its_share(top_p, ids):
    share = SHARES[ids].sum()
    assert kept(LOGITS, top_p=top_p) == pytest.approx({i: SHARES[i] / share for i in ids}, rel=1e-6)


@pytest.mark.parametrize("top_k, ids", [(1, [1]), (2, [1, 3]), (4, [1, 2, 3, 4]), (9, range(5))])
def test_as_many_as_asked_for_may_be_drawn(top_k, ids):
    assert list(kept(LOGITS, top_k=top_k)) == list(ids)


def test_the_nucleus_is_one_of_the_likeliest():
    """The 3 likeliest, 1, 3 and 4, have 40, 30 and 15 of 85 parts: the first two have 82 %."""
    assert list(kept(LOGITS, top_k=3, top_p=0.81)) == [1, 3]
    assert list(kept(LOGITS, top_k=3, top_p=0.83)) == [1, 3, 4]


def test_of_equal_tokens_the_first_are_taken():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert list(kept(logits, top_k=2)) == [1, 2]
    assert list(kept(logits, top_p=0.5)) == [1, 2]
    assert kept(np.zeros(8), top_p=0.5) == pytest.approx(dict.fromkeys(range(4), 0.25))
    for greedy in (Sampling(temperature=0), Sampling(temperature=9, top_k=1)):
        assert greedy.draw(logits, np.random.default_rng(0)) == 1


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(1, 3000), spread=st.sampled_from([0, 1, 20]),
    top_p=st.floats(1e-3, 1),
)  # fmt: skip
def test_a_nucleus_of_any_distribution(seed, size, spread, top_p):
    """Against sorting the whole: no fewer tokens would do, and none left out is likelier."""
    logits = spread * np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    found = kept(logits, top_p=top_p)
    scaled = logits.astype(float) - logits.max()
    shares = np.exp(scaled) / np.exp(scaled).sum()
    ids = np.array(list(found))
    assert shares[ids].sum() >= top_p - 1e-9
    assert shares[ids].sum() - shares[ids].min() < top_p + 1e-9
    left_out = np.delete(shares, ids)
    assert not left_out.size or left_out.max() <= shares[ids].min()


def test_draws_have_the_frequencies():
    sampling, stream, draws = Sampling(temperature=1.0), np.random.default_rng(5), 20_000
    counts = np.bincount([sampling.draw(LOGITS, stream) for _ in range(draws)], minlength=5)
    spread = np.sqrt(draws * SHARES * (1 - SHARES))
    assert (np.abs(counts - draws * SHARES) < 4 * spread).all()


def test_a_draw_takes_one_number_of_its_stream():
    one, other = np.random.default_rng(1), np.random.default_rng(1)
    Sampling(temperature=1.0, top_k=2).draw(LOGITS, one)
    other.random()
    assert one.random() == other.random()


def test_impossible_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 1, -np.inf], np.float32)
    stream = np.random.default_rng(0)
    for settings in ({}, {"top_k": 4}, {"top_p": 0.999}):
        drawn = {Sampling(temperature=3.0, **settings).draw(logits, stream) for _ in range(200)}
        assert drawn == {1, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e300])
def test_extreme_temperatures_are_no_error(temperature):
    sampling = Sampling(temperature=temperature)
    drawn = {sampling.draw(LOGITS, np.random.default_rng(seed)) for seed in range(60)}
    assert drawn == ({1} if temperature < 1 else set(range(5)))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_has_diverged_is_named(broken, temperature):
    logits = np.array([0, broken, 1], np.float32)
    with pytest.raises(UserError) as error:
        Sampling(temperature=temperature).draw(logits, np.random.default_rng(0))
    names(error, broken)


@pytest.mark.parametrize(
    "wrong, values",
    [
        ({"temperature": -1}, ("temperature=-1", "0")),
        ({"temperature": np.inf}, ("temperature=inf",)),
        ({"top_k": -2}, ("top_k=-2", "0")),
        ({"top_p": 0}, ("top_p=0", "0", "1")),
        ({"top_p": 1.01}, ("top_p=1.01", "0")),
        ({"top_p": np.nan}, ("top_p=nan", "0")),
    ],
)
def test_values_out_of_range_are_named(wrong, values):
    with pytest.raises(UserError) as error:
        Sampling(**wrong)
    names(error, *values)
