"""Schedules of any maker: the contents of their tables, and a replay as the program runs them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.schedules import makers
from mtx.schedules.makers import MAKERS, forward_table, make
from mtx.schedules.makers.one_f_one_b import one_f_one_b
from mtx.schedules.orders import B, F, Orders, orders_of
from mtx.schedules.schedule import IDLE, MOST_PHASES, Schedule, looped_placement, vee_placement
from mtx.schedules.shape import Shape

quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("row", ["None", "Maker(make=lambda shape: None, source='here')"])
def test_a_schedule_is_a_maker_with_a_docstring(row, tmp_path, monkeypatch):
    file = f"my_own_{len(row)}"
    text = f"from mtx.schedules.shape import Maker\nMAKERS = {{'mine': {row}}}\n"
    (tmp_path / f"{file}.py").write_text(text)
    monkeypatch.setattr(makers, "__path__", [*makers.__path__, str(tmp_path)])
    with pytest.raises(UserError) as error:
        makers.find_makers()
    assert names(error, "'mine'", f"{file}.py", "docstring")


@pytest.mark.parametrize("text", ["", 'MAKERS = {"1f1b": None}\n'], ids=["none", "twice"])
def test_a_file_of_makers_without_a_table_or_with_a_known_name_is_refused(
    text, tmp_path, monkeypatch
):
    file = f"my_{len(text)}"
    (tmp_path / f"{file}.py").write_text(text)
    monkeypatch.setattr(makers, "__path__", [*makers.__path__, str(tmp_path)])
    with pytest.raises(UserError) as error:
        makers.find_makers()
    assert names(error, *(("'1f1b'", "one_f_one_b.py") if text else ("MAKERS",)), f"{file}.py")


@st.composite
def made_schedules(draw) -> Schedule:
    name = draw(st.sampled_from(sorted(MAKERS)))
    maker = MAKERS[name]
    try:
        return make(
            name,
            microbatches=draw(st.integers(1, 11)),
            stages=draw(st.integers(1, 6)),
            virtual=maker.virtual or draw(st.integers(1, 4)),
            slices=draw(st.integers(1, 3)) if maker.sliced else 1,
        )
    except UserError as refusal:  # some makers support fewer shapes than these
        assert "\n" not in str(refusal)
        return make("1f1b", microbatches=4, stages=3)


@st.composite
def random_schedules(draw) -> Schedule:
    """Any legal table: in each tick a stage picks ready ops at random, or stays idle."""
    stages, virtual, slices = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    items, split = draw(st.integers(1, 4)) * slices, draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, never = stages * virtual, 10**6
    placements = {
        "looped": looped_placement(stages, virtual),
        "vee": vee_placement(stages, virtual),
        "any": rng.permutation(count).reshape(virtual, stages),
    }
    virtual_stages = placements[draw(st.sampled_from(sorted(placements)))]
    done = np.full((3 if split else 2, items, count), never)
    first, last = (np.arange(items)[:, None] % slices == end for end in (0, slices - 1))
    nothing, tick = np.full((items, 1), -1), 0
    while (done == never).any():
        inputs = np.maximum(
            np.hstack([nothing, done[F][:, :-1]]),
            np.where(first, -1, np.roll(done[F], 1, axis=0)),
        )
        gradients = np.maximum(
            np.hstack([done[B][:, 1:], nothing]), np.where(last, -1, np.roll(done[B], -1, axis=0))
        )
        for stage in range(stages):
            mine = np.isin(np.arange(count), virtual_stages[:, stage])
            for kind in range(len(done)):
                ready = [
                    inputs < tick,
                    (done[F] <= tick) & (gradients < tick),
                    done[B] <= tick,
                ][kind]
                choices = np.argwhere(ready & (done[kind] == never) & mine)
                if len(choices) and rng.random() < 0.7:
                    done[kind][tuple(rng.choice(choices))] = tick
        tick += 1
    tables = [table[:, virtual_stages] for table in done]
    return Schedule.from_ticks("random", *tables, virtual_stages=virtual_stages, slices=slices)


schedules = st.one_of(made_schedules(), random_schedules())


def tables_of(schedule: Schedule) -> list[np.ndarray]:
    tables = [schedule.forward_ticks, schedule.backward_ticks, schedule.weight_ticks]
    return [table for table in tables if table is not None]


def ops(schedule: Schedule):
    """(kind, item, chunk, stage, tick) of every op of the table."""
    for kind, half in enumerate(schedule.halves):
        for tick, stage in np.argwhere(half.busy):
            yield kind, int(half.item[tick, stage]), int(half.chunk[tick, stage]), stage, tick


@quick
@given(schedules)
def test_every_op_stands_in_the_table_once_and_in_its_tick(schedule):
    tables = tables_of(schedule)
    seen = [op[:4] for op in ops(schedule)]
    assert len(seen) == len(set(seen)) == sum(table.size for table in tables)
    for kind, item, chunk, stage, tick in ops(schedule):
        assert tables[kind][item, chunk, stage] == tick


@quick
@given(schedules)
def test_every_op_runs_after_what_it_needs(schedule):
    virtual_stage = np.argsort(schedule.virtual_stages.ravel())
    forward, backward, *weight = (
        table.reshape(schedule.items, -1)[:, virtual_stage] for table in tables_of(schedule)
    )
    assert (forward[:, 1:] > forward[:, :-1]).all()
    assert (backward[:, :-1] > backward[:, 1:]).all()
    assert (backward >= forward).all()
    assert all((w >= backward).all() for w in weight)
    by_slice = (-1, schedule.slices, forward.shape[1])
    assert (np.diff(forward.reshape(by_slice), axis=1) > 0).all()
    assert (np.diff(backward.reshape(by_slice), axis=1) < 0).all()


class Ring:
    """Slots of one stage that remember whether their value is still to be read."""

    def __init__(self, slots: int):
        self.values, self.held = [None] * slots, [False] * slots

    def write(self, slot: int, value, *, keep: bool) -> None:
        assert not self.held[slot], (
            f"slot {slot} with {self.values[slot]} is overwritten by {value}"
        )
        self.values[slot], self.held[slot] = value, keep

    def read(self, slot: int):
        assert self.held[slot], f"slot {slot} is read without a value that waits for it"
        self.held[slot] = False
        return self.values[slot]


def through(slots, ring, tick: int, stage: int, arrival, *, use: bool):
    """The value that the stage uses in this tick; each stage writes its ring in every tick."""
    if slots.slots == 0:
        return arrival if use else None
    ring.write(slots.write[tick, stage], arrival, keep=arrival is not None)
    return ring.read(slots.read[tick, stage]) if use else None


class Post:
    """The routes of one direction, the rings at their destinations, and values in flight."""

    def __init__(self, routes, stages: int):
        self.routes, self.stages = routes, stages
        self.rings = [[Ring(route.ring.slots) for _ in range(stages)] for route in routes]
        self.sent = [(None, None)] * stages  # (value, the stage it is for), last tick

    def receive(self, tick: int, stage: int):
        """The value that this tick's op takes, or None; values sent to others do not arrive."""
        values = []
        for route, rings in zip(self.routes, self.rings, strict=True):
            value, wanted_by = self.sent[(stage - route.by) % self.stages]
            arrival = value if wanted_by == stage else None
            use = bool(route.used[tick, stage])
            got = through(route.ring, rings[stage], tick, stage, arrival, use=use)
            values += [got] if use else []
        assert len(values) <= 1
        return values[0] if values else None


