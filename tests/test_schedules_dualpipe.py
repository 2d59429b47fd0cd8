"""DualPipeV: memory, bubble, torch's orders, and fewer microbatches than torch accepts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.schedules.makers.dualpipe import MAKERS
from mtx.schedules.makers.vee import PERIOD
from mtx.schedules.orders import B, F, Op
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import Simulation, simulate

quick = settings(max_examples=60, deadline=None)
DUALPIPE_V = MAKERS["dualpipe_v"]


def run(p: int, m: int, times: Times | None = None) -> Simulation:
    """weight_share=1: a stash is kept whole until W."""
    shape = Shape(microbatches=m, stages=p, virtual=2, times=times or Times())
    return simulate(DUALPIPE_V.make(shape), times, weight_share=1.0)


@quick
@given(p=st.integers(1, 12), m=st.integers(1, 40))
def test_closed_forms_hold(p, m):
    shape, simulation = Shape(microbatches=m, stages=p, virtual=2), run(p, m)
    assert simulation.in_flight.tolist() == DUALPIPE_V.in_flight(shape).tolist()
    assert simulation.peak_memory.tolist() == (simulation.in_flight / 2).tolist()
    bubble = DUALPIPE_V.bubble_over_ideal(shape)
    assert (bubble is not None) == (m >= 2 * p)
    if bubble is not None:
        assert simulation.bubble_over_ideal == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_memory_and_bubble_beside_deepseeks(p):
    """With PP = 2p virtual stages: PP + 1 chunks, and (PP/2 - 1)(F&B + B - 3W) of bubble."""
    m = 3 * p
    simulation = run(p, m)
    assert simulation.in_flight.tolist() == [2 * p + 1] * p
    chunk_f, chunk_b, chunk_w = 1, 2, 1  # B: of input and weights
    published = (p - 1) * (chunk_f + chunk_b + chunk_b - 3 * chunk_w)
    assert simulation.bubble_over_ideal * PERIOD * m == pytest.approx(published / 2)


def test_no_bubble_is_claimed_for_other_times():
    shape = Shape(microbatches=24, stages=4, virtual=2, times=Times(weight=0.5))
    assert DUALPIPE_V.bubble_over_ideal(shape) is None
    assert DUALPIPE_V.in_flight(shape).tolist() == run(4, 24, shape.times).in_flight.tolist()


@pytest.mark.parametrize("p", [2, 5])
def test_fewer_microbatches_are_those_of_the_larger_table(p):
    whole = run(p, 2 * p).orders
    for m in range(1, 2 * p):
        orders = run(p, m).orders
        for stage in range(p):
            assert orders.of(stage) == [op for op in whole.of(stage) if op.item < m]


def test_steady_state_pairs_f_of_one_chunk_with_b_of_the_other():
    ops = run(4, 20).orders.of(1)
    step_4 = 2 * (4 - 1 - 1) + 2 * (1 + 1) + 3 * (4 - 1 - 1)
    kinds = [(op.kind, op.chunk) for op in ops[step_4 : step_4 + PERIOD * 14]]
    assert kinds == [(F, 0), (B, 1), (2, 1), (F, 1), (B, 0), (2, 0)] * 14


def test_orders_are_those_of_torch():
    """Op by op on each rank; two overlapped ops are taken one after the other, and torch's full
    backward B stands for B, then W."""
    pytest.importorskip("torch", reason="torch is absent: DualPipeV is not compared with torch's")
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    kinds = {"F": [0], "I": [1], "W": [2], "B": [1, 2]}
    for p, m in [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 11), (5, 10), (6, 13)]:
        orders = run(p, m).orders
        for stage, row in enumerate(get_schedule_ops("DualPipeV", p, m)):
            actions = [each for cell in row if cell for each in cell.sub_actions or [cell]]
            theirs = [
                Op(kind, action.microbatch_index, int(action.stage_index != stage))
                for action in actions
                for kind in kinds[action.computation_type.value]
            ]
            assert orders.of(stage) == theirs
