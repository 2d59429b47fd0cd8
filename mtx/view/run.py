"""A training run as pictures: loss, throughput, where its time went, and which process was slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mtx.train.goodput import Goodput, Record, measure_goodput, steps_that_count
from mtx.view.picture import BACKWARD, COMMUNICATION, FAINT, FORWARD, IDLE, INK, LIMIT, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 2000  # of a curve: beyond it, means of as many steps as it takes
_COLOURS = {
    "steps": BACKWARD, "lost": LIMIT, "skipped": "#e08a2e", "start": "#9cc4ee", "compile": FORWARD,
    "eval": COMMUNICATION, "save": "#c3a6dc", "other": IDLE, "down": INK,
}  # fmt: skip
WORDS = {
    "steps": "steps that count", "lost": "steps trained again later", "skipped": "skipped steps",
    "start": "start: imports, data, restoring", "compile": "compiling", "eval": "held-out loss",
    "save": "waiting for saves", "other": "anything else", "down": "down, between sessions",
}  # fmt: skip


def draw_run(records: Sequence[Record]) -> Figure:
    """Loss, throughput, goodput and processes of a run's log, one below the other."""
    steps, goodput = steps_that_count(records), measure_goodput(records)
    figure = new_figure(9.0, 10.0)
    loss, speed, time, processes = figure.subplots(4, 1, height_ratios=(3, 2.2, 1, 2.2))
    fill_loss(loss, steps, records)
    fill_throughput(speed, steps)
    fill_goodput(time, goodput)
    fill_processes(processes, records, steps)
    return figure


def fill_loss(axes: Axes, steps: Sequence[Record], records: Sequence[Record]) -> None:
    """Training and held-out loss over the steps; rollbacks and restarts as lines."""
    x, y = _thinned(steps, "loss")
    axes.plot(x, y, color=FORWARD, linewidth=1.0, label="training")
    held_out = [r for r in records if r["kind"] == "eval" and r["loss"] is not None]
    axes.plot(
        [r["step"] for r in held_out], [r["loss"] for r in held_out], "o-", color=BACKWARD,
        markersize=3.5, linewidth=1.0, label="held out",
    )  # fmt: skip
    starts = [r["step"] for r in records if r["kind"] == "start" and r["step"]]
    backs = [r["step"] for r in records if r["kind"] == "rollback"]
    for places, colour, label in ((starts, FAINT, "started again"), (backs, LIMIT, "went back to")):
        for number, step in enumerate(places):
            axes.axvline(
                step, color=colour, linewidth=0.8, linestyle=":",
                label=label if number == 0 else None,
            )  # fmt: skip
    axes.set_ylabel("loss, nats a token", fontsize=8)
    axes.legend(fontsize=7.5, frameon=False)
    _plain(axes, "Loss")


def fill_throughput(axes: Axes, steps: Sequence[Record]) -> None:
    """Tokens a second over the steps, with the median."""
    x, y = _thinned(steps, "tokens_per_s")
    axes.plot(x, y, color=COMMUNICATION, linewidth=1.0)
    if len(y):
        middle = float(np.median([step["tokens_per_s"] for step in steps]))
        axes.axhline(middle, color=INK, linewidth=0.8, linestyle="--")
        axes.annotate(
            f"median {middle:,.0f}", (1, 1), xycoords="axes fraction", fontsize=7.5, ha="right",
            va="bottom", color=INK,
        )  # fmt: skip
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("tokens/s", fontsize=8)
    _plain(axes, "Throughput, all devices")


def fill_goodput(axes: Axes, goodput: Goodput) -> None:
    """One bar: the wall clock's time, by what it went to."""
    left = 0.0
    for name, seconds in goodput.parts.items():
        if seconds:
            share = seconds / goodput.wall_s
            axes.barh(
                0, seconds, left=left, color=_COLOURS[name], edgecolor="white", linewidth=0.5,
                label=f"{WORDS[name]} {share:.1%}",
            )  # fmt: skip
            left += seconds
    axes.set_yticks([])
    axes.set_xlim(0, max(goodput.wall_s, 1e-9))
    axes.set_xlabel("seconds since the first launch", fontsize=8)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.75), ncols=3, fontsize=7.5, frameon=False,
        handlelength=1.0,
    )  # fmt: skip
    sessions = f"{goodput.sessions} session" + ("s" if goodput.sessions > 1 else "")
    _plain(axes, f"Goodput {goodput.fraction:.1%}, {sessions}")


def fill_processes(axes: Axes, records: Sequence[Record], steps: Sequence[Record]) -> None:
    """A heat map of each process's own time at each probe; of one process, its steps' times."""
    probes = [r for r in records if r["kind"] == "processes"]
    counts = {len(r["host_s"]) for r in probes}
    if len(counts) != 1 or counts == {1}:
        axes.hist([1e3 * s["step_s"] for s in steps], bins=60, color=FORWARD)
        axes.set_xlabel("ms a step", fontsize=8)
        axes.set_ylabel("steps", fontsize=8)
        _plain(axes, "Step times")
        return
    own_NT = np.array([[h + d for h, d in zip(r["host_s"], r["device_s"])] for r in probes]).T
    ratio_NT = own_NT / np.median(own_NT, axis=0, keepdims=True)
    image = axes.imshow(
        ratio_NT, aspect="auto", cmap="OrRd", vmin=1.0, vmax=max(2.0, float(ratio_NT.max())),
        interpolation="nearest",
    )  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    places = np.linspace(0, len(probes) - 1, min(len(probes), 8)).round().astype(int)
    axes.set_xticks(places, [str(probes[place]["step"]) for place in places])
    axes.set_ylabel("process", fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _plain(axes, "Time of each process outside of collectives, over the median of all")


def _thinned(steps: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values), means of neighbours where there are very many; values that are not finite
    are left out."""
    known = [(s["step"], s[name]) for s in steps if s[name] is not None]
    if not known:
        return np.empty(0), np.empty(0)
    x, y = np.array(known, float).T
    each = -(-len(x) // _MOST_POINTS)
    cuts = range(0, len(x), each)
    return np.array([x[c : c + each].mean() for c in cuts]), np.array(
        [y[c : c + each].mean() for c in cuts]
    )


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT)
