"""One machine's processes under their supervisor: restarts, limits, signals, and no orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from errors import names

from mtx.errors import UserError
from mtx.launch.exits import Exit
from mtx.launch.supervisor import LaunchOptions, _cluster_variables, supervise

# A process without JAX: the script says what it does, and `attempt` counts its starts.
PRELUDE = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
count = pathlib.Path(f"{sys.argv[1]}/{rank}")
attempt = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(attempt))
def tell(**values):
    os.write(int(os.environ["MTX_STATUS_FD"]), json.dumps(values).encode() + b"\\n")
def wait_for_other():
    while not (count.parent / str(1 - rank)).exists():
        time.sleep(0.01)
"""


def command(folder: Path, script: str) -> list[str]:
    return [sys.executable, "-S", "-c", PRELUDE + script, str(folder)]


def run(folder: Path, script: str, **options) -> Exit:
    given = {"processes": 2, "cpu": True, "backoff_s": 0.01, "max_restarts": 2} | options
    return supervise(command(folder, script), LaunchOptions(**given))


def starts(folder: Path, rank: int = 0) -> int:
    return int((folder / str(rank)).read_text())


def test_it_gives_each_its_number_and_prefixes_what_it_says(tmp_path, capfd):
    script = """
print("one of", os.environ["JAX_NUM_PROCESSES"], "with", os.environ["MTX_VIRTUAL_DEVICES"])
print("and no end of line", end="", file=sys.stderr)
"""
    assert run(tmp_path, script, devices_per_process=3) == Exit.FINISHED
    lines = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        assert f"[{rank}] one of 2 with 3" in lines
        assert f"[{rank}] and no end of line" in lines
    assert lines[0].startswith("[launch] attempt 1: 2 processes of 3 devices: ")


def test_all_start_again_after_one_fails(tmp_path, capfd):
    script = """
wait_for_other()
time.sleep(300 * (rank == 0 and attempt == 1)); sys.exit(7 * (attempt == 1))
"""
    assert run(tmp_path, script, grace_s=0.1) == Exit.FINISHED
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (2, 2)
    printed = capfd.readouterr().out
    assert "process 1 (pid" in printed and "ended (exit status 7)" in printed
    assert "starts all again in 0.01 s, restart 1 of at most 2 in a row" in printed
    assert re.search(r"process 0 .* is (waiting|running), and is killed", printed)


def test_it_gives_up(tmp_path, capfd):
    assert run(tmp_path, "sys.exit(70)") == Exit.GAVE_UP
    assert starts(tmp_path) == 3
    assert "gives up after 3 failures in a row without a later checkpoint" in capfd.readouterr().out


def test_progress_resets_the_count(tmp_path, capfd):
    script = "tell(start=10 * attempt); sys.exit(70 * (attempt < 6))"
    assert run(tmp_path, script, max_restarts=1) == Exit.FINISHED
    assert starts(tmp_path) == 6
    assert "restart 2" not in capfd.readouterr().out


@pytest.mark.parametrize("status", [Exit.MISTAKE, Exit.PREEMPTED, Exit.INTERRUPTED])
def test_what_is_not_started_again(tmp_path, status):
    assert run(tmp_path, f"sys.exit({int(status)})") == status
    assert starts(tmp_path) == 1


def test_the_one_at_fault_is_named_and_not_who_lost_it(tmp_path, capfd):
    script = "wait_for_other(); time.sleep(0.2 * rank); sys.exit(70 if rank else 69)"
    assert run(tmp_path, script, max_restarts=0) == Exit.GAVE_UP
    last = capfd.readouterr().out.splitlines()[-1]
    assert "the last: process 1" in last and "failed (exit status 70)" in last


def test_a_frozen_one_is_found_by_its_silence(tmp_path, capfd):
    script = """
import faulthandler; faulthandler.register(signal.SIGUSR1)
tell(step=4, stages=[1])
if rank == 1 and attempt == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
for _ in range(30 // attempt):
    tell(step=5); time.sleep(0.1)
"""
    assert run(tmp_path, script, silent_s=2, grace_s=0) == Exit.FINISHED
    printed = capfd.readouterr().out
    assert re.search(r"process 1 \(pid \d+, stage 1\) at step 4: no sign of life for", printed)
    assert "is stopped by a signal, and is killed" in printed
    assert "[1] Current thread" in printed or "[1] Stack (most recent call first):" in printed


def supervisor(folder: Path, script: str) -> subprocess.Popen:
    code = (
        "import sys; from mtx.launch.supervisor import *; "
        "options = LaunchOptions(processes=2, cpu=True, backoff_s=0.01); "
        "sys.exit(supervise(sys.argv[1:], options))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *command(folder, script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_pids(folder: Path) -> list[int]:
    for _ in range(2400):
        texts = [path.read_text() for path in sorted(folder.glob("pid*"))]
        if len(texts) == 2 and all(texts):
            return list(map(int, texts))
        time.sleep(0.05)
    raise AssertionError("the processes did not start")


PIDS = """
def ready():
    pathlib.Path(f"{sys.argv[1]}/pid{rank}").write_text(str(os.getpid()))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_are_passed_on_as_sigterm(tmp_path, number, status):
    script = PIDS + (
        'signal.signal(signal.SIGTERM, lambda *_: (print("saves", rank), sys.exit(75)))\n'
        "ready(); time.sleep(300)"
    )
    process = supervisor(tmp_path, script)
    wait_for_pids(tmp_path)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == status
    assert "[0] saves 0" in printed and "[1] saves 1" in printed
    assert "starts all again" not in printed


def test_no_process_outlives_its_supervisor(tmp_path):
    process = supervisor(tmp_path, PIDS + "ready(); time.sleep(300)")
    pids = wait_for_pids(tmp_path)
    process.kill()
    process.communicate(timeout=300)
    for _ in range(1200):
        if not any(map(running, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(pids)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- what it refuses, and what it passes on --------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"processes": 0}, {"devices_per_process": 0}, {"max_restarts": -1}, {"silent_s": 0}]
)
def test_options_that_cannot_be(options):
    with pytest.raises(UserError):
        LaunchOptions(**options)


def test_each_process_gets_its_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    options = LaunchOptions(processes=2, devices_per_process=2)
    variables = _cluster_variables(options)
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3,5,7"
    assert "MTX_VIRTUAL_DEVICES" not in variables
    assert re.fullmatch(r"127\.0\.0\.1:\d+", variables["JAX_COORDINATOR_ADDRESS"])
    with pytest.raises(UserError) as error:
        _cluster_variables(LaunchOptions(processes=3, devices_per_process=2))
    assert names(error, 6, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _cluster_variables(options)["MTX_VIRTUAL_DEVICES"] == "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
