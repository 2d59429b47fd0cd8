"""Directives `schedule-table` and `schedule-gallery`: every maker of `mtx.schedules`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mtx.schedules.makers import MAKERS, make
from mtx.schedules.simulate import simulate
from mtx.view.timeline import draw_timeline

STAGES, MICROBATCHES = 4, 8
FOLDER = "_gallery"  # next to the built pages


class ScheduleTable(SphinxDirective):
    """A row for each schedule: its ticks, bubbles and memory."""

    def run(self):
        return self.parse_text_to_nodes("\n".join(_table()))


class ScheduleGallery(SphinxDirective):
    """A section for each schedule: its picture and its source."""

    def run(self):
        lines = [line for name in sorted(MAKERS) for line in _section(name)]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _section(name: str) -> list[str]:
    return [
        f"## `{name}`", "", _purpose(name), "", f"*{MAKERS[name].source}.*", "", ":::{raw} html",
        f'<div class="gallery"><img src="{FOLDER}/{name}.svg" loading="lazy" '
        f'alt="{name}: {STAGES} stages, {MICROBATCHES} microbatches"></div>', ":::", "",
    ]  # fmt: skip


def _purpose(name: str) -> str:
    """The first sentence of the maker's docstring."""
    first = inspect.getdoc(MAKERS[name].make).split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[^.A-Z]\.)\s(?=[A-Z])", first)[0]


def _table() -> list[str]:
    rows = [
        "| schedule | chunks | ticks | bubble, lock-step | bubble, asynchronous | most stashes |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(MAKERS):
        schedule = make(name, stages=STAGES, microbatches=MICROBATCHES)
        lockstep, free = simulate(schedule, model="lockstep"), simulate(schedule)
        chunks = f"{schedule.virtual}"
        chunks += f", {schedule.slices} slices" if schedule.slices > 1 else ""
        rows.append(
            f"| [`{name}`](#{nodes.make_id(name)}) | {chunks} | {schedule.ticks} | "
            f"{lockstep.bubble_over_ideal:.1%} | {free.bubble_over_ideal:.1%} | "
            f"{lockstep.peak_memory.max():.3g} |"
        )
    return rows


def draw_all(app: Sphinx, error: Exception | None) -> None:
    """Draw one SVG per maker, next to the HTML."""
    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir) / FOLDER
    folder.mkdir(exist_ok=True)
    for name in MAKERS:
        draw_timeline(
            simulate(make(name, stages=STAGES, microbatches=MICROBATCHES), model="lockstep"),
            folder / f"{name}.svg",
        )


def setup(app: Sphinx) -> dict:
    app.add_directive("schedule-table", ScheduleTable)
    app.add_directive("schedule-gallery", ScheduleGallery)
    app.connect("build-finished", draw_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
