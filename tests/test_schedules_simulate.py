"""The simulator against published bubbles, the papers' closed forms, and a simple, slow oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.orders import B, BadOp, F, Op, Orders, W
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Shape, Times
from mtx.schedules.simulate import simulate

quick = settings(max_examples=80, deadline=None)
MODELS = ("asynchronous", "lockstep")


@st.composite
def any_times(draw, stages: int) -> Times:
    """Whole numbers and halves, so that sums are exact in any order."""
    half = st.integers(0, 8).map(lambda n: n / 2)
    forward, backward, weight = draw(half), draw(half), draw(half)
    factor = st.sampled_from([0.5, 1.0, 1.5, 2.0])
    factors = draw(st.none() | st.lists(factor, min_size=stages, max_size=stages).map(tuple))
    return Times(
        forward=forward + 1, backward=backward, weight=weight, comm=draw(half),
        stage_factors=factors,
    )  # fmt: skip


@st.composite
def random_orders(draw) -> Schedule:
    """Any legal orders of random ready ops: W split or not, slices or not, chunks anywhere."""
    stages, virtual = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    microbatches, slices, split = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(booleans)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    items, last = microbatches * slices, stages * virtual - 1
    virtual_stages = rng.permutation(stages * virtual).reshape(virtual, stages)
    where = {int(k): (c, s) for (c, s), k in np.ndenumerate(virtual_stages)}
    kinds = (F, B, W) if split else (F, B)
    left = {(kind, i, k) for kind in kinds for i in range(items) for k in where}
    done: set[tuple[int, int, int]] = set()
    lists: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
    while left:
        ready = sorted(op for op in left if needs(*op, slices, last) <= done)
        op = kind, item, virtual_stage = ready[rng.integers(len(ready))]
        chunk, stage = where[virtual_stage]
        lists[stage].append((kind, item, chunk))
        left.remove(op)
        done.add(op)
    return Schedule.from_orders(
        "any", Orders.from_lists(lists), virtual_stages=virtual_stages, slices=slices
    )


@st.composite
def known_schedules(draw) -> Schedule:
    name = draw(st.sampled_from(sorted(MAKERS)))
    virtual = MAKERS[name].virtual or draw(st.integers(1, 3))
    slices = draw(st.integers(1, 3)) if MAKERS[name].sliced else 1
    # Some makers need as many microbatches as stages, and V-shapes an even number of both.
    stages = draw(st.sampled_from([2, 4]))
    microbatches = 2 * stages + draw(st.integers(0, 4))
    return make(
        name, microbatches=microbatches, stages=stages, virtual=virtual, slices=slices
    )  # fmt: skip


booleans, counts = st.booleans(), st.integers(1, 3)
schedules = st.one_of(known_schedules(), random_orders())


def needs(
    kind: int, item: int, virtual_stage: int, slices: int, last: int
) -> set[tuple[int, int, int]]:
    """(kind, item, virtual stage) of the ops that must have ended before this one."""
    if kind == W:
        return {(B, item, virtual_stage)}
    if kind == F:
        before = {(F, item, virtual_stage - 1)} if virtual_stage > 0 else set()
        return before | ({(F, item - 1, virtual_stage)} if item % slices else set())
    after = {(F, item, virtual_stage)} | (
        {(B, item, virtual_stage + 1)} if virtual_stage < last else set()
    )
    return after | ({(B, item + 1, virtual_stage)} if (item + 1) % slices else set())


def duration(schedule: Schedule, times: Times, kind: int, stage: int) -> float:
    backward = times.backward + (0 if schedule.split else times.weight)
    factor = times.stage_factors[stage] if times.stage_factors else 1.0
    share = schedule.virtual * schedule.slices
    return (times.forward, backward, times.weight)[kind] * factor / share


def slow_simulation(schedule: Schedule, times: Times) -> dict[tuple[int, int, int], float]:
    """{(kind, item, virtual stage): end}, by searching repeatedly for an op that can run."""
    last = schedule.stages * schedule.virtual - 1
    stage_of = {int(k): s for (_, s), k in np.ndenumerate(schedule.virtual_stages)}
    todo = [schedule.orders.of(stage) for stage in range(schedule.stages)]
    end: dict[tuple[int, int, int], float] = {}
    clock = [0.0] * schedule.stages
    while any(todo):
        for stage in range(schedule.stages):
            if not todo[stage]:
                continue
            kind, item, chunk = todo[stage][0]
            virtual_stage = int(schedule.virtual_stages[chunk, stage])
            needed = needs(kind, item, virtual_stage, schedule.slices, last)
            if needed <= end.keys():
                arrivals = [
                    end[op] + (times.comm if stage_of[op[2]] != stage else 0) for op in needed
                ]
                begin = max([clock[stage], *arrivals])
                clock[stage] = begin + duration(schedule, times, kind, stage)
                end[kind, item, virtual_stage] = clock[stage]
                todo[stage].pop(0)
    return end


# --- published rows -------------------------------------------------------------------------------

# Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24 (arXiv 2401.10241): F, B, W and comm in ms of
# table 6, and the bubble rates of 1F1B and of interleaved 1F1B in table 5; p = 8 in all of them.
ZERO_BUBBLE_ROWS = [
    # m, v, F, B, W, comm, 1F1B, interleaved
    (24, 3, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055),  # 1.5B, 22 layers
    (32, 3, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818),
    (64, 3, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443),
    (24, 4, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808),  # 6.2B, 30 layers
    (32, 4, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628),
    (64, 4, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320),
]


@pytest.mark.parametrize("m, v, f, b, w, comm, plain, interleaved", ZERO_BUBBLE_ROWS)
def test_bubble_rates_of_1f1b_are_those_of_the_zero_bubble_paper(
    m, v, f, b, w, comm, plain, interleaved
):
    p, times = 8, Times(forward=f, backward=b, weight=w, comm=comm)
    simulation = simulate(make("1f1b", microbatches=m, stages=p), times)
    assert round(simulation.zero_bubble_rate, 4) == plain
    # The paper's figure for the interleaved schedule leaves out p of the sends.
    cost = simulate(make("1f1b", microbatches=m, stages=p, virtual=v), times).cost - p * comm
    assert round((cost - m * times.work) / cost, 4) == interleaved


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name, v", [("gpipe", 1), ("1f1b", 1), ("gpipe", 3), ("1f1b", 2)])
@pytest.mark.parametrize("p, groups", [(1, 2), (2, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (1, 2, 0), (3, 1, 1)])
def test_bubbles_are_those_of_narayanan(model, name, v, p, groups, f, b, w):
    """SC'21, section 2.2: bubble over ideal time (p-1)/m, and (p-1)/(v m) interleaved."""
    schedule = make(name, microbatches=groups * p, stages=p, virtual=v)
    simulation = simulate(schedule, Times(forward=f, backward=b, weight=w), model=model)
    assert simulation.bubble_over_ideal == pytest.approx((p - 1) / (v * groups * p), abs=1e-12)
    assert simulation.makespan == pytest.approx((groups * p + (p - 1) / v) * (f + b + w))


