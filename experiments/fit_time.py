"""Fits the time model's constants to what SC'21 published, and shows how far off they are.

    python experiments/fit_time.py

The constants of `mtx.plan.calibration.FITTED` are moved until the 30 runs of table 1, figure 16,
figure 18, and the two of figure 13 whose tensor groups leave their node, are predicted best: the
least mean sixth power of log(predicted / published), which keeps the worst of them small, by the
simplex method of Nelder and Mead (1965). Then all published runs are predicted, the others too,
which the fit has not seen: figures 7, 11, 12, the rest of 13, table 2, and table 5 of Korthikanti
et al. 2022, which is another software on the same machine.

How gradients are reduced is not fitted but stands in `Software`: these runs hardly tell. Where they
have replicas, these have many microbatches (or, in table 1's smallest, the reduction runs under B).

Expected time: ten seconds on one core.
Expected result: the constants that stand in `mtx/plan/calibration.py`; table 1 within 4.5 %, the
figures 11 to 18 within 5.3 %, but for one run of figure 13.

    python experiments/fit_time.py --check     # the constants as they stand: residuals only
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.plan.calibration import FITTED, Calibration, calibration_of
from mtx.plan.hardware import hardware
from mtx.plan.published_runs import FITTED_RUNS, HELD_OUT_RUNS, MACHINE, PublishedRun

START = dict(matmul_share=0.7, memory_share=0.8, network_share=0.7, send_share=0.7)
_WIDTH = 100
_POWER = 6


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fits the time model's constants to published runs, and prints the residuals of all."""

    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # fit nothing
    rounds: int = 200  # of the simplex method


def fit(runs: Sequence[PublishedRun], *, rounds: int) -> Calibration:
    """The calibration of SC'21's machine and software that predicts `runs` best."""
    base = calibration_of(hardware(MACHINE))

    def calibration(logs: np.ndarray) -> Calibration:
        return replace(base, **dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))

    def badness(logs: np.ndarray) -> float:
        tried = calibration(logs)
        beyond = float(np.maximum(logs, 0).sum())  # no share is above 1
        errors = [math.log1p(run.error(tried)) for run in runs]
        return float(np.mean(np.power(errors, _POWER))) + beyond

    start = np.log([START[name] for name in FITTED])
    return calibration(minimize(badness, start, rounds=rounds))


def minimize(
    function: Callable[[np.ndarray], float], start: np.ndarray, *, rounds: int, step: float = 0.1
) -> np.ndarray:
    """The best point that the simplex method finds from `start`, [N]."""
    points = start + step * np.vstack([np.zeros(len(start)), np.eye(len(start))])
    values = np.array([function(point) for point in points])
    for _ in range(rounds):
        order = values.argsort()
        points, values = points[order], values[order]
        centre, worst = points[:-1].mean(axis=0), points[-1]
        tried = {times: centre + times * (centre - worst) for times in (1.0, 2.0, 0.5, -0.5)}
        value = function(tried[1.0])
        times = 1.0
        if value < values[0]:
            further = function(tried[2.0])
            times, value = (2.0, further) if further < value else (1.0, value)
        elif value >= values[-2]:
            times = 0.5 if value < values[-1] else -0.5
            value = function(tried[times])
        if value < values[-1]:
            points[-1], values[-1] = tried[times], value
        else:  # shrink towards the best
            points[1:] = points[0] + 0.5 * (points[1:] - points[0])
            values[1:] = [function(point) for point in points[1:]]
    return points[values.argmin()]


# --- saying it ------------------------------------------------------------------------------------


def constants_table(fitted: Calibration) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for column in ("constant", "start", "fitted", "in the package"):
        table.add_column(column, justify="left" if column == "constant" else "right")
    package = calibration_of(hardware(MACHINE))
    for name in FITTED:
        values = START[name], getattr(fitted, name), getattr(package, name)
        table.add_row(name, *(f"{value:.4g}" for value in values))
    return table


def residuals_table(runs: Sequence[PublishedRun], calibration: Calibration) -> Table:
    """A line a curve: the errors of its runs in percent, and the worst."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for column in ("where", "series", "errors, %", "worst"):
        table.add_column(column, justify="right" if column == "worst" else "left", overflow="fold")
    curves: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        curves.setdefault((run.where, run.series), []).append(100 * run.error(calibration))
    for (where, series), errors in curves.items():
        worst = max(errors, key=abs)
        table.add_row(where, series, " ".join(f"{e:+.1f}" for e in errors), f"{worst:+.1f}")
    return table


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="fit_time.py")
    fitted = calibration_of(hardware(MACHINE))
    console = Console(width=_WIDTH)
    if not options.check:
        fitted = fit(FITTED_RUNS, rounds=options.rounds)
        console.print(constants_table(fitted))
    for title, runs in (("fitted", FITTED_RUNS), ("held out", HELD_OUT_RUNS)):
        console.print(f"\n{title}: {len(runs)} runs, predicted against published", style="bold")
        console.print(residuals_table(runs, fitted))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
