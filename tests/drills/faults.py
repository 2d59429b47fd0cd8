"""Faults in a run of two processes under `mtx launch` are found, named and survived.

    python tests/drills/faults.py [--seed 0] [--rounds 1] [--only kill,freeze]

Each drill must end with the losses of an undisturbed run, bit for bit, and leave no process. Prints
a line for each: the fault, what the run said about it, and the seconds between the two.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import STEPS, Run, alive, launch, listening, losses

QUICK = ("--watch.heartbeat-s", "5", "--watch.hang-s", "5")


class Drills:
    """All faults: the methods whose names begin with `drill_`."""

    def __init__(self, folder: Path, chance: random.Random):
        self.folder, self.chance = folder, chance
        self.reference: dict[int, float] = {}
        self.count = 0

    def out(self) -> Path:
        self.count += 1
        return self.folder / f"run{self.count}"

    def undisturbed(self) -> str:
        run = launch(self.out(), options=QUICK)
        run.wait_for(lambda: run.steps_logged() > 2)
        addresses = listening(list(run.pids().values()))
        assert addresses and all(a.startswith("127.0.0.1:") for a in addresses), addresses
        assert run.wait() == 0, run.text()
        self.reference = losses(run.out)
        assert len(self.reference) == STEPS
        for rank in range(2):  # each says once who it is
            who = re.findall(rf"process {rank} of 2 on \S+, pid \d+: 1 of 2 devices", run.text())
            assert len(who) == 1, run.text()
        said = [line for line in run.text().splitlines() if line.startswith("[1] ")]
        assert len([line for line in said if "[Gloo]" not in line]) == 1, said
        return f"listens at {len(addresses)} addresses, all of loopback"

    def finish(self, run: Run, restarts: int = 1) -> None:
        """Check that the run ends well, after this many restarts, with the undisturbed losses."""
        assert run.wait() == 0, run.text()
        assert run.text().count("starts all again") == restarts, run.text()
        assert losses(run.out) == self.reference
        time.sleep(0.5)
        assert not any(alive(pid) for pid in run.pids().values())

    def strike(self, run: Run, act: Callable[[dict[int, int]], None], sign: str) -> str:
        """Do something to the processes at a random moment of training; the run has to print
        `sign`. Returns the time until then and the line."""
        at = self.chance.randrange(3, STEPS - 8)
        run.wait_for(lambda: run.steps_logged() >= at)
        time.sleep(self.chance.random() * 0.1)
        length, start_s = len(run.text()), time.monotonic()
        act(run.pids())
        run.wait_for(lambda: re.search(sign, run.text()[length:]) is not None)
        after_s = time.monotonic() - start_s
        line = next(line for line in run.text()[length:].splitlines() if re.search(sign, line))
        return f"after {after_s:.1f} s: {line}"

    # -- signals ----------------------------------------------------------------------------------

    def drill_kill(self) -> str:
        rank = self.chance.randrange(2)
        run = launch(self.out(), options=QUICK)
        said = self.strike(
            run, lambda pids: os.kill(pids[rank], signal.SIGKILL),
            rf"lost process {rank} \(host \S+, pid \d+, stage {rank}\), last seen at step \d+",
        )  # fmt: skip
        self.finish(run)
        assert f"process {rank} (pid" in run.text() and "was killed by SIGKILL" in run.text()
        return said

    def drill_freeze(self) -> str:
        rank = self.chance.randrange(2)
        run = launch(self.out(), options=QUICK)
        said = self.strike(
            run, lambda pids: os.kill(pids[rank], signal.SIGSTOP),
            rf"lost process {rank} \(host \S+, pid \d+, stage {rank}\), last seen at step \d+",
        )  # fmt: skip
        self.finish(run)
        assert re.search(rf"\[{rank}\] (Current t|T)hread 0x", run.text()), "the frozen one's stack"
        return said

    def drill_term(self) -> str:
        run = launch(self.out(), options=QUICK)
        said = self.strike(run, lambda pids: run.process.terminate(), r"stopped    at step \d+ of")
        assert run.wait() == 75, run.text()
        again = launch(run.out, options=QUICK)
        self.finish(again, restarts=0)
        return said

    def drill_preempt_one(self) -> str:
        rank = self.chance.randrange(2)
        run = launch(self.out(), options=QUICK)
        said = self.strike(
            run, lambda pids: os.kill(pids[rank], signal.SIGTERM), r"stopped    at step \d+ of"
        )
        assert run.wait() == 75, run.text()
        self.finish(launch(run.out, options=QUICK), restarts=0)
        return said

    def drill_orphans(self) -> str:
        run = launch(self.out(), options=QUICK)
        run.wait_for(lambda: run.steps_logged() >= 15)
        pids, start_s = run.pids(), time.monotonic()
        run.process.kill()
        while any(map(alive, pids.values())) and time.monotonic() < start_s + 5:
            time.sleep(0.01)
        assert not any(map(alive, pids.values()))
        after_s = time.monotonic() - start_s
        self.finish(launch(run.out, options=QUICK), restarts=0)
        return f"supervisor killed, no process left after {after_s:.2f} s"

    # -- in the program ---------------------------------------------------------------------------

    def inside(self, kind: str, sign: str) -> Run:
        """Run with a fault that happens once, in one process."""
        rank, at = self.chance.randrange(2), self.chance.randrange(3, STEPS - 8)
        run = launch(
            self.out(), options=QUICK, fault=f"{kind}:{rank}:{at}",
            DRILL_ONCE=str(self.folder / f"once{self.count}"),
        )  # fmt: skip
        run.wait_for(lambda: "starts all again" in run.text())
        assert re.search(sign.format(rank=rank, at=at), run.text()), run.text()
        self.finish(run)
        return run

    def drill_exception(self) -> str:
        run = self.inside(
            "raise",
            r"process {rank} \(host \S+, pid \d+, stage {rank}\) at step {at}, in loop failed: "
            r"RuntimeError: a drill's exception",
        )
        assert "exit status 70" in run.text()
        return "named on both sides"

    def drill_hang(self) -> str:
        run = self.inside(
            "hang",
            r"hung for \d+ s: process {rank} \(host \S+, pid \d+, stage {rank}\) at step {at}",
        )
        assert re.search(r"worker.py\", line \d+ in on_step", run.text()), "its stack"
        assert "exit status 124" in run.text()
        return "named, with the stack of the one that hung"

    def drill_grip(self) -> str:
        """A thread never releases the interpreter: no Python code of that process can report it."""
        run = self.inside("grip", r"lost process {rank} \(host \S+, pid \d+, stage {rank}\)")
        assert re.search(r"worker.py\", line \d+ in on_step", run.text()), "its stack"
        return "named, with the stack of the one that held the interpreter"

    def drill_late(self) -> str:
        """Killed when the last checkpoint is complete: the other does not wait for it."""
        run = self.inside("late", r"lost process {rank} \(host \S+, pid \d+, stage {rank}\)")
        assert f"already at step {STEPS}" in run.text()
        return "named; nothing was left to do"

    def drill_no_progress(self) -> str:
        """The same exception repeats, before the first checkpoint."""
        own = ("--max-restarts", "1", "--backoff-s", "0.2")
        run = launch(self.out(), options=QUICK, own=own, fault="raise:1:5")
        assert run.wait() == 79, run.text()
        assert run.text().count("starts all again") == 1
        return "gives up with exit status 79"

    def drill_mistake(self) -> str:
        run = launch(self.out(), options=QUICK, fault="refuse:1:5")
        assert run.wait() == 2, run.text()
        assert "starts all again" not in run.text()
        return "exit status 2, no restart"

    def drill_clock(self) -> str:
        """The time of day jumps, in both processes. It stays ahead of the kernel's time: otherwise
        code that waits until a time of day would find that it has passed."""
        library, offset = self.folder / "clock.so", self.folder / "offset"
        source = Path(__file__).with_name("clock.c")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return "left out: there is no C compiler"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        offset.write_text("7200")
        run = launch(
            self.out(), options=QUICK, LD_PRELOAD=str(library), CLOCK_OFFSET_FILE=str(offset)
        )
        for jump_s in (10800, 10797, 3600):  # an hour on, 3 s back, two hours back
            seen = run.steps_logged()
            run.wait_for(lambda seen=seen: run.steps_logged() >= seen + 8)
            assert "starts all again" not in run.text(), run.text()
            offset.write_text(str(jump_s))
        assert run.wait() == 0, run.text()
        assert losses(run.out) == self.reference
        told = "an hour on and 3 s back change nothing; two hours back"
        if "starts all again" in run.text():
            assert "the clock was set by -3,600 s" in run.text(), run.text()
            return f"{told}: named, started again"
        return f"{told}, neither"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    names = [name for name in vars(Drills) if name.startswith("drill_")]
    if options.only:
        names = [f"drill_{name}" for name in options.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        drills = Drills(Path(folder), random.Random(options.seed))
        print(f"{'undisturbed':<12} {drills.undisturbed()}", flush=True)
        for _ in range(options.rounds):
            for name in names:
                print(f"{name[6:]:<12} {getattr(drills, name)()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
