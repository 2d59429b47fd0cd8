"""Zero-bubble schedules: published bubbles, closed forms, memory."""

from dataclasses import replace

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.schedules.makers import make
from mtx.schedules.makers.one_f_one_b import one_f_one_b
from mtx.schedules.makers.zero_bubble import (
    MAKERS,
    aligned_zb,
    automatic,
    deferred_zb,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
)
from mtx.schedules.orders import KINDS
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import simulate

# Qi et al., ICLR'24 (arXiv 2401.10241), tables 5 and 6: microbatches over 8 stages; F, B, W and
# comm in ms; bubble rates of ZB-H1, ZB-H2 and ZB-2p.
# Hidden size and heads of the paper's models, whose sequences are of 1024.
MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32)}
ROWS = [
    ("1.5B", 24, (18.522, 18.086, 9.337, 0.601), (0.1585, 0.1083, 0.0433)),
    ("1.5B", 32, (18.513, 18.086, 9.331, 0.626), (0.1242, 0.0837, 0.0039)),
    ("1.5B", 64, (18.546, 18.097, 9.321, 0.762), (0.0674, 0.0444, 0.0026)),
    ("6.2B", 24, (29.718, 29.444, 19.927, 0.527), (0.1323, 0.0698, 0.0029)),
    ("6.2B", 32, (29.802, 29.428, 19.530, 0.577), (0.1045, 0.0559, 0.0022)),
    ("6.2B", 64, (29.935, 29.621, 19.388, 0.535), (0.0554, 0.0294, 0.0010)),
]
ROW_IDS = [f"{row[0]}-{row[1]}" for row in ROWS]


def to_times(forward, backward, weight, comm):
    return Times(forward=forward, backward=backward, weight=weight, comm=comm)


def weight_share_of(model):
    """Table 1: bytes that a layer keeps for W, over those that it keeps for B; each over s b."""
    hidden, heads = MODELS[model]
    return 32 * hidden / (34 * hidden + 5 * heads * 1024)


times = st.builds(
    to_times,
    *[st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]) | st.floats(0.2, 3.0)] * 3,
    st.sampled_from([0.0, 0.0625, 0.25, 1.0]) | st.floats(0.0, 1.0),
)
shapes = st.builds(
    Shape,
    microbatches=st.integers(1, 20),
    stages=st.integers(1, 7),
    times=times,
)
few = settings(max_examples=60, deadline=None)


def fields(text):
    return [row.split() for row in text.strip().splitlines()]


def ops(schedule):
    return [[f"{KINDS[op.kind]}{op.item}" for op in schedule.orders.of(stage)]
            for stage in range(schedule.stages)]  # fmt: skip


def bubble(run):
    """Time for which the slowest stage is idle between its first op and its last."""
    return run.cost - run.ideal


@pytest.mark.parametrize(("model", "microbatches", "measured", "rates"), ROWS, ids=ROW_IDS)
def test_bubbles_are_the_published_ones(model, microbatches, measured, rates):
    shape = Shape(microbatches=microbatches, stages=8, times=to_times(*measured))
    two_p = automatic(replace(shape, weight_share=weight_share_of(model)), 16)
    schedules = [zb_h1(shape), zb_h2(shape), two_p]
    found = [round(simulate(schedule, shape.times).zero_bubble_rate, 4) for schedule in schedules]
    assert found == list(rates)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.5])
def test_published_2p_rates_hold_up_to_half_a_stash_for_w(share):
    """They do not depend on the models' exact share."""
    for _, microbatches, measured, rates in ROWS:
        shape = Shape(microbatches=microbatches, stages=8, times=to_times(*measured))
        schedule = automatic(replace(shape, weight_share=share), 16)
        assert round(simulate(schedule, shape.times).zero_bubble_rate, 4) == rates[2]


def test_h1_runs_the_ops_of_the_papers_figure():
    assert ops(zb_h1(Shape(microbatches=4, stages=3))) == fields("""
        F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
        F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """)


def test_h2_runs_the_ops_of_the_papers_figure():
    assert ops(zb_h2(Shape(microbatches=6, stages=3))) == fields("""
        F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
        F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
    """)


@given(shape=shapes)
@few
def test_h1_bubble_is_the_closed_form(shape):
    t, p = shape.times, shape.stages
    run = simulate(zb_h1(shape), t)
    if shape.microbatches > p and 2 * t.comm <= t.weight <= t.forward + 2 * t.comm:
        expected = (p - 1) * (t.forward + t.backward - t.weight + 4 * t.comm)
        assert bubble(run) == pytest.approx(expected, abs=1e-9)


