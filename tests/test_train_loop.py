"""Whole runs: what they print, log and save, how they stop and continue, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from errors import names
from rich.console import Console

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import (
    DataConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    from_dict,
    to_dict,
)
from mtx.errors import UserError
from mtx.launch.exits import Exit, leave_at_once
from mtx.launch.interrupt import stop_requests
from mtx.plan.flops import parameters
from mtx.step.trainer import Trainer
from mtx.train import session
from mtx.train.log import Log
from mtx.train.loop import run_training

pytestmark = pytest.mark.usefixtures("kept_programs")
ROOT = Path(__file__).parent.parent


def small_run(folder: Path, **changes) -> RunConfig:
    """Ten steps on two stages and three replicas; 3 divides nothing in the model."""
    text = folder / "text.txt"
    lines = (
        f"{n} times {m} makes {n * m}, and so it goes on.\n" for n in range(30) for m in range(30)
    )
    text.write_text("".join(lines))
    run = RunConfig(
        model=ModelConfig(
            layers=4, hidden=32, heads=4, sequence=16, vocab=300, compute_dtype="float32"
        ),
        layout=Layout(data=3, pipe=2),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        data=DataConfig(path=(str(text),)),
        global_batch=6, steps=10, eval_every=4, eval_batches=2, save_every=5,
        out=str(folder / "out"),
    )  # fmt: skip
    return replace(run, **changes)


def read_log(path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def assert_same_state(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A complete run."""
    run = small_run(tmp_path_factory.mktemp("first"))
    printed, records = io.StringIO(), []
    summary = run_training(run, console=Console(file=printed), on_step=records.append)
    return SimpleNamespace(
        run=run, summary=summary, records=records, printed=printed.getvalue(), out=Path(run.out)
    )


@pytest.fixture
def half_way(first, tmp_path):
    """The run that continues the first one, in a directory as it was after the fifth step."""
    shutil.copytree(first.out / "checkpoints" / "5", tmp_path / "out" / "checkpoints" / "5")
    return replace(first.run, out=str(tmp_path / "out"))


# -- from beginning to end -------------------------------------------------------------------------


def test_it_learns(first):
    summary = first.summary
    assert len(summary.losses) == 10 and not summary.interrupted
    assert summary.losses[-1] < 0.8 * summary.losses[0]
    assert summary.last_eval_loss < 0.8 * summary.first_eval_loss
    assert abs(summary.first_eval_loss - np.log(300)) < 0.2
    assert int(summary.state.step) == 10
    assert summary.data.vocab == 256


def test_it_logs_strict_json(first):
    log = read_log(first.summary.log)
    kinds = [(line["kind"], line["step"]) for line in log]
    steps = [("step", step) for step in range(1, 11)]
    assert [kind for kind in kinds if kind[0] == "step"] == steps
    assert [kind for kind in kinds if kind[0] != "step"] == [
        ("start", 0), ("compile", 0), ("memory", 0), ("eval", 0), ("startup", 1), ("eval", 4),
        ("save", 5), ("eval", 8), ("eval", 10), ("save", 10), ("end", 10),
    ]  # fmt: skip
    times = [line.pop("t_s") for line in log]
    assert times == sorted(times) and 0 <= times[0] < times[-1]
    assert log[2]["compiled_bytes"] > 4 * parameters(first.run.model)
    logged = [line for line in log if line["kind"] == "step"]
    assert logged == [{"kind": "step"} | asdict(record) for record in first.records]
    assert [line["loss"] for line in logged] == first.summary.losses
    assert logged[0]["mfu"] is None  # nobody knows the peak of a virtual device
    rates = [line["learning_rate"] for line in logged]
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[-1] < 0.002
    assert from_dict(RunConfig, log[0]["run"]) == first.run
    assert from_dict(RunConfig, json.loads((first.out / "run.json").read_text())) == first.run


def test_it_saves_and_keeps_the_newest(first):
    checkpoints = Checkpoints(first.out)
    assert checkpoints.steps() == [5, 10]
    assert first.summary.checkpoint == checkpoints.directory / "10"
    assert checkpoints.run() == first.run
    last = first.summary.last_eval_loss
    assert checkpoints.extra()["held_out"] == {"step": 10, "loss": last}
    assert_same_state(checkpoints.restore(first.summary.trainer), first.summary.state)
    assert sorted(p.name for p in first.out.iterdir()) == ["checkpoints", "log.jsonl", "run.json"]


