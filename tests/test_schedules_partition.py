"""Placement of layers on stages and chunks, and conversion back to model order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.presets import NAMES, preset
from mtx.schedules.partition import EMPTY, place_layers

quick = settings(max_examples=80, deadline=None)


@st.composite
def placed(draw):
    """(layers, pipe, virtual, placement), for any kind of placement."""
    pipe, virtual = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    virtual_stages = pipe * virtual
    kind = draw(st.sampled_from(["even", "balanced", "explicit"]))
    if kind == "even":
        layers, stage_layers = virtual_stages * draw(st.integers(1, 4)), "even"
    elif kind == "balanced":
        layers, stage_layers = virtual_stages + draw(st.integers(0, 20)), "balanced"
    else:
        counts = st.lists(
            st.integers(0, 5), min_size=virtual_stages, max_size=virtual_stages
        ).filter(any)
        stage_layers = tuple(draw(counts))
        layers = sum(stage_layers)
    placement = place_layers(layers, pipe=pipe, virtual=virtual, stage_layers=stage_layers)
    return layers, pipe, virtual, placement


@quick
@given(placed())
def test_pieces_in_model_order_hold_the_layers_in_order(case):
    layers, pipe, virtual, placement = case
    assert placement.layer.shape[:2] == (pipe, virtual)
    along = [
        placement.layer[virtual_stage % pipe, virtual_stage // pipe]
        for virtual_stage in range(pipe * virtual)
    ]
    in_order = np.concatenate([held[held != EMPTY] for held in along])
    assert in_order.tolist() == list(range(layers))


@quick
@given(placed())
def test_place_of_layer_is_the_way_back(case):
    layers, pipe, _, placement = case
    slots, rows = placement.slots_of("block"), placement.rows_of("block")
    assert slots.ravel()[placement.place_of_layer("block")].tolist() == list(range(layers))
    values_L = np.random.default_rng(0).normal(size=layers)
    stack = np.full(slots.size, np.nan)
    stack[placement.place_of_layer("block")] = values_L
    taken = np.where(placement.layer == EMPTY, np.nan, values_L[placement.layer])
    held = placement.count > 0
    by_chunk = stack.reshape(slots.shape)[np.arange(pipe)[:, None], rows]
    np.testing.assert_array_equal(by_chunk[held], taken[held])


@quick
@given(placed())
def test_layers_fill_the_first_places_of_a_chunk(case):
    layers, _, _, placement = case
    place = np.arange(placement.layer.shape[2])
    filled = place < placement.count[..., None]
    assert ((placement.layer != EMPTY) == filled).all()
    assert placement.count.sum() == layers and placement.count.max() == len(place)
    assert placement.even == (placement.count == len(place)).all()


@quick
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30))
def test_balanced_counts_differ_by_one_and_the_ends_are_light(pipe, virtual, more):
    virtual_stages = pipe * virtual
    placement = place_layers(
        virtual_stages + more, pipe=pipe, virtual=virtual, stage_layers="balanced"
    )
    counts = placement.count.T.ravel()  # in model order
    light = (virtual_stages + more) // virtual_stages
    assert set(counts) <= {light, light + 1}
    heavy = np.flatnonzero(counts > light)
    if len(heavy):
        before, after = heavy[0], virtual_stages - 1 - heavy[-1]
        assert len(heavy) == heavy[-1] - heavy[0] + 1  # one run, in the middle
        assert before - after in (0, 1)


def test_interleaved_stages_hold_every_pth_virtual_stage():
    placement = place_layers(8, pipe=2, virtual=2, stage_layers="even")
    assert placement.layer.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert placement.place_of_layer("block").tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_explicit_counts_may_leave_a_piece_without_layers():
    placement = place_layers(4, pipe=2, virtual=2, stage_layers=(1, 2, 0, 1))
    assert placement.layer.tolist() == [[[0, EMPTY], [EMPTY, EMPTY]], [[1, 2], [3, EMPTY]]]
    assert not placement.even


# -- kinds -----------------------------------------------------------------------------------------


@quick
@given(placed(), st.randoms(use_true_random=False))
def test_layers_of_a_kind_are_found_again(case, random):
    layers, pipe, virtual, one = case
    pattern = tuple(random.choice("ab") for _ in range(layers))
    counts = one.count.T.ravel().tolist()
    placement = place_layers(pattern, pipe=pipe, virtual=virtual, stage_layers=tuple(counts))
    assert (placement.layer == one.layer).all() and placement.pattern == pattern
    for number, kind in enumerate(placement.kinds):
        slots, numbers = placement.slots_of(kind), placement.layers_of(kind)
        there, rows = (placement.kind == number).any(axis=-1), placement.rows_of(kind)
        assert slots.shape[1] == there.sum(axis=1).max() and rows.max() < slots.shape[1]
        assert [pattern[layer] for layer in numbers] == [kind] * len(numbers)
        assert slots.ravel()[placement.place_of_layer(kind)].tolist() == [*range(len(numbers))]
        assert slots.shape[-1] == (slots != EMPTY).sum(axis=-1).max()
        for stage, chunk, n in zip(*np.nonzero(placement.kind == number)):
            slot = slots[stage, rows[stage, chunk], placement.index[stage, chunk, n]]
            assert numbers[slot] == placement.layer[stage, chunk, n]


def test_a_stage_holds_an_encoder_and_a_decoder_once():
    """In the two chunks of each stage; woven, where each chunk has its own row, twice."""
    pattern = ("encoder",) * 4 + ("decoder",) * 4
    for row_a_chunk in (False, True):
        placement = place_layers(
            pattern, pipe=2, virtual=2, stage_layers="even", row_a_chunk=row_a_chunk
        )
        assert [placement.slots_of(kind).shape for kind in placement.kinds] == [
            (2, 1 + row_a_chunk, 2)
        ] * 2
        assert (placement.row is None) == row_a_chunk


@pytest.mark.parametrize(
    ("pattern", "pipe", "periods"),
    [
        ("aaaa", 2, ["aa"]),
        ("abababab", 2, ["2 a b"]),
        ("aabbaabb", 1, ["2 aa bb"]),
        ("aabbaabb", 2, ["aa", "bb"]),
        ("aabaab", 1, ["2 aa b"]),
        ("abba", 1, ["a", "bb", "a"]),
        ("ababa", 1, ["2 a b", "a"]),
        ("mmmmammmammmamm", 1, ["mmm", "3 m a mm"]),
        ("cabababddadda", 1, ["c", "3 a b", "2 dd a"]),
        ("abba", 2, None),
    ],
)
def test_the_periods_of_a_chunk(pattern, pipe, periods):
    """The periods with the fewest runs, which cover all of its layers."""
    placement = place_layers(pattern, pipe=pipe, virtual=1, stage_layers="even")
    if periods is None:
        assert placement.periods is None
        return
    assert [
        " ".join([str(times)] * (times > 1) + [run.kind * run.count for run in runs])
        for times, _, runs in placement.periods
    ] == periods
    chunk = pattern[: len(pattern) // pipe]
    layers = [
        (k * period.layers + run.place + i, run.kind, k * period.of_kind(run.kind) + run.index + i)
        for period in placement.periods
        for k in range(period.repeats)
        for run in period.runs
        for i in range(run.count)
    ]
    assert layers == [(n, kind, chunk[:n].count(kind)) for n, kind in enumerate(chunk)]


def test_chunks_of_other_lengths_have_no_periods():
    assert place_layers(3, pipe=2, virtual=1, stage_layers=(1, 2)).periods is None


# Layers that stages do not divide (Llama 3's largest has one less at each end), or other kinds.
UNEVEN = {"llama-3-405b", "deepseek-v3", "qwen3-235b-a22b", "miniature-llava"}


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_can_be_placed(name):
    run = preset(name)
    placement = place_layers(
        run.model.layers,
        pipe=run.layout.pipe,
        virtual=run.layout.virtual,
        stage_layers=run.layout.stage_layers,
    )
    assert placement.even == (name not in UNEVEN)


def message(layers: int, pipe: int, virtual: int, stage_layers) -> str:
    with pytest.raises(UserError) as caught:
        place_layers(layers, pipe=pipe, virtual=virtual, stage_layers=stage_layers)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_uneven_layers_are_an_error_with_remedies():
    assert message(10, 4, 2, "even") == (
        "layers=10 cannot be divided over pipe*virtual=4*2; use layers=8 or 16, another pipe or "
        "virtual, or stage_layers='balanced' to place them unevenly"
    )
    assert "use layers=8, another pipe" in message(3, 8, 1, "even")


def test_fewer_layers_than_pieces_are_an_error_with_remedies():
    text = message(3, 2, 2, "balanced")
    assert "layers=3" in text and "pipe*virtual=4" in text and "at most 3" in text


@pytest.mark.parametrize("counts", [(4, 4), (2, 2, 2, 3), (3, 3, 3, -1)])
def test_counts_that_do_not_fit_are_an_error_with_the_sums(counts):
    text = message(8, 2, 2, counts)
    assert f"stage_layers={counts} must give the layers of each of the pipe*virtual=2*2" in text
    assert f"8 in all; it gives {len(counts)} counts with the sum {sum(counts)}" in text


@quick
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=9), st.data())
def test_balanced_by_costs_no_cut_has_a_lighter_heaviest_stage(costs, data):
    """Checked against all possible cuts."""
    number = data.draw(st.integers(1, len(costs)))
    placement = place_layers(
        len(costs), pipe=number, virtual=1, stage_layers="balanced", costs=costs
    )
    held = [costs[layers[0] : layers[0] + n[0]] for layers, n in zip(
        placement.layer[:, 0], placement.count
    )]  # fmt: skip
    assert [each for stage in held for each in stage] == costs
    cuts = itertools.combinations(range(1, len(costs)), number - 1)
    every = [[0, *cut, len(costs)] for cut in cuts]
    least = min(max(sum(costs[i:j]) for i, j in itertools.pairwise(cut)) for cut in every)
    assert max(map(sum, held)) == pytest.approx(least)
