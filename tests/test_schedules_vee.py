"""ZB-V, V-Half and V-Min: memory, bubble, torch's orders, and the effect of other times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.schedules.makers.vee import MAKERS, PERIOD, half_memory, min_memory
from mtx.schedules.orders import KINDS, Orders
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import Simulation, simulate

quick = settings(max_examples=60, deadline=None)
names = pytest.mark.parametrize("name", sorted(MAKERS))
MEMORY = {"zb_v": lambda p: p, "v_half": half_memory, "v_min": min_memory}  # microbatches per stage


def run(name: str, p: int, m: int, times: Times | None = None) -> Simulation:
    """weight_share=1: a stash is kept whole until W, as the papers count."""
    times = times or Times()
    shape = Shape(microbatches=m, stages=p, virtual=2, times=times)
    return simulate(MAKERS[name].make(shape), times, weight_share=1.0)


def stage_text(orders: Orders, stage: int) -> str:
    """One letter per op, capital for chunk 0: "FfbwBW"."""
    letters = (KINDS[op.kind] for op in orders.of(stage))
    chunks = orders.chunk[stage].tolist()
    return "".join(k.lower() if c else k for k, c in zip(letters, chunks, strict=True))


@names
@pytest.mark.parametrize("p", range(1, 17))
def test_memory_is_as_published(name, p):
    most = MEMORY[name](p)
    for m in (1, 2, p, 2 * p, 3 * p + 1):
        peak = run(name, p, m).peak_memory
        assert peak.max() <= most
        if m >= 2 * p:
            assert peak.tolist() == [most] * p


def test_memory_is_a_third_a_half_and_all_of_1f1bs():
    assert [min_memory(p) for p in (2, 4, 8, 12, 16, 24)] == [2, 2, 4, 5, 6, 9]  # (p + 4) // 3
    assert [half_memory(p) for p in (2, 4, 8, 12, 16, 24)] == [2, 3, 5, 7, 9, 13]  # (p + 2) // 2


@names
@quick
@given(p=st.integers(1, 16), m=st.integers(1, 50))
def test_closed_forms_hold(name, p, m):
    shape, maker = Shape(microbatches=m, stages=p, virtual=2), MAKERS[name]
    simulation = run(name, p, m)
    bubble, in_flight = maker.bubble_over_ideal(shape), maker.in_flight(shape)
    if bubble is not None:
        assert simulation.bubble_over_ideal == pytest.approx(bubble, abs=1e-12)
    if in_flight is not None:
        assert simulation.in_flight.tolist() == in_flight.tolist()
        assert simulation.schedule.in_flight.tolist() == in_flight.tolist()
    assert (bubble is not None) == (name == "zb_v" or m >= 2 * p)
    assert (in_flight is not None) == (name == "zb_v" or m >= 2 * MEMORY[name](p) - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16])
def test_bubble_rates_are_no_more_than_published(p):
    m = 4 * p
    assert run("zb_v", p, m).zero_bubble_rate == 0
    # p / 2m and 2p / 3m, for large m, where the two measures of a bubble are the same.
    assert run("v_half", p, m).bubble_over_ideal <= p / (2 * m)
    assert run("v_min", p, m).bubble_over_ideal <= 2 * p / (3 * m)
    # 1F1B, with W joined to B: (p-1) / m.
    assert run("v_half", p, m).bubble_over_ideal < (p - 1) / m


@names
def test_bubble_does_not_grow_with_microbatches(name):
    idle = [PERIOD * m * run(name, 6, m).bubble_over_ideal for m in (12, 24, 48)]
    assert idle == pytest.approx(idle[:1] * 3)


@pytest.mark.parametrize("name, block", [("v_half", "FBbf"), ("v_min", "BFbf")])
def test_blocks_repeat(name, block):
    """Between warm-up and cool-down each stage runs one block after the other; F and B of stage 2
    in slots 4, 8, 18, 23 (V-Half) and 2, 5, 10, 13 (V-Min), modulo 6, and W where it fits."""
    orders = run(name, 4, 24).orders
    middles = [stage_text(orders, stage)[PERIOD * 8 : PERIOD * 14] for stage in range(4)]
    for middle in middles:
        assert middle == middle[:PERIOD] * 6
        assert sorted(middle[:PERIOD]) == sorted("FfBbWw")
    assert middles[2].upper().count("W") == 12
    assert block in middles[2].translate(str.maketrans("", "", "Ww"))


def test_zb_v_warm_up_and_cool_down():
    """Stage 0 runs F of chunk 0 until the first microbatch returns; stage 3 turns each around."""
    orders = run("zb_v", 4, 8).orders
    assert stage_text(orders, 0) == "FFFFFFFfbwfbwfbwfbwFBWfbwBWfbwBWfbwBWfbwBWBWBWBW"
    assert stage_text(orders, 3) == "FfFfFfFfbwFBWfbwFBWfbwFBWfbwFBWfbwBbBbBbBWwwwWWW"


some_times = st.builds(
    Times,
    forward=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    backward=st.sampled_from([0.5, 1.0, 1.3]),
    weight=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    comm=st.sampled_from([0.0, 0.05, 0.5]),
)


@names
@quick
@given(p=st.integers(1, 7), m=st.integers(1, 20), times=some_times, skew=st.booleans())
def test_other_times_keep_to_the_memory(name, p, m, times, skew):
    if skew:
        factors = tuple(1.0 + 0.2 * (stage % 3) for stage in range(p))
        times = Times(**{**vars(times), "stage_factors": factors})
    simulation = run(name, p, m, times)  # every op once, and no stage waits forever
    assert simulation.peak_memory.max() <= MEMORY[name](p)
    assert simulation.cost >= simulation.ideal * (1 - 1e-9) or skew


@names
def test_orders_for_given_times_idle_less(name):
    times = Times(weight=2.0)
    even = MAKERS[name].make(Shape(microbatches=24, stages=8, virtual=2))
    assert run(name, 8, 24, times).cost < simulate(even, times).cost


def test_zb_v_with_the_papers_times():
    """Times of table 6 of the zero-bubble paper (1.5B and 6.2B models), where 1F1B idles 24 %."""
    small = Times(forward=18.522, backward=18.086, weight=9.337, comm=0.601)
    large = Times(forward=29.718, backward=29.444, weight=19.927, comm=0.527)
    assert run("zb_v", 8, 24, small).zero_bubble_rate == pytest.approx(0.0728, abs=1e-4)
    assert run("zb_v", 8, 24, large).zero_bubble_rate == pytest.approx(0.0446, abs=1e-4)
    assert run("zb_v", 8, 24, Times(weight=2.0)).zero_bubble_rate == pytest.approx(0, abs=1e-12)


def test_no_closed_form_is_claimed_for_other_times():
    shape = Shape(microbatches=24, stages=4, virtual=2, times=Times(weight=0.5))
    for maker in MAKERS.values():
        assert maker.bubble_over_ideal(shape) is None and maker.in_flight(shape) is None


def test_one_stage_never_waits():
    for name in MAKERS:
        assert run(name, 1, 5).bubble_over_ideal == pytest.approx(0, abs=1e-12)


def test_orders_are_those_of_torch():
    """Op by op on each rank, idle cells left out; torch's full backward B stands for B, then W."""
    pytest.importorskip("torch", reason="torch is absent: ZB-V is not compared with torch's")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    kinds = {"F": [0], "I": [1], "W": [2], "B": [1, 2]}
    for p, m in [(1, 3), (2, 1), (2, 4), (3, 5), (4, 2), (4, 7), (4, 8), (6, 13)]:
        orders = run("zb_v", p, m).orders
        for stage, row in enumerate(get_schedule_ops("ZBVZeroBubble", p, m)):
            theirs = [
                (kind, action.microbatch_index, int(action.stage_index != stage))
                for action in row
                if action is not None
                for kind in kinds[action.computation_type.value]
            ]
            assert [tuple(op) for op in orders.of(stage)] == theirs


def test_pieces_go_up_and_down():
    schedule = run("v_min", 3, 4).schedule
    assert np.array_equal(schedule.virtual_stages, [[0, 1, 2], [5, 4, 3]])
    assert schedule.split and schedule.virtual == 2
