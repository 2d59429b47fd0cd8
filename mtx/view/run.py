"""A training run as pictures: loss, learning rate, gradients, throughput, where its time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mtx.train.goodput import Record, measure_goodput, steps_that_count
from mtx.view import picture
from mtx.view.picture import BACKWARD, COMMUNICATION, FAINT, FORWARD, INK, LIMIT, WEIGHT
from mtx.view.spans import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 2000  # of a curve: beyond it, means over as many steps as needed
_WIDE_RANGE = 30  # the largest gradient norm over the smallest: above it, the axis is logarithmic
SPENT = {  # what wall-clock time was spent on: in words, and its colour
    "steps": ("steps that count", BACKWARD),
    "lost": ("steps trained again later", LIMIT),
    "skipped": ("skipped steps", WEIGHT),
    "start": ("start: imports, data, restoring", "#9cc4ee"),
    "compile": ("compiling", FORWARD),
    "eval": ("held-out loss", COMMUNICATION),
    "save": ("waiting for saves", picture.COMMUNICATION_LIGHT),
    "other": ("anything else", picture.IDLE),
    "down": ("down, between sessions", INK),
}


class RunLog:
    """A run's log, and what every picture needs from it."""

    def __init__(self, records: Sequence[Record]):
        self.records, self.goodput = records, measure_goodput(records)
        self.steps = steps_that_count(records)  # in order

    def told(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def start(self) -> Record:
        """The start record of the last session."""
        return self.told("start")[-1]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values), means of neighbours if there are very many; values that are not
        finite are left out."""
        known = [(s["step"], s[name]) for s in self.steps if s.get(name) is not None]
        if not known:
            return np.empty(0), np.empty(0)
        points = np.array(known, float)
        cuts = np.arange(0, len(points), -(-len(points) // _MOST_POINTS))
        sizes = np.diff(np.append(cuts, len(points)))
        x, y = np.add.reduceat(points, cuts).T / sizes
        return x, y


def draw_run(records: Sequence[Record]) -> Figure:
    """All panels of a run's log in one figure."""
    log, figure = RunLog(records), picture.new_figure(12.0, 11.0)
    rows = "loss rate\ngradients skipped\nspeed processes\ngoodput goodput"
    panels, heights = panels_of(log), (3, 2.4, 2.4, 0.8)
    if "experts" in panels:
        rows = rows.replace("goodput goodput", "experts experts\ngoodput goodput")
        heights = (*heights[:-1], 2.4, heights[-1])
        figure.set_figheight(14.0)
    names = [list(row.split()) for row in rows.split("\n")]
    axes = figure.subplot_mosaic(names, height_ratios=heights)  # pyright: ignore
    for name, (fill, _) in panels.items():
        fill(axes[name], log)
    return figure


def panels_of(log: RunLog) -> dict[str, tuple[Callable, float]]:
    """What draws each panel, and its height alone in inches; with experts if there are any."""
    return PANELS | ({"experts": (fill_experts, 2.8)} if log.told("experts") else {})


def draw_panels(records: Sequence[Record]) -> list[Figure]:
    """Each panel as a figure of its own, narrow enough for a phone."""
    log, figures = RunLog(records), []
    for fill, height_inches in panels_of(log).values():
        figures.append(picture.new_figure(4.5, height_inches))
        fill(figures[-1].add_subplot(), log)
    return figures


def fill_loss(axes: Axes, log: RunLog) -> None:
    """Training and held-out loss over the steps; rollbacks and restarts as lines."""
    _plot(axes, log, "loss", FORWARD, "Loss, nats a token", label="training")
    steps, second = log.curve("second_loss")
    if len(steps):
        axes.plot(steps, second, color=WEIGHT, linewidth=1.0, label="second token, weighted")
    held_out = [record for record in log.told("eval") if record["loss"] is not None]
    axes.plot(
        [r["step"] for r in held_out], [r["loss"] for r in held_out], "o-", color=BACKWARD,
        markersize=3.5, linewidth=1.0, label="held out" if held_out else None,
    )  # fmt: skip
    starts = [r["step"] for r in log.told("start") if r["step"]]
    backs = [r["step"] for r in log.told("rollback")]
    for steps, colour, label in ((starts, FAINT, "started again"), (backs, LIMIT, "rolled back")):
        for number, step in enumerate(steps):
            label = None if number else label
            axes.axvline(step, color=colour, linewidth=0.8, linestyle=":", label=label)
    axes.legend(fontsize=8, frameon=False)


def fill_rate(axes: Axes, log: RunLog) -> None:
    """The learning rate over the steps."""
    _plot(axes, log, "learning_rate", FORWARD, "Learning rate", form="{x:.3g}")


def fill_gradients(axes: Axes, log: RunLog) -> None:
    """The gradients' global norm before clipping, and where clipping begins."""
    norm = _plot(axes, log, "gradient_norm", BACKWARD, "Gradient norm, before clipping")
    clip = log.start["run"].get("optimizer", {}).get("clip")
    if clip and len(norm):
        _level(axes, clip, f"clipped to {clip:g}")
    if len(norm) and norm.min() > 0 and norm.max() > _WIDE_RANGE * norm.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def fill_throughput(axes: Axes, log: RunLog) -> None:
    """Tokens per second over the steps, with the median."""
    title = "Throughput of all devices, tokens/s"
    if len(_plot(axes, log, "tokens_per_s", COMMUNICATION, title, form="{x:,.0f}")):
        middle = float(np.median([step["tokens_per_s"] for step in log.steps]))
        _level(axes, middle, f"median {middle:,.0f}")