@given(shape=shapes)
@few
def test_h2_bubble_is_the_closed_form(shape):
    t, p = shape.times, shape.stages
    run = simulate(zb_h2(shape), t)
    expected = (p - 1) * (t.forward + t.backward - 2 * t.weight + 2 * t.comm)
    holds = t.weight <= t.forward and 2 * t.comm <= t.forward + t.backward and expected >= 0
    if shape.microbatches >= 2 * p - 1 and holds:
        assert bubble(run) == pytest.approx(expected, abs=1e-9)


def test_h2_leaves_no_bubble_where_all_ops_are_equal():
    shape = Shape(microbatches=20, stages=8)
    run = simulate(zb_h2(shape), shape.times)
    assert bubble(run) == 0
    assert run.makespan == run.ideal + 7  # the last stage begins, and ends, seven F later


@given(shape=shapes, virtual=st.integers(1, 3))
@few
def test_makers_say_the_bubble_and_what_is_in_flight(shape, virtual):
    for name, maker in MAKERS.items():
        chunks = maker.virtual or virtual
        given_shape = Shape(
            microbatches=shape.microbatches, stages=shape.stages, virtual=chunks, times=shape.times
        )
        schedule = maker.make(given_shape)
        in_flight = maker.in_flight(given_shape)
        if in_flight is not None:
            assert schedule.in_flight.tolist() == in_flight.tolist(), name
        over_ideal = maker.bubble_over_ideal(given_shape)
        if over_ideal is not None:
            model = "asynchronous" if maker.virtual else "lockstep"
            run = simulate(schedule, shape.times, model=model)
            assert run.bubble_over_ideal == pytest.approx(over_ideal, abs=1e-9), name


def test_closed_forms_hold_where_the_paper_looks():
    """Otherwise the tests above could pass because no shape has a closed form."""
    for _, microbatches, measured, _ in ROWS:
        shape = Shape(microbatches=microbatches, stages=8, times=to_times(*measured))
        assert all(MAKERS[name].bubble_over_ideal(shape) for name in ("zb_h1", "zb_h2"))
    assert MAKERS["aligned_zb"].bubble_over_ideal(Shape(microbatches=8, stages=4, virtual=2))