@quick
@given(schedules)
def test_replay_of_the_table_moves_the_right_values(schedule):
    """The program's dataflow, with names as values. Slots are written in every tick, idle or not,
    F's in every tick of its phases; in a tick F writes its slots before B reads, and B before W."""
    computes_f = np.zeros(schedule.ticks, bool)
    for phase in schedule.phases:
        computes_f[phase.start : phase.stop] = phase.forward
    stages, last_virtual_stage = schedule.stages, schedule.stages * schedule.virtual - 1
    stage_of = {int(k): s for (_, s), k in np.ndenumerate(schedule.virtual_stages)}
    stash = [Ring(schedule.slots) for _ in range(stages)]
    waits = [Ring(schedule.weight_stash.slots if schedule.split else 0) for _ in range(stages)]
    outputs = [Ring(schedule.outputs.slots) for _ in range(stages)]
    forward_post = Post(schedule.receives, stages)
    backward_post = Post(schedule.gradient_receives, stages)
    finished, weights = [], 0
    for tick in range(schedule.ticks):
        sending, sending_back = [(None, None)] * stages, [(None, None)] * stages
        for stage in range(stages):

            def op(half, tick=tick, stage=stage):
                item, chunk = int(half.item[tick, stage]), half.chunk[tick, stage]
                return item, int(schedule.virtual_stages[chunk, stage]), item != IDLE

            item, virtual_stage, busy = op(schedule.forward)
            x = forward_post.receive(tick, stage)
            if busy and virtual_stage == 0:
                assert schedule.embed[tick] == item
            elif busy:
                assert x == ("y", item, virtual_stage - 1)
            slot = schedule.forward.slot[tick, stage]
            if busy or computes_f[tick]:
                stash[stage].write(slot, ("x", item, virtual_stage), keep=busy)
            at_head = (
                ("y", item, virtual_stage) if busy and virtual_stage == last_virtual_stage else None
            )
            if busy and virtual_stage < last_virtual_stage:
                sending[stage] = ("y", item, virtual_stage), stage_of[virtual_stage + 1]

            item, virtual_stage, busy = op(schedule.backward)
            use = busy and virtual_stage == last_virtual_stage
            at_head = through(schedule.outputs, outputs[stage], tick, stage, at_head, use=use)
            gradient = backward_post.receive(tick, stage)
            if busy and virtual_stage == last_virtual_stage:
                assert schedule.head[tick] == item
                assert at_head == ("y", item, last_virtual_stage)
            elif busy:
                assert gradient == ("dx", item, virtual_stage + 1)
            if busy:
                kept = stash[stage].read(schedule.backward.slot[tick, stage])
                assert kept == ("x", item, virtual_stage)
                if virtual_stage > 0:
                    sending_back[stage] = ("dx", item, virtual_stage), stage_of[virtual_stage - 1]
                else:
                    assert schedule.embed_backward[tick] == item
                    finished.append(item)
            if schedule.split:
                slot = schedule.weight_stash.write[tick, stage]
                waits[stage].write(slot, ("w", item, virtual_stage), keep=busy)
                item, virtual_stage, busy = op(schedule.weight)
                if busy:
                    kept = waits[stage].read(schedule.weight.slot[tick, stage])
                    assert kept == ("w", item, virtual_stage)
                    weights += 1
        forward_post.sent, backward_post.sent = sending, sending_back
    assert sorted(finished) == list(range(schedule.items))
    assert weights == (schedule.forward_ticks.size if schedule.split else 0)
    assert not any(held for ring in [*stash, *waits] for held in ring.held)


