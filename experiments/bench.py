"""What the two benchmarks share: progress, the machine in words, ratios of rounds, table and file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mtx.errors import UserError

WIDTH = 100  # columns of what is printed


def machine(*packages: str) -> dict:
    """Cores, load and versions, for the record; a package that is not installed is left out."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": cores(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measured_on(machine: dict) -> str:
    """The stamp that every printed result carries."""
    names = [name for name in ("jax", "torch") if name in machine]
    return ", ".join(
        ["measured", f"{machine['cores']} cores", *(f"{name} {machine[name]}" for name in names)]
    )


def load_note(machine: dict) -> list[str]:
    """A warning where others were at work when the run began; it counts for nothing after that."""
    if machine["load_at_start"] <= 0.5 * machine["cores"]:
        return []
    return [
        f"Other programs were running when this one began (load {machine['load_at_start']:g}): "
        "compare within a round, and trust the least times more than the medians."
    ]


def speed_up(base_s: Sequence[float], row_s: Sequence[float]) -> float:
    """How many times faster than `base` a row is: the median over rounds of the ratio within one,
    since whatever slows a machine down slows neighbours in time alike."""
    return statistics.median(base / row for base, row in zip(base_s, row_s, strict=True))


class Work:
    """Says on stderr what is being done: a bar in a terminal, a line each elsewhere."""

    def __init__(self, total: int):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)
        self._total, self._begun = total, 0

    def __enter__(self) -> Work:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """The next of the `total` parts starts."""
        self._bar.update(self._task, description=what, completed=self._begun)
        self._begun += 1
        if self._bar.disable:
            print(f"{self._begun}/{self._total}  {what}", file=sys.stderr, flush=True)


def print_table(title: str, table: Table, notes: Iterable[str], console: Console | None = None):
    """Title, table and notes, at most `WIDTH` columns wide."""
    console = console or Console(width=WIDTH)
    console.print(Text(title, style="bold"))
    console.print(table)
    for note in notes:
        lines = textwrap.wrap(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        console.print(Text("\n".join(lines)))


def check_path(path: str) -> None:
    """UserError where `path` cannot be written: better now than after minutes of work."""
    if path and not Path(path).absolute().parent.is_dir():
        raise UserError(f"cannot write {path}: there is no directory {Path(path).parent}")


def write_json(path: str, result: dict) -> None:
    """The result as JSON; nothing where `path` is empty."""
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
