"""The log of a run: one strict JSON object per line, which trackers get as well."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Literal

import numpy as np

from mtx.errors import UserError
from mtx.train.track import Tracker

LogKind = Literal[
    "start", "startup", "compile", "memory", "step", "eval", "save", "save_failed", "damaged",
    "rollback", "processes", "experts", "end",
]  # fmt: skip


class Log:
    """Appends strict JSON objects to a file, one per line, each written at once.

    A run that continues from a checkpoint repeats the steps after it: of two lines for one step,
    the later counts. Without a path nothing is written: only process 0 has one. Every line has
    "t_s", the seconds since the log was opened, by a monotonic clock. Lines that cannot be written,
    as on a full disk, wait until a later one can: no run ends because of its log. Raises UserError
    if the file cannot be opened.
    """

    def __init__(self, path: Path | None, trackers: Sequence[Tracker] = ()):
        self._path, self._file = path, None
        self._waiting = b""
        self._trackers = trackers
        self._began_s = time.monotonic()
        if path is not None:
            try:
                _drop_torn_line(path)
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written ({error.strerror}); move it away, or use another out"
                ) from error

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception) -> None:
        if self._file is not None:
            self._file.close()
            if self._waiting:
                lines = self._waiting.count(b"\n")
                which = "last line is" if lines == 1 else f"last {lines:,} lines are"
                print(f"mtx: the {which} not in {self._path}", file=sys.stderr)
        for tracker in self._trackers:
            tracker.close()

    def write(self, kind: LogKind, values: Mapping) -> None:
        """Writes `values`, with NaN and infinities as null and arrays of one number as numbers."""
        if self._file is None:
            return
        at = {"t_s": round(time.monotonic() - self._began_s, 3)}
        record = {"kind": kind} | _strict(values) | at
        self._append(self._file, json.dumps(record, allow_nan=False).encode() + b"\n")
        for tracker in self._trackers:
            tracker.write(kind, record)

    def _append(self, file: FileIO, line: bytes) -> None:
        waited, self._waiting = bool(self._waiting), self._waiting + line
        try:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            if not waited:
                print(
                    f"mtx: {self._path} cannot be written ({error.strerror}); its lines are kept "
                    "until it can",
                    file=sys.stderr,
                )


def _drop_torn_line(path: Path) -> None:
    """Cuts off a last line that a killed process has left incomplete."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def _strict(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = np.asarray(value).item()
    return number if isinstance(number, bool | int) or math.isfinite(number) else None