@quick
@given(schedules)
def test_a_cache_is_held_by_one_sequence_from_its_first_slice_to_its_last(schedule):
    if schedule.slices == 1:
        assert schedule.cache is schedule.gradient_cache is None
        return
    for stage in range(schedule.stages):
        held: dict[int, tuple[int, int]] = {}
        held_gradient: dict[int, tuple[int, int]] = {}
        for tick in range(schedule.ticks):
            # F writes its cache, idle or not; B reads it, and writes the gradients' cache.
            item, chunk = schedule.forward.item[tick, stage], schedule.forward.chunk[tick, stage]
            slot = schedule.cache.write[tick, stage]
            sequence = item // schedule.slices, chunk
            if item == IDLE:
                assert slot not in held
            elif item % schedule.slices == 0:
                assert slot not in held
                held[slot] = sequence
            else:
                assert held[slot] == sequence
            item, chunk = schedule.backward.item[tick, stage], schedule.backward.chunk[tick, stage]
            slot, sequence = schedule.gradient_cache.write[tick, stage], (
                item // schedule.slices, chunk,
            )  # fmt: skip
            if item == IDLE:
                assert slot not in held_gradient
                continue
            assert held[schedule.cache.read[tick, stage]] == sequence
            if item % schedule.slices == schedule.slices - 1:
                assert slot not in held_gradient
                held_gradient[slot] = sequence
            assert held_gradient[slot] == sequence
            if item % schedule.slices == 0:
                del held[schedule.cache.read[tick, stage]], held_gradient[slot]
        assert not held and not held_gradient


@quick
@given(random_schedules())
def test_orders_packed_again_take_no_more_ticks(schedule):
    orders = orders_of(*schedule.tables)
    packed = Schedule.from_orders(
        "packed", orders, virtual_stages=schedule.virtual_stages, slices=schedule.slices
    )
    assert packed.ticks <= schedule.ticks
    again = orders_of(*packed.tables)
    for stage in range(schedule.stages):
        assert again.of(stage) == orders.of(stage)


@quick
@given(random_schedules(), st.integers(1, 9))
def test_any_placement_has_a_table_for_f_alone(schedule, microbatches):
    table = forward_table(schedule.virtual_stages, microbatches)
    assert (
        table.virtual_stages == schedule.virtual_stages
    ).all() and table.microbatches == microbatches
    assert table.forward_ticks.max() < microbatches * schedule.virtual * (2 * schedule.stages)


