"""Two hosts, as two network namespaces with a link that is cut for a moment, slow, cut for good.

    python tests/drills/namespaces.py            (as root; needs ip and tc of iproute2)

Process 0 is in one, process 1 in the other; they find each other by addresses alone, since their
host has a single name, which resolves to loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import STEPS, Run, listening, losses, start, train_command

NAMES = ("mtxdrill0", "mtxdrill1")
HOSTS = ("10.77.0.1", "10.77.0.2")
HEARTBEAT_S = 6


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(index: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", NAMES[index], *command]


def why_not() -> str:
    """The reason why this cannot be run here; empty if it can."""
    if os.getuid() != 0:
        return "left out: network namespaces are for root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "left out: there is no iproute2"
    try:
        with link():
            return ""
    except subprocess.CalledProcessError as error:
        return f"left out: no network namespaces here ({error.stderr.decode().strip()})"


@contextlib.contextmanager
def link() -> Iterator[None]:
    """Two namespaces and a pair of interfaces, called veth0 in each."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth0",
           "netns", NAMES[1])  # fmt: skip
        for name, host in zip(NAMES, HOSTS):
            ip("-n", name, "address", "add", f"{host}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def cut(on: bool) -> None:
    ip("-n", NAMES[1], "link", "set", "veth0", "down" if on else "up")


def start_both(out: Path, port: int, *options: str) -> list[Run]:
    quick = ("--watch.heartbeat-s", str(HEARTBEAT_S), "--virtual-devices", "1")
    runs = []
    for index in range(2):
        command = inside(index, *train_command(out, *quick, *options))
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"{HOSTS[0]}:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }
        run = start(command, out.with_name(f"{out.name}-{index}"), **variables)
        run.out = out
        runs.append(run)
    return runs


def drill(folder: Path) -> Iterator[str]:
    out = folder / "run"
    zero, one = start_both(out, 4001)
    zero.wait_for(lambda: zero.steps_logged() >= 5)
    pids = zero.pids() | one.pids()
    addresses = listening([pids[0]]) | listening([pids[1]])
    hosts = {address.rpartition(":")[0] for address in addresses}
    assert hosts == set(HOSTS), addresses
    assert f"{HOSTS[0]}:4001" in addresses
    yield f"listens at {', '.join(sorted(hosts))} and nowhere else"
    assert (zero.wait(), one.wait()) == (0, 0), zero.text() + one.text()
    undisturbed = losses(out)

    out = folder / "cut-briefly"
    zero, one = start_both(out, 4002)
    zero.wait_for(lambda: zero.steps_logged() >= 12)
    cut(True)
    time.sleep(3)
    cut(False)
    assert (zero.wait(), one.wait()) == (0, 0), zero.text() + one.text()
    assert losses(out) == undisturbed
    yield "cut for 3 s: goes on, with the same losses"

    out = folder / "slow"
    rate = ["tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "2mbit", "burst", "16kb",
            "latency", "400ms"]  # fmt: skip
    for index in range(2):
        subprocess.run(inside(index, *rate), check=True, capture_output=True)
    zero, one = start_both(out, 4003)
    assert (zero.wait(), one.wait()) == (0, 0), zero.text() + one.text()
    assert losses(out) == undisturbed
    for index in range(2):
        subprocess.run(inside(index, "tc", "qdisc", "del", "dev", "veth0", "root"), check=True)
    yield "2 Mbit/s: slower, with the same losses"

    out = folder / "cut"
    zero, one = start_both(out, 4004)
    zero.wait_for(lambda: zero.steps_logged() >= 15)
    cut(True)
    start_s = time.monotonic()
    assert (zero.wait(60), one.wait(60)) == (69, 69), zero.text() + one.text()
    after_s = time.monotonic() - start_s
    assert "lost process 1 (host" in zero.text(), zero.text()
    assert "lost process 0 (host" in one.text(), one.text()
    cut(False)
    yield f"cut: both sides name the other and end after {after_s:.1f} s, exit status 69"

    zero, one = start_both(out, 4005)
    assert (zero.wait(), one.wait()) == (0, 0), zero.text() + one.text()
    assert losses(out) == undisturbed and len(undisturbed) == STEPS
    assert "resumes    from step 10" in zero.text()
    yield "started again: goes on from step 10, with the same losses"


def main() -> int:
    if why := why_not():
        print(why)
        return 0
    with link(), tempfile.TemporaryDirectory() as folder:
        for told in drill(Path(folder)):
            print(told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
