"""`mtx report`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtx.cli.options import parse, split_name
from mtx.errors import UserError
from mtx.train.goodput import read_log
from mtx.view.report import report_facts, report_page, summarize

_PICTURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    out: str = ""  # FILE: .html with everything in it, or a picture: .png, .svg, .pdf
    json: str = ""  # FILE for the numbers


def report_command(arguments: list[str]) -> None:
    """Say how a training run went: loss, throughput, goodput, faults, slow processes.

    RUN_DIR is the --out of a training run, which may still be going on. Prints a table; --out
    draws it.
    """
    directory, rest = split_name(arguments)
    options = parse(rest, ReportOptions(), prog="mtx report RUN_DIR", about=report_command)
    if directory is None:
        raise UserError("mtx report RUN_DIR: name the directory of a training run (its --out)")
    suffix = Path(options.out).suffix.lower()
    if options.out and suffix not in (".html", *_PICTURES):
        raise UserError(f"out={options.out} must end in .html, {', '.join(_PICTURES)}")
    records = read_log(Path(directory) / "log.jsonl")
    numbers = summarize(records)
    _print(numbers, directory)
    if options.json:
        _write(options.json, json.dumps(numbers, indent=2) + "\n")
    if options.out:
        if suffix == ".html":
            _write(options.out, report_page(records, Path(directory).absolute().name))
        else:
            from mtx.view.picture import save_figure
            from mtx.view.run import draw_run

            save_figure(draw_run(records), options.out)


def _print(numbers: dict, directory: str) -> None:
    table = Table(title=f"run {directory}", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = None
    for fact in report_facts(numbers):
        if fact.section != section:
            section = fact.section
            table.add_row(f"[bold]{section}[/bold]")
        table.add_row(f"  {fact.name}", Text(fact.value))
    Console().print(table, highlight=False)


def _write(path: str, text: str) -> None:
    from mtx.view.files import replacing

    with replacing(path) as written:
        written.write_text(text, encoding="utf-8")
