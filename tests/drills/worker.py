"""`mtx train`, with a fault: python worker.py FAULT [--options of train].

FAULT is KIND:PROCESS:STEP[:SECONDS], or none. After that step, that process raises an exception
(raise), refuses (refuse), waits forever (hang), does so holding the interpreter (grip), is killed
when everything is done and saved (late), or spends SECONDS more on each step (slow). If DRILL_ONCE
names a file, the fault happens once: it is not repeated when the run is started again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from pathlib import Path

from mtx.cli import main


def is_due() -> bool:
    """Whether the fault has not happened yet, or is to be repeated."""
    once = os.environ.get("DRILL_ONCE")
    if once and Path(once).exists():
        return False
    if once:
        Path(once).touch()
    return True


def die_when_done(_, phase: str = "", **others) -> None:
    if phase == "done":
        os.kill(os.getpid(), signal.SIGKILL)


def fault(text: str):
    """The function that `train` calls after each step."""
    kind, process, step, *seconds = text.split(":")

    def on_step(record) -> None:
        import jax

        from mtx.errors import UserError
        from mtx.launch.status import StatusPipe

        if jax.process_index() != int(process) or record.step < int(step):
            return
        if kind == "slow":
            time.sleep(float(seconds[0]))
            return
        if not is_due():
            return
        if kind == "late":
            StatusPipe.send = die_when_done
            return
        if kind == "raise":
            raise RuntimeError("a drill's exception")
        if kind == "refuse":
            raise UserError("a drill's mistake=1; use another")
        if kind == "hang":
            time.sleep(1e6)
        if kind == "grip":
            ctypes.PyDLL(None).sleep(1_000_000)  # without releasing the interpreter
        raise ValueError(kind)

    return on_step


if __name__ == "__main__":
    if sys.argv[1] != "none":
        # `mtx train` imports it when it starts.
        from mtx.train import loop

        loop.run_training = functools.partial(loop.run_training, on_step=fault(sys.argv[1]))
    sys.exit(main(["train", *sys.argv[2:]]))
