"""Which process is named when some die, freeze, hang or lose a connection; and which is slow."""

from __future__ import annotations

import pytest

from mtx.launch.exits import Exit, describe_exit
from mtx.launch.judge import Heartbeat, Identity, Judge, Verdict
from mtx.launch.stragglers import Probe, Record, Stragglers, gather, slow_processes


def sent(process: int, count: int, **values) -> Heartbeat:
    who = Identity(process=process, host=f"h{process}", pid=100 + process, stages=(process,))
    return Heartbeat(**{"who": who, "count": count, "step": 7, "phase": "step"} | values)


def seen(*each: Heartbeat) -> dict[int, Heartbeat]:
    return {b.who.process: b for b in each}


def watch(judge: Judge, until_s: float, each) -> tuple[float, Verdict] | None:
    """Judge twice a second until there is a verdict; `each` gives the heartbeats at a time."""
    for tick in range(int(until_s * 2) + 1):
        if verdict := judge.see(each(tick / 2, tick), tick / 2):
            return tick / 2, verdict
    return None


def test_what_is_sent_is_what_is_read():
    one = sent(1, 3, error="x", probe=Probe(4, 0.1, 0.2, 0.3))
    assert Heartbeat.from_json(one.to_json()) == one
    assert Heartbeat.from_json(sent(0, 1).to_json()).probe is None
    verdict = Verdict(text="t", exit=Exit.HUNG, culprits=(1,), dump=(0, 1))
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_all_is_well():
    judge = Judge(silent_s=10, suspect_s=2)
    assert watch(judge, 60, lambda s, tick: seen(sent(0, tick), sent(1, tick))) is None


def test_the_silent_one_is_lost():
    judge = Judge(silent_s=10, suspect_s=2)
    after_s, verdict = watch(
        judge,
        60,
        lambda s, tick: seen(sent(0, tick), sent(1, min(tick, 10)), sent(2, tick)),
    )
    assert 15 < after_s <= 16  # silent since second 5
    assert verdict.exit == Exit.LOST and verdict.culprits == (1,)
    assert verdict.text.startswith(
        "lost process 1 (host h1, pid 101, stage 1), last seen at step 7, in step: no sign of life"
    )


def test_who_never_begins_is_lost():
    judge = Judge(silent_s=10, suspect_s=2, processes=3)
    after_s, verdict = watch(judge, 400, lambda s, tick: seen(sent(0, tick), sent(2, tick)))
    assert 300 < after_s <= 301 and verdict.culprits == (1,)
    assert verdict.text == "no sign of life from process 1 within 300 s"


def test_who_compiles_may_be_silent_for_longer():
    judge = Judge(silent_s=10, suspect_s=2)
    after_s, verdict = watch(
        judge, 90, lambda s, tick: seen(sent(0, tick), sent(1, 1, phase="compile"))
    )
    assert 60 < after_s <= 61.5 and verdict.culprits == (1,)


def test_a_broken_connection_makes_it_quick():
    judge = Judge(silent_s=10, suspect_s=2)

    def each(s, tick):
        error = "Gloo: reset by peer" if s > 5 else ""
        return seen(sent(0, tick, error=error), sent(1, min(tick, 10)), sent(2, tick))

    after_s, verdict = watch(judge, 60, each)
    assert after_s <= 8 and verdict.culprits == (1,)
    assert "process 0 (host h0, pid 100, stage 0) reports: Gloo: reset by peer" in verdict.text


def test_a_broken_connection_between_the_living():
    judge = Judge(silent_s=10, suspect_s=2)

    def each(s, tick):
        return seen(sent(0, tick), sent(1, tick, error="reset" if s > 5 else "", step=9))

    after_s, verdict = watch(judge, 60, each)
    assert 15 <= after_s <= 16.5 and verdict.exit == Exit.LOST and verdict.culprits == ()
    assert "all processes live, but a connection broke: process 1 (host h1" in verdict.text


def test_who_is_silent_since_it_compiled_is_lost_where_a_connection_broke():
    judge = Judge(silent_s=10, suspect_s=2)

    def each(s, tick):
        error = "Gloo: reset by peer" if s > 5 else ""
        return seen(sent(0, tick, error=error), sent(1, min(tick, 10), phase="compile"))

    after_s, verdict = watch(judge, 60, each)
    assert 15 <= after_s <= 16.5 and verdict.culprits == (1,)
    assert "last seen at step 7, in compile: no sign of life" in verdict.text


def test_a_process_that_was_away_itself_blames_nobody():
    judge = Judge(silent_s=10, suspect_s=2)
    judge.see(seen(sent(0, 1), sent(1, 1)), 0.0)
    assert judge.see(seen(sent(0, 2), sent(1, 1)), 100.0) is None  # frozen for 100 s
    assert judge.see(seen(sent(0, 3), sent(1, 2)), 100.5) is None


