"""Seconds of a schedule equal its table's, by a simulation that shares no code, or by hand."""

import json
import random

import pytest
from errors import names

from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.choose import schedule_for
from mtx.plan.makespan import LOOPED, pipeline_s
from mtx.plan.published import bubble
from mtx.schedules.formats import to_dict
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate


@pytest.mark.parametrize("model", ["asynchronous", "lockstep"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pipe", "virtual", "m"), [(4, 1, 8), (4, 2, 8), (8, 3, 24), (2, 1, 1)])
def test_equal_stages_idle_for_the_papers_bubble(schedule, pipe, virtual, m, model):
    layout = Layout(pipe=pipe, virtual=virtual, schedule=schedule)
    stages = [(1.0, 1.5, 0.5)] * pipe
    seconds = pipeline_s(layout, stages, microbatches=m, hop_s=0.0, model=model)
    assert seconds == pytest.approx(3 * m * (1 + bubble(layout, m)))


def test_the_slowest_stage_sets_the_pace():
    even, head = [(1.0, 1.0, 1.0)] * 4, [(1.0, 1.0, 1.0)] * 3 + [(1.5, 1.0, 1.0)]
    layout = Layout(pipe=4)
    slower = pipeline_s(layout, head, microbatches=16, hop_s=0) - pipeline_s(
        layout, even, microbatches=16, hop_s=0
    )
    assert slower == pytest.approx(16 * 0.5)
    one = pipeline_s(Layout(), even[:1], microbatches=16, hop_s=1.0)
    assert one == 16 * 3.0  # no stage to send to


def asynchronous_s(table, stages, hop_s):
    """Seconds until the last op ends, found by trying all ops again until each has run."""
    v, virtual_stages, last = table.virtual, table.virtual_stages, table.virtual_stages.max()
    stage_of = {int(virtual_stages[c, s]): s for c in range(v) for s in range(table.stages)}
    lists = [table.orders.of(stage) for stage in range(table.stages)]
    done = {}  # (kind, item, virtual_stage): its end
    position, clock = [0] * table.stages, [0.0] * table.stages
    while any(at < len(ops) for at, ops in zip(position, lists, strict=True)):
        for stage, ops in enumerate(lists):
            if position[stage] == len(ops):
                continue
            kind, item, chunk = ops[position[stage]]
            virtual_stage = int(virtual_stages[chunk, stage])
            needs = {
                0: (0, item, virtual_stage - 1),
                1: (1, item, virtual_stage + 1),
                2: (1, item, virtual_stage),
            }[kind]
            if kind == 1 and virtual_stage == last:
                needs = (0, item, virtual_stage)
            ready = 0.0 if needs[2] < 0 else done.get(needs)
            if ready is None:
                continue
            if needs[2] >= 0 and stage_of[needs[2]] != stage:
                ready += hop_s
            forward, backward, weight = stages[stage]
            lasts = (forward, backward if table.split else backward + weight, weight)[kind] / v
            clock[stage] = done[kind, item, virtual_stage] = max(clock[stage], ready) + lasts
            position[stage] += 1
    return max(clock)


def lockstep_s(table, stages, hop_s):
    """The sum over ticks of the longest stage, plus a message if a stage sends to another one."""
    v, virtual_stages, total = table.virtual, table.virtual_stages, 0.0
    stage_of = {int(virtual_stages[c, s]): s for c in range(v) for s in range(table.stages)}
    for tick in range(table.ticks):
        longest, sends = 0.0, False
        for stage, (forward, backward, weight) in enumerate(stages):
            parts = (forward, backward if table.split else backward + weight, weight)
            takes = 0.0
            for kind, half in enumerate(table.halves):
                if half.item[tick, stage] >= 0:
                    takes += parts[kind] / v
                    virtual_stage = int(virtual_stages[half.chunk[tick, stage], stage])
                    to = stage_of.get(virtual_stage + (1, -1, 0)[kind], stage)
                    sends |= to != stage
            longest = max(longest, takes)
        total += longest + hop_s * sends
    return total


def random_stages(rng, pipe):
    """F, B and W of every stage: equal, equal except first and last, proportional, or random."""
    work = tuple(rng.uniform(0.1, 1) for _ in range(3))
    kind = rng.choice(("equal", "ends", "proportional", "nearly equal", "free"))
    if kind == "free":
        return [tuple(rng.uniform(0.1, 1) for _ in range(3)) for _ in range(pipe)]
    spread = {"proportional": 0.5, "nearly equal": 0.01}.get(kind, 0.0)
    stages = [
        tuple(part * factor for part in work)
        for factor in (rng.uniform(1 - spread, 1 + spread) for _ in range(pipe))
    ]
    if kind == "ends":
        stages[0] = (work[0] * rng.choice((1.02, 1.5)), work[1], work[2] * 1.2)
        stages[-1] = tuple(part * rng.choice((1.0, 1.3)) for part in work)
    return stages


LOOPED_AND_OTHERS = (
    *LOOPED, *LOOPED, "breadth_first", "zb_h1", "zb_h2", "aligned_zb", "deferred_zb", "zb_v",
    "v_half", "dualpipe_v",
)  # fmt: skip


def test_the_price_is_that_of_the_table():
    """500 tables with random p, v and m, stages uneven in F, B and W, and messages that take time;
    and the bound by which the search orders candidates is never above it."""
    rng = random.Random(25)
    for _ in range(500):
        name, pipe = rng.choice(LOOPED_AND_OTHERS), rng.randint(2, 5)
        virtual = MAKERS[name].virtual or rng.randint(1, 4)
        layout = Layout(pipe=pipe, virtual=virtual, schedule=name)
        m, hop_s = rng.randint(1, 6 * pipe), rng.choice((0.0, 0.0, 0.01, 0.1))
        stages = random_stages(rng, pipe)
        table = make(name, microbatches=m, stages=pipe, virtual=virtual)
        for model, oracle in (("asynchronous", asynchronous_s), ("lockstep", lockstep_s)):
            given = dict(microbatches=m, hop_s=hop_s, model=model)
            seconds = pipeline_s(layout, stages, **given)
            assert seconds == pytest.approx(oracle(table, stages, hop_s), rel=1e-9), (name, given)
            if name in LOOPED:
                assert pipeline_s(layout, stages, bound=True, **given) <= seconds * (1 + 1e-9)


def test_a_price_is_the_simulations_of_the_whole_table():
    """If stages differ only by a factor, which `simulate` supports; with many microbatches."""
    rng = random.Random(7)
    for _ in range(60):
        name, pipe, virtual = rng.choice(LOOPED), rng.choice((4, 8)), rng.randint(1, 3)
        layout, m = Layout(pipe=pipe, virtual=virtual, schedule=name), rng.randint(1, 20 * pipe)
        factors = tuple(rng.uniform(0.8, 1.25) for _ in range(pipe))
        times = Times(forward=1.0, backward=1.7, weight=0.8, stage_factors=factors)
        stages = [(f, 1.7 * f, 0.8 * f) for f in factors]
        for model in ("asynchronous", "lockstep"):
            run = simulate(schedule_for(layout, m), times, model=model)
            seconds = pipeline_s(layout, stages, microbatches=m, hop_s=0.0, model=model)
            assert seconds == pytest.approx(run.makespan, rel=1e-9)


def test_a_sliced_sequence_is_simulated():
    times = Times(forward=1.0, backward=1.7, weight=0.8)
    for m in (1, 4, 30):
        layout = Layout(pipe=4, slices=2, schedule="seq1f1b")
        run = simulate(schedule_for(layout, m), times)
        stages = [(1.0, 1.7, 0.8)] * 4
        assert pipeline_s(layout, stages, microbatches=m, hop_s=0.0) == pytest.approx(run.makespan)


def test_a_file_of_another_shape_has_no_price(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(to_dict(make("zb_h1", microbatches=6, stages=2))))
    layout, stages = Layout(pipe=2, schedule=str(path)), [(1.0, 1.0, 1.0)] * 2
    as_named = pipeline_s(
        Layout(pipe=2, schedule="zb_h1"), stages, microbatches=6, hop_s=0.0, model="lockstep"
    )
    in_file = pipeline_s(layout, stages, microbatches=6, hop_s=0.0, model="lockstep")
    assert in_file == pytest.approx(as_named)
    with pytest.raises(UserError) as error:
        pipeline_s(layout, stages, microbatches=7, hop_s=0.0)
    names(error, "6 microbatches", "microbatches=7")
