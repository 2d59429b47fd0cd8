"""How a run's processes end, as numbers that a scheduler can act on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of `mtx train` and `mtx launch`; the numbers are those of sysexits.h, where it
    has one. Any other status came from outside: 128 + n, or -n, is signal n."""

    FINISHED = 0  # the run is at its last step
    MISTAKE = 2  # the user's: one line says what to change; starting again would not help
    LOST = 69  # another process died, failed or could not be reached: start all again
    FAILED = 70  # this process raised an exception: start all again, with a limit
    UNSAVED = 74  # all went well except for the last checkpoint: start again when there is room
    PREEMPTED = 75  # SIGTERM: all that was done is saved; start again when there is room
    GAVE_UP = 79  # `mtx launch`: no restarts are left; somebody has to look
    HUNG = 124  # no step finished for too long; stacks are on stderr: start all again
    INTERRUPTED = 130  # Ctrl-C: all that was done is saved


def leave_at_once() -> None:
    """Makes Ctrl-C and SIGTERM end a run at once, from now until it can save anything. For a
    command with a single process: several processes tell each other.

    A thread does this: handlers in the main thread would wait until the compiler returns, an
    exception could be lost in a callback of the garbage collector, and JAX could crash within a
    compilation.
    """
    if threading.current_thread() is threading.main_thread():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, leaving)
        threading.Thread(target=_leave, args=(reading,), daemon=True).start()


def leaving(number: int, frame: object) -> None:
    """The handler until then: only waits, because the thread, told as well, ends the process."""
    while True:
        signal.pause()


def stay() -> None:
    """Ends `leave_at_once`: from now on, signal handlers wait for the main thread."""
    told = signal.set_wakeup_fd(-1)
    if told >= 0:
        os.close(told)  # which ends the thread


def _leave(reading: int) -> None:
    """Ends the process at the first signal, whose number is written to the pipe."""
    told = os.read(reading, 1)
    os.close(reading)
    if told:
        os.write(2, b"\nmtx: interrupted before the first step; nothing is lost\n")
        os._exit(Exit.INTERRUPTED if told[0] == signal.SIGINT else Exit.PREEMPTED)


def on_abort(handle: Callable[[], None] | None) -> object:
    """Has `handle` called on SIGABRT, which is how C++ ends a process, in the thread that aborts;
    None restores the usual effect. The caller must keep the returned object.

    Python's own handlers run later in the main thread, and after abort(3) there is no later.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    if handle is None:
        libc.signal(signal.SIGABRT, None)
        return None
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: handle())
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return handler


class LostProcess(Exception):
    """The processes of a run did not connect, or are no longer connected; ends in `Exit.LOST`."""


def describe_exit(status: int) -> str:
    """How a process ended, in words. `status`: as `subprocess` gives it, -n for signal n."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    words = {
        Exit.FINISHED: "finished",
        1: "failed",  # an exception before the run began
        Exit.MISTAKE: "refused what it was asked for",
        Exit.LOST: "stopped, having lost another process",
        Exit.FAILED: "failed",
        Exit.UNSAVED: "could not save its last step",
        Exit.PREEMPTED: "stopped as asked, with a checkpoint",
        Exit.HUNG: "hung",
        Exit.INTERRUPTED: "was interrupted",
    }
    return f"{words.get(status, 'ended')} (exit status {status})"
