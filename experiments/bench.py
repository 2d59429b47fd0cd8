"""Shared by the benchmarks: progress, a description of the machine, ratios, tables and files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mtx.errors import UserError
from mtx.launch.start import usable_cores, use_virtual_devices

WIDTH = 100  # columns of what is printed
LOSS_TOLERANCE = 1e-5  # relative, between two ways to compute the same step


class LossesDiffer(Exception):
    """The steps that were timed do not compute the same thing."""


def describe_machine(*packages: str) -> dict:
    """Date, cores, load and versions; a package that is not installed is left out."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": usable_cores(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def on_virtual_devices(
    count: int, measure: Callable[[dict], dict], show: Callable[[dict], None], *, path: str
) -> int:
    """Measure on virtual CPU devices, show the result and write it to `path`; returns the status.

    measure: is given `describe_machine`'s dict. The status is 1 if it raises LossesDiffer; nothing
    is shown then.
    """
    import jax  # not at the top: bench_peers.py must leave all cores to the trainers it starts

    check_path(path)
    machine, program = describe_machine("jax", "jaxlib"), Path(sys.argv[0]).name
    use_virtual_devices(count)
    if jax.default_backend() != "cpu":
        raise UserError(
            f"{program} times virtual CPU devices, and JAX runs on {jax.default_backend()}; set "
            "JAX_PLATFORMS=cpu"
        )
    try:
        result = measure(machine)
    except LossesDiffer as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    show(result)
    write_json(path, result)
    return 0


def measured_on(machine: dict) -> str:
    """The stamp that every printed result carries."""
    versions = [f"{name} {machine[name]}" for name in ("jax", "torch") if name in machine]
    return ", ".join(["measured", f"{machine['cores']} cores", *versions])


def load_notes(machine: dict) -> list[str]:
    """A warning if other programs were running when this one began; otherwise nothing."""
    if machine["load_at_start"] <= 0.5 * machine["cores"]:
        return []
    return [
        f"Other programs were running when this one began (load {machine['load_at_start']:g} on "
        f"{machine['cores']} cores): seconds are too high, and ratios uncertain."
    ]


def speed_up(base_s: Sequence[float], row_s: Sequence[float]) -> float:
    """How many times faster than `base` a row is: the median over rounds of the ratio within a
    round, since a slow machine slows steps that run close together alike."""
    return statistics.median(base / row for base, row in zip(base_s, row_s, strict=True))


def differing(losses: dict[str, float]) -> str:
    """A description of the first loss that differs from the very first by more than
    `LOSS_TOLERANCE`; "" if all agree. NaN agrees with nothing."""
    first, *others = losses
    for name in others:
        if not abs(losses[name] - losses[first]) <= LOSS_TOLERANCE * abs(losses[first]):
            return f"{first!r} {losses[first]:.7g}, {name!r} {losses[name]:.7g}"
    return ""


class Work:
    """Shows on stderr what is being done: a bar in a terminal, otherwise a line per part."""

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
        """Start the next of the `total` parts."""
        self._bar.update(self._task, description=what, completed=self._begun)
        self._begun += 1
        if self._bar.disable:
            print(f"{self._begun}/{self._total}  {what}", file=sys.stderr, flush=True)


def print_table(title: str, table: Table, notes: Iterable[str]) -> None:
    """Title, table and notes, `WIDTH` columns wide."""
    console = Console(width=WIDTH)
    console.print(Text(title, style="bold"), Text(), table, sep="\n")
    for note in notes:
        lines = textwrap.wrap(note, WIDTH, initial_indent="- ", subsequent_indent="  ")
        console.print(Text("\n".join(lines)))


def check_path(path: str) -> None:
    """UserError if `path` is in no existing directory: better now than after minutes of work."""
    if path and not Path(path).absolute().parent.is_dir():
        raise UserError(f"cannot write {path}: there is no directory {Path(path).parent}")


def write_json(path: str, result: dict) -> None:
    """Write the result as JSON; nothing is written if `path` is empty."""
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
