"""`mtx train`, with a fault: python worker.py FAULT [--options of train].

FAULT is KIND:PROCESS:STEP[:SECONDS], or none. After that step that process raises an exception
(raise), refuses (refuse), waits for ever (hang), does so holding the interpreter (grip), or spends
so many SECONDS more on each step (slow). Where DRILL_ONCE names a file, the fault comes once:
it is not repeated when the run is started again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from pathlib import Path

from mtx.cli import main


def fault(text: str):
    """What `train` calls after each step."""
    kind, process, step, *seconds = text.split(":")

    def on_step(record) -> None:
        import jax

        from mtx.errors import UserError

        if jax.process_index() != int(process) or record.step < int(step):
            return
        if kind == "slow":
            time.sleep(float(seconds[0]))
            return
        once = os.environ.get("DRILL_ONCE")
        if once and Path(once).exists():
            return
        if once:
            Path(once).touch()
        if kind == "raise":
            raise RuntimeError("a drill's exception")
        if kind == "refuse":
            raise UserError("a drill's mistake=1; use another")
        if kind == "hang":
            time.sleep(1e6)
        if kind == "grip":
            ctypes.PyDLL(None).sleep(1_000_000)  # without letting go of the interpreter
        raise ValueError(kind)

    return on_step


if __name__ == "__main__":
    if sys.argv[1] != "none":
        # `mtx train` imports it when it starts.
        from mtx.train import loop

        loop.train = functools.partial(loop.train, on_step=fault(sys.argv[1]))
    sys.exit(main(["train", *sys.argv[2:]]))
