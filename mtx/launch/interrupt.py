"""Ctrl-C and SIGTERM as requests to stop after the running step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils

from mtx.launch.exits import Exit, leaving, stay

_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequests:
    """Says, before each step, whether somebody wants the run to stop."""

    def __init__(self):
        self._several = jax.process_count() > 1
        self._signal: int | None = None  # the one that came first

    def __call__(self, step: int) -> bool:
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._signal is not None

    def request(self, number: int) -> None:
        """Records a signal that this process got."""
        self._signal = self._signal or number
        if self._several and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)

    def leave(self) -> None:
        """Ends the run here if a signal has come, since it cannot end as requested: raises
        KeyboardInterrupt, or SystemExit with `exit`. Several processes stop at the step that they
        have agreed on instead."""
        if self._signal is None or self._several:
            return
        raise KeyboardInterrupt if self._signal == signal.SIGINT else SystemExit(self.exit)

    @property
    def exit(self) -> Exit:
        """The exit of a run that was stopped, from the signal that this process got. A process that
        got none was stopped by another's signal, which means preemption."""
        return Exit.INTERRUPTED if self._signal == signal.SIGINT else Exit.PREEMPTED


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Takes a first Ctrl-C or SIGTERM as a request; the second one has its usual effect.

    With several processes, JAX's coordination service takes a SIGTERM to any of them, and all agree
    on the step; Ctrl-C is passed on as a SIGTERM.
    """
    requests = StopRequests()
    before = {}

    def request(number, frame):
        restore()
        os.write(2, b"\nmtx: finishing this step, then saving; once more leaves at once\n")
        requests.request(number)

    def restore():
        for number, handler in before.items():
            usual = _USUAL[number] if handler is leaving else handler
            signal.signal(number, signal.SIG_DFL if usual is None else usual)

    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in numbers:
            before[number] = signal.signal(number, request)
        if leaving in before.values():
            stay()
    try:
        yield requests
    finally:
        restore()