def test_a_judge_that_often_comes_late_still_names_who_is_lost():
    """On a busy machine it looks every 1.5 s instead of twice a second."""
    judge = Judge(silent_s=10, suspect_s=2)
    for tick in range(20):
        error = "Gloo: reset by peer" if tick > 3 else ""
        verdict = judge.see(seen(sent(0, tick, error=error), sent(1, min(tick, 3))), 1.5 * tick)
        if verdict:
            break
    assert tick <= 7 and verdict.culprits == (1,)


def test_who_has_finished_may_fall_silent():
    judge = Judge(silent_s=10, suspect_s=2)

    def each(s, tick):
        return seen(sent(0, tick), sent(1, min(tick, 10), phase="done" if s >= 5 else "step"))

    assert watch(judge, 60, each) is None


HANGS = {
    "one is not in the step": (
        [sent(0, 1, stalled_s=31), sent(1, 1, phase="batch", stalled_s=31)],
        "hung for 31 s: process 1 (host h1, pid 101, stage 1) at step 7, in batch, and the others",
        (1,),
        (1,),
    ),
    "one is behind": (
        [sent(0, 1, stalled_s=31, step=8), sent(1, 1, stalled_s=31)],
        "hung for 31 s: process 1 (host h1",
        (1,),
        (1,),
    ),
    "all are in it": (
        [sent(0, 1, stalled_s=31), sent(1, 1, stalled_s=30)],
        "hung: all processes are in step 8, which has not finished for 31 s",
        (),
        (0, 1),
    ),
    "alone": (
        [sent(0, 1, stalled_s=31)],
        "process 0 (host h0, pid 100, stage 0) is in",
        (),
        (0,),
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_names_who_is_behind(name):
    each, text, culprits, dump = HANGS[name]
    verdict = Judge(silent_s=10, suspect_s=2).see(seen(*each), 0.0)
    assert verdict.exit == Exit.HUNG and text in verdict.text
    assert (verdict.culprits, verdict.dump) == (culprits, dump)


def test_a_slow_save_is_no_hang():
    saving = sent(1, 1, phase="save", waits=True)
    assert Judge(silent_s=10, suspect_s=2).see(seen(sent(0, 1, stalled_s=31), saving), 0.0) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "finished (exit status 0)"),
        (-9, "was killed by SIGKILL"),
        (75, "stopped as asked, with a checkpoint (exit status 75)"),
        (1, "failed (exit status 1)"),
        (99, "ended (exit status 99)"),
    ],
)
def test_how_it_ended_in_words(status, words):
    assert describe_exit(status) == words


# -- stragglers ------------------------------------------------------------------------------------


def record(step=50, host_s=(0.01,) * 4, device_s=(0.02,) * 4, late_s=(0.0,) * 4) -> Record:
    return Record(step, list(host_s), list(device_s), list(late_s))


def test_records_are_of_all_and_new():
    probes = {p: Probe(50, 0.1 * p, 0.2, 0.0) for p in range(3)}
    assert gather(probes, 3, after=0) == Record(50, [0.0, 0.1, 0.2], [0.2] * 3, [0.0] * 3)
    assert gather(probes, 3, after=50) is None
    assert gather(probes, 4, after=0) is None
    assert gather(probes | {2: Probe(100, 0.0, 0.2, 0.0)}, 3, after=0).step == 50
    assert gather(probes | {2: Probe(100, 0.0, 0.2, 0.0)}, 3, after=50) is None
    assert gather(probes | {2: None}, 3, after=0) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_s": (0.02, 0.02, 0.07, 0.03)}, "product takes 3.5 times as long as the others'"),
        ({"host_s": (0.01, 0.01, 0.4, 0.01)}, "0.400 s of a step outside of its devices, the oth"),
        ({"late_s": (0.0, 0.1, 0.6, 0.1)}, "it stands still for 60% of the time"),
    ],
)
def test_the_slow_one_is_named_with_the_reason(change, words):
    reasons = slow_processes(record(**change), step_s=1.0)
    assert list(reasons) == [2] and words in reasons[2]


def test_equals_are_not_slow():
    assert slow_processes(record(host_s=(0.3, 0.31, 0.32, 0.4)), step_s=1.0) == {}


def test_it_takes_two_records_to_be_named_and_one_to_be_cleared():
    stragglers = Stragglers(step_s=1.0)
    slow, well = record(late_s=(0, 0, 0.9, 0)), record()
    names = {p: f"process {p} (host h{p})" for p in range(4)}
    assert stragglers.see(slow, names) == []
    told = stragglers.see(slow, names)
    assert told == ["slow: process 2 (host h2): it stands still for 90% of the time"]
    assert stragglers.see(slow, names) == []
    assert stragglers.see(well, names) == ["no longer slow: process 2 (host h2)"]
    assert stragglers.see(slow, names) == []
