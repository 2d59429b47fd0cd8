"""Between `mtx launch` and its processes: how many devices each makes, and what it tells of itself,
one JSON object a line, through a pipe."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

STATUS_FD = "MTX_STATUS_FD"  # the environment's name for the pipe's number
VIRTUAL_DEVICES = "MTX_VIRTUAL_DEVICES"  # and for the CPU devices to make, where none are asked for


@dataclass(frozen=True)
class StatusPipe:
    """The writing end; None where nobody started this process to listen."""

    descriptor: int | None = None

    @classmethod
    def inherited(cls) -> StatusPipe:
        text = os.environ.get(STATUS_FD, "")
        if not text.isdecimal():
            return cls()
        try:
            os.set_blocking(int(text), False)
        except OSError:  # inherited by name only, through a process that closed it
            return cls()
        return cls(int(text))

    def send(self, **values) -> None:
        """Never waits. Ends the process where the supervisor has gone: nothing outlives it."""
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, json.dumps(values).encode() + b"\n")
        except BlockingIOError:
            pass  # the reader is behind: it will get the next
        except BrokenPipeError:
            os._exit(128 + 9)
