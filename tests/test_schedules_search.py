"""The search: its winner against all possible tables of small shapes, its limits, its reasons."""

from __future__ import annotations

import heapq
import itertools

import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.plan.choose import resolve
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.search import Candidate, search_schedules
from mtx.schedules.search import choose as choose_of
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate


def choose(*args, **kwargs) -> Candidate:
    return choose_of(search_schedules(*args, **kwargs))


def least_makespan(m: int, p: int, times: Times, limit: float | None = None) -> float:
    """The least makespan of tables of full ticks with one chunk per stage: a shortest path over
    states.

    A state is the numbers of F, B and W that each stage has run: with whole sequences, nothing is
    gained if kinds or stages take microbatches in different orders. B followed by W in the same
    tick costs as much as an unsplit B, so tables without W are included.
    """
    counts = [(f, b, w) for f in (0, 1) for b in (0, 1) for w in (0, 1)]
    lasts = [f * times.forward + b * times.backward + w * times.weight for f, b, w in counts]
    start, goal = ((0, 0, 0),) * p, ((m, m, m),) * p
    best, queue = {start: 0.0}, [(0.0, start)]
    while queue:
        spent, state = heapq.heappop(queue)
        if state == goal:
            return spent
        if spent > best[state]:
            continue
        options = []
        for s, (f, b, w) in enumerate(state):
            inputs = m if s == 0 else state[s - 1][0]
            gradients = m if s == p - 1 else state[s + 1][1]
            options.append([])
            for (df, db, dw), last in zip(counts, lasts, strict=True):
                after = f + df, b + db, w + dw
                ready = after[0] <= inputs and after[1] <= min(gradients, after[0])
                kept = after[0] - b + b - w  # what B and W use is held while they run
                small = limit is None or kept <= limit
                if ready and after[2] <= after[1] and (small or not df):
                    sends = (df and s < p - 1) or (db and s > 0)
                    options[-1].append((after, last, sends))
        for tick in itertools.product(*options):
            after, took, sends = zip(*tick, strict=True)
            total = spent + max(took) + times.comm * any(sends)
            if after != state and total < best.get(after, float("inf")):
                best[after] = total
                heapq.heappush(queue, (total, after))
    raise AssertionError("no table")


# --- the oracle -----------------------------------------------------------------------------------

lasts = st.sampled_from([0.5, 1.0, 1.5, 3.0])
sizes = st.sampled_from([(1, 1), (1, 2), (2, 2), (3, 2), (4, 2), (1, 3), (2, 3)])


@settings(max_examples=40, deadline=None)
@given(sizes, lasts, lasts, lasts, st.sampled_from([0.0, 0.5]), st.sampled_from([None, 2, 3]))
def test_nothing_found_beats_the_best_of_all_tables(size, f, b, w, comm, limit):
    m, p = size
    times = Times(forward=f, backward=b, weight=w, comm=comm)
    least = least_makespan(m, p, times, limit)
    for candidate in search_schedules(m, p, times=times, memory_limit=limit):
        assert not candidate.fits or candidate.lockstep >= least - 1e-9


@settings(max_examples=20, deadline=None)
@given(sizes, lasts, lasts)
def test_the_choice_is_the_best_of_all_tables_where_w_takes_no_time(size, f, b):
    times = Times(forward=f, backward=b, weight=0)
    assert choose(*size, times=times).lockstep == pytest.approx(least_makespan(*size, times))


@pytest.mark.parametrize("m, p", [(2, 2), (3, 2), (5, 2), (2, 3), (4, 3)])
def test_the_choice_is_the_best_of_all_tables_where_w_is_long(m, p):
    times = Times(forward=1, backward=1, weight=4)
    assert choose(m, p, times=times).lockstep == pytest.approx(least_makespan(m, p, times))


