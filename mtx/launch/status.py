"""Between `mtx launch` and its processes: how many devices each makes, and the status that it sends
through a pipe, one JSON object per line."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

STATUS_FD = "MTX_STATUS_FD"  # the environment's name for the pipe's number
VIRTUAL_DEVICES = "MTX_VIRTUAL_DEVICES"  # and for how many CPU devices to make, if not asked for


@dataclass(frozen=True)
class StatusPipe:
    """The write end of the pipe; None if no supervisor listens."""

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
        """Never waits. Ends the process if the supervisor is gone: nothing outlives it."""
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, json.dumps(values).encode() + b"\n")
        except BlockingIOError:
            pass  # the reader is behind: it will get the next
        except BrokenPipeError:
            os._exit(128 + 9)
