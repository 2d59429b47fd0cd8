"""Schedules that cut sequences into slices, each of which moves through the pipeline on its own.

Attention looks back, so the F of a slice needs the keys and values of the slices before it, and its
B the gradients that those after it left on its own keys and values: F runs in the order of the
slices, B in the reverse order. All slices are priced alike here; with causal attention that asks
for later slices to be cut shorter, as both papers do.

Letters: m microbatches · k slices of each · p stages · v chunks a stage · F, B, W times of a
microbatch
"""

from __future__ import annotations

import math

import numpy as np

from mtx.schedules import breadth_first
from mtx.schedules.orders import B, F, Orders
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape


def terapipe(shape: Shape) -> Schedule:
    """TeraPipe (Li et al., ICML'21): every F of every slice, then every B; GPipe over slices.

    With v > 1, which the paper does not have, chunk after chunk as `breadth_first`. Bubble over
    ideal time, in both models of cost: (p-1)/(v k m) where k m >= p. In flight: k m v slices.
    """
    ticks = breadth_first.breadth_first_ticks(
        shape.microbatches * shape.slices, shape.virtual, shape.stages
    )
    return Schedule.from_ticks("terapipe", *ticks, slices=shape.slices)


def seq1f1b(shape: Shape) -> Schedule:
    """Seq1F1B (Sun et al., NAACL'25, section 3.2), interleaved where v > 1: 1F1B over slices.

    The first B waits for its whole microbatch: k - 1 slices more than in 1F1B are under way.
    Microbatches go in groups of ceil(p/k) through chunk after chunk, so that a group has G =
    k ceil(p/k) >= p slices and no microbatch straddles two; with k = 1 that is 1F1B.
    Bubble over ideal time, in both models of cost: (p-1)/(v k m) where v = 1 or groups are full.
    In flight on stage s: 2(p-1-s) + (v-1) G + k slices, of which k make a microbatch.
    At v = 1 the orders for runtimes with a program per stage are the paper's, with p - s - 2 + k
    slices of warm-up and so p - s - 1 + k in flight.
    """
    orders = _paper_orders(shape) if shape.virtual == 1 else None
    return Schedule.from_ticks(
        "seq1f1b", *_seq1f1b_ticks(shape), slices=shape.slices, orders=orders
    )


def _group(shape: Shape) -> int:
    """Items that go through a chunk before the next one is taken up."""
    return shape.slices * math.ceil(shape.stages / shape.slices)


def _seq1f1b_ticks(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    stages, virtual, slices, group = shape.stages, shape.virtual, shape.slices, _group(shape)
    item, chunk, stage = np.indices((shape.microbatches * slices, virtual, stages))
    forward = _turn(item, chunk, virtual, group) + stage
    # The last virtual stage's B of a microbatch begins when its last slice has been through F.
    wait = (virtual - 1) * group + (stages - 1) + (slices - 1)
    from_last = item // slices * slices + (slices - 1 - item % slices)
    backward = _turn(from_last, virtual - 1 - chunk, virtual, group) + wait + (stages - 1 - stage)
    return forward, backward


def _turn(item: np.ndarray, chunk: np.ndarray, virtual: int, group: int) -> np.ndarray:
    """How many ops of its kind a stage runs before this one."""
    return item // group * virtual * group + chunk * group + item % group


def _paper_orders(shape: Shape) -> Orders:
    items, slices = shape.microbatches * shape.slices, shape.slices
    turns = [i // slices * slices + (slices - 1 - i % slices) for i in range(items)]
    lists = []
    for stage in range(shape.stages):
        warm_up = min(shape.stages - 1 - stage + slices - 1, items)
        ops = [(F, i, 0) for i in range(warm_up)]
        for i in range(items - warm_up):
            ops += [(F, warm_up + i, 0), (B, turns[i], 0)]
        ops += [(B, i, 0) for i in turns[items - warm_up :]]
        lists.append(ops)
    return Orders.from_lists(lists)


def _groups_are_full(shape: Shape) -> bool:
    return shape.virtual == 1 or shape.microbatches * shape.slices % _group(shape) == 0


def _seq1f1b_bubble(shape: Shape) -> float | None:
    if not shape.times.only_ops or not _groups_are_full(shape):
        return None
    return (shape.stages - 1) / (shape.virtual * shape.slices * shape.microbatches)


def _seq1f1b_in_flight(shape: Shape) -> np.ndarray | None:
    if not _groups_are_full(shape):
        return None
    stage = np.arange(shape.stages)
    count = 2 * (shape.stages - 1 - stage) + (shape.virtual - 1) * _group(shape) + shape.slices
    return np.minimum(count, shape.microbatches * shape.slices * shape.virtual)


MAKERS: dict[str, Maker] = {
    "seq1f1b": Maker(
        make=seq1f1b,
        source="Sun et al., NAACL'25 (arXiv 2406.03488)",
        sliced=True,
        default_slices=2,
        bubble_over_ideal=_seq1f1b_bubble,
        in_flight=_seq1f1b_in_flight,
    ),
    "terapipe": Maker(
        make=terapipe,
        source="Li et al., ICML'21 (arXiv 2102.07988)",
        sliced=True,
        default_slices=2,
        bubble_over_ideal=breadth_first.bubble_over_ideal,
        in_flight=breadth_first.in_flight,
    ),
}
