"""`mtx report`."""

from __future__ import annotations

import html
import io
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mtx.cli.options import parse, split_name
from mtx.errors import UserError
from mtx.train.goodput import Record, measure_goodput, read_log, steps_that_count

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
        from mtx.view.picture import Picture, save_figure
        from mtx.view.run import draw_run

        figure = draw_run(records)
        if suffix == ".html":
            svg = Picture(figure=figure).svg()
            _write(options.out, _page(numbers, directory, svg))
        else:
            save_figure(figure, options.out)


def summarize(records: list[Record]) -> dict:
    """The numbers of a run's log, ready for JSON. Medians are over the steps that count."""
    steps, goodput = steps_that_count(records), measure_goodput(records)
    start = [record for record in records if record["kind"] == "start"][-1]
    held_out = [record for record in records if record["kind"] == "eval"]
    memory = [record for record in records if record["kind"] == "memory"]
    numbers = {
        "steps": steps[-1]["step"] if steps else start["step"],
        "of": start["run"]["steps"],
        "parameters": start["parameters"],
        "devices": start["devices"],
        "device_kind": start["device_kind"],
        "loss": steps[-1]["loss"] if steps else None,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "goodput": goodput.fraction,
        "wall_s": goodput.wall_s,
        "seconds": goodput.parts,
        "sessions": goodput.sessions,
        "lost_steps": goodput.lost_steps,
        "skipped_steps": goodput.skipped_steps,
        "rollbacks": goodput.rollbacks,
        "damaged_checkpoints": sum(record["kind"] == "damaged" for record in records),
        "failed_saves": sum(record["kind"] == "save_failed" for record in records),
        "clock_jumps": goodput.clock_jumps,
    }
    for name in ("step_s", "tokens_per_s", "tflops_sc21", "tflops_model", "mfu"):
        known = [step[name] for step in steps if step.get(name) is not None]
        numbers[name] = statistics.median(known) if known else None
    numbers["compiled_bytes"] = next(
        (m["compiled_bytes"] for m in reversed(memory) if "compiled_bytes" in m), None
    )
    peaks = [d["peak_bytes"] for m in memory for d in m.get("devices", ()) if d["peak_bytes"]]
    numbers["peak_bytes"] = max(peaks, default=None)
    return numbers


def _rows(numbers: dict) -> list[tuple[str, str]]:
    """What a person reads first."""

    def number(name: str, form: str, unit: str = "") -> str:
        value = numbers[name]
        return "-" if value is None else format(value, form) + unit

    def gib(name: str) -> str:
        return "-" if numbers[name] is None else f"{numbers[name] / 2**30:.2f} GiB a device"

    lost = numbers["lost_steps"], numbers["skipped_steps"], numbers["rollbacks"]
    return [
        ("steps", f"{numbers['steps']:,} of {numbers['of']:,}"),
        ("model", f"{numbers['parameters']:,} parameters"),
        ("devices", f"{numbers['devices']:,} x {numbers['device_kind']}"),
        ("loss", number("loss", ".4f")),
        ("held-out loss", number("held_out_loss", ".4f")),
        ("step", number("step_s", ".4g", " s (median)")),
        ("throughput", number("tokens_per_s", ",.0f", " tokens/s (median)")),
        ("SC'21 formula", number("tflops_sc21", ".4g", " TFLOP/s a device")),
        ("model FLOPs", number("tflops_model", ".4g", " TFLOP/s a device")),
        ("MFU", number("mfu", ".1%")),
        ("memory, compiled", gib("compiled_bytes")),
        ("memory, peak", gib("peak_bytes")),
        ("sessions", f"{numbers['sessions']:,}"),
        ("lost steps", f"{lost[0]:,} trained again, {lost[1]:,} skipped, {lost[2]:,} rollbacks"),
        (
            "checkpoints",
            f"{numbers['damaged_checkpoints']:,} damaged, {numbers['failed_saves']:,} not saved",
        ),
        ("goodput", f"{numbers['goodput']:.1%} of {numbers['wall_s']:,.1f} s"),
        *(
            (f"  {name}", f"{seconds:,.1f} s  {seconds / max(numbers['wall_s'], 1e-9):.1%}")
            for name, seconds in numbers["seconds"].items()
            if seconds
        ),
        *([("clock", f"{numbers['clock_jumps']} jumps back")] if numbers["clock_jumps"] else []),
    ]


def _print(numbers: dict, directory: str) -> None:
    table = Table(title=f"run {directory}", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in _rows(numbers):
        table.add_row(*row)
    Console().print(table, highlight=False)


def _page(numbers: dict, directory: str, svg: str) -> str:
    """One HTML file that needs no other."""
    name = html.escape(Path(directory).absolute().name)
    text = io.StringIO()
    text.write(
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{name}</title>\n"
        "<style>body{font:14px system-ui,sans-serif;max-width:60em;margin:2em auto;color:#303030}"
        "td{padding:.1em 1em .1em 0;white-space:pre}svg{width:100%;height:auto}</style>\n"
        f"<h1>{name}</h1>\n<table>\n"
    )
    for label, value in _rows(numbers):
        text.write(f"<tr><td>{html.escape(label)}<td>{html.escape(value)}\n")
    text.write(f"</table>\n{svg}\n</html>\n")
    return text.getvalue()


def _write(path: str, text: str) -> None:
    from mtx.view.files import replacing

    with replacing(path) as written:
        written.write_text(text, encoding="utf-8")
