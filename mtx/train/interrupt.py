"""Ctrl-C and SIGTERM as a wish to stop after the running step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils


@contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Gives a function that says, before each step, whether somebody wants the run to stop.

    One process: after a first Ctrl-C or SIGTERM; the second one has its usual effect. Several:
    JAX's coordination service takes a SIGTERM to any of them, and all agree on the step; Ctrl-C
    is passed on as one.
    """
    several = jax.process_count() > 1
    requested = threading.Event()
    before = {}

    def request(number, frame):
        restore()
        os.write(2, b"\nmtx: finishing this step, then saving; once more leaves at once\n")
        requested.set()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    def restore():
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    if threading.current_thread() is threading.main_thread():  # no other may have handlers
        for number in (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    try:
        if several:
            yield multihost_utils.reached_preemption_sync_point
        else:
            yield lambda step: requested.is_set()
    finally:
        restore()
