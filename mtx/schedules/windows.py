"""Ticks of other chunks beside which a chunk's parameters are gathered and its gradients scattered.

ZeRO-1 gathers all parameters before the first tick and scatters all gradients after the last. But a
pipeline with v > 1 needs only the first chunks at its beginning, and at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mtx.schedules.schedule import Phase, Schedule


class Window(NamedTuple):
    """The ticks [start, stop) for a chunk; none if start == stop."""

    chunk: int
    start: int
    stop: int

    @property
    def ticks(self) -> int:
        return self.stop - self.start


def gather_windows(schedule: Schedule) -> tuple[Window, ...]:
    """For each chunk, the ticks from the first F of the chunk before it up to its own first F; none
    for the first chunk."""
    first = schedule.forward_ticks.min(axis=(0, 2)).tolist()
    order = np.argsort(first, kind="stable").tolist()
    windows = [Window(order[0], 0, 0)]
    windows += [Window(chunk, first[before], first[chunk]) for before, chunk in pairwise(order)]
    return tuple(windows)


def scatter_windows(schedule: Schedule) -> tuple[Window, ...]:
    """For each chunk, the ticks after its last B and W up to those of the chunk after it; none for
    the last chunk."""
    ends = np.max([table.max(axis=(0, 2)) for table in schedule.tables[1:]], axis=0)
    last = (ends + 1).tolist()
    order = np.argsort(last, kind="stable").tolist()
    windows = [Window(chunk, last[chunk], last[after]) for chunk, after in pairwise(order)]
    windows += [Window(order[-1], schedule.ticks, schedule.ticks)]
    return tuple(windows)


def cut(phases: Iterable[Phase], windows: Iterable[Window]) -> tuple[Phase, ...]:
    """The phases, cut so that each is within a window or outside all windows."""
    edges = {edge for window in windows for edge in (window.start, window.stop)}
    found = []
    for phase in phases:
        inside = sorted(edge for edge in edges if phase.start < edge < phase.stop)
        for start, stop in pairwise((phase.start, *inside, phase.stop)):
            found.append(phase._replace(start=start, stop=stop))
    return tuple(found)
