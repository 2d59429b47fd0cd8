"""Breadth-first: all microbatches through a chunk before the next chunk begins.

Lamy-Poirier, MLSys'23 (arXiv 2211.05953); PyTorch's LoopedBFS. A stage uses each chunk's weights in
one run of F and in one run of B: where parameters are sharded over `data`, they are gathered twice
a chunk and step, and not with every microbatch; and each chunk's gradients are whole as soon as its
run of B ends. The price is memory: every microbatch waits for its B.

Letters: m microbatches · p stages · v chunks a stage · F, B, W times
"""

from __future__ import annotations

import numpy as np

from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape


def breadth_first(shape: Shape) -> Schedule:
    """Every F, chunk after chunk, then every B in exactly the reverse order.

    Bubble over ideal time, with lock-step ticks as well as with a program per stage: (p-1)/(v m)
    where m >= p. With fewer microbatches a chunk waits for the one before it to come round:
    (v-1)(p-m) more ops of one chunk. In flight on every stage: m v.
    """
    ticks = breadth_first_ticks(shape.microbatches, shape.virtual, shape.stages)
    return Schedule.from_ticks("breadth_first", *ticks)


def breadth_first_ticks(items: int, virtual: int, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """Ticks [I, C, P] of F and of B.

    B mirrors F in time: what comes last in F comes first in B, so that whatever had to be there
    before an F is released after its B. The last F and the first B share a tick.
    """
    item, chunk, stage = np.indices((items, virtual, stages))
    forward = chunk * max(items, stages) + item + stage
    return forward, 2 * forward.max() - forward


def bubble_over_ideal(shape: Shape) -> float | None:
    """(idle + busy) / busy - 1 of any stage; cut sequences count as so many more microbatches. None
    where sends take time or stages differ.
    """
    if not shape.times.only_ops:
        return None
    items = shape.microbatches * shape.slices
    ops = (shape.virtual - 1) * max(items, shape.stages) + items + shape.stages - 1
    return ops / (items * shape.virtual) - 1


def in_flight(shape: Shape) -> np.ndarray:
    """int [P]: everything."""
    return np.full(shape.stages, shape.microbatches * shape.slices * shape.virtual)


MAKERS: dict[str, Maker] = {
    "breadth_first": Maker(
        make=breadth_first,
        source="Lamy-Poirier, MLSys'23 (arXiv 2211.05953)",
        default_virtual=2,
        bubble_over_ideal=bubble_over_ideal,
        in_flight=in_flight,
    ),
}