@pytest.mark.parametrize("gpus, batch", [(32, 32), (32, 128), (128, 128), (128, 512)])
@pytest.mark.parametrize("data", [1, 2, 4, 8, 16, 32])
def test_bubbles_are_those_of_narayanan_figure_6(gpus, batch, data):
    """SC'21, figure 6: n GPUs, d of them data-parallel, batch/microbatch b': (n - d)/b'."""
    schedule = make("1f1b", microbatches=batch // data, stages=gpus // data)
    assert simulate(schedule).bubble_over_ideal == pytest.approx((gpus - data) / batch)


@pytest.mark.parametrize("d, n", [(2, 4), (4, 4), (4, 12), (8, 16)])
def test_bubbles_and_activations_are_those_of_the_chimera_paper(d, n):
    """Li and Hoefler, Chimera, SC'21 (arXiv 2107.06925), table 2, depth D and N microbatches: GPipe
    and DAPPLE (1F1B) have bubble ratio (D-1)/(N+D-1); GPipe keeps N activations, DAPPLE 1 to D."""
    for name, kept in (("gpipe", [n] * d), ("1f1b", list(range(d, 0, -1)))):
        simulation = simulate(make(name, microbatches=n, stages=d))
        idle = simulation.makespan - simulation.ideal
        assert idle / simulation.makespan == pytest.approx((d - 1) / (n + d - 1))
        assert simulation.in_flight.tolist() == simulation.peak_memory.tolist() == kept


def test_interleaved_1f1b_runs_as_drawn_in_figure_4():
    """SC'21, figure 4, bottom (p=4, v=2, m=8, B twice F): the starts of each device's first ops, in
    units of the F of one chunk. Digits are microbatches, primes the second chunk."""
    simulation = simulate(
        make("1f1b", microbatches=8, stages=4, virtual=2), Times(forward=2, backward=4, weight=0)
    )
    drawn = {
        0: "1 2 3 4 1' 2' 3' 4' 5 6 7 | 1'",
        1: "1 2 3 4 1' 2' 3' 4' 5 | 1'",
        2: "1 2 3 4 1' 2' 3' | 1'",
        3: "1 2 3 4 1' | 1' | 2' | 2' | 3' | 3' | 4' | 4' | 5 | 1 | 6 | 2",
    }
    for stage, row in drawn.items():
        names, kind = [], F
        for op in simulation.orders.of(stage):
            if op.kind != kind:
                names, kind = [*names, "|"], op.kind
            names.append(f"{op.item + 1}{chr(39) * op.chunk}")
        assert " ".join(names).startswith(row)
    assert simulation.start[:, 0].tolist() == [0, 1, 2, 3]
    first_backward = [simulation.start[s][simulation.orders.kind[s] == B][0] for s in range(4)]
    assert first_backward == [14, 12, 10, 8]
    assert simulation.makespan == (8 + 3 / 2) * 6


# --- the oracle -----------------------------------------------------------------------------------


@quick
@given(st.data(), schedules)
def test_ops_run_when_a_slow_simulation_runs_them(data, schedule):
    times = data.draw(any_times(schedule.stages))
    simulation = simulate(schedule, times)
    expected = slow_simulation(schedule, times)
    for stage in range(schedule.stages):
        for at, (kind, item, chunk) in enumerate(simulation.orders.of(stage)):
            end = expected[kind, item, int(schedule.virtual_stages[chunk, stage])]
            assert simulation.end[stage, at] == pytest.approx(end, abs=1e-9)
            took = simulation.end[stage, at] - simulation.start[stage, at]
            assert took == pytest.approx(duration(schedule, times, kind, stage), abs=1e-9)


@quick
@given(st.data(), schedules)
def test_ticks_last_as_long_as_their_longest_stage(data, schedule):
    times = data.draw(any_times(schedule.stages))
    simulation = simulate(schedule, times, model="lockstep")
    last = schedule.stages * schedule.virtual - 1
    stage_of = {int(k): s for (_, s), k in np.ndenumerate(schedule.virtual_stages)}
    begin, starts = 0.0, {}
    for tick in range(schedule.ticks):
        longest, sends = 0.0, False
        for stage in range(schedule.stages):
            now = begin
            for kind, half in enumerate(schedule.halves):
                if half.busy[tick, stage]:
                    item, chunk = int(half.item[tick, stage]), int(half.chunk[tick, stage])
                    starts[stage, Op(kind, item, chunk)] = now
                    now += duration(schedule, times, kind, stage)
                    virtual_stage = int(schedule.virtual_stages[chunk, stage])
                    to = np.clip(virtual_stage + (1, -1, 0)[kind], 0, last)
                    sends |= stage_of[int(to)] != stage
            longest = max(longest, now - begin)
        begin += longest + times.comm * sends
    assert simulation.makespan == pytest.approx(begin)
    for stage in range(schedule.stages):
        for at, op in enumerate(simulation.orders.of(stage)):
            assert simulation.start[stage, at] == pytest.approx(starts[stage, op], abs=1e-9)


# --- what holds for every schedule ----------------------------------------------------------------


@quick
@given(st.data(), schedules, st.sampled_from(MODELS))
def test_no_stage_is_faster_than_its_work(data, schedule, model):
    times = data.draw(any_times(schedule.stages))
    simulation = simulate(schedule, times, model=model)
    assert simulation.cost <= simulation.makespan + 1e-9
    assert simulation.ideal <= simulation.cost + 1e-9
    assert -1e-9 <= simulation.zero_bubble_rate < 1 and simulation.bubble_over_ideal >= -1e-9
    gaps = simulation.start[:, 1:] - simulation.end[:, :-1]
    assert (gaps >= -1e-9).all()


@quick
@given(st.data(), schedules, st.sampled_from(MODELS))
def test_the_bubble_is_what_stages_idle_over_what_they_work(data, schedule, model):
    """Over all stages together, whatever they wait for, even if each has its own times."""
    stages, half = schedule.stages, st.integers(1, 8).map(lambda n: n / 2)
    own = data.draw(st.lists(st.tuples(half, half, half), min_size=stages, max_size=stages))
    for times in (data.draw(any_times(stages)), Times(comm=0.5, stage_times=tuple(own))):
        run = simulate(schedule, times, model=model)
        works = (run.end - run.start).sum()
        assert run.ideal == pytest.approx(works / stages)
        assert run.bubble_over_ideal == pytest.approx((stages * run.makespan - works) / works)


@quick
@given(st.data(), schedules, st.sampled_from(MODELS))
def test_times_of_every_stage_are_as_factors_where_these_can_say_them(data, schedule, model):
    times = replace(data.draw(any_times(schedule.stages)), comm=0.5)
    own = tuple(map(tuple, times.of_stages(schedule.stages).tolist()))
    one, other = (
        simulate(schedule, t, model=model) for t in (times, Times(comm=0.5, stage_times=own))
    )
    assert (one.start == other.start).all() and (one.end == other.end).all()


@quick
@given(st.data(), schedules, st.sampled_from(MODELS), st.sampled_from([0.5, 3.0]))
def test_more_comm_never_shortens(data, schedule, model, more):
    times = data.draw(any_times(schedule.stages))
    slower = replace(times, comm=times.comm + more)
    before, after = (simulate(schedule, t, model=model) for t in (times, slower))
    assert (after.end >= before.end - 1e-9).all()


@quick
@given(st.data(), schedules)
def test_a_stage_that_waits_for_nobody_is_never_later_than_in_lock_step(data, schedule):
    times = data.draw(any_times(schedule.stages))
    ticks = Schedule.from_ticks(  # without other orders than those of the ticks
        "ticks", schedule.forward_ticks, schedule.backward_ticks, schedule.weight_ticks,
        virtual_stages=schedule.virtual_stages, slices=schedule.slices,
    )  # fmt: skip
    alone, together = (simulate(ticks, times, model=model) for model in MODELS)
    assert (alone.end <= together.end + 1e-9).all()


@quick
@given(st.data(), schedules, st.sampled_from(MODELS), st.sampled_from([0.0, 0.25, 1.0]))
def test_memory_is_what_lies_between_f_and_w(data, schedule, model, weight_share):
    times = data.draw(any_times(schedule.stages))
    simulation = simulate(schedule, times, model=model, weight_share=weight_share)
    share = 1 / (schedule.slices * schedule.virtual)
    split = weight_share if schedule.split else 0.0
    for stage in range(schedule.stages):
        kept, waiting, peak, most = 0.0, 0, 0.0, 0
        for kind, _, _ in simulation.orders.of(stage):
            kept += share * (kind == F)
            waiting += kind == F
            peak, most = max(peak, kept), max(most, waiting)
            kept -= share * ((kind == B) * (1 - split) + (kind == W) * split)
            waiting -= kind == B
        assert simulation.peak_memory[stage] == pytest.approx(peak)
        assert simulation.in_flight[stage] == most
        moments, values = simulation.memory_over_time(stage)
        assert (np.diff(moments) >= -1e-9).all()
        assert values.max() == pytest.approx(peak) and values[-1] == pytest.approx(0)
    if model == "lockstep":
        assert simulation.in_flight.tolist() == schedule.in_flight.tolist()


def test_a_short_f_warms_up_in_flight_of_the_closed_form():
    """1F1B keeps p - s microbatches on stage s in Megatron's order, 2(p-1-s) + 1 in our ticks."""
    schedule = make("1f1b", microbatches=16, stages=4)
    assert simulate(schedule).in_flight.tolist() == [4, 3, 2, 1]
    assert simulate(schedule, model="lockstep").in_flight.tolist() == [7, 5, 3, 1]
    assert simulate(schedule, model="lockstep").peak_memory.tolist() == [7, 5, 3, 1]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(MAKERS)), st.integers(1, 10), st.integers(1, 4))
