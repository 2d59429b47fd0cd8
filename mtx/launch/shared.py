"""Checks, before anything is computed, that all processes share a folder and are asked for the same
run on the same data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from mtx.errors import UserError, shown
from mtx.sharding.agree import agree

_SEEN_S = 30.0  # for a process to see what another has written: NFS and mounted buckets cache
_ANSWER_S = 600.0  # for a process that is still starting
_PAUSE_S = 0.1


def require_shared(folder: Path) -> None:
    """Raises UserError, on all processes, if `folder`, a run's out, is not on a disk that they
    share, or if one of them cannot write there. Everything created for this check is removed."""
    if jax.process_count() == 1:
        return
    process, made = jax.process_index(), []  # created by process 0, to be removed

    def make(_) -> str:
        place = folder / f".shared.{uuid.uuid4().hex}"
        made.extend(path for path in (place, *place.parents) if not os.path.exists(path))
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise _cannot_be_written(folder, 0, error) from error
        return place.name

    def answer() -> str:
        """What is wrong for this process, if anything; if not, it leaves its number in `place`."""
        if process == 0:
            return ""
        if not _appears(place):
            return str(_not_shared(folder, process, "process 0"))
        try:
            (place / str(process)).touch()
        except OSError as error:
            return str(_cannot_be_written(folder, process, error))
        return ""

    def judge(all_said: Sequence[str]) -> str:
        if failures := list(filter(None, all_said)):
            raise UserError(failures[0])
        for other in range(1, jax.process_count()):
            if not _appears(place / str(other)):
                raise _not_shared(folder, 0, f"process {other}")
        return ""

    try:
        place = folder / agree("shared_place", "", make, timeout_s=_ANSWER_S)
        agree("shared", answer(), judge, timeout_s=_ANSWER_S + _SEEN_S)
    finally:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
        for path in made[1:]:
            with contextlib.suppress(OSError):
                path.rmdir()


def require_same(subject: str, values: Mapping[str, object]) -> None:
    """Raises UserError, on all processes, if one of them has other `values` (of JSON) than
    process 0: they would run different programs, or read batches of different data."""

    def judge(all_said: Sequence[str]) -> str:
        first, *others = map(json.loads, all_said)
        for process, other in enumerate(others, start=1):
            differ = [name for name in first if name not in other or first[name] != other[name]]
            if differ:
                name = differ[0]
                more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
                raise UserError(
                    f"{name}={shown(first[name])} on process 0 and {shown(other.get(name))} on "
                    f"process {process}{more}; start all with the same options and files"
                )
        return ""

    agree(subject, json.dumps(values), judge, timeout_s=_ANSWER_S)


def _appears(path: Path) -> bool:
    """Whether a path exists, or appears in time."""
    end_s = time.monotonic() + _SEEN_S
    while not os.path.exists(path):
        if time.monotonic() > end_s:
            return False
        for parent in path.parents:  # opening a folder makes NFS ask the server again
            with contextlib.suppress(OSError):
                os.close(os.open(parent, os.O_RDONLY))
        time.sleep(_PAUSE_S)
    return True


def _not_shared(folder: Path, process: int, other: str) -> UserError:
    return UserError(
        f"out={folder} is not on a disk that all processes share: process {process} on "
        f"{socket.gethostname()} does not see what {other} writes there; use a folder of a shared "
        "file system (NFS, Lustre, a mounted bucket), under the same name on every host"
    )


def _cannot_be_written(folder: Path, process: int, error: OSError) -> UserError:
    return UserError(
        f"out={folder} cannot be written by process {process} on {socket.gethostname()} "
        f"({error.strerror}); use another, or let it write there"
    )