def test_it_prints_plain_lines_where_there_is_no_terminal(first):
    lines = first.printed.splitlines()
    assert not set(first.printed) & {"\x1b", "\r", "\b"}
    assert lines[0] == "devices    8 x cpu, of which 6 are used"
    assert lines[1] == "layout     data 3 x pipe 2 x tensor 1"
    assert "m = 2: bubble 50.00% of ideal time, F, B and W taking equally long" in lines[2]
    steps = [line for line in lines if "TFLOP/s a device" in line]
    assert len(steps) == 10
    assert all(" model, " in line and line.endswith(" SC'21") for line in steps)
    assert sum("held-out loss" in line for line in lines) == 4 + 2  # at the start and the end
    assert any(line.startswith("finished   step 10: ") for line in lines)


def test_seconds_are_accounted_for(first):
    seconds = first.summary.seconds
    assert min(seconds.compile, seconds.train, seconds.eval, seconds.save) > 0
    assert seconds.train == pytest.approx(sum(record.step_s for record in first.records))


# -- continuing ------------------------------------------------------------------------------------


def test_ten_steps_are_five_and_five(first, half_way, monkeypatch):
    """Bit for bit, even with a step in flight, as on devices that are not virtual."""
    monkeypatch.setattr(session, "_runs_ahead", lambda device: True)
    printed, records = io.StringIO(), []
    summary = run_training(half_way, console=Console(file=printed), on_step=records.append)
    assert summary.losses == first.summary.losses[5:]
    assert [record.step for record in records] == [6, 7, 8, 9, 10]
    assert all(record.step_s > 0 for record in records)
    assert_same_state(summary.state, first.summary.state)
    assert summary.last_eval_loss == first.summary.last_eval_loss
    assert f"resumes    from step 5: {Path(half_way.out)}/checkpoints/5\n" in printed.getvalue()


def test_going_on_with_another_layout(first, half_way):
    run = replace(half_way, layout=Layout(microbatch=3), steps=7, eval_every=0, save_every=0)
    run = replace(run, optimizer=replace(run.optimizer, decay_steps=10))
    printed = io.StringIO()
    summary = run_training(run, console=Console(file=printed))
    assert summary.losses == pytest.approx(first.summary.losses[5:7], rel=1e-5)
    assert "changed    layout." in printed.getvalue()
    assert "optimizer.decay_steps None -> 10, " in printed.getvalue()
    assert Checkpoints(run.out).steps() == [5, 7]


def test_a_checkpoint_of_step_0_is_where_a_run_begins(first, tmp_path):
    """A converted model has had no step of training here."""
    run = replace(first.run, out=str(tmp_path / "out"), steps=1, eval_every=0, save_every=0)
    trainer = Trainer(run)
    with Checkpoints(tmp_path / "out" / "checkpoints") as checkpoints:
        state = first.summary.state._replace(step=jax.numpy.int32(0))
        checkpoints.save(trainer, state, tokenizer=first.summary.data.tokenizer)
    summary = run_training(run, console=Console(quiet=True))
    assert summary.first_eval_loss == first.summary.last_eval_loss
    assert len(summary.losses) == 1


def test_what_is_finished_is_only_evaluated(first, tmp_path):
    out = shutil.copytree(first.out, tmp_path / "out")
    printed = io.StringIO()
    run = replace(first.run, out=str(out))
    summary = run_training(run, console=Console(file=printed))
    assert summary.losses == [] and not summary.interrupted
    assert summary.first_eval_loss == summary.last_eval_loss == first.summary.last_eval_loss
    assert summary.checkpoint == out / "checkpoints" / "10"
    assert f"finished   already at step 10: {out}/checkpoints/10\n" in printed.getvalue()
    added = read_log(summary.log)[len(read_log(first.summary.log)) :]
    assert [line["kind"] for line in added] == ["start", "eval"]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (
            {"model": {"vocab": 100}},
            ("256", "model.vocab=100"),
        ),
        ({"layout": {"data": 1, "pipe": 4, "tensor": 4}}, ("16", "8")),
        ({"data": {"path": ("/nowhere",)}}, ("/nowhere",)),
        (
            {"model": {"hidden": 2**20, "layers": 96}},
            ("1,2",),
        ),
    ],
)
def test_refused_before_anything_is_written(tmp_path, few_presets, change, values):
    run = small_run(tmp_path)
    run = replace(run, **{name: replace(getattr(run, name), **c) for name, c in change.items()})
    with pytest.raises(UserError) as error:
        run_training(run, console=Console(quiet=True))
    names(error, *values)
    assert not Path(run.out).exists()


