"""SIGABRT, which is how C++ ends a process: the last chance to say why."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


def on_abort(handle: Callable[[], None] | None) -> object:
    """Has `handle` called on SIGABRT, in the thread that aborts; None: the usual effect.

    Python's own handlers run later in the main thread, and after abort(3) there is no later. What
    is returned must be kept.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    if handle is None:
        libc.signal(signal.SIGABRT, None)
        return None
    handler = _Handler(lambda number: handle())
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return handler
