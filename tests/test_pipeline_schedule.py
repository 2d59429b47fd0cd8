"""Schedules: closed forms, Megatron's order, and a replay of the table as the program runs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.pipeline.makers import MAKERS, make, one_f_one_b
from mtx.pipeline.schedule import IDLE, Schedule
from mtx.view.schedule import LockStep, op_order

quick = settings(max_examples=60, deadline=None)
sizes = {
    "microbatches": st.integers(1, 11),
    "stages": st.integers(1, 6),
    "virtual": st.integers(1, 4),
}


@st.composite
def made_schedules(draw) -> Schedule:
    return make(draw(st.sampled_from(sorted(MAKERS))), **{k: draw(s) for k, s in sizes.items()})


@st.composite
def random_schedules(draw) -> Schedule:
    """Any legal table: in each tick a stage picks ready ops at random, or sits the half out."""
    microbatches, stages, virtual = draw(st.integers(1, 6)), draw(st.integers(1, 4)), 2
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pieces, never = stages * virtual, 10**6
    forward = np.full((microbatches, pieces), never)
    backward = np.full((microbatches, pieces), never)
    tick = 0
    while (backward == never).any():
        inputs = np.hstack([np.full((microbatches, 1), -1), forward[:, :-1]])
        gradients = np.hstack([backward[:, 1:], np.full((microbatches, 1), -1)])
        for stage in range(stages):
            mine = np.arange(pieces) % stages == stage
            for done in (forward, backward):
                ready = inputs < tick if done is forward else (forward <= tick) & (gradients < tick)
                choices = np.argwhere(ready & (done == never) & mine)
                if len(choices) and rng.random() < 0.7:
                    done[tuple(rng.choice(choices))] = tick
        tick += 1
    shape = (microbatches, virtual, stages)
    return Schedule.from_ticks("random", forward.reshape(shape), backward.reshape(shape))


schedules = st.one_of(made_schedules(), random_schedules())


def ops(schedule: Schedule):
    """(op, half, microbatch, chunk, stage, tick) of every busy half."""
    for op, half in (("F", schedule.forward), ("B", schedule.backward)):
        for tick, stage in np.argwhere(half.busy):
            yield op, int(half.microbatch[tick, stage]), int(half.chunk[tick, stage]), stage, tick


@quick
@given(schedules)
def test_every_op_stands_in_the_table_once_and_in_its_tick(schedule):
    seen = [op[:4] for op in ops(schedule)]
    assert len(seen) == len(set(seen)) == 2 * schedule.forward_ticks.size
    for op, microbatch, chunk, stage, tick in ops(schedule):
        ticks = schedule.forward_ticks if op == "F" else schedule.backward_ticks
        assert ticks[microbatch, chunk, stage] == tick


@quick
@given(schedules)
def test_every_op_runs_after_what_it_needs(schedule):
    forward = schedule.forward_ticks.reshape(schedule.microbatches, -1)
    backward = schedule.backward_ticks.reshape(schedule.microbatches, -1)
    assert (forward[:, 1:] > forward[:, :-1]).all()
    assert (backward[:, :-1] > backward[:, 1:]).all()
    assert (backward >= forward).all()


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


def through(mailbox, rings, tick: int, stage: int, arrival, *, keep: bool, use: bool):
    """The value that the stage uses in this tick; every stage writes its mailbox in every tick."""
    if mailbox.slots == 0:
        return arrival
    rings[stage].write(mailbox.write[tick, stage], arrival, keep=keep)
    return rings[stage].read(mailbox.read[tick, stage]) if use else None


@quick
@given(schedules)
def test_replay_of_the_table_moves_the_right_values(schedule):
    """The program's dataflow with names for values. Every slot is written in every tick, idle or
    not; F writes its slots before B reads."""
    stages, last_piece = schedule.stages, schedule.stages * schedule.virtual - 1
    stash = [Ring(schedule.slots) for _ in range(stages)]
    inbox = [Ring(schedule.inbox.slots) for _ in range(stages)]
    gradient_inbox = [Ring(schedule.gradient_inbox.slots) for _ in range(stages)]
    outbox = [Ring(schedule.outbox.slots) for _ in range(stages)]
    sent, sent_gradient = [None] * stages, [None] * stages  # by each stage in the tick before
    finished = []
    for tick in range(schedule.ticks):
        arrived = [sent[stage - 1] for stage in range(stages)]
        arrived_gradient = [sent_gradient[(stage + 1) % stages] for stage in range(stages)]
        for stage in range(stages):
            microbatch, chunk = (
                schedule.forward.microbatch[tick, stage],
                schedule.forward.chunk[tick, stage],
            )
            piece, busy = chunk * stages + stage, microbatch != IDLE
            x = through(
                schedule.inbox, inbox, tick, stage, arrived[stage],
                keep=arrived[stage] is not None, use=busy and piece > 0,
            )  # fmt: skip
            if busy and piece == 0:
                assert schedule.embed[tick] == microbatch
            elif busy:
                assert x == ("y", microbatch, piece - 1)
            stash[stage].write(
                schedule.forward.slot[tick, stage], ("x", microbatch, piece), keep=busy
            )
            y = ("y", microbatch, piece) if busy else None
            at_head = y if piece == last_piece else None
            sent[stage] = y if piece < last_piece else None

            microbatch, chunk = (
                schedule.backward.microbatch[tick, stage],
                schedule.backward.chunk[tick, stage],
            )
            piece, busy = chunk * stages + stage, microbatch != IDLE
            at_head = through(
                schedule.outbox, outbox, tick, stage, at_head,
                keep=at_head is not None, use=busy and piece == last_piece,
            )  # fmt: skip
            gradient = through(
                schedule.gradient_inbox, gradient_inbox, tick, stage, arrived_gradient[stage],
                keep=arrived_gradient[stage] is not None, use=busy and piece < last_piece,
            )  # fmt: skip
            sent_gradient[stage] = None
            if not busy:
                continue
            if piece == last_piece:
                assert schedule.head[tick] == microbatch
                assert at_head == ("y", microbatch, last_piece)
            else:
                assert gradient == ("dx", microbatch, piece + 1)
            slot = schedule.backward.slot[tick, stage]
            assert stash[stage].read(slot) == ("x", microbatch, piece)
            if piece > 0:
                sent_gradient[stage] = ("dx", microbatch, piece)
            else:
                assert schedule.embed_backward[tick] == microbatch
                finished.append(microbatch)
    assert sorted(finished) == list(range(schedule.microbatches))
    assert not any(ring.held[slot] for ring in stash for slot in range(schedule.slots))


@quick
@given(schedules)
def test_slots_are_as_few_as_idle_writes_allow(schedule):
    """What waits at once needs as many slots; a write of an idle stage may need one more."""
    most = schedule.in_flight.max()
    assert most <= schedule.slots <= most + 1


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
    for before, after in zip(phases, phases[1:], strict=False):
        assert before.stop == after.start
        assert (before.forward, before.backward) != (after.forward, after.backward)
    for phase in phases:
        for half, occurs in (
            (schedule.forward, phase.forward),
            (schedule.backward, phase.backward),
        ):
            assert (half.busy[phase.start : phase.stop].any(axis=1) == occurs).all()


@quick
@given(schedules)
def test_embed_and_head_name_each_microbatch_once(schedule):
    for named in (schedule.embed, schedule.head, schedule.embed_backward):
        assert sorted(named[named != IDLE]) == list(range(schedule.microbatches))


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
    for mailbox in (schedule.inbox, schedule.gradient_inbox, schedule.outbox):
        assert mailbox.slots == 0


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
    """SC'21 section 2.2: the time is m (F + B), with F and B of all chunks of a stage, and the
    bubble over it (p - 1) / (v m)."""
    m = groups * p
    schedule = make(name, microbatches=m, stages=p, virtual=v)
    run = LockStep(schedule=schedule, forward_time=forward_time, backward_time=backward_time)
    ideal = m * v * (forward_time + backward_time)
    assert (run.total - ideal) / ideal == pytest.approx((p - 1) / (v * m))
    assert run.idle_share == pytest.approx((p - 1) / (v * m + p - 1))


def megatron_order(stage: int, *, p: int, v: int, m: int) -> list[str]:
    """Interleaved 1F1B of Megatron-LM: 2(p-1-s) + (v-1)p warm-up Fs, then F and B in turn."""

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


def broken(change) -> str:
    """The error's text after `change` has moved ops of a sound 1F1B table (m=4, p=2, v=1)."""
    forward, backward = one_f_one_b(4, 2, 1)
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
    assert text.startswith("schedule 'mine': stage 0 has two F ops in tick 0, one of them")
    assert "stage 0 has two B ops in tick 3" in broken(overlap_backward)


def test_an_op_before_its_input_is_an_error():
    def forward_early(forward, backward):
        forward[2, 0, 1] = forward[2, 0, 0]

    def backward_early(forward, backward):
        backward[2, 0, 0] = backward[2, 0, 1]

    def backward_before_forward(forward, backward):
        forward[3, 0, 1] = 20

    assert (
        "microbatch 2, chunk 0, stage 1 F runs before the F of the piece before it has finished "
        "(F in tick 2, B in tick 3)" in broken(forward_early)
    )
    assert (
        "microbatch 2, chunk 0, stage 0 B runs before the B of the piece after it has finished "
        "(F in tick 2, B in tick 3)" in broken(backward_early)
    )
    assert "microbatch 3, chunk 0, stage 1 B runs before its own F" in broken(
        backward_before_forward
    )


def test_a_negative_tick_is_an_error():
    def negative(forward, backward):
        forward[0, 0, 0] = -1

    assert "F in tick -1" in broken(negative)


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(UserError, match="unknown schedule '1f1n': did you mean '1f1b'"):
        make("1f1n", microbatches=4, stages=2)