def test_another_model_or_tokenizer_is_refused(half_way):
    wider = replace(half_way, model=replace(half_way.model, hidden=64))
    with pytest.raises(UserError) as error:
        run_training(wider)
    names(error, "5", "hidden=32", "64")
    bpe = replace(half_way, data=replace(half_way.data, tokenizer="bpe", bpe_vocab=280))
    with pytest.raises(UserError) as error:
        run_training(bpe)
    names(error, "tokenizer")
    with pytest.raises(UserError) as error:
        run_training(replace(half_way, resume=False))
    names(error, "step 5", "resume=False")
    assert [p.name for p in Path(half_way.out).iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("log.jsonl", Path.mkdir, "file"),
        ("log.jsonl", os.mkfifo, "file"),
        ("run.json", Path.mkdir, "file"),
        ("profile", Path.touch, "folder"),
    ],
)
def test_something_else_in_the_place_of_what_a_run_writes(tmp_path, name, make, kind):
    make(tmp_path / name)
    with pytest.raises(UserError) as error:
        run_training(replace(small_run(tmp_path), out=str(tmp_path)))
    names(error, name, kind)
    assert {path.name for path in tmp_path.iterdir()} == {name, "text.txt"}


def test_a_log_that_cannot_be_opened(tmp_path):
    """`log.jsonl` is a broken link."""
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "gone" / "log.jsonl")
    with pytest.raises(UserError) as error:
        Log(tmp_path / "log.jsonl")
    names(error, "log.jsonl")


def test_out_that_cannot_be_written(tmp_path):
    run = small_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        run_training(replace(run, out=str(tmp_path / "file")))
    names(error, "/file")
    assert (tmp_path / "file").read_text() == ""


@pytest.fixture
def held(tmp_path):
    """A folder that a run in another process has locked."""
    code = f"import fcntl, os, time; folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
    code += "fcntl.flock(folder, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        yield tmp_path
        other.kill()


def test_one_folder_is_for_one_run_at_a_time(held):
    run = replace(small_run(held), out=str(held))
    with pytest.raises(UserError) as error:
        run_training(run, console=Console(quiet=True))
    names(error, held)
    assert not (held / "run.json").exists() and not (held / "log.jsonl").exists()


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.PREEMPTED)],
)
def test_before_the_first_step_a_signal_ends_the_process(number, status):
    """Even where an exception would be lost."""
    code = f"""
import os
from mtx.launch.exits import leave_at_once

class Lost:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})

leave_at_once()
Lost()
print("goes on")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert "interrupted before the first step" in ended.stderr


def test_before_the_first_step_a_signal_waits_for_no_call_that_does_not_return():
    """Such as a call of XLA's compiler: the main thread's handlers run only when it returns."""
    code = """
import ctypes, os, signal, threading, time
from mtx.launch.exits import leave_at_once

