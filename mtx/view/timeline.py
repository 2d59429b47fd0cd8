"""Simulations as pictures: what every stage does over time, and what it keeps meanwhile.

Several are drawn one above the other on the same time axis. If ops are too narrow for the number of
their microbatch, they are boxes without numbers; if there are too many to be told apart, bands as
high as their share of the time replace them. Microbatches and chunks are counted from 0.

Legend: P stages · K ops of one stage · N moments
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtx.schedules.cells import item_text
from mtx.schedules.orders import KINDS, F
from mtx.schedules.simulate import Simulation
from mtx.view import picture
from mtx.view.picture import COMMUNICATION, FAINT, IDLE, ink, rgb, shade
from mtx.view.spans import Shown, memory_between, run_title, runs_of, shares, tick_spans, waits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES_PER_OP = 0.18  # of the shortest, if the picture may choose its own width
_EDGED_OP_INCHES = 0.08  # a narrower op has no edge, and is a bitmap in an SVG
_NARROWEST_OP_INCHES, _LOWEST_ROW_INCHES = 0.04, 0.1  # below either, shares are drawn, not ops
_SMALLEST_FONT_POINTS, _TITLE_POINTS = 4.5, 10.0
_MOST_NUMBERS = 6000  # of one run: each takes about a third of a millisecond
_MOST_SWATCHES = 4  # with more chunks than this, the legend lists the first and the last
_BINS = 800  # of time, approximately, in the picture of shares
_LOWEST_BANDS_INCHES = 0.18  # of a row of shares; if not all stages fit, a row is several
_LEVELS, _GAP_LEVELS = 36, 3  # of a row's height, in the picture of shares
_MOST_LINES = 8  # of memory: with more stages, a few of them and the range of all

Swatches = dict[str, str]  # text of the legend: colour


def draw_timeline(
    shown: Shown | Sequence[Shown],
    path: str | Path | None = None,
    *,
    memory: bool = True,
    memory_limit: float | None = None,
) -> Figure:
    """A picture of simulations, or of schedules in lock-step, saved to `path` if given.

    memory: draw below it what every stage keeps, in stashes of a whole stage; memory_limit: a line
    there. UserError if matplotlib is missing, or `path` does not end in .svg, .png or .pdf.
    """
    runs = runs_of(shown)
    total = max(run.makespan for run in runs)
    shortest = min(_shortest_op(run) for run in runs)
    width = float(np.clip(total / shortest * _INCHES_PER_OP, 7.0, 15.0))
    rows = [float(np.clip(run.schedule.stages * 0.36, 1.0, 7.0)) for run in runs]
    heights = [height for row in rows for height in (row, 1.1)[: 1 + memory]]
    gaps = len(runs) * (0.9 + 0.15 * memory) + 0.4
    figure = picture.new_figure(width, sum(heights) + gaps, path)
    grid = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    swatches: Swatches = {}
    for i, (run, row) in enumerate(zip(runs, rows)):
        axes = grid[i * (1 + memory)]
        swatches |= fill_timeline(axes, run, (0.92 * width, row), total=total)
        if memory:
            _draw_memory(grid[2 * i + 1], run, memory_limit)
    grid[-1].set_xlabel(_time_label(runs), fontsize=8.5)
    grid[-1].tick_params(labelbottom=True)
    for still in ("waiting for data", "idle"):  # last, whichever run named them first
        if still in swatches:
            swatches[still] = swatches.pop(still)
    legend_of(figure, swatches)
    return picture.save_figure(figure, path)


def _shortest_op(run: Simulation) -> float:
    lengths = run.end - run.start
    return float(lengths[lengths > 1e-9 * run.makespan].min())


def _time_label(runs: list[Simulation]) -> str:
    one, split = runs[0].times, {run.schedule.split for run in runs}
    if any(run.times != one or run.times.stage_times for run in runs):
        return "time"
    ways = [f"B {one.backward:g}, W {one.weight:g}"] if True in split else []
    ways += [f"B {one.backward + one.weight:g}"] if False in split else []
    comm = f", communication {one.comm:g}" if one.comm else ""
    return f"time (a microbatch on one stage: F {one.forward:g}, {' or '.join(ways)}{comm})"


# --- ops ------------------------------------------------------------------------------------------


def fill_timeline(
    axes: Axes, run: Simulation, inches: tuple[float, float], *, total: float | None = None,
    title: str | None = None,
) -> Swatches:  # fmt: skip
    """The rows of `draw_timeline`, with title and phases, in axes about `inches` wide and high.

    total: the length of the time axis; None: the run's. title: by default `run_title`'s. Returns
    the colours and what they mean.
    """
    total = total or run.makespan
    stages, together = run.schedule.stages, 1  # in a row
    op_inches = _shortest_op(run) * inches[0] / total
    if op_inches >= _NARROWEST_OP_INCHES and inches[1] / stages >= _LOWEST_ROW_INCHES:
        swatches = _draw_ops(axes, run, op_inches, inches[1] / stages)
    else:
        least = -(-stages // max(1, int(inches[1] / _LOWEST_BANDS_INCHES)))
        together = next((n for n in range(least, 2 * least) if stages % n == 0), least)
        swatches = _draw_shares(axes, run, together)
    _label_stages(axes, stages, together, inches[1])
    axes.set_xlim(0, total)
    _without_frame(axes)
    title, lockstep = title or run_title(run), run.model == "lockstep"
    if len(title) * _TITLE_POINTS * 0.55 > 72 * inches[0]:
        title = title.replace("; ", "\n")
    axes.set_title(title, loc="left", fontsize=_TITLE_POINTS, pad=18 if lockstep else 6)
    if lockstep:
        _bracket_phases(axes, run, total)
    waiting = {"waiting for data": COMMUNICATION} if run.times.comm else {}
    return swatches | waiting | {"idle": IDLE}


def _draw_ops(axes: Axes, run: Simulation, op_inches: float, row_inches: float) -> Swatches:
    """One box per op, with its microbatch if there is room."""
    schedule, orders = run.schedule, run.orders
    longest = len(item_text(schedule.items - 1, schedule.slices))
    font_points = min(8.5, op_inches * 72 / (0.75 * longest), row_inches * 72 * 0.65)
    numbered = font_points >= _SMALLEST_FONT_POINTS and orders.kind.size <= _MOST_NUMBERS
    wide = op_inches > _EDGED_OP_INCHES
    start, length = run.start - run.start.min(), run.end - run.start
    chunks = schedule.virtual
    palette = [[shade(kind, chunk, chunks) for chunk in range(chunks)] for kind in range(3)]
    for stage in range(schedule.stages):
        row = (stage - 0.42, 0.84)
        axes.broken_barh([(0, run.makespan)], row, facecolors=IDLE, zorder=1)
        first, last = waits(run, stage)
        if len(first):
            spans = _pairs(first - run.start.min(), last - first)
            axes.broken_barh(spans, (stage - 0.12, 0.24), facecolors=COMMUNICATION, zorder=1.5)
        colours = [palette[k][c] for k, c in zip(orders.kind[stage], orders.chunk[stage])]
        axes.broken_barh(
            _pairs(start[stage], length[stage]), row, facecolors=colours, edgecolors="white",
            linewidth=0.7 if wide else 0.0, rasterized=not wide, zorder=2,
        )  # fmt: skip
        middle = (start[stage] + length[stage] / 2).tolist() if numbered else []
        for x, item, colour in zip(middle, orders.item[stage].tolist(), colours):
            axes.text(
                x, stage, item_text(item, schedule.slices), ha="center", va="center_baseline",
                color=ink(colour), fontsize=font_points, zorder=3, clip_on=True,
            )  # fmt: skip
    listed = range(chunks) if chunks <= _MOST_SWATCHES else (0, chunks - 1)
    return {
        f"{KINDS[kind]}, chunk {chunk}" if chunks > 1 else KINDS[kind]: colours[chunk]
        for kind, colours in enumerate(palette[: len(schedule.halves)])
        for chunk in listed
    }


def _pairs(first: np.ndarray, length: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(first.tolist(), length.tolist(), strict=True))


def _draw_shares(axes: Axes, run: Simulation, together: int) -> Swatches:
    """Rows of `together` stages, divided into bands: the shares of their time that F, B, W, waiting
    and idling take, from the top.

    A bin of time is a whole number of the steady state's periods; otherwise stripes would show.
    """
    stages, period = run.schedule.stages, _period(run)
    width = period * -(-run.makespan // (period * _BINS))
    bins = int(-(-run.makespan // width))
    share = shares(run, run.start.min() + width * np.arange(bins + 1))
    firsts = np.arange(0, stages, together)
    share = np.add.reduceat(share, firsts) / np.diff(np.append(firsts, stages))[:, None, None]
    level = (np.arange(_LEVELS + _GAP_LEVELS) + 0.5) / _LEVELS  # above 1: between two rows
    kind = (level[:, None, None] >= share.cumsum(axis=-1)[:, None]).sum(axis=-1)  # [rows, L, N]
    ops = [shade(kind) for kind in range(3)]
    palette = np.stack([rgb(colour) for colour in (*ops, COMMUNICATION, IDLE, "#ffffff")])
    axes.imshow(
        palette[kind].reshape(-1, bins, 3), aspect="auto", interpolation="nearest",
        extent=(0, bins * width, len(firsts) * together - 0.5, -0.5),
    )  # fmt: skip
    return {f"{KINDS[kind]}'s share of the time": ops[kind]
            for kind in range(len(run.schedule.halves))}  # fmt: skip


def _period(run: Simulation) -> float:
    """The usual time from one F to the next, on the stage in the middle; a hundredth of the
    makespan if they come in bursts."""
    stage = run.schedule.stages // 2
    between = np.diff(run.start[stage][run.orders.kind[stage] == F])
    usual = float(np.median(between)) if len(between) else 0.0
    return usual if usual > 1e-6 * run.makespan else run.makespan / 100


# --- frame, memory, legend ------------------------------------------------------------------------


def _label_stages(axes: Axes, stages: int, together: int, inches: float) -> None:
    """Name as many rows as there is room for; a row is `together` stages."""
    rows = -(-stages // together)
    axes.set_ylim(rows * together - 0.5, -0.5)
    firsts = range(0, stages, together * max(1, math.ceil(rows * 0.2 / inches)))
    lasts = [min(first + together, stages) - 1 for first in firsts]
    names = [f"stage {first}" if first == last else f"stages {first}-{last}"
             for first, last in zip(firsts, lasts, strict=True)]  # fmt: skip
    axes.set_yticks([first + (together - 1) / 2 for first in firsts], names)


def _without_frame(axes: Axes) -> None:
    axes.tick_params(length=0, labelsize=8.5, labelbottom=False)
    axes.spines[:].set_visible(False)


def _bracket_phases(axes: Axes, run: Simulation, total: float) -> None:
    """Mark above the rows where only F, F and B, or only B occur, and so on."""
    from matplotlib.transforms import ScaledTranslation

    points = ScaledTranslation(0, 8 / 72, axes.figure.dpi_scale_trans)
    above = axes.get_xaxis_transform() + points
    ticks, start, _ = tick_spans(run)
    edges = np.append(start, run.end.max()) - run.start.min()
    gap = 0.002 * total
    for phase in run.schedule.phases:
        names = [kind for kind, runs in zip(KINDS, (phase.forward, phase.backward, phase.weight))
                 if runs]  # fmt: skip
        first, last = edges[np.searchsorted(ticks, [phase.start, phase.stop])]
        if not names or last <= first:
            continue
        axes.plot(
            [first + gap, last - gap], [1, 1], transform=above, clip_on=False, color="#a0a0a0",
            linewidth=0.9, marker="|", markersize=5,
        )  # fmt: skip
        label = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        if last - first > (0.03 + 0.01 * len(label)) * total:
            axes.text(
                (first + last) / 2, 1, label, transform=above, ha="center", va="center",
                fontsize=8.5, color="#404040",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
            )  # fmt: skip


def _draw_memory(axes: Axes, run: Simulation, limit: float | None) -> None:
    """Stashes over time: a line per stage, or the range of all with first, last and fullest."""
    from matplotlib import colormaps

    stages, peak, begin = run.schedule.stages, run.peak_memory, run.start.min()
    drawn = list(range(stages))
    if stages > _MOST_LINES:
        drawn = sorted({0, stages - 1, int(peak.argmax())})
        moments = np.linspace(begin, run.end.max(), 2 * _BINS)
        kept = memory_between(run, moments)
        axes.fill_between(
            moments - begin, kept.min(axis=0), kept.max(axis=0), color="#dfe3ea", linewidth=0,
            label="all stages", step="post",
        )  # fmt: skip
    for i, stage in enumerate(drawn):
        times, values = run.memory_over_time(stage)
        lasting = np.append(np.diff(times) > 1e-9 * run.makespan, True)
        axes.step(
            np.append(0.0, times[lasting] - begin), np.append(0.0, values[lasting]), where="post",
            color=colormaps["viridis"](0.9 * i / max(1, len(drawn) - 1)), linewidth=1.1,
            label=f"stage {stage}",
        )  # fmt: skip
    if limit is not None:
        axes.axhline(limit, color=picture.LIMIT, linewidth=0.9, linestyle="--", label="limit")
    axes.set_ylim(0, 1.1 * max(float(peak.max()), limit or 0.0))
    axes.set_ylabel("stashes", fontsize=8.5)
    _without_frame(axes)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False, handlelength=1.0,
        labelspacing=0.25,
    )  # fmt: skip
    axes.annotate(
        f"most: {peak.max():.4g} on stage {int(peak.argmax())}", (0, 1), xytext=(2, 2),
        xycoords="axes fraction", textcoords="offset points", fontsize=7.5, color=picture.INK,
    )  # fmt: skip


def legend_of(figure: Any, swatches: Swatches) -> None:
    """The legend of timelines, below their figure."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=colour, label=text) for text, colour in swatches.items()],
        loc="outside lower right", ncols=min(8, len(swatches)), fontsize=8.5, frameon=False,
        handlelength=1.2, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip
