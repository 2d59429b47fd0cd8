"""A real SLURM of one node and a real mpirun: each trains, is killed, and continues by itself.

    python tests/drills/launchers.py [--processes 2] [--only slurm,openmpi]

Needs slurm-wlm and munge, or openmpi-bin; a missing one is left out and reported. Everything runs
in a separate directory, with its own munge key, on free ports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import ROOT, RUN, STEPS, Run, alive, listening, losses, start

QUICK = ("--watch.heartbeat-s", "5", "--watch.hang-s", "60", "--virtual-devices", "1")
LAUNCH = ROOT / "launch"


def arguments(processes: int) -> list[str]:
    """Arguments of `mtx train`: a stage per process; for four, the miniature, two devices each."""
    if processes == 4:
        quick = [*QUICK[:-1], "2", "--eval-batches", "1", "--eval-every", "0"]
        return ["miniature", "--steps", str(STEPS), "--save-every", "10", *quick]
    layers = ["--model.layers", str(processes), "--layout.pipe", str(processes)]
    return [*RUN, *layers, "--steps", str(STEPS), "--save-every", "10", *QUICK]


def missing(*commands: str) -> str:
    """The reason why a drill cannot be run here; empty if it can."""
    absent = [command for command in commands if shutil.which(command) is None]
    return f"left out: there is no {', '.join(absent)}" if absent else ""


def follow(run: Run, processes: int, launcher: str) -> str:
    """Wait for some steps, kill one process, and wait for the end."""
    run.wait_for(lambda: run.steps_logged() >= 15)
    pids = run.pids()
    assert sorted(pids) == list(range(processes)), run.text()
    assert run.text().count(f"found by {launcher}") == processes, run.text()
    addresses = listening(list(pids.values()))
    assert addresses and all(a.startswith("127.0.0.1:") for a in addresses), addresses
    os.kill(pids[processes - 1], signal.SIGKILL)
    run.wait_for(lambda: run.steps_logged() >= STEPS + 3)
    return (
        f"{processes} processes of {launcher}, one killed at step {last_before(run)}, went on from "
        f"step {resumed(run)}"
    )


def last_before(run: Run) -> int:
    lines = (run.out / "log.jsonl").read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if '"kind": "start"' in line]
    steps = [line for line in lines[: starts[1]] if '"kind": "step"' in line]
    return int(re.search(r'"step": (\d+)', steps[-1])[1])


def resumed(run: Run) -> int:
    return int(re.findall(r"resumes    from step (\d+)", run.text())[-1])


def check_end(run: Run) -> None:
    done = losses(run.out)
    assert sorted(done) == list(range(1, STEPS + 1)), run.text()
    lines = (run.out / "log.jsonl").read_text().splitlines()
    assert sum('"kind": "start"' in line for line in lines) == 2
    for _ in range(300):  # if nobody waits for the job, it may still be ending
        if not any(map(alive, run.pids().values())):
            return
        time.sleep(0.1)
    raise AssertionError(run.pids())


# -- SLURM -----------------------------------------------------------------------------------------

CONFIG = """
ClusterName=drill
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A SLURM of this machine alone; yields the variables with which its commands find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(), user=pwd.getpwuid(os.getuid()).pw_name, folder=folder,
            controller_port=free_port(), node_port=free_port(), cpus=max(os.cpu_count(), 16),
        )
    )  # fmt: skip
    variables = {"SLURM_CONF": str(config)}
    names = ("socket", "pid-file", "log-file", "seed-file")
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in names]
    commands = (munge, ["slurmctld", "-D", "-f", str(config)], ["slurmd", "-D", "-f", str(config)])
    daemons = []
    try:
        for command in commands:
            daemons.append(
                subprocess.Popen(
                    command, env=os.environ | variables, stdout=subprocess.DEVNULL,
                    stderr=(folder / f"{command[0]}.err").open("w"),
                )
            )  # fmt: skip
            time.sleep(1)
        wait_for_node(variables, folder)
        yield variables
    finally:
        # Jobs outlive their daemons: leave none behind, whatever went wrong.
        stop = ["scancel", "--signal=KILL", "--full", "--user", pwd.getpwuid(os.getuid()).pw_name]
        for command in (stop, ["scancel", *stop[3:]]):
            subprocess.run(command, env=os.environ | variables, check=False, timeout=30)
        time.sleep(2)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def wait_for_node(variables: dict[str, str], folder: Path) -> None:
    for _ in range(60):
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=os.environ | variables, capture_output=True, text=True
        )
        if done.stdout.strip() in ("idle", "mixed"):
            return
        time.sleep(0.5)
    logs = [p.read_text()[-2000:] for p in folder.iterdir() if p.suffix in (".err", ".log")]
    raise AssertionError("\n".join([done.stdout + done.stderr, *logs]))


