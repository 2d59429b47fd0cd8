"""Schedules of sequence slices: their orders, and their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.schedules.makers import MAKERS, make
from mtx.schedules.makers.breadth_first import terapipe
from mtx.schedules.makers.one_f_one_b import seq1f1b
from mtx.schedules.orders import KINDS, B, F
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import simulate

SLICED = sorted(name for name, maker in MAKERS.items() if maker.sliced)
quick = settings(max_examples=80, deadline=None)
MODELS = st.sampled_from(["lockstep", "asynchronous"])
shapes = st.builds(
    Shape,
    microbatches=st.integers(1, 8), stages=st.integers(1, 6), virtual=st.integers(1, 3),
    slices=st.integers(1, 5),
    times=st.sampled_from([Times(), Times(forward=1.5, weight=0.25), Times(backward=2.0)]),
)  # fmt: skip


def row(schedule: Schedule, stage: int, ops: int) -> str:
    """The first ops of a stage, microbatches and slices counted from 1: "F1a F1b B1b"."""
    k = schedule.slices
    names = [
        f"{KINDS[kind]}{item // k + 1}{'abcdefgh'[item % k]}"
        for kind, item, _ in schedule.orders.of(stage)[:ops]
    ]
    return " ".join(names)


@quick
@given(shapes, st.sampled_from(SLICED))
def test_slices_go_forth_in_f_and_back_in_b(shape, name):
    schedule = MAKERS[name].make(shape)
    for stage in range(shape.stages):
        seen: dict[tuple[int, int, int], list[int]] = {}
        for kind, item, chunk in schedule.orders.of(stage):
            microbatch, cut = divmod(item, shape.slices)
            seen.setdefault((kind, microbatch, chunk), []).append(cut)
        assert len(seen) == 2 * shape.microbatches * shape.virtual
        forth = list(range(shape.slices))
        assert all(cuts == (forth if op[0] == F else forth[::-1]) for op, cuts in seen.items())


@quick
@given(shapes, st.sampled_from(SLICED), MODELS)
def test_bubbles_are_the_closed_forms(shape, name, model):
    claimed = MAKERS[name].bubble_over_ideal(shape)
    simulation = simulate(MAKERS[name].make(shape), shape.times, model=model)
    if claimed is None:
        assert simulation.bubble_over_ideal > (shape.stages - 1) / (
            shape.virtual * shape.slices * shape.microbatches
        ) - 1e-12  # fmt: skip
    else:
        assert simulation.bubble_over_ideal == pytest.approx(claimed, abs=1e-12)


@quick
@given(shapes, st.sampled_from(SLICED))
def test_in_flight_is_the_closed_form(shape, name):
    claimed = MAKERS[name].in_flight(shape)
    if claimed is not None:
        assert MAKERS[name].make(shape).in_flight.tolist() == claimed.tolist()


@quick
@given(shapes)
def test_terapipe_has_everything_in_flight(shape):
    simulation = simulate(terapipe(shape), shape.times)
    assert simulation.peak_memory.tolist() == pytest.approx([shape.microbatches] * shape.stages)
    items, p, v = shape.microbatches * shape.slices, shape.stages, shape.virtual
    waits = (v - 1) * max(p - items, 0)
    assert simulation.bubble_over_ideal == pytest.approx((p - 1 + waits) / (v * items), abs=1e-12)


@pytest.mark.parametrize("m, p, k", [(4, 4, 2), (6, 4, 4), (8, 3, 3), (1, 4, 8), (2, 2, 1)])
def test_seq1f1b_is_as_its_paper_says(m, p, k):
    """Warm-up of p - s - 2 + k slices, so p - s - 1 + k of them in flight; bubble (p-1)/(k m)."""
    shape = Shape(microbatches=m, stages=p, slices=k)
    times = Times(forward=1.0, backward=1.25, weight=0.5)
    simulation = simulate(seq1f1b(shape), times)
    for stage in range(p):
        kinds = [op.kind for op in seq1f1b(shape).orders.of(stage)]
        assert kinds.index(B) == min(p - stage - 1 + k, m * k)
    most = [min(p - s - 1 + k, m * k) for s in range(p)]
    assert simulation.in_flight.tolist() == most
    assert simulation.peak_memory.tolist() == pytest.approx([n / k for n in most])
    assert simulation.bubble_over_ideal == pytest.approx((p - 1) / (k * m))


def test_seq1f1b_runs_in_the_order_of_its_papers_figure():
    """Sun et al., section 3.2: of two slices, the second comes first in B."""
    schedule = seq1f1b(Shape(microbatches=4, stages=4, slices=2))
    assert row(schedule, 3, 8) == "F1a F1b B1b F2a B1a F2b B2b F3a"
    assert row(schedule, 0, 10) == "F1a F1b F2a F2b F3a B1b F3b B1a F4a B2b"


@pytest.mark.parametrize("m, p, v", [(8, 4, 1), (8, 4, 2), (7, 3, 1), (6, 2, 3)])
def test_seq1f1b_of_whole_sequences_is_1f1b(m, p, v):
    ours = seq1f1b(Shape(microbatches=m, stages=p, virtual=v))
    plain = make("1f1b", microbatches=m, stages=p, virtual=v)
    assert (ours.forward_ticks == plain.forward_ticks).all()
    assert (ours.backward_ticks == plain.backward_ticks).all()
    for stage in range(p):
        assert ours.orders.of(stage) == plain.orders.of(stage)


@quick
@given(shapes)
def test_seq1f1b_needs_less_memory_and_time_than_1f1b(shape):
    if shape.virtual > 1:
        return
    whole = seq1f1b(Shape(microbatches=shape.microbatches, stages=shape.stages))
    for model in ("lockstep", "asynchronous"):
        cut, plain = (simulate(s, shape.times, model=model) for s in (seq1f1b(shape), whole))
        assert (cut.peak_memory <= plain.peak_memory + 1e-9).all()
        assert cut.makespan <= plain.makespan + 1e-9


@pytest.mark.parametrize("m", [8, 64, 512])
def test_seq1f1b_slots_do_not_grow_with_microbatches(m):
    assert seq1f1b(Shape(microbatches=m, stages=4, virtual=2, slices=2)).slots == 12
