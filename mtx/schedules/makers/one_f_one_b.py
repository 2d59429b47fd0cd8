"""The schedules of SC'21 and their next of kin: GPipe, 1F1B, interleaved and eager 1F1B."""

from __future__ import annotations

import numpy as np

from mtx.schedules.orders import B, F, Orders
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape


def one_f_one_b(shape: Shape) -> Schedule:
    """1F1B, interleaved where virtual > 1 (Narayanan et al., SC'21, section 2.2).

    Microbatches go in groups of P through chunk after chunk. Ticks: m v + (v+1) p - 2 where p
    divides m or v = 1; else the last group is short by -m mod p, and each chunk but the last leaves
    so many idle ticks, in all (v-1) (-m mod p) more. Bubble over ideal time, but for those:
    (p-1)/(v m). In flight on stage s: 2(p-1-s) + (v-1) p + 1, Megatron's interleaved count. At v=1
    that is 2(p-1-s) + 1, against p - s in Megatron's own non-interleaved 1F1B, whose stages do not
    run F and B in the same tick: in full ticks those p - s would leave every second tick idle.
    The orders, for runtimes with a program per stage, are Megatron's in both cases.
    """
    orders = _megatron_orders(shape) if shape.virtual == 1 else None
    return Schedule.from_ticks("1f1b", *one_f_one_b_ticks(shape), orders=orders)


def eager_one_f_one_b(shape: Shape) -> Schedule:
    """Eager 1F1B (Zhuang et al., MLSys'23, section 4): 1F1B with 2(p-1-s) + 1 microbatches in
    flight on stage s, so that sends have the time of one more op to arrive.

    The table in full ticks is that of 1F1B; the orders differ.
    """
    return Schedule.from_ticks("eager_1f1b", *one_f_one_b_ticks(shape))


def gpipe(shape: Shape) -> Schedule:
    """GPipe (Huang et al. 2019): every F, then every B, both in the order of interleaved 1F1B.

    Bubble over ideal time: (p-1)/(v m), as 1F1B; in flight on every stage: m v.
    """
    forward, backward = one_f_one_b_ticks(shape)
    return Schedule.from_ticks(
        "gpipe", forward, backward + int(forward.max()) + 1 - int(backward.min())
    )


def one_f_one_b_ticks(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Ticks [M, C, P] of F and B."""
    stages, virtual = shape.stages, shape.virtual
    microbatch, chunk, stage = np.indices((shape.microbatches, virtual, stages))
    group, position = np.divmod(microbatch, stages)
    start = group * virtual * stages + position
    forward = start + chunk * stages + stage
    backward = start + (2 * virtual - 1 - chunk) * stages - 1 + (stages - 1 - stage)
    return forward, backward


def _megatron_orders(shape: Shape) -> Orders:
    """p - 1 - s times F, then F and B in turn, then what is left of B."""
    microbatches, stages = shape.microbatches, shape.stages
    lists = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        ops = [(F, i, 0) for i in range(warm_up)]
        for i in range(microbatches - warm_up):
            ops += [(F, warm_up + i, 0), (B, i, 0)]
        ops += [(B, i, 0) for i in range(microbatches - warm_up, microbatches)]
        lists.append(ops)
    return Orders.from_lists(lists)


def _looped_bubble(shape: Shape) -> float | None:
    if not shape.times.only_ops or (shape.microbatches % shape.stages and shape.virtual > 1):
        return None
    return (shape.stages - 1) / (shape.virtual * shape.microbatches)


def _dense_in_flight(shape: Shape) -> np.ndarray | None:
    if shape.microbatches % shape.stages and shape.virtual > 1:
        return None
    stage = np.arange(shape.stages)
    count = 2 * (shape.stages - 1 - stage) + (shape.virtual - 1) * shape.stages + 1
    return np.minimum(count, shape.microbatches * shape.virtual)


_NARAYANAN = "Narayanan et al., SC'21, section 2.2"
MAKERS: dict[str, Maker] = {
    "gpipe": Maker(
        make=gpipe,
        source="Huang et al., NeurIPS'19 (arXiv 1811.06965)",
        bubble_over_ideal=_looped_bubble,
        in_flight=lambda shape: np.full(shape.stages, shape.microbatches * shape.virtual),
    ),
    "1f1b": Maker(
        make=one_f_one_b,
        source=_NARAYANAN,
        bubble_over_ideal=_looped_bubble,
        in_flight=_dense_in_flight,
    ),
    "interleaved_1f1b": Maker(
        make=one_f_one_b,
        source=_NARAYANAN,
        default_virtual=2,
        bubble_over_ideal=_looped_bubble,
        in_flight=_dense_in_flight,
    ),
    "eager_1f1b": Maker(
        make=eager_one_f_one_b,
        source="Zhuang et al., MLSys'23 (arXiv 2211.05322), section 4",
        bubble_over_ideal=_looped_bubble,
        in_flight=_dense_in_flight,
    ),
}
