"""Breadth-first: its order, and its closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.schedules.makers import make
from mtx.schedules.makers.breadth_first import MAKERS, breadth_first
from mtx.schedules.orders import B, F
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import simulate

quick = settings(max_examples=60, deadline=None)
maker = MAKERS["breadth_first"]
shapes = st.builds(
    Shape,
    microbatches=st.integers(1, 10), stages=st.integers(1, 6), virtual=st.integers(1, 4),
    times=st.sampled_from([Times(), Times(forward=1.5, weight=0.25), Times(backward=2.0)]),
)  # fmt: skip


@quick
@given(shapes)
def test_each_chunk_has_one_run_of_f_and_one_of_b(shape):
    """So a chunk's weights are gathered twice a step for any m."""
    schedule = breadth_first(shape)
    for stage in range(shape.stages):
        runs = [[-1, -1, 0]]
        for kind, _, chunk in schedule.orders.of(stage):
            if [kind, chunk] != runs[-1][:2]:
                runs.append([kind, chunk, 0])
            runs[-1][2] += 1
        forward = [[F, chunk, shape.microbatches] for chunk in range(shape.virtual)]
        backward = [[B, chunk, shape.microbatches] for chunk in reversed(range(shape.virtual))]
        assert runs[1:] == forward + backward


@quick
@given(shapes)
def test_b_is_f_in_reverse(shape):
    for stage in range(shape.stages):
        ops = [op[1:] for op in breadth_first(shape).orders.of(stage)]
        assert ops == ops[::-1]


@quick
@given(shapes, st.sampled_from(["lockstep", "asynchronous"]))
def test_bubble_and_memory_are_the_closed_forms(shape, model):
    schedule = breadth_first(shape)
    simulation = simulate(schedule, shape.times, model=model)
    m, p, v = shape.microbatches, shape.stages, shape.virtual
    waits = (v - 1) * max(p - m, 0)
    assert simulation.bubble_over_ideal == pytest.approx((p - 1 + waits) / (v * m), abs=1e-12)
    assert simulation.bubble_over_ideal == pytest.approx(maker.bubble_over_ideal(shape), abs=1e-12)
    assert simulation.in_flight.tolist() == maker.in_flight(shape).tolist() == [m * v] * p
    assert simulation.peak_memory.tolist() == [m] * p


@quick
@given(shapes)
def test_no_op_can_run_in_an_earlier_tick(shape):
    schedule = breadth_first(shape)
    packed = Schedule.from_orders("packed", schedule.orders)
    assert (packed.forward_ticks == schedule.forward_ticks).all()
    assert (packed.backward_ticks == schedule.backward_ticks).all()


@pytest.mark.parametrize("m, p", [(4, 4), (8, 4), (6, 2)])
def test_with_one_chunk_it_costs_what_gpipe_does(m, p):
    ours = breadth_first(Shape(microbatches=m, stages=p))
    gpipe = make("gpipe", microbatches=m, stages=p)
    assert (ours.forward_ticks == gpipe.forward_ticks).all()
    assert np.ptp(ours.backward_ticks) == np.ptp(gpipe.backward_ticks)
    costs = [simulate(s, Times(comm=0.5)).makespan for s in (ours, gpipe)]
    assert costs[0] == costs[1]