leave_at_once()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
lock(mutex)  # waits for itself, and no signal wakes it
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == Exit.PREEMPTED
    assert "interrupted before the first step" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_once_a_run_can_save_signals_have_their_usual_effect(number):
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        leave_at_once()
        with stop_requests() as stop:
            os.kill(os.getpid(), number)
            assert stop(1)
            assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_a_second_request_has_its_usual_effect(usual_interrupt):
    with stop_requests() as stop:
        assert not stop(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(0)
        assert signal.getsignal(signal.SIGTERM) == before


_PROCESS = """
import json, sys, time
from mtx.launch.start import join_cluster, use_virtual_devices
use_virtual_devices(int(sys.argv[2]))
print(join_cluster(), flush=True)
from mtx.config import RunConfig, from_dict
from mtx.train.loop import run_training
summary = run_training(from_dict(RunConfig, json.loads(sys.argv[1])))
print("interrupted", summary.interrupted, "losses", summary.losses[0])
"""


_FLAGS = (  # conftest's, without its eight devices
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def start_process(run: RunConfig, *, devices: int, **environment: str) -> subprocess.Popen:
    flags = {"XLA_FLAGS": _FLAGS, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, json.dumps(to_dict(run)), str(devices)],
        cwd=ROOT, env=dict(os.environ) | flags | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    while not condition():
        if process.poll() is not None:
            raise AssertionError(process.communicate())
        time.sleep(0.05)


def wait_for_steps(run: RunConfig, count: int, process: subprocess.Popen) -> None:
    log = Path(run.out) / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count('"kind": "step"') >= count, process)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    run = small_run(tmp_path, layout=Layout(), steps=10**6, eval_every=0, save_every=0)
    process = start_process(run, devices=1)
    wait_for_steps(run, 2, process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "finishing this step, then saving; once more leaves at once" in errors
    log = read_log(Path(run.out) / "log.jsonl")
    last = log[-1]["step"]
    assert log[-1] | {"seconds": None, "t_s": None} == {
        "kind": "end", "step": last, "interrupted": True, "seconds": None, "skipped": 0,
        "rollbacks": 0, "t_s": None,
    }  # fmt: skip
    assert f"stopped    at step {last:,} of 1,000,000: {run.out}/checkpoints/{last}; " in printed
    assert "interrupted True" in printed
    checkpoints = Checkpoints(run.out)
    assert checkpoints.steps() == [last]
    assert int(checkpoints.restore(Trainer(run)).step) == last


# It waits after its seventh step until a process has been killed; `known`: exists once all have
# heard that process 1 has come this far.
_UNTIL_ONE_IS_KILLED = """
from pathlib import Path
def on_step(record, known=Path(sys.argv[3]), killed=Path(sys.argv[4])):
    from jax._src import distributed
    while record.step == 7 and not killed.exists():
        if '"loop"' in distributed.global_state.client.key_value_try_get("mtx/heartbeat/1"):
            known.touch()
        time.sleep(0.05)
"""


def test_two_processes_train_one_model_though_one_is_killed(first, tmp_path):
    """Under `mtx launch`, and with the values of one process that is not killed; one process reads
    what both save together."""
    run = replace(first.run, out=str(tmp_path / "out"), eval_every=0, layout=Layout(data=2))
    known, killed = tmp_path / "known", tmp_path / "killed"
    program = _PROCESS.replace("argv[1])))", "argv[1])), on_step=on_step)")
    program = program.replace("\nsummary", f"\n{_UNTIL_ONE_IS_KILLED}summary")
    command = [sys.executable, "-c", program, json.dumps(to_dict(run)), "1", known, killed]
    with (tmp_path / "printed").open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtx", "launch", "-n", "2", "--cpu", "--", *command],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env=dict(os.environ) | {"XLA_FLAGS": _FLAGS},
        )  # fmt: skip
    wait_for(lambda: known.exists() and Checkpoints(run.out).steps() == [5], process)
    wait_for_steps(run, 7, process)
    printed = (tmp_path / "printed").read_text
    os.kill(int(re.search(r"process 1 of 2 on \S+, pid (\d+): 1 of 2", printed())[1]), 9)
    killed.touch()
    assert process.wait(300) == 0, printed()
    assert re.search(r"lost process 1 \(host \S+, pid \d+, stage 0\), last seen at", printed())
    assert re.search(r"\[launch] process 1 \(pid .*was killed by SIGKILL", printed())
    assert printed().count("starts all again") == 1
    assert "resumes    from step 5" in printed()
    assert printed().count("[0] devices    2 x cpu in 2 processes") == 2
    assert "[1] devices" not in printed()  # one of them prints for all
    steps = [line for line in read_log(Path(run.out) / "log.jsonl") if line["kind"] == "step"]
    assert {line["step"] for line in steps} == set(range(1, 11)) and len(steps) > 11
    for line in steps:  # those before the kill, and those done again after it
        assert line["loss"] == pytest.approx(first.summary.losses[line["step"] - 1], rel=1e-5)
    again = [line for line in steps if line["step"] == 6]
    assert len(again) == 2 and again[0]["loss"] == again[1]["loss"]
    assert int(Checkpoints(run.out).restore(first.summary.trainer).step) == 10
