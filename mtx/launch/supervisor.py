"""Many processes on one machine: started together, and again from the last checkpoint when one
fails. Beyond one machine this is the scheduler's business (see `launch/`).

No JAX here, nor anything else that could fail with the run. The processes die with their
supervisor, even when it is killed: the kernel sees to it (PR_SET_PDEATHSIG), and their status pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mtx.errors import UserError
from mtx.fields import resolve_types
from mtx.launch.exits import Exit, describe_exit
from mtx.launch.status import STATUS_FD, VIRTUAL_DEVICES
from mtx.sizes import Devices, Interval, Patience, Processes, Seconds

# What each process does first: PR_SET_PDEATHSIG is 1, and outlives the exec.
_DIE_WITH_SUPERVISOR = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # it died before the kernel knew
os.execvp(sys.argv[2], sys.argv[2:])
"""
_GPUS = "CUDA_VISIBLE_DEVICES"
_TICK_S = 0.1
_MAX_BACKOFF_S = 300.0
_FLIGHT_S = 3.0  # between the first and the last that leaves for one reason


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How many processes, with which devices, and how often again."""

    processes: Processes = 1  # of this machine
    devices_per_process: Devices = 1  # GPUs, or virtual CPU devices where there are none
    cpu: bool = False  # virtual devices, also where there are GPUs
    max_restarts: Interval = 3  # in a row without progress: a later checkpoint to start from
    backoff_s: Seconds = 1.0  # before the first restart, and twice as much before each further one
    grace_s: Seconds = 12.0  # for the others to leave by themselves, once one has failed
    silent_s: Patience = 30.0  # without a sign of life, a process is taken for frozen

    def __post_init__(self):
        resolve_types(self)


def supervise(command: Sequence[str], options: LaunchOptions) -> Exit:
    """Runs `command` in every process until it has finished; returns what `mtx launch` ends with.

    SIGTERM and Ctrl-C are passed on, as SIGTERM: the run saves and ends, and is not started again.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is no command of mtx that computes, and no program here")
    supervisor = _Supervisor(command=list(command), options=options)
    before = {
        number: signal.signal(number, supervisor.request)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        return supervisor.run()
    finally:
        supervisor.end_all()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(kw_only=True, eq=False)
class _Worker:
    """One process of an attempt, and the ends of its pipes."""

    rank: int
    process: subprocess.Popen
    readers: list[threading.Thread] = field(default_factory=list)  # of its pipes
    heard_s: float = 0.0  # when it last spoke through its status pipe; 0: it never has
    step: int = 0
    stages: tuple[int, ...] = ()
    start: int | None = None  # the step that it goes on from
    forced: bool = False  # it did not end by itself

    def describe(self) -> str:
        where = f", stage {','.join(map(str, self.stages))}" if self.stages else ""
        return f"process {self.rank} (pid {self.process.pid}{where}) at step {self.step:,}"


@dataclass(kw_only=True, eq=False)
class _Supervisor:
    command: list[str]
    options: LaunchOptions
    workers: list[_Worker] = field(default_factory=list)
    requested: int | None = None  # the signal that asks for the end
    requests: int = 0

    def request(self, number: int, frame: object) -> None:
        self.requested = self.requested or number
        self.requests += 1

    def run(self) -> Exit:
        failures, best = 0, -1  # in a row; the latest step that an attempt went on from
        for attempt in itertools.count(1):
            cause = self._attempt(attempt)
            statuses = [worker.process.returncode for worker in self.workers]
            if Exit.MISTAKE in statuses:
                return Exit.MISTAKE
            if cause is None or self.requested:
                return self._final(statuses)
            start = max((w.start for w in self.workers if w.start is not None), default=-1)
            failures = 1 if start > best else failures + 1
            best = max(best, start)
            if failures > self.options.max_restarts:
                self._say(
                    f"gives up after {failures} failures in a row without a later checkpoint; the "
                    f"last: {cause.describe()} {describe_exit(cause.process.returncode)}"
                )
                return Exit.GAVE_UP
            wait_s = min(self.options.backoff_s * 2 ** (failures - 1), _MAX_BACKOFF_S)
            self._say(
                f"starts all again in {wait_s:g} s, restart {failures} of at most "
                f"{self.options.max_restarts} in a row"
            )
            end_s = time.monotonic() + wait_s
            while not self.requested and time.monotonic() < end_s:
                time.sleep(min(_TICK_S, wait_s))
            if self.requested:
                return self._final(statuses)
        raise AssertionError("counting has no end")

    def _final(self, statuses: Sequence[int]) -> Exit:
        """The end, where nothing failed or somebody asked for it."""
        if not any(statuses):
            return Exit.FINISHED
        if self.requested == signal.SIGINT or Exit.INTERRUPTED in statuses:
            return Exit.INTERRUPTED
        if set(statuses) - {Exit.FINISHED, Exit.PREEMPTED}:
            self._say("stopped as asked, without a new checkpoint")
        return Exit.PREEMPTED

    # -- one attempt ------------------------------------------------------------------------------

    def _attempt(self, attempt: int) -> _Worker | None:
        """Starts all processes and waits for their end; returns the one at fault, if one failed."""
        self._say(
            f"attempt {attempt}: {self.options.processes} processes of "
            f"{self.options.devices_per_process} devices: {' '.join(self.command)}"
        )
        variables = _cluster_variables(self.options)
        self.workers = []
        for rank in range(self.options.processes):
            self.workers.append(_start(self.command, rank, variables))
        cause = self._follow()
        self.end_all()
        return cause

    def _follow(self) -> _Worker | None:
        """Until the last process has ended; returns the one at fault, if one failed."""
        failed: list[_Worker] = []
        forced_at_s, passed_on = math.inf, 0
        while any(worker.process.poll() is None for worker in self.workers):
            time.sleep(_TICK_S)
            now_s = time.monotonic()
            if self.requests > passed_on:
                passed_on = self.requests
                number = signal.SIGTERM if passed_on == 1 else signal.SIGKILL
                self._say(f"passes on {signal.Signals(self.requested).name} as {number.name}")
                for worker in self.workers:
                    _signal(worker, number)
            failed += self._new_failures(failed, now_s)
            if failed and forced_at_s == math.inf:
                # Who left because of another knew which: those that are still there are no help.
                knew = failed[0].process.returncode in (Exit.LOST, Exit.HUNG)
                wait_s = min(self.options.grace_s, _FLIGHT_S) if knew else self.options.grace_s
                forced_at_s = now_s + wait_s
            if now_s > forced_at_s:
                self._end_by_force(*self.workers)
        failed += self._new_failures(failed, time.monotonic())
        # Who had to be killed is at fault, rather than who says that it has lost another.
        return min(
            failed, default=None, key=lambda w: (not w.forced, w.process.returncode == Exit.LOST)
        )

    def _new_failures(self, known: Sequence[_Worker], now_s: float) -> list[_Worker]:
        found = []
        for worker in self.workers:
            status = worker.process.poll()
            silent_s = now_s - worker.heard_s if worker.heard_s else 0.0
            if worker in known:
                continue
            if status is None and silent_s > self.options.silent_s:
                self._say(f"{worker.describe()}: no sign of life for {silent_s:.0f} s")
                self._end_by_force(worker)
                found.append(worker)
            elif status in (Exit.PREEMPTED, Exit.INTERRUPTED):
                self.requested = self.requested or signal.SIGTERM  # somebody asked it directly
            elif status:
                if not worker.forced:
                    self._say(f"{worker.describe()} {describe_exit(status)}")
                found.append(worker)
        return found

    def _end_by_force(self, *workers: _Worker) -> None:
        """Ends those that do not end by themselves, once they have had time to write the stacks of
        their threads, also where they were stopped."""
        for worker in workers:
            if worker.process.poll() is None:
                self._say(f"{worker.describe()} is {_state(worker.process.pid)}, and is killed")
                if worker.heard_s:
                    _signal(worker, signal.SIGUSR1)
                    _signal(worker, signal.SIGCONT)
                    time.sleep(0.5)
                worker.forced = True
                worker.process.kill()
                worker.process.wait()

    def end_all(self) -> None:
        """No process of this run is left, nor a child of one."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            for reader in worker.readers:  # what the last ones have left in their pipes
                reader.join(_TICK_S * 10)

    def _say(self, text: str) -> None:
        _print(f"[launch] {text}")


def _signal(worker: _Worker, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.process.send_signal(number)


# -- what the processes say ------------------------------------------------------------------------


def _print(line: str) -> None:
    with contextlib.suppress(BrokenPipeError, OSError):
        sys.stdout.write(f"{line}\n")  # whole, as several threads do
        sys.stdout.flush()


def _read_output(worker: _Worker, pipe: IO[bytes]) -> None:
    for line in pipe:
        text = line.decode(errors="replace").removesuffix("\n")
        _print(f"[{worker.rank}] {text}")
    pipe.close()


def _read_status(worker: _Worker, pipe: IO[bytes]) -> None:
    for line in pipe:
        with contextlib.suppress(ValueError):
            status = json.loads(line)
            done = status.get("phase") == "done"  # it ends, in its own time, and says no more
            worker.heard_s = 0.0 if done else time.monotonic()
            worker.step = status.get("step", worker.step)
            worker.stages = tuple(status.get("stages", worker.stages))
            worker.start = status.get("start", worker.start)
    pipe.close()


def _start(command: Sequence[str], rank: int, variables: Mapping[str, str]) -> _Worker:
    read_fd, write_fd = os.pipe()
    own = {"JAX_PROCESS_ID": str(rank), STATUS_FD: str(write_fd), "PYTHONUNBUFFERED": "1"}
    if _GPUS in variables:
        gpus = variables[_GPUS].split(",")
        count = len(gpus) // int(variables["JAX_NUM_PROCESSES"])
        own[_GPUS] = ",".join(gpus[rank * count : (rank + 1) * count])
    first = [sys.executable, "-I", "-S", "-c", _DIE_WITH_SUPERVISOR, str(os.getpid())]
    first = first if sys.platform == "linux" else []
    process = subprocess.Popen(
        [*first, *command], env={**os.environ, **variables, **own}, pass_fds=(write_fd,),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal is for the supervisor alone
    )  # fmt: skip
    os.close(write_fd)
    worker = _Worker(rank=rank, process=process)
    for read, pipe in ((_read_output, process.stdout), (_read_status, open(read_fd, "rb"))):
        worker.readers.append(threading.Thread(target=read, args=(worker, pipe), daemon=True))
        worker.readers[-1].start()
    return worker


def _cluster_variables(options: LaunchOptions) -> dict[str, str]:
    """What every process of one attempt gets; all on loopback, on a port of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {
        "MTX_LAUNCHER": "mtx launch",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(options.processes),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }
    gpus = [] if options.cpu or os.environ.get("JAX_PLATFORMS") == "cpu" else find_gpus()
    if not gpus:
        devices = str(options.devices_per_process)
        return variables | {"JAX_PLATFORMS": "cpu", VIRTUAL_DEVICES: devices}
    wanted = options.processes * options.devices_per_process
    if len(gpus) < wanted:
        raise UserError(
            f"{options.processes} processes of {options.devices_per_process} devices ask for "
            f"{wanted} GPUs, and there are {len(gpus)}; use fewer, or virtual devices with --cpu"
        )
    return variables | {_GPUS: ",".join(gpus[:wanted])}


def find_gpus() -> list[str]:
    """NVIDIA GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all there are."""
    if _GPUS in os.environ:
        return [gpu for gpu in os.environ[_GPUS].split(",") if gpu]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def _state(pid: int) -> str:
    """What the kernel says that a process does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "still there"
    words = {
        "T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk",
        "R": "running", "S": "waiting",
    }  # fmt: skip
    return words.get(state, state)
