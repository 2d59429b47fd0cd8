"""Many processes on one machine: started together, and restarted from the last checkpoint when one
fails. Beyond one machine this is the scheduler's business (see `launch/`).

No JAX here, nor anything else that could fail with the run. The processes die with their
supervisor, even if it is killed: the kernel (PR_SET_PDEATHSIG) and their status pipe see to it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
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
_FLIGHT_S = 3.0  # between the first and the last process that leave for the same reason


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How many processes to start, with which devices, and how often to restart them."""

    processes: Processes = 1  # of this machine
    devices_per_process: Devices = 1  # GPUs, or virtual CPU devices if there are none
    cpu: bool = False  # virtual devices, even if there are GPUs
    max_restarts: Interval = 3  # in a row without progress: a later checkpoint to start from
    backoff_s: Seconds = 1.0  # before the first restart, and twice as long before each later one
    grace_s: Seconds = 12.0  # for the others to leave by themselves, once one has failed
    silent_s: Patience = 30.0  # without a sign of life, a process is taken for frozen

    def __post_init__(self):
        resolve_types(self)


def supervise(command: Sequence[str], options: LaunchOptions) -> Exit:
    """Runs `command` in every process until it has finished; returns the exit of `mtx launch`.

    SIGTERM and Ctrl-C are passed on, as SIGTERM: the run saves and ends, and is not started again.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]} is neither a command of mtx that computes nor a program here"
        )
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
    status_fd: int
    partial: dict[int, bytes] = field(default_factory=dict)  # by file descriptor: an unended line
    heard_s: float = 0.0  # when it last spoke through its status pipe; 0: it never has
    step: int = 0
    stages: tuple[int, ...] = ()
    start: int | None = None  # the step that it continues from
    forced: bool = False  # it did not end by itself

    @property
    def output(self) -> IO[bytes]:
        """The pipe of its output."""
        assert self.process.stdout is not None
        return self.process.stdout

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
        failures, best = 0, -1  # in a row; the latest step that an attempt started from
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
            if not self._wait(wait_s):
                return self._final(statuses)
        raise AssertionError("counting has no end")

    def _final(self, statuses: Sequence[int]) -> Exit:
        """The exit if nothing failed or somebody asked for the end."""
        if not any(statuses):
            return Exit.FINISHED
        if self.requested == signal.SIGINT or Exit.INTERRUPTED in statuses:
            return Exit.INTERRUPTED
        if set(statuses) - {Exit.FINISHED, Exit.PREEMPTED}:
            self._say("stopped as asked, without a new checkpoint")
        return Exit.PREEMPTED

    def _wait(self, seconds: float) -> bool:
        """Waits; returns False if a signal came."""
        end_s = time.monotonic() + seconds
        while not self.requested and time.monotonic() < end_s:
            time.sleep(min(_TICK_S, seconds))
        return not self.requested

    # -- one attempt ------------------------------------------------------------------------------

    def _attempt(self, attempt: int) -> _Worker | None:
        """Starts all processes and waits for their end; returns the one at fault, if one failed."""
        self._say(
            f"attempt {attempt}: {self.options.processes} processes of "
            f"{self.options.devices_per_process} devices: {' '.join(self.command)}"
        )
        variables = _cluster_variables(self.options)
        self.workers = []
        with selectors.DefaultSelector() as selector:
            for rank in range(self.options.processes):
                worker = _start(self.command, rank, variables)
                self.workers.append(worker)
                for descriptor in (worker.output.fileno(), worker.status_fd):
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ, worker)
            cause = self._follow(selector)
            self._drain(selector)
        self.end_all()
        return cause

    def _follow(self, selector: selectors.BaseSelector) -> _Worker | None:
        """Waits until the last process has ended; returns the one at fault, if one failed."""
        failed: list[_Worker] = []
        forced_at_s, passed_on = math.inf, 0
        while any(worker.process.poll() is None for worker in self.workers):
            self._read(selector, _TICK_S)
            now_s = time.monotonic()
            if self.requests > passed_on:
                passed_on = self.requests
                number = signal.SIGTERM if passed_on == 1 else signal.SIGKILL
                self._say(f"passes on {signal.Signals(self.requested).name} as {number.name}")
                self._signal_all(number)
            failed += self._new_failures(failed, now_s)
            if failed and forced_at_s == math.inf:
                # A process that left because of another knew which; those still there add nothing.
                knew = failed[0].process.returncode in (Exit.LOST, Exit.HUNG)
                wait_s = min(self.options.grace_s, _FLIGHT_S) if knew else self.options.grace_s
                forced_at_s = now_s + wait_s
            if now_s > forced_at_s:
                self._end_by_force(*self.workers)
        failed += self._new_failures(failed, time.monotonic())
        return min(failed, key=_innocence, default=None)

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
        """Kills the workers that did not end by themselves, and shows where they were."""
        for worker in workers:
            if worker.process.poll() is None:
                self._say(f"{worker.describe()} is {_state(worker.process.pid)}, and is killed")
                self._show_stack(worker)
                worker.forced = True
                worker.process.kill()
                worker.process.wait()

    def _show_stack(self, worker: _Worker) -> None:
        """Makes a worker write the stacks of its threads, even if it has been stopped, and keeps
        reading for as long as that may take."""
        for number in (signal.SIGUSR1, signal.SIGCONT) if worker.heard_s else ():
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(number)
        end_s = time.monotonic() + (0.5 if worker.heard_s else 0.0)
        while time.monotonic() < end_s:
            self._read_worker(worker, worker.output.fileno())
            time.sleep(_TICK_S / 2)

    def _signal_all(self, number: int) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(number)

    def end_all(self) -> None:
        """Kills every process of this run that is left, and their children."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
            worker.output.close()
            with contextlib.suppress(OSError):
                os.close(worker.status_fd)

    # -- what the processes say -------------------------------------------------------------------

    def _read(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        """Prints what has come; returns whether anything has."""
        events = selector.select(timeout_s)
        if not selector.get_map():
            time.sleep(timeout_s)
        for key, _ in events:
            if not self._read_worker(key.data, key.fd):
                selector.unregister(key.fd)
        return bool(events)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Reads what the last processes have left in their pipes."""
        while selector.get_map() and self._read(selector, 0):
            pass

    def _read_worker(self, worker: _Worker, descriptor: int) -> bool:
        """Reads a pipe of a worker; returns False at its end."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        lines = (worker.partial.pop(descriptor, b"") + data).split(b"\n")
        if lines[-1] and data:
            worker.partial[descriptor] = lines[-1]
        for line in lines[:-1] if data else filter(None, lines):
            if descriptor == worker.status_fd:
                self._take_status(worker, line)
            else:
                _print(f"[{worker.rank}] {line.decode(errors='replace')}")
        return bool(data)

    def _take_status(self, worker: _Worker, line: bytes) -> None:
        with contextlib.suppress(ValueError):
            status = json.loads(line)
            done = status.get("phase") == "done"  # it ends, in its own time, and says no more
            worker.heard_s = 0.0 if done else time.monotonic()
            worker.step = status.get("step", worker.step)
            worker.stages = tuple(status.get("stages", worker.stages))
            worker.start = status.get("start", worker.start)

    def _say(self, text: str) -> None:
        _print(f"[launch] {text}")


def _innocence(worker: _Worker) -> int:
    """0 for a process that had to be killed, 2 for one that says that it has lost another."""
    return 0 if worker.forced else 2 if worker.process.returncode == Exit.LOST else 1


def _print(line: str) -> None:
    with contextlib.suppress(BrokenPipeError, OSError):
        print(line, flush=True)


def _start(command: Sequence[str], rank: int, variables: Mapping[str, str]) -> _Worker:
    read_fd, write_fd = os.pipe()
    own = {"JAX_PROCESS_ID": str(rank), STATUS_FD: str(write_fd), "PYTHONUNBUFFERED": "1"}
    if _GPUS in variables:
        gpus = variables[_GPUS].split(",")
        count = len(gpus) // int(variables["JAX_NUM_PROCESSES"])
        own[_GPUS] = ",".join(gpus[rank * count : (rank + 1) * count])
    first = []
    if sys.platform == "linux":
        first = [sys.executable, "-I", "-S", "-c", _DIE_WITH_SUPERVISOR, str(os.getpid())]
    process = subprocess.Popen(
        [*first, *command], env={**os.environ, **variables, **own}, pass_fds=(write_fd,),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal is for the supervisor alone
    )  # fmt: skip
    os.close(write_fd)
    return _Worker(rank=rank, process=process, status_fd=read_fd)


def _cluster_variables(options: LaunchOptions) -> dict[str, str]:
    """The variables for every process of an attempt; all on loopback, on the attempt's own port."""
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
    """What a process is doing, according to the kernel."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "still there"
    words = {
        "T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk",
        "R": "running", "S": "waiting",
    }  # fmt: skip
    return words.get(state, state)