@quick
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_the_table_for_f_alone_is_as_dense_as_1f1b(m, p, v):
    table = forward_table(looped_placement(p, v), m)
    interleaved = make("1f1b", microbatches=m, stages=p, virtual=v)
    assert table.forward_ticks.max() <= interleaved.forward_ticks.max()
    assert (table.forward_ticks <= interleaved.forward_ticks).all()


@quick
@given(schedules)
def test_slots_are_as_few_as_idle_writes_allow(schedule):
    """Values that wait at once need a slot each; a write of an idle stage may need one more."""
    most = schedule.in_flight.max()
    assert most <= schedule.slots <= most + 1
    if schedule.split:
        most = schedule.weights_in_flight.max()
        assert most <= schedule.weight_stash.slots <= most + 1


@quick
@given(schedules)
def test_in_flight_counts_what_waits(schedule):
    ticks = np.arange(schedule.ticks)[:, None, None, None]
    waits = (schedule.forward_ticks <= ticks) & (ticks <= schedule.backward_ticks)  # [T, M, C, P]
    assert schedule.in_flight.tolist() == waits.sum(axis=(1, 2)).max(axis=0).tolist()


@quick
@given(schedules)
def test_phases_cover_all_ticks_and_say_what_occurs_in_them(schedule):
    phases = schedule.phases
    assert phases[0].start == 0 and phases[-1].stop == schedule.ticks
    kinds = np.stack([half.busy.any(axis=1) for half in schedule.halves], axis=1)
    # A value arrives a tick after it was sent, in that tick's F or B, busy or not.
    for kind, sent in ((F, schedule.forward_ticks), (B, schedule.backward_ticks)):
        sends = schedule.virtual_stages != (schedule.virtual_stages.max() if kind == F else 0)
        kinds[sent[:, sends] + 1, kind] = True
    exact = (kinds[1:] != kinds[:-1]).any(axis=1).sum() < MOST_PHASES
    for before, after in zip(phases, phases[1:], strict=False):
        assert before.stop == after.start
        assert before[2:] != after[2:] or not exact
    for phase in phases:
        for occurs, busy in zip(phase[2:], kinds[phase.start : phase.stop].T):
            assert (busy == occurs).all() if exact else occurs or not busy.any()
    assert len(phases) <= MOST_PHASES


@quick
@given(schedules)
def test_embed_and_head_name_each_microbatch_once(schedule):
    for named in (schedule.embed, schedule.head, schedule.embed_backward):
        assert sorted(named[named != IDLE]) == list(range(schedule.items))


def broken(change) -> str:
    """The error's text after `change` has moved ops of a sound 1F1B table (m=4, p=2, v=1)."""
    sound = one_f_one_b(Shape(microbatches=4, stages=2))
    forward, backward = sound.forward_ticks.copy(), sound.backward_ticks.copy()
    change(forward, backward)
    with pytest.raises(UserError) as caught:
        Schedule.from_ticks("mine", forward, backward)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_ops_in_one_half_tick_are_an_error():
    def overlap_forward(forward, backward):
        forward[1, 0, 0] = forward[0, 0, 0]

    def overlap_backward(forward, backward):
        backward[0, 0, 0] = backward[1, 0, 0]

    text = broken(overlap_forward)
    assert text == "schedule 'mine': stage 0 has two F ops in tick 0, F0.0 and F1.0"
    assert "stage 0 has two B ops in tick 3" in broken(overlap_backward)


def test_an_op_before_its_input_is_an_error():
    def forward_early(forward, backward):
        forward[2, 0, 1] = forward[2, 0, 0]

    def backward_early(forward, backward):
        backward[2, 0, 0] = backward[2, 0, 1]

    def backward_before_forward(forward, backward):
        forward[3, 0, 1] = 20

    assert (
        "microbatch 2, chunk 0, stage 1 F runs before the F of the virtual stage before it has "
        "finished (F in tick 2, B in tick 3)" in broken(forward_early)
    )
    assert (
        "microbatch 2, chunk 0, stage 0 B runs before the B of the virtual stage after it has "
        "finished (F in tick 2, B in tick 3)" in broken(backward_early)
    )
    assert "microbatch 3, chunk 0, stage 1 B runs before its own F" in broken(
        backward_before_forward
    )


def test_a_negative_tick_is_an_error():
    def negative(forward, backward):
        forward[0, 0, 0] = -1

    assert "F runs before the first tick (F in tick -1," in broken(negative)


def orders_of_two_stages(first: str, second: str) -> Schedule:
    lists = [[("FBW".index(op[0]), int(op[1]), 0) for op in ops.split()] for ops in (first, second)]
    return Schedule.from_orders("mine", Orders.from_lists(lists))


