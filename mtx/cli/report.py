"""`mtx report`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mtx.cli.options import File, Flag, Line, command
from mtx.cli.output import check_picture, facts, say, write_text
from mtx.errors import UserError
from mtx.files import replacing
from mtx.plan.page import render, rows_table
from mtx.train.goodput import read_log
from mtx.view.report import report_facts, report_page, summarize


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    out: File = None  # write a page with everything in it: .html
    draw: File = None  # draw the curves as a picture: .svg, .png or .pdf
    json: Flag = False  # print the numbers as JSON instead of a table


@command("mtx report RUN_DIR", ReportOptions)
def report_command(line: Line[ReportOptions]) -> None:
    """Show what a training run was and how it went: loss, throughput, goodput, faults.

    RUN_DIR is the --out of a training run, which may still be running. Prints a table; --out writes
    it as a page, with the run's curves, and --draw draws the curves as a picture.
    """
    options, directory = line.options, line.names[0]
    if options.out and not options.out.lower().endswith(".html"):
        raise UserError(f"out={options.out} must end in .html; --draw makes a picture")
    check_picture(options.draw)
    records = read_log(Path(directory) / "log.jsonl")
    numbers = summarize(records)
    table = rows_table(report_facts(numbers), heading=f"run {directory}")
    width = shutil.get_terminal_size((100, 24)).columns
    if options.out:
        write_text(options.out, report_page(records, Path(directory).absolute().name))
    if options.draw:
        from mtx.view.picture import save_figure
        from mtx.view.run import draw_run

        with replacing(Path(options.draw).expanduser()) as written:
            save_figure(draw_run(records), written)
    made = {"wrote page": options.out, "wrote picture": options.draw}
    lines = facts({what: path for what, path in made.items() if path}, width=15)
    say(numbers, [*render(table, width=width), *lines], as_json=options.json)
