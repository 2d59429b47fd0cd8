"""SC'21's table 1, published beside predicted: ten models, 1.7 billion to a trillion parameters.

    python experiments/table1.py
    python experiments/table1.py --draw table1.png

prints for every row the throughput that the paper measured and the one that `mtx.plan.time`
predicts for the same model, layout, batch and settings (fp16, every block recomputed, no sequence
parallelism), and the time of a step by either. The last columns say where the predicted time goes.
`experiments/fit_time.py` says how the prediction was calibrated, in part on this table.

Expected time: a second.
Expected result: every row within 5 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from published_runs import TABLE_1_RUNS, PublishedRun
from rich.console import Console
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.errors import UserError
from mtx.plan.flops import sc21_flops
from mtx.plan.time import StepTime

WIDTH = 100
# What the time is spent on, in the drawing's order: fields of StepTime, and a colour.
PARTS = {
    "matmuls": (("matmul_s", "embedding_and_head_s"), "#3b6fb6"),
    "attention": (("attention_s",), "#7fa7d9"),
    "memory": (("elementwise_s", "optimizer_s"), "#b9d0ec"),
    "communication": (("tensor_comm_s", "pipeline_comm_s", "data_comm_s"), "#8e5ea2"),
    "idle": (("bubble_s",), "#d9d9d9"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prints SC'21's table 1 beside what the planner predicts for its rows."""

    draw: str = ""  # FILE for a picture: .png, .pdf or .svg


def shares(time: StepTime) -> dict[str, float]:
    """The parts of a step's time, as fractions of 1."""
    return {
        name: sum(getattr(time, field) for field in parts) / time.step_s
        for name, (parts, _) in PARTS.items()
    }


def columns(*headers: str, left: int, between: int = 2) -> Table:
    """An empty table whose first `left` columns are text and the others numbers."""
    table = Table(box=None, padding=(0, between, 0, 0), header_style="")
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < left else "right", no_wrap=True)
    return table


def curves(runs: Sequence[PublishedRun]) -> dict[tuple[str, str], list[PublishedRun]]:
    """The runs by table or figure and by series, in order."""
    found: dict[tuple[str, str], list[PublishedRun]] = {}
    for run in runs:
        found.setdefault((run.where, run.series), []).append(run)
    return found


def table_of(runs: Sequence[PublishedRun]) -> Table:
    table = columns(
        "\nmodel", "\nGPUs", "\nd x p x t", "\nb", "\nv", "TFLOP/s\npublished", "a GPU\npredicted",
        "\nerror", "step, s\npublished", "\npredicted", "idle\n%", "comm.\n%", left=1, between=1,
    )  # fmt: skip
    for run in runs:
        layout, time = run.layout, run.time()
        part = shares(time)
        published_s = sc21_flops(run.model, run.global_batch) / (
            run.published * 1e12 * layout.devices
        )
        table.add_row(
            run.x, f"{layout.devices:,}", f"{layout.data} x {layout.pipe} x {layout.tensor}",
            f"{layout.microbatch}", f"{layout.virtual}", f"{run.published:g}",
            f"{run.predicted():.1f}", f"{run.error():+.1%}", f"{published_s:.1f}",
            f"{time.step_s:.1f}", f"{100 * part['idle']:.0f}",
            f"{100 * part['communication']:.0f}",
        )  # fmt: skip
    return table


def picture_of(runs: Sequence[PublishedRun]) -> Figure:
    """Throughputs side by side, and the parts of the predicted time."""
    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    places = range(len(runs))
    names = [run.x.removeprefix("gpt-").upper() for run in runs]
    left.bar([p - 0.2 for p in places], [run.published for run in runs], 0.4, color="#444444",
             label="published, SC'21")  # fmt: skip
    left.bar([p + 0.2 for p in places], [run.predicted() for run in runs], 0.4, color="#3b6fb6",
             label="predicted")  # fmt: skip
    left.set_ylabel("teraFLOP/s a GPU")
    left.set_ylim(0, 200)
    left.set_title("Throughput of table 1's models")
    parts = [shares(run.time()) for run in runs]
    bottoms = [0.0] * len(runs)
    for name, (_, colour) in PARTS.items():
        heights = [100 * part[name] for part in parts]
        right.bar(places, heights, 0.8, bottom=bottoms, color=colour, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    right.set_ylabel("% of the predicted step")
    right.set_title("Where the time goes, predicted")
    for axes in (left, right):
        axes.set_xticks(places, names)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=5, frameon=False,
                    handlelength=1, columnspacing=1)  # fmt: skip
    return figure


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str) -> None:
    """Write a picture; UserError if that fails."""
    folder = Path(path).parent
    if not folder.absolute().is_dir():
        raise UserError(f"cannot draw {path}: there is no directory {folder}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UserError(f"cannot draw {path}: {error}; use a .png, .pdf or .svg file") from None


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="table1.py")
    console = Console(width=WIDTH)
    console.print("SC'21, table 1: A100-80GB, fp16, every block recomputed", style="bold")
    console.print(table_of(TABLE_1_RUNS))
    worst = max((run.error() for run in TABLE_1_RUNS), key=abs)
    console.print(f"\nThe largest error is {worst:+.1%}.")
    if options.draw:
        save(picture_of(TABLE_1_RUNS), options.draw)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
