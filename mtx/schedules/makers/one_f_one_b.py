"""The schedules of SC'21 and their relatives: GPipe, 1F1B, interleaved and eager 1F1B, and 1F1B
over slices of sequences.

Attention looks back, so the F of a slice needs the keys and values of the slices before it, and its
B needs the gradients that the slices after it left on its own keys and values: F runs in the order
of the slices, B in reverse. All slices are assumed to take the same time; with causal attention,
later slices must be cut shorter for that, as the papers do.

Letters: m microbatches · k slices of each · p stages · v chunks a stage · F, B, W times
"""

from __future__ import annotations

import math

import numpy as np

from mtx.schedules.orders import B, F, Orders
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape


def one_f_one_b(shape: Shape) -> Schedule:
    """1F1B, interleaved if virtual > 1 (Narayanan et al., SC'21, section 2.2).

    Microbatches go in groups of P through chunk after chunk. Ticks: m v + (v+1) p - 2 if p divides
    m or v = 1; else the last group is short by -m mod p, and each chunk but the last leaves that
    many idle ticks, (v-1) (-m mod p) more in all. Bubble over ideal time, apart from those:
    (p-1)/(v m). In flight on stage s: 2(p-1-s) + (v-1) p + 1, Megatron's interleaved count. At v=1
    that is 2(p-1-s) + 1, against p - s in Megatron's own non-interleaved 1F1B, whose stages do not
    run F and B in the same tick: in full ticks those p - s would leave every second tick idle.
    The orders, for runtimes with a program per stage, are Megatron's in both cases.
    """
    orders = _fewest_in_flight(shape) if shape.virtual == 1 else None
    ticks = one_f_one_b_ticks(shape)
    return Schedule.from_ticks("1f1b", *ticks, slices=shape.slices, orders=orders)


def seq1f1b(shape: Shape) -> Schedule:
    """Seq1F1B (Sun et al., NAACL'25, section 3.2), interleaved if v > 1: 1F1B over slices.

    The first B waits for its whole microbatch: k - 1 more slices are under way than in 1F1B.
    Microbatches go in groups of ceil(p/k) through chunk after chunk, so that a group has G =
    k ceil(p/k) >= p slices and no microbatch straddles two. Bubble over ideal time, in both models
    of cost: (p-1)/(v k m) if v = 1 or groups are full. In flight on stage s:
    2(p-1-s) + (v-1) G + k slices. At v = 1 the orders for runtimes with a program per stage are the
    paper's, with p - s - 2 + k slices of warm-up and so p - s - 1 + k in flight.
    """
    return one_f_one_b(shape)


def eager_one_f_one_b(shape: Shape) -> Schedule:
    """Eager 1F1B (Zhuang et al., MLSys'23, section 4): 1F1B with 2(p-1-s) + 1 microbatches in
    flight on stage s, so that sends have the time of one more op to arrive.

    The table in full ticks is that of 1F1B; the orders differ.
    """
    return Schedule.from_ticks("eager_1f1b", *one_f_one_b_ticks(shape))


def gpipe(shape: Shape) -> Schedule:
    """GPipe (Huang et al. 2019): every F, then every B, both in the order of interleaved 1F1B.

    Bubble over ideal time: (p-1)/(v m), as for 1F1B; in flight on every stage: m v.
    """
    forward, backward = one_f_one_b_ticks(shape)
    later = int(forward.max()) + 1 - int(backward.min())
    return Schedule.from_ticks("gpipe", forward, backward + later)


def one_f_one_b_ticks(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Ticks [I, C, P] of F and B."""
    stages, virtual, slices, group = shape.stages, shape.virtual, shape.slices, _group(shape)
    item, chunk, stage = np.indices((shape.microbatches * slices, virtual, stages))

    def turn(item: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """How many ops of its kind a stage runs before this one."""
        return item // group * virtual * group + chunk * group + item % group

    # The last virtual stage's B of a microbatch begins when its last slice has been through F.
    wait = (virtual - 1) * group + (stages - 1) + (slices - 1)
    backward = turn(_last_slice_first(item, slices), virtual - 1 - chunk)
    return turn(item, chunk) + stage, backward + wait + (stages - 1 - stage)


def _group(shape: Shape) -> int:
    """Items that go through a chunk before the next chunk begins."""
    return shape.slices * math.ceil(shape.stages / shape.slices)


def _last_slice_first(item: np.ndarray, slices: int) -> np.ndarray:
    return item // slices * slices + (slices - 1 - item % slices)


def _fewest_in_flight(shape: Shape) -> Orders:
    """p - 1 - s + k - 1 times F, then F and B in turn, then the remaining Bs."""
    items = shape.microbatches * shape.slices
    turns = _last_slice_first(np.arange(items), shape.slices).tolist()
    lists = []
    for stage in range(shape.stages):
        warm_up = min(shape.stages - 1 - stage + shape.slices - 1, items)
        ops = [(F, i, 0) for i in range(warm_up)]
        for i in range(items - warm_up):
            ops += [(F, warm_up + i, 0), (B, turns[i], 0)]
        lists.append(ops + [(B, i, 0) for i in turns[items - warm_up :]])
    return Orders.from_lists(lists)


def _groups_are_full(shape: Shape) -> bool:
    return shape.virtual == 1 or shape.microbatches * shape.slices % _group(shape) == 0


def _bubble(shape: Shape) -> float | None:
    if not shape.times.only_ops or not _groups_are_full(shape):
        return None
    return (shape.stages - 1) / (shape.virtual * shape.slices * shape.microbatches)


def in_flight(shape: Shape) -> np.ndarray | None:
    if not _groups_are_full(shape):
        return None
    stage = np.arange(shape.stages)
    count = 2 * (shape.stages - 1 - stage) + (shape.virtual - 1) * _group(shape) + shape.slices
    return np.minimum(count, shape.microbatches * shape.slices * shape.virtual)


_FORMS = {"bubble_over_ideal": _bubble, "in_flight": in_flight}
_NARAYANAN = "Narayanan et al., SC'21, section 2.2"
MAKERS: dict[str, Maker] = {
    "gpipe": Maker(
        make=gpipe,
        source="Huang et al., NeurIPS'19 (arXiv 1811.06965)",
        bubble_over_ideal=_bubble,
        in_flight=lambda shape: np.full(shape.stages, shape.microbatches * shape.virtual),
    ),
    "1f1b": Maker(make=one_f_one_b, source=_NARAYANAN, **_FORMS),
    "interleaved_1f1b": Maker(make=one_f_one_b, source=_NARAYANAN, default_virtual=2, **_FORMS),
    "eager_1f1b": Maker(
        make=eager_one_f_one_b,
        source="Zhuang et al., MLSys'23 (arXiv 2211.05322), section 4",
        **_FORMS,
    ),
    "seq1f1b": Maker(
        make=seq1f1b,
        source="Sun et al., NAACL'25 (arXiv 2406.03488)",
        sliced=True,
        default_slices=2,
        **_FORMS,
    ),
}
