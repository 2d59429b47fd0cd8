"""`mtx report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtx.cli.options import File, Flag, read_line
from mtx.cli.output import check_picture, say, write_text
from mtx.errors import UserError
from mtx.files import replacing
from mtx.train.goodput import read_log
from mtx.view.report import report_facts, report_page, summarize


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    out: File = None  # a page with everything in it: .html
    draw: File = None  # the curves as a picture: .svg, .png or .pdf
    json: Flag = False  # the numbers as JSON, instead of a table


def report_command(arguments: list[str]) -> None:
    """Say what a training run was and how it went: loss, throughput, goodput, faults.

    RUN_DIR is the --out of a training run, which may still be going on. Prints a table; --out
    makes a page of it, with its curves, and --draw a picture of these.
    """
    line = read_line(arguments, ReportOptions(), "mtx report RUN_DIR", report_command)
    options, directory = line.options, line.names[0]
    if options.out and not options.out.lower().endswith(".html"):
        raise UserError(f"out={options.out} must end in .html; --draw makes a picture")
    check_picture(options.draw)
    records = read_log(Path(directory) / "log.jsonl")
    numbers = summarize(records)
    if options.json:
        say(numbers, [], as_json=True)
    else:
        _print(numbers, directory)
    if options.out:
        write_text(options.out, report_page(records, Path(directory).absolute().name))
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
