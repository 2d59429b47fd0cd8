"""Shared by the drills: a tiny run in several processes, its log, and who listens where."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WORKER = Path(__file__).parent / "worker.py"
STEPS = 40
# LLVM's optimisations cost more here than they save.
FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
RUN = (
    "miniature", "--model.layers", "2", "--model.hidden", "32", "--model.heads", "2",
    "--model.sequence", "16", "--layout.data", "1", "--layout.tensor", "1", "--layout.virtual",
    "1", "--layout.pipe", "2", "--layout.microbatch", "2", "--global-batch", "4",
    "--eval-batches", "1", "--eval-every", "0",
)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class Run:
    """A command that trains, its output so far, and its log."""

    out: Path
    process: subprocess.Popen
    printed: Path
    began_s: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        return self.printed.read_text(errors="replace")

    def pids(self) -> dict[int, int]:
        """Process ids of the newest attempt, by rank."""
        found = re.findall(r"process (\d+) of \d+ on \S+, pid (\d+):", self.text())
        return {int(rank): int(pid) for rank, pid in found}

    def steps_logged(self) -> int:
        log = self.out / "log.jsonl"
        return log.read_text().count('"kind": "step"') if log.exists() else 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 300) -> None:
        end_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise AssertionError(f"it ended, or took too long:\n{self.text()}")
            time.sleep(0.02)

    def wait(self, timeout_s: float = 600) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(f"it does not end:\n{self.text()}") from None


def environment(**more: str) -> dict[str, str]:
    """This process's variables, so that mtx is found and compiles fast, without a launcher's."""
    launchers = ("JAX_", "SLURM_", "OMPI_", "PMIX_", "MTX_", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    cache = {name: os.environ[name] for name in ["JAX_COMPILATION_CACHE_DIR"] if name in os.environ}
    return kept | cache | {"PYTHONPATH": path, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"} | more


def train_command(out: Path, *options: str, fault: str = "none") -> list[str]:
    """The command of `mtx train` for the tiny run; later options win."""
    command = [sys.executable, str(WORKER), fault, *RUN, "--steps", str(STEPS)]
    return [*command, "--save-every", "10", "--out", str(out), *options]


def start(command: Sequence[str], out: Path, **variables: str) -> Run:
    """Start a command in the background, with its output next to `out`."""
    printed = out.with_name(out.name + ".txt")
    with printed.open("a") as file:
        process = subprocess.Popen(
            list(command), env=environment(**variables), cwd=ROOT, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    # A drill that fails, or is ended, leaves nothing behind.
    atexit.register(_end_group, process.pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return Run(out=out, process=process, printed=printed)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def launch(
    out: Path, *, options: Sequence[str] = (), own: Sequence[str] = (), fault: str = "none",
    processes: int = 2, **variables: str,
) -> Run:  # fmt: skip
    """Start `mtx launch` with a virtual device per process. own: its options; options: train's."""
    command = [
        sys.executable, "-m", "mtx", "launch", "-n", str(processes), "--cpu", *own, "--",
        *train_command(out, *options, fault=fault),
    ]  # fmt: skip
    return start(command, out, **variables)


def losses(out: Path) -> dict[int, float]:
    """Losses by step; if a step has two lines, the later counts."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def repeated(out: Path) -> dict[int, set[float]]:
    """The losses of steps that were done more than once."""
    seen: dict[int, list[float]] = {}
    for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()):
        if line["kind"] == "step":
            seen.setdefault(line["step"], []).append(line["loss"])
    return {step: set(values) for step, values in seen.items() if len(values) > 1}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def listening(pids: Sequence[int]) -> set[str]:
    """The addresses at which these processes listen, as host:port, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                found.add(_address(parts[1]))
    return found


def _address(text: str) -> str:
    """0100007F:1F90 -> 127.0.0.1:8080; also for IPv6 addresses that hold a mapped IPv4 address."""
    host, port = text.split(":")
    if len(host) == 32:
        mapped = host.startswith("0000000000000000FFFF0000")
        host = host[24:] if mapped else host
    if len(host) == 8:
        host = ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
    return f"{host}:{int(port, 16)}"