def fill_skipped(axes: Axes, log: RunLog) -> None:
    """How many steps were skipped so far, and in float16 the loss scale, which they lower."""
    skipped = [step["step"] for step in log.steps if not step["finite"]]
    axes.step(
        [0, *skipped, log.last_step], [*range(len(skipped) + 1), len(skipped)], where="post",
        color=WEIGHT, linewidth=1.4,
    )  # fmt: skip
    axes.set_ylim(0, max(1, len(skipped)) * 1.1)
    if not skipped:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", fontsize=9, color=FAINT)
    _whole_numbers(axes)
    if any(step.get("loss_scale", 1) != 1 for step in log.steps):
        scale = axes.twinx()
        scale.plot(*log.curve("loss_scale"), color=FAINT, linewidth=1.0)
        scale.set_yscale("log", base=2)
        scale.set_ylabel("loss scale", fontsize=8, color=FAINT)
        scale.tick_params(labelsize=8, color=FAINT, labelcolor=FAINT)
        scale.spines[:].set_visible(False)
    of = f"{len(skipped):,} of {len(log.steps):,}"
    _over_steps(axes, log, f"Skipped steps, gradients not finite: {of}")


def fill_processes(axes: Axes, log: RunLog) -> None:
    """A heat map of each process's own time at each probe; for one process, its steps' times."""
    probes = log.told("processes")
    counts = {len(r["host_s"]) for r in probes}
    if len(counts) != 1 or counts == {1}:
        axes.hist([1e3 * step["step_s"] for step in log.steps], bins=60, color=FORWARD)
        picture.plain_axes(axes, "Steps by their time", "ms a step")
        return
    own_NT = np.array([[h + d for h, d in zip(r["host_s"], r["device_s"])] for r in probes]).T
    ratio_NT = own_NT / np.median(own_NT, axis=0, keepdims=True)
    image = axes.imshow(
        ratio_NT, aspect="auto", cmap="OrRd", vmin=1.0, vmax=max(2.0, float(ratio_NT.max())),
        interpolation="nearest",
    )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)
    shown = np.linspace(0, len(probes) - 1, min(len(probes), 8)).round().astype(int)
    axes.set_xticks(shown, [str(probes[at]["step"]) for at in shown])
    _whole_numbers(axes)
    title = "Time of each process by itself, over the median of all"
    picture.plain_axes(axes, title, "step", "process")


def fill_experts(axes: Axes, log: RunLog) -> None:
    """A heat map of the last step that reports it: how often each expert was chosen, over the mean
    of its layer."""
    told = log.told("experts")[-1]
    load_LE = np.array(told["load"])
    image = axes.imshow(
        load_LE, aspect="auto", cmap="PuOr_r", vmin=0.0, vmax=2.0, interpolation="nearest"
    )
    axes.figure.colorbar(image, ax=axes, pad=0.01, extend="max").ax.tick_params(labelsize=7)
    layers = np.unique(np.linspace(0, len(load_LE) - 1, min(len(load_LE), 8)).round().astype(int))
    axes.set_yticks(layers, [str(told["layers"][row]) for row in layers])
    title = f"Choices of each expert over its layer's mean, step {told['step']:,}"
    picture.plain_axes(axes, title, "expert", "layer")


def fill_goodput(axes: Axes, log: RunLog) -> None:
    """One bar: wall-clock time, by what it was spent on."""
    goodput, whole = log.goodput, log.goodput.wall_s
    parts = [
        (f"{SPENT[name][0]} {seconds / whole:.1%}", seconds, SPENT[name][1])
        for name, seconds in goodput.parts.items()
        if seconds
    ]
    picture.stack_bars(axes, 0, parts)
    axes.set_yticks([])
    axes.set_xlim(0, max(whole, 1e-9))
    title = f"Goodput {goodput.fraction:.1%}, {count(goodput.sessions, 'session')}"
    picture.plain_axes(axes, title, "seconds since the first launch")
    picture.legend_below(axes, 2, "left")


# For each panel: what fills it, and its height in inches if it is drawn alone.
PANELS: dict[str, tuple[Callable[[Axes, RunLog], None], float]] = {
    "loss": (fill_loss, 3.2),
    "rate": (fill_rate, 2.2),
    "gradients": (fill_gradients, 2.6),
    "skipped": (fill_skipped, 2.2),
    "speed": (fill_throughput, 2.6),
    "processes": (fill_processes, 2.6),
    "goodput": (fill_goodput, 2.4),
}


def _plot(
    axes: Axes, log: RunLog, name: str, colour: str, title: str, *, label: str | None = None,
    form: str | None = None,
) -> np.ndarray:  # fmt: skip
    """Plot what steps report, from 0 up if it has a form; returns the values."""
    x, y = log.curve(name)
    axes.plot(x, y, color=colour, linewidth=1.0, label=label)
    if form is not None:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(form)
    _over_steps(axes, log, title)
    return y


def _level(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=INK, linewidth=0.8, linestyle="--", label=label)
    axes.legend(fontsize=8, frameon=False)


def _over_steps(axes: Axes, log: RunLog, title: str) -> None:
    axes.set_xlim(0, max(1, log.last_step))
    picture.plain_axes(axes, title, "step")


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