# --- all makers and parameters --------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.sampled_from([(1,), (2,), (1, 2), (1, 3)]),
    st.sampled_from([(1,), (1, 2), (3,)]), st.sampled_from([None, 1.0, 3.0, 6.5]),
    st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_every_maker_is_tried_and_the_best_comes_first(m, p, virtuals, slices, limit, comm):
    times = Times(forward=1, backward=1.25, weight=0.5, comm=comm)
    arguments = {
        "virtuals": virtuals, "slices": slices, "times": times, "memory_limit": limit,
        "weight_share": 1.0,
    }  # fmt: skip
    found = search_schedules(m, p, **arguments)
    tried = {(c.name, c.virtual, c.slices): c for c in found}
    assert len(tried) == len(found) and {c.name for c in found} == set(MAKERS)
    fitting = []
    every = [
        (name, virtual, cuts)
        for name, maker in MAKERS.items()
        for virtual in virtuals
        for cuts in (slices if maker.sliced else (1,))
        if maker.virtual in (None, virtual)
    ]
    for name, virtual, cuts in every:
        try:
            schedule = make(
                name, microbatches=m, stages=p, virtual=virtual, slices=cuts, times=times,
                memory_limit=limit, weight_share=1.0,
            )  # fmt: skip
        except UserError as error:
            assert tried[name, virtual, cuts].reason == str(error)
            continue
        waiting = schedule.weight_stash.slots if schedule.split else 0
        memory = (schedule.slots + waiting) / (virtual * cuts)
        candidate = tried[name, virtual, cuts]
        assert candidate.memory == pytest.approx(memory)
        assert candidate.fits == (limit is None or memory <= limit)
        assert candidate.lockstep == simulate(schedule, times, model="lockstep").makespan
        assert candidate.asynchronous == simulate(schedule, times).makespan
        assert candidate.for_comparison != MAKERS[name].lockstep
        if candidate.fits and MAKERS[name].lockstep:
            fitting.append(candidate.lockstep)
    prices = [c.lockstep for c in found if c.fits]
    assert prices == pytest.approx(sorted(prices))
    assert [c.fits for c in found] == sorted((c.fits for c in found), reverse=True)
    if fitting:
        assert choose(m, p, **arguments).lockstep == pytest.approx(min(fitting))
    else:
        with pytest.raises(UserError):
            choose(m, p, **arguments)


def test_every_candidate_has_a_reason():
    times = Times(comm=0.1)
    found = search_schedules(
        8, 4, virtuals=(1, 2, 3), slices=(1, 2), times=times, memory_limit=8, layers=16
    )
    reasons = {candidate.label: candidate.reason for candidate in found}
    assert all(reasons.values())
    assert reasons["gpipe"] == "keeps 9 stashes, over the limit of 8"
    assert reasons["1f1b v=3"] == "layers=16 cannot be divided over stages*virtual=4*3"
    assert reasons["interleaved_1f1b v=2"] == "the same table as 1f1b v=2"
    assert "% faster than" in found[0].reason and "of ideal time, not" in found[0].reason


def test_a_fixed_number_of_chunks_that_is_not_allowed_is_said():
    found = search_schedules(8, 4, virtuals=(2,))
    out = {c.label: c.reason for c in found if c.schedule is None}
    assert out["zb_h1"] == "made for virtual=1; allowed is 2"


def test_what_lock_step_does_not_suit_is_said_with_both_prices():
    found = {c.label: c for c in search_schedules(16, 4)}
    slow = found["zb_h1"]
    assert slow.asynchronous < 0.9 * slow.lockstep
    assert slow.reason.endswith(
        f"lock-step does not suit it: {slow.lockstep:.4g}, with a program per stage "
        f"{slow.asynchronous:.4g}"
    )
    assert "lock-step" not in found["1f1b"].reason


def test_less_memory_comes_first_among_the_equally_fast():
    labels = [c.label for c in search_schedules(8, 4, times=Times(weight=0))]
    assert labels.index("1f1b") < labels.index("gpipe")


def test_no_choice_says_what_would_be_needed():
    with pytest.raises(UserError) as error:
        choose(8, 4, virtuals=(1, 2), memory_limit=0.5)
    names(error, "v_min v=2", "3 stashes", "limit of 0.5")
    with pytest.raises(UserError) as error:
        choose(8, 4, virtuals=(1, 2), memory_limit=3.5)
    names(error, "memory_limit", "v_min v=2", "3")  # it fits, but is used only if named
    with pytest.raises(UserError) as error:
        choose(8, 4, layers=6)
    names(error, "layers=6", "stages*virtual=4*1")
    with pytest.raises(UserError) as error:
        choose(8, 4, virtuals=())
    names(error, "virtuals", "slices")


# --- the schedule of a layout ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, stage_layers, virtual, resolved",
    [
        (8, "even", 1, 2),
        (8, "balanced", 1, 2),  # the same
        (10, "balanced", 1, 1),
        (10, "balanced", 2, 2),
        (8, (3, 2, 2, 1), 1, 1),  # so there are four virtual stages
        (8, (1, 1, 2, 1, 0, 1, 1, 1), 2, 2),
        (2, (1, 0, 0, 1), 1, 1),
    ],
)
def test_what_auto_finds_can_place_the_layers(layers, stage_layers, virtual, resolved):
    layout = Layout(pipe=4, virtual=virtual, schedule="auto", stage_layers=stage_layers)
    model = ModelConfig(layers=layers)
    found, reason = resolve(layout, model, 8)
    found.check(model)
    assert found.virtual == resolved and reason.startswith(f"schedule {found.schedule}")


def test_even_stages_that_are_none_are_not_resolved():
    with pytest.raises(UserError) as error:
        resolve(Layout(pipe=4, schedule="auto"), ModelConfig(layers=10), 8)
    names(error, "layers=10", "stages*virtual=4*1")
