"""Breadth-first: everything through a chunk before the next chunk begins; TeraPipe, over slices.

A stage uses each chunk's weights in one run of F and in one run of B: if parameters are sharded
over `data`, they are gathered twice per chunk and step, not with every microbatch; and each chunk's
gradients are complete as soon as its run of B ends. The price is memory: every microbatch waits for
its B.

Letters: m microbatches · k slices of each · p stages · v chunks a stage · F, B, W times
"""

from __future__ import annotations

import numpy as np

from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape


def breadth_first(shape: Shape) -> Schedule:
    """Every F, chunk after chunk, then every B in exactly the reverse order.

    Lamy-Poirier, MLSys'23 (arXiv 2211.05953); PyTorch's LoopedBFS. B mirrors F in time, so that
    whatever an F needs beforehand is released after its B; the last F and the first B share a tick.
    Bubble over ideal time, in both models of cost: (p-1)/(v k m) if k m >= p. With fewer, a chunk
    waits for the one before it to come round: (v-1)(p - k m) more ops of one chunk. In flight on
    every stage: k m v.
    """
    items, virtual, stages = shape.microbatches * shape.slices, shape.virtual, shape.stages
    item, chunk, stage = np.indices((items, virtual, stages))
    forward = chunk * max(items, stages) + item + stage
    backward = 2 * forward.max() - forward
    return Schedule.from_ticks("breadth_first", forward, backward, slices=shape.slices)


def terapipe(shape: Shape) -> Schedule:
    """TeraPipe (Li et al., ICML'21): every F of every slice, then every B; GPipe over slices.

    With v > 1, which the paper does not have, chunk after chunk as in `breadth_first`.
    """
    return breadth_first(shape)


def _bubble(shape: Shape) -> float | None:
    """(idle + busy) / busy - 1 of any stage. None if sends take time or stages differ."""
    if not shape.times.only_ops:
        return None
    items = shape.microbatches * shape.slices
    ops = (shape.virtual - 1) * max(items, shape.stages) + items + shape.stages - 1
    return ops / (items * shape.virtual) - 1


def _in_flight(shape: Shape) -> np.ndarray:
    """int [P]: everything."""
    return np.full(shape.stages, shape.microbatches * shape.slices * shape.virtual)


MAKERS: dict[str, Maker] = {
    "breadth_first": Maker(
        make=breadth_first,
        source="Lamy-Poirier, MLSys'23 (arXiv 2211.05953)",
        default_virtual=2,
        bubble_over_ideal=_bubble,
        in_flight=_in_flight,
    ),
    "terapipe": Maker(
        make=terapipe,
        source="Li et al., ICML'21 (arXiv 2102.07988)",
        sliced=True,
        default_slices=2,
        bubble_over_ideal=_bubble,
        in_flight=_in_flight,
    ),
}
