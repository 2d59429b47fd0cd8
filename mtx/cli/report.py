"""`mtx report`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtx.cli.options import parse, split_name
from mtx.errors import UserError
from mtx.files import replacing
from mtx.train.goodput import read_log
from mtx.view.report import report_facts, report_page, summarize

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    out: _File = None  # a page with everything in it: .html
    draw: _File = None  # the curves as a picture: .svg, .png or .pdf
    json: _Flag = False  # the numbers as JSON, instead of a table


def report_command(arguments: list[str]) -> None:
    """Say what a training run was and how it went: loss, throughput, goodput, faults.

    RUN_DIR is the --out of a training run, which may still be going on. Prints a table; --out
    makes a page of it, with its curves, and --draw a picture of these.
    """
    directory, rest = split_name(arguments)
    options = parse(rest, ReportOptions(), prog="mtx report RUN_DIR", about=report_command)
    if directory is None:
        raise UserError("mtx report RUN_DIR: name the directory of a training run (its --out)")
    if options.out and not options.out.lower().endswith(".html"):
        raise UserError(f"out={options.out} must end in .html; --draw makes a picture")
    if options.draw:
        from mtx.view.picture import check_suffix

        check_suffix(options.draw)
    records = read_log(Path(directory) / "log.jsonl")
    numbers = summarize(records)
    if options.json:
        print(json.dumps(numbers, indent=1))
    else:
        _print(numbers, directory)
    if options.out:
        with replacing(Path(options.out).expanduser()) as written:
            page = report_page(records, Path(directory).absolute().name)
            written.write_text(page, encoding="utf-8")
    if options.draw:
        from mtx.view.picture import save_figure
        from mtx.view.run import draw_run

        with replacing(Path(options.draw).expanduser()) as written:
            save_figure(draw_run(records), written)


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
