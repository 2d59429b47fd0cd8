"""The output that commands have in common: JSON or lines, tables, files, progress."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mtx.cli.options import Command, summary
from mtx.errors import UserError, unknown_name
from mtx.files import replacing
from mtx.paths import user_path

Report = Callable[..., None]  # takes (done, total), and a text before the bar
Unit = Literal["bytes", "rows", ""]
_EVERY_S = 60.0  # between two lines of progress, if there is no terminal


def say(numbers: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command found: `numbers` for programs, or `lines` for people."""
    print(json.dumps(numbers, indent=1) if as_json else "\n".join(lines))


def facts(pairs: Mapping[str, Any], width: int = 11) -> list[str]:
    """One line for each name and its value; None is left out."""
    return [f"{name:<{width}}{value}" for name, value in pairs.items() if value is not None]


def table(rows: Sequence[Sequence[Any]], align: str) -> list[str]:
    """Rows as lines, with columns as wide as they need to be. align: < or > for each column."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, align, widths)).rstrip()
        for row in cells
    ]


def run_action(
    arguments: list[str], actions: Mapping[str, Command], *, usage: str, about: Command
) -> int | None:
    """Run one of a command's actions: mtx data build ..."""
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print("\n".join([
            summary(about), "", f"usage: {usage} [OPTIONS]", "",
            *(f"  {name:<10}{summary(each)}" for name, each in actions.items()), "",
            f"{' '.join(usage.split()[:2])} ACTION --help lists the options.",
        ]))  # fmt: skip
        return None
    if action not in actions:
        raise unknown_name("action", action, actions)
    return actions[action](rest)


# --- files ----------------------------------------------------------------------------------------


def check_writable(out: str | None) -> None:
    """UserError, before anything is computed, if the file --out cannot be created."""
    if out is None:
        return
    path = Path(out).expanduser()
    if path.is_dir():
        raise UserError(f"out={out} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"out={out} lies in a folder that does not exist; make it first")


def check_picture(draw: str | None) -> None:
    """UserError, before anything is computed, if --draw does not name a picture."""
    if draw:
        from mtx.view.picture import check_suffix

        check_suffix(draw)


def check_distinct(files: Mapping[str, str | None]) -> None:
    """UserError, before anything is computed, if two options name the same file to write. What is
    not a file, such as - or /dev/null, may be named twice."""
    found: dict[str, str] = {}
    for name, path in files.items():
        if path in (None, "", "-") or os.path.exists(path) and not os.path.isfile(path):
            continue
        if (first := found.setdefault(os.path.realpath(user_path(path)), name)) != name:
            raise UserError(f"--{first} and --{name} both write {path}; name two files")


def write_text(path: str | Path, text: str) -> None:
    """Write a file: all of it, or nothing."""
    with replacing(Path(path).expanduser()) as written:
        written.write_text(text, encoding="utf-8")


# --- progress -------------------------------------------------------------------------------------


def _by_lines(unit: Unit, said: str) -> Report:
    """Prints how far the work is, but at most once in `_EVERY_S`."""
    told_s = time.monotonic()

    def report(done: float, total: float | None, text: str = said) -> None:
        nonlocal told_s
        if time.monotonic() - told_s < _EVERY_S:
            return
        told_s = time.monotonic()
        of = [done] if total is None else [done, total]
        counts = [f"{n / 2**30:.2f} GiB" if unit == "bytes" else f"{n:,}" for n in of]
        print(f"{text}: {' of '.join(counts)}".removeprefix(": "), file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def progress(unit: Unit = "", *, said: str = "", silent: bool = False) -> Iterator[Report]:
    """A bar on stderr if that is a terminal, else a line there every minute; yields what takes
    (done, total, text before it)."""
    if silent:
        yield lambda done, total, text="": None
        return
    if not sys.stderr.isatty():
        yield _by_lines(unit, said)
        return
    from rich import progress as rich
    from rich.console import Console

    counts = {
        "bytes": (rich.DownloadColumn(), rich.TransferSpeedColumn()),
        "rows": (rich.MofNCompleteColumn(),), "": (),
    }[unit]  # fmt: skip
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *counts)
    with rich.Progress(
        *columns, rich.TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(said, total=None)
        yield lambda done, total, text=said: bar.update(
            task, completed=done, total=total, description=text
        )
