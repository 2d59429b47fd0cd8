"""Plans and searches as pages: for the terminal, as plain lines, and for a notebook."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from mtx.plan.compare import Change, reasons
from mtx.plan.hardware import Hardware
from mtx.plan.priced import GIB, PricedRun
from mtx.plan.search import Candidate, Found
from mtx.plan.summary import Row, plan_rows, title
from mtx.sharding.axes import RARE


def plan_lines(
    plan: PricedRun, *, tokens: float | None = None, price: float | None = None, width: int = 100
) -> list[str]:
    """The page of a plan as plain lines of at most `width` characters.

    tokens: of a training run whose days are asked for. price: per GPU hour, in any currency.
    """
    rows = plan_rows(plan, tokens=tokens, price=price)
    return render(rows_table(rows, heading=title(plan)), width=width)


def rows_table(rows: Iterable[Row], *, heading: str) -> Table:
    """Rows as a table; consecutive rows of the same section share one heading."""
    table = Table(title=heading, show_header=False, box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("", max_width=len("predicted "), style="dim")
    section = None
    for row in rows:
        if row.section != section:
            if section is not None:
                table.add_section()
            section = row.section
            table.add_row(f"[bold]{escape(section)}[/bold]")
        table.add_row(f"  {escape(row.name)}", escape(row.value), row.source)
    return table


def ranking_lines(found: Found, hardware: Hardware, *, heading: str, width: int = 100) -> list[str]:
    """The meshes of a search, fastest first, and why each beats the next one."""
    table = Table(title=heading)
    cut = any(one.layout.context > 1 for one in found.ranked)
    rare = [axis for axis in RARE if any(one.layout.sizes[axis] > 1 for one in found.ranked)]
    axes = ("data", "pipe", *rare, "tensor")
    names = (axis[0] for axis in axes) if rare else axes  # another column leaves no room for names
    sizes, ways = ("", *names, "b", "v"), ("schedule", "recompute", *(["over c"] if cut else []))
    for name in (*sizes, *ways, "zero", "s a step", "GiB"):
        table.add_column(name, justify="left" if name in ways else "right", no_wrap=True)
    if not all(one.runs for one in found.ranked):
        table.add_column("")
    why = []
    for place, one in enumerate(found.ranked, start=1):
        table.add_row(str(place), *_settings(one, axes), *([] if one.runs else ["priced only"]))
        if place < len(found.ranked):
            text = f"{place} beats {place + 1}: {reasons(one, found.ranked[place], hardware)}"
            why += textwrap.wrap(text, width, subsequent_indent=" " * 11)
    return [*render(table, width=width), *why]


def _settings(one: Candidate, axes: Collection[str]) -> list[str]:
    layout = one.layout
    recompute = layout.recompute
    if layout.tensor > 1 and not layout.sequence_parallel:
        recompute += ", no sp"
    if not layout.expert_tensor:
        recompute += ", whole experts"
    numbers = (*(layout.sizes[axis] for axis in axes), layout.microbatch, layout.virtual)
    return [
        *map(str, numbers),
        layout.schedule + (", woven" if layout.weave == "on" else ""),
        recompute,
        *([layout.context_attention if layout.context > 1 else ""] if "context" in axes else []),
        str(one.zero),
        f"{one.time.step_s:,.2f}",
        f"{one.memory.total_bytes / GIB:.1f}",
    ]


def change_lines(best: Candidate, changed: list[Change], *, width: int = 100) -> list[str]:
    """What each single change of the best layout would do."""
    table = Table(title="One change of the best layout")
    for name in ("change", "s a step", "slower by", "GiB"):
        table.add_column(name, justify="left" if name == "change" else "right", no_wrap=True)
    table.add_column("")
    for change in changed:
        one = change.candidate
        slower = one.time.step_s / best.time.step_s - 1
        remarks = ["" if change.fits else "does not fit", "" if one.runs else "priced only"]
        table.add_row(
            f"{change.name}={change.value}", f"{one.time.step_s:,.2f}", f"{slower:.1%}",
            f"{one.memory.total_bytes / GIB:.1f}", ", ".join(filter(None, remarks)),
        )  # fmt: skip
    return render(table, width=width)


def render(what: RenderableType, *, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(what)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def rows_html(rows: Iterable[Row]) -> str:
    """Rows as an HTML table; a section is a row of its own."""
    lines, section = ["<table>"], None
    left = ' style="text-align:left"'
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f'<tr><th colspan="3"{left}>{html.escape(section)}</th></tr>')
        cells = "".join(
            f"<td{left}>{html.escape(cell)}</td>" for cell in (row.name, row.value, row.source)
        )
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])