def test_a_closed_form_of_the_bubble_holds_or_is_none(data, name, microbatches, stages):
    """For ticks in lock-step or for a program per stage; each form says for which of the two."""
    known = MAKERS[name]
    shape = Shape(
        microbatches=microbatches, stages=stages, virtual=known.virtual or data.draw(counts),
        slices=data.draw(counts) if known.sliced else 1, times=data.draw(any_times(stages)),
    )  # fmt: skip
    if (claimed := known.bubble_over_ideal(shape)) is not None:
        runs = [simulate(known.make(shape), shape.times, model=model) for model in MODELS]
        assert any(run.bubble_over_ideal == pytest.approx(claimed) for run in runs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "breadth_first", "seq1f1b", "terapipe"])
@pytest.mark.parametrize("times", [Times(comm=0.5), Times(stage_factors=(1.0, 1.0, 2.0, 1.0))])
def test_where_sends_take_time_or_stages_differ_there_is_none(name, times):
    for virtual in (1, 2):
        shape = Shape(microbatches=8, stages=4, virtual=virtual, times=times)
        assert MAKERS[name].bubble_over_ideal(shape) is None


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_told():
    schedule = make("1f1b", microbatches=4, stages=2)
    with pytest.raises(UserError) as error:
        simulate(schedule, model="sync")
    names(error, "'sync'")
    with pytest.raises(UserError) as error:
        simulate(schedule, Times(stage_factors=(1.0, 1.0, 1.0)))
    names(error, "stage_factors", "3", "2")
    own = Times(stage_times=((1.0, 1.0, 1.0),) * 3)
    with pytest.raises(UserError) as error:
        simulate(schedule, own)
    names(error, "stage_times", "3", "2")
    with pytest.raises(UserError) as error:
        make("1f1b", microbatches=4, stages=3, times=own)
    names(error, "stage_times")
    with pytest.raises(UserError) as error:
        simulate(schedule, weight_share=1.5)
    names(error, "weight_share=1.5", "0", "1")


def test_stages_that_wait_for_one_another_for_ever_are_named():
    """Stage 0 has its first B before it sends the F that stage 1 starts with."""
    kinds = [[F, B, F, B], [F, F, B, B]]
    items = [[0, 0, 1, 1], [0, 1, 0, 1]]
    orders = Orders(
        kind=np.array(kinds), item=np.array(items), chunk=np.zeros((2, 4), int)
    )  # fmt: skip
    schedule = replace(make("1f1b", microbatches=2, stages=2), name="mine", orders=orders)
    with pytest.raises(BadOp) as e:
        simulate(schedule)
    names(e, "'mine'", "stage 0", "B0.0")
    assert (e.value.stage, e.value.op) == (0, Op(B, 0, 0))