def test_orders_that_cannot_be_are_an_error():
    assert orders_of_two_stages("F0 B0 W0", "F0 B0 W0").weight_ticks.tolist() == [[[2, 1]]]
    for first, second, text in (
        (
            "F0 B0 F1 B1",
            "F1 B1 F0 B0",
            "stage 0 for the input of B0.0, stage 1 for",
        ),
        ("F0 F1 B0 B1", "F0 F0 B0 B1", "stage 1 runs F0.0 2 times"),
        ("F0 F1 B0 B1", "F0 B0", "stage 1 has 2 ops and stage 0 has 4"),
        ("F0 B0 W0 F1 B1 B0", "F0 B0 W0 F1 B1 W1", "stage 0 runs B0.0 2 times"),
    ):
        with pytest.raises(UserError) as caught:
            orders_of_two_stages(first, second)
        assert text in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(UserError) as error:
        make("1f1n", microbatches=4, stages=2)
    names(error, "'1f1n'", "'1f1b'")


def test_a_new_schedule_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "backwards.py").write_text(
        "from mtx.schedules.makers.one_f_one_b import gpipe\n"
        "from mtx.schedules.shape import Maker\n"
        "MAKERS = {'backwards': Maker(make=gpipe, source='a test')}\n"
    )
    monkeypatch.setattr(makers, "__path__", [*makers.__path__, str(tmp_path)])
    found = makers.find_makers()
    monkeypatch.delitem(sys.modules, "mtx.schedules.makers.backwards")
    assert set(found) == {*MAKERS, "backwards"} and found["backwards"].source == "a test"


TICKS = np.array([[[0, 1]]]), np.array([[[2, 1]]])


@pytest.mark.parametrize(
    "tables, others, values",
    [
        ((TICKS[0] * 1.0, TICKS[1]), {}, ("F", "float64")),
        ((TICKS[0][0], TICKS[1]), {}, ("F", "[1, 2]")),
        ((TICKS[0], TICKS[1][:0]), {}, ("B", "[0, 1, 2]")),
        ((TICKS[0], TICKS[1][..., :1]), {}, ("[1, 1, 2]", "[1, 1, 1]")),
        ((*TICKS, TICKS[1][..., :1]), {}, ("FBW", "[1, 1, 1]")),
        (([[[0], [1, 2]]], TICKS[1]), {}, ("F", "[[[0], [1, 2]]]")),
        (TICKS, {"virtual_stages": [[0, 2]]}, ("[[0, 2]]", "[1, 2]")),
        (TICKS, {"virtual_stages": [[0, 0]]}, ("[[0, 0]]", "[1, 2]")),
        (TICKS, {"virtual_stages": [[0], [1]]}, ("[[0], [1]]", "[1, 2]")),
        (TICKS, {"virtual_stages": [0, 1]}, ("[0, 1]", "chunk")),
        (TICKS, {"slices": 2}, ("slices=2", "1 items")),
    ],
)
def test_tables_that_are_none_are_refused(tables, others, values):
    with pytest.raises(UserError) as error:
        Schedule.from_ticks("mine", *tables, **others)
    assert names(error, *values)


@pytest.mark.parametrize(
    "lists, values",
    [
        ([], ("no stage",)),
        ([[]], ("stage 0", "[]")),
        ([[("F", 0, 0)]], ("stage 0", "('F', 0, 0)")),
        ([[(F, 0, 0)], [(0, 0)]], ("stage 1", "(0, 0)")),
        ([[(F, 0, 0), (3, 0, 0)]], ("stage 0", "(3, 0, 0)")),
        ([[(F, 0.0, 0)]], ("stage 0", "(0, 0.0, 0)")),
        ([[(F, 2**31, 0)]], ("stage 0", f"(0, {2**31}, 0)")),
        ([[(F, 0, 0), (B, 0)]], ("stage 0", "(1, 0)")),
    ],
)
def test_lists_that_are_no_orders_are_refused(lists, values):
    with pytest.raises(UserError) as error:
        Orders.from_lists(lists)
    assert names(error, *values)


def test_orders_on_other_stages_than_they_are_placed_are_refused():
    orders = Orders.from_lists([[(F, 0, 0), (B, 0, 0)]] * 2)
    with pytest.raises(UserError) as error:
        Schedule.from_orders("mine", orders, virtual_stages=[[0, 1, 2]])
    assert names(error, "[[0, 1, 2]]", "[1, 2]")