def drill_slurm(folder: Path, processes: int) -> str:
    if why := missing("srun", "sbatch", "slurmctld", "slurmd", "munged"):
        return why
    with slurm(folder) as variables:
        out = folder / "run"
        command = [
            "sbatch", "--wait", f"--ntasks-per-node={processes}", "--overcommit",
            f"--output={out}.txt", f"--chdir={ROOT}", LAUNCH / "slurm.sbatch",
            *arguments(processes),
        ]  # fmt: skip
        more = {"OUT": str(out), "MTX": f"{sys.executable} -m mtx", "SLURM_OVERCOMMIT": "1"}
        run = start(list(map(str, command)), out, **variables, **more)
        told = follow(run, processes, "SLURM")
        assert run.wait() == 0, run.text()
        check_end(run)
        return told + "; " + preempt(folder, processes, variables | more)


def preempt(folder: Path, processes: int, variables: dict[str, str]) -> str:
    """scancel's SIGTERM to the batch script: a checkpoint, and the job is queued again."""
    out = folder / "preempted"
    command = [
        "sbatch", "--parsable", f"--ntasks-per-node={processes}", "--overcommit",
        f"--output={out}.txt", f"--chdir={ROOT}", LAUNCH / "slurm.sbatch", *arguments(processes),
    ]  # fmt: skip
    # The first line of its output is the job's number.
    run = start(list(map(str, command)), out, **variables | {"OUT": str(out)})
    run.process.wait(30)
    job = run.text().split()[0]

    def wait_for(condition) -> None:
        for _ in range(12_000):  # a job that is queued again waits for two minutes first
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError(run.text())

    wait_for(lambda: run.steps_logged() >= 5)
    subprocess.run(
        ["scancel", "--batch", "--signal=TERM", job], env=os.environ | variables, check=True
    )
    wait_for(lambda: "stopped    at step" in run.text())
    wait_for(lambda: run.steps_logged() >= STEPS)
    check_end(run)
    return f"SIGTERM by scancel: saved, queued again, went on from step {resumed(run)}"


# -- Open MPI --------------------------------------------------------------------------------------


def drill_openmpi(folder: Path, processes: int) -> str:
    if why := missing("mpirun"):
        return why
    out = folder / "run"
    script = [str(LAUNCH / "openmpi.sh"), "-n", str(processes), "--oversubscribe"]
    if os.getuid() == 0:
        script.append("--allow-run-as-root")
    more = {"OUT": str(out), "MTX": f"{sys.executable} -m mtx"}
    run = start([*script, "--", *arguments(processes)], out, **more)
    told = follow(run, processes, "Open MPI")
    assert run.wait() == 0, run.text()
    check_end(run)
    out = folder / "preempted"
    run = start([*script, "--", *arguments(processes)], out, **more | {"OUT": str(out)})
    run.wait_for(lambda: run.steps_logged() >= 5)
    run.process.terminate()
    assert run.wait() == 75, run.text()
    assert "stopped    at step" in run.text()
    again = start([*script, "--", *arguments(processes)], out, **more | {"OUT": str(out)})
    assert again.wait() == 0, again.text()
    check_end(again)
    return f"{told}; SIGTERM: saved, exit status 75, went on from step {resumed(again)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="slurm,openmpi")
    options = parser.parse_args()
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            told = globals()[f"drill_{name}"](Path(folder), options.processes)
            print(f"{name:<10} {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
