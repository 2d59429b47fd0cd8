"""Where a run's time went, from logs written by hand and by a run."""

import json

import pytest
from errors import names

from mtx.errors import UserError
from mtx.train.goodput import measure_goodput, read_log, steps_that_count


def start(step, unix_time, since_launch_s):
    return {"kind": "start", "step": step, "unix_time": unix_time, "t_s": 0.0,
            "since_launch_s": since_launch_s, "parameters": 8, "devices": 1,
            "device_kind": "cpu", "run": {"steps": 6}}  # fmt: skip


def step(number, t_s, *, step_s=1.0, finite=True, loss=2.0):
    return {"kind": "step", "step": number, "t_s": t_s, "step_s": step_s, "finite": finite,
            "loss": loss, "tokens_per_s": 8.0}  # fmt: skip


LOG = [
    start(0, 1000.0, 3.0),
    {"kind": "compile", "step": 0, "seconds": 5.0, "t_s": 5.0},
    step(1, 6.0), step(2, 7.0),
    {"kind": "save", "step": 2, "seconds": 0.5, "t_s": 7.5},
    step(3, 8.5), step(4, 9.5, finite=False), step(5, 10.5),
    # killed; the save of step 2 is the newest; launched again 17 s after the last line
    start(2, 1030.0, 2.5),
    {"kind": "compile", "step": 2, "seconds": 1.0, "t_s": 1.0},
    {"kind": "rollback", "step": 2, "what": "", "t_s": 1.0},
    step(3, 2.0), step(4, 3.0, finite=False), step(5, 4.0), step(6, 5.5, step_s=1.5),
    {"kind": "eval", "step": 6, "seconds": 0.25, "loss": 2.0, "t_s": 6.0},
]  # fmt: skip


def test_every_second_has_its_place():
    goodput = measure_goodput(LOG)
    assert goodput.parts == pytest.approx({
        "steps": 1 + 1 + 1 + 1 + 1.5, "lost": 3.0, "skipped": 1.0, "start": 5.5, "compile": 6.0,
        "eval": 0.25, "save": 0.5, "other": 0.25, "down": 17.0,
    })  # fmt: skip
    assert goodput.wall_s == pytest.approx(3 + 10.5 + 17 + 2.5 + 6)
    assert goodput.fraction == pytest.approx(5.5 / 39)
    assert (goodput.sessions, goodput.lost_steps, goodput.skipped_steps) == (2, 3, 1)
    assert (goodput.rollbacks, goodput.clock_jumps) == (1, 0)


def test_a_run_that_had_come_to_its_end_was_not_down():
    log = [start(0, 1000.0, 1.0), step(6, 8.0), start(6, 9000.0, 2.0), step(7, 4.0)]
    goodput = measure_goodput(log)
    assert goodput.parts["down"] == 0.0 and goodput.wall_s == pytest.approx(1 + 8 + 2 + 4)


def test_a_clock_that_was_set_back_takes_no_time_away():
    log = [start(0, 5000.0, 1.0), step(1, 10.0), start(1, 4000.0, 1.0), step(2, 10.0)]
    goodput = measure_goodput(log)
    assert goodput.clock_jumps == 1
    assert goodput.parts["down"] == 0
    assert goodput.wall_s == pytest.approx(22)


def test_of_two_lines_for_a_step_the_later_counts():
    again = [step(3, 1.0, loss=9.0), start(2, 0.0, 0.0), step(3, 1.0, loss=1.0)]
    assert [s["loss"] for s in steps_that_count([step(1, 0.0), step(2, 0.5), *again])] == [2, 2, 1]


def test_a_log_is_read_but_for_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in LOG) + '{"kind": "st')
    assert read_log(path) == LOG
    path.write_text("text\n")
    with pytest.raises(UserError) as error:
        read_log(path)
    names(error, "line 1")
    for name, value in (("step", []), ("step_s", None), ("loss", "x"), ("t_s", float("nan"))):
        path.write_text(json.dumps(LOG[0]) + "\n" + json.dumps(step(1, 0.0) | {name: value}) + "\n")
        with pytest.raises(UserError) as error:
            read_log(path)
        names(error, "line 2")
    for name in ("run", "unix_time", "devices"):
        path.write_text(json.dumps({key: LOG[0][key] for key in LOG[0] if key != name}) + "\n")
        with pytest.raises(UserError) as error:
            read_log(path)
        names(error, "line 1")
    for name, value in (("step", []), ("step_s", None), ("loss", "x"), ("t_s", float("nan"))):
        path.write_text(json.dumps(LOG[0]) + "\n" + json.dumps(step(1, 0.0) | {name: value}) + "\n")
        with pytest.raises(UserError) as error:
            read_log(path)
        names(error, "line 2")
    for name in ("run", "unix_time", "devices"):
        path.write_text(json.dumps({key: LOG[0][key] for key in LOG[0] if key != name}) + "\n")
        with pytest.raises(UserError) as error:
            read_log(path)
        names(error, "line 1")
    path.write_text(json.dumps(step(1, 0.0)) + "\n")
    with pytest.raises(UserError) as error:
        read_log(path)
    names(error, "session")
    with pytest.raises(UserError) as error:
        read_log(tmp_path / "other")
    names(error, "file")