@given(shape=shapes, share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@few
def test_handcrafted_peaks_are_the_papers(shape, share):
    """(p - s) + s W stashes, and 2(p - s) - 1 + 2s W (section 2), once the pipeline is full."""
    stage = np.arange(shape.stages)
    for maker, b_stashes, w_stashes in [
        (zb_h1, shape.stages - stage, stage),
        (zb_h2, 2 * (shape.stages - stage) - 1, 2 * stage),
    ]:
        peak = simulate(maker(shape), weight_share=share).peak_memory
        full = b_stashes + share * w_stashes
        assert (peak <= full + 1e-9).all()
        if shape.microbatches >= 2 * shape.stages:
            assert peak.tolist() == pytest.approx(full.tolist())


@given(
    shape=shapes,
    limit=st.integers(1, 15) | st.floats(1, 15),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    data=st.data(),
)
@few
def test_automatic_keeps_to_its_memory(shape, limit, share, data):
    factors = st.lists(st.floats(0.5, 2.0), min_size=shape.stages, max_size=shape.stages)
    t = shape.times
    uneven = Times(
        forward=t.forward, backward=t.backward, weight=t.weight, comm=t.comm,
        stage_factors=data.draw(st.none() | factors.map(tuple)),
    )  # fmt: skip
    shape = Shape(microbatches=shape.microbatches, stages=shape.stages, times=uneven)
    schedule = automatic(replace(shape, weight_share=share), limit)
    run = simulate(schedule, uneven, weight_share=share)
    assert run.peak_memory.max() <= limit + 1e-9


@given(shape=shapes)
@few
def test_automatic_is_no_worse_than_what_fits_by_hand(shape):
    makers = (zb_h1, zb_h2, zb_1p, zb_2p)
    cost = {maker: simulate(maker(shape), shape.times).cost for maker in makers}
    assert cost[zb_1p] <= cost[zb_h1] * (1 + 1e-9)
    assert cost[zb_2p] <= min(cost[zb_h1], cost[zb_h2]) * (1 + 1e-9)
    for maker, limit in ((zb_1p, shape.stages), (zb_2p, 2 * shape.stages)):
        run = simulate(maker(shape), weight_share=shape.weight_share)
        assert run.peak_memory.max() <= limit


def test_memory_buys_time():
    measured = to_times(*ROWS[0][2])

    def cost(limit, maker):
        shape = Shape(
            microbatches=24, stages=8, times=measured, memory_limit=limit, weight_share=1.0
        )
        return simulate(maker(shape), measured).cost

    costs = [cost(limit, zb_1p) for limit in (4, 8, 16, 28)]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == 4
    assert cost(16, zb_1p) == cost(16, zb_2p) == cost(None, zb_2p)  # an explicit limit counts
    assert cost(1e6, zb_1p) <= costs[-1]


def test_less_than_one_stash_is_refused():
    with pytest.raises(UserError) as error:
        zb_1p(Shape(microbatches=4, stages=2, memory_limit=0.5))
    names(error, "memory_limit=0.5", "1")
    with pytest.raises(UserError) as error:
        zb_1p(Shape(microbatches=4, stages=2, weight_share=1.5))
    names(error, "weight_share=1.5")


@given(shape=shapes, virtual=st.integers(1, 3))
@few
def test_aligned_zb_costs_lockstep_no_bubble_of_w(shape, virtual):
    m, p, t = shape.microbatches, shape.stages, shape.times
    m = m * p if virtual > 1 else m
    schedule = aligned_zb(Shape(microbatches=m, stages=p, virtual=virtual))
    assert schedule.ticks == m * virtual + (virtual + 1) * p - 2
    assert (schedule.weight_ticks == schedule.weight_ticks[:, :, :1]).all()  # at once on all stages
    assert (schedule.weight_ticks == schedule.backward_ticks.max(axis=2, keepdims=True)).all()
    waiting = np.minimum(np.arange(p) + 1, m * virtual)
    assert schedule.weights_in_flight.tolist() == waiting.tolist()
    silent = Times(forward=t.forward, backward=t.backward, weight=t.weight)
    makespan = (m + (p - 1) / virtual) * (t.forward + t.backward) + m * t.weight
    assert simulate(schedule, silent, model="lockstep").makespan == pytest.approx(makespan)


def test_aligned_zb_against_1f1b_in_lockstep():
    """At p=8, m=24 and equal F, B and W, 16.3 % of the time is bubble; with 1F1B 22.6 %."""
    plain = make("1f1b", microbatches=24, stages=8)
    for schedule, rate in [(aligned_zb(Shape(microbatches=24, stages=8)), 0.163), (plain, 0.226)]:
        assert round(simulate(schedule, model="lockstep").zero_bubble_rate, 3) == rate


@given(shape=shapes, virtual=st.integers(1, 3))
@few
def test_deferred_zb_hides_w_in_lockstep_where_it_fits(shape, virtual):
    m, p, t = shape.microbatches, shape.stages, shape.times
    m = m * p if virtual > 1 else m
    shape = Shape(microbatches=m, stages=p, virtual=virtual, times=t)
    schedule, aligned = deferred_zb(shape), aligned_zb(shape)
    if m * virtual < (virtual + 1) * p - 2:
        assert (schedule.weight_ticks == aligned.weight_ticks).all()
        return
    assert schedule.ticks == m * virtual + (virtual + 2) * p - 3
    assert schedule.weights_in_flight.max() <= 2 * p - 1
    assert schedule.in_flight.tolist() == aligned.in_flight.tolist()
    most = (2 * (p - 1) + (virtual - 1) * p + 1) / virtual
    assert simulate(schedule, weight_share=1.0).peak_memory.max() <= most + 1e-9
    w = min(t.weight, t.forward, t.backward)
    times = Times(forward=t.forward, backward=t.backward, weight=w, comm=t.comm)
    shape = Shape(microbatches=m, stages=p, virtual=virtual, times=times)
    run = simulate(schedule, times, model="lockstep")
    assert run.bubble_over_ideal == pytest.approx(MAKERS["deferred_zb"].bubble_over_ideal(shape))
    silent = Times(forward=t.forward, backward=t.backward, weight=w)
    idle = (p - 1) / virtual * (t.forward + t.backward - w)
    run = simulate(schedule, silent, model="lockstep")
    assert run.makespan == pytest.approx(m * silent.work + idle)


def test_deferred_zb_halves_the_bubble_of_aligned_zb():
    """F = B = W, p=8, m=24: 7/72 of ideal time, as ZB-H1's asynchronously; 14/72; 1F1B's 21/72."""
    shape = Shape(microbatches=24, stages=8)
    bubbles = [
        simulate(make(shape), model="lockstep").bubble_over_ideal
        for make in (deferred_zb, aligned_zb, one_f_one_b)
    ]
    assert bubbles == pytest.approx([7 / 72, 14 / 72, 21 / 72])
    assert simulate(zb_h1(shape)).bubble_over_ideal == pytest.approx(7 / 72)
