"""1F1B and GPipe: closed forms, the paper's bubble, and Megatron's order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.schedules.makers import make
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate
from mtx.view.schedule import op_order

quick = settings(max_examples=60, deadline=None)
groups, stage_counts, virtuals = st.integers(1, 5), st.integers(1, 8), st.integers(1, 4)


@quick
@given(groups, stage_counts, virtuals)
def test_1f1b_closed_forms(groups, p, v):
    m = groups * p
    schedule = make("1f1b", microbatches=m, stages=p, virtual=v)
    assert schedule.ticks == m * v + (v + 1) * p - 2
    megatron = [2 * (p - 1 - s) + (v - 1) * p + 1 for s in range(p)]
    assert schedule.in_flight.tolist() == [min(n, m * v) for n in megatron]
    if m * v >= megatron[0]:
        assert schedule.slots == megatron[0]
    assert schedule.receive_slots == 0


@quick
@given(st.integers(1, 20), stage_counts, virtuals)
def test_a_short_last_group_leaves_idle_ticks(m, p, v):
    schedule = make("1f1b", microbatches=m, stages=p, virtual=v)
    assert schedule.ticks == m * v + (v + 1) * p - 2 + (v - 1) * (-m % p)


def test_1f1b_slots_do_not_grow_with_microbatches():
    slots = {m: make("1f1b", microbatches=m, stages=4, virtual=2).slots for m in (8, 32, 128)}
    assert slots == {8: 11, 32: 11, 128: 11}


@quick
@given(groups, stage_counts, virtuals)
def test_gpipe_closed_forms(groups, p, v):
    m = groups * p
    schedule = make("gpipe", microbatches=m, stages=p, virtual=v)
    assert schedule.ticks == 2 * (m * v + p - 1)
    assert schedule.in_flight.tolist() == [m * v] * p
    assert [(phase.forward, phase.backward) for phase in schedule.phases] == [
        (True, False),
        (False, True),
    ]


@quick
@given(
    st.sampled_from(["1f1b", "gpipe"]), groups, stage_counts, virtuals,
    st.integers(1, 4), st.integers(1, 8),
)  # fmt: skip
def test_bubble_is_that_of_the_paper(name, groups, p, v, forward_time, backward_time):
    """SC'21 section 2.2: ideal time is m (F + B), with F and B of all chunks of a stage, and the
    bubble over it is (p - 1) / (v m)."""
    m = groups * p
    schedule = make(name, microbatches=m, stages=p, virtual=v)
    times = Times(forward=forward_time, backward=backward_time, weight=0)
    for model in ("lockstep", "asynchronous"):
        run = simulate(schedule, times, model=model)
        assert run.bubble_over_ideal == pytest.approx((p - 1) / (v * m))


def megatron_order(stage: int, *, p: int, v: int, m: int) -> list[str]:
    """Megatron-LM's interleaved 1F1B: 2(p-1-s) + (v-1)p warm-up Fs, then F and B alternate."""

    def op(kind: str, k: int) -> str:
        group, place = divmod(k, p * v)
        chunk = place // p
        return f"{kind}{group * p + place % p}.{chunk if kind == 'F' else v - 1 - chunk}"

    total = m * v
    warmup = min(2 * (p - 1 - stage) + (v - 1) * p, total)
    steady = [op(kind, k + (kind == "F") * warmup) for k in range(total - warmup) for kind in "FB"]
    return (
        [op("F", k) for k in range(warmup)]
        + steady
        + [op("B", k) for k in range(total - warmup, total)]
    )


@pytest.mark.parametrize(
    "p, v, m", [(4, 2, 8), (2, 2, 8), (4, 3, 12), (8, 4, 32), (3, 2, 9), (12, 4, 60), (1, 2, 3)]
)
def test_1f1b_order_is_that_of_megatron(p, v, m):
    orders = op_order(make("1f1b", microbatches=m, stages=p, virtual=v))
    assert orders == [megatron_order(stage, p=p, v=v, m=m) for stage in range(p)]


def test_1f1b_order_is_that_of_figure_4():
    """SC'21, figure 4, bottom (interleaved, p=4, v=2, m=8): the first and the last device's row.

    Dark numbers (the first chunk) end with .0 here, light ones with .1; the figure counts from 1.
    """
    first, *_, last = op_order(make("1f1b", microbatches=8, stages=4, virtual=2))
    assert " ".join(first) == (
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 "
        "F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 B1.0 "
        "B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0"
    )
    assert " ".join(last) == (
        "F0.0 F1.0 F2.0 F3.0 "
        "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 B2.0 F7.0 B3.0 "
        "F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 "
        "B4.0 B5.0 B6.0 B7.0"
    )
