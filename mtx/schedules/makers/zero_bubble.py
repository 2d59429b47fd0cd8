"""Zero bubble: B is only the gradient of the input, and W fills time that would be idle.

zb_h1, zb_h2, zb_1p and zb_2p are from Qi et al., ICLR'24 (arXiv 2401.10241). They are orders for a
runtime with a program per stage, in which one stage may run W while another runs F. Their tables
hold the same orders, and so need the same memory, in full ticks, but save nothing there: zb_h2
takes as long as 1F1B, and zb_h1 far longer, with too few in flight to run F and B in every tick.
`aligned_zb` and `deferred_zb` are ours, for lock-step: use `deferred_zb` there.

Letters as in the paper: m microbatches · p stages · s this stage, from 0 · F, B, W, c times of an
op and of a send
"""

from __future__ import annotations

import math

import numpy as np

from mtx.errors import UserError
from mtx.schedules.makers.one_f_one_b import in_flight, one_f_one_b_ticks
from mtx.schedules.orders import B, F, Orders, W
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker, Shape
from mtx.schedules.simulate import simulate
from mtx.schedules.zero_bubble_auto import automatic_kinds


def zb_h1(shape: Shape) -> Schedule:
    """ZB-H1 (section 2.1): 1F1B with W of stage s delayed by s microbatches, in 1F1B's memory.

    In flight on stage s: p - s, and up to s more wait for W. The slowest stage, run asynchronously,
    is idle for (p-1)(F + B - W + 4c), given 2c <= W <= F + 2c and m > p (at c = 0: m >= p).
    """
    stages = np.arange(shape.stages)
    return _handcrafted("zb_h1", shape, shape.stages - stages, stages)


def zb_h2(shape: Shape) -> Schedule:
    """ZB-H2 (section 2.2): stage s runs 2(p-s) - 1 Fs before its first B and delays W by 2s
    microbatches; if F = B = W, no stage is idle, in about twice 1F1B's memory.

    In flight on stage s: 2(p-s) - 1, and up to 2s more wait for W. The slowest stage, run
    asynchronously, is idle for (p-1)(F + B - 2W + 2c), given m >= 2p - 1, W <= F, 2c <= F + B and
    that this is at least 0. Stages end one after another, as they begin: the next step's F must not
    wait for all of them (section 4 of the paper).
    """
    stages = np.arange(shape.stages)
    return _handcrafted("zb_h2", shape, 2 * (shape.stages - stages) - 1, 2 * stages)


def zb_1p(shape: Shape) -> Schedule:
    """ZB-1p (section 3.1): `automatic` in 1F1B's memory, p stashes a stage, or in memory_limit."""
    return automatic(shape, shape.memory_limit or shape.stages)


def zb_2p(shape: Shape) -> Schedule:
    """ZB-2p (section 3.1): `automatic` in twice 1F1B's memory, 2p stashes a stage, or in
    memory_limit."""
    return automatic(shape, shape.memory_limit or 2 * shape.stages)


def automatic(shape: Shape, memory_limit: float) -> Schedule:
    """The order that leaves the slowest stage idle for the least time, run asynchronously with
    shape.times: that of the paper's heuristic, or ZB-H1 or ZB-H2 if they fit and are better.

    memory_limit: stashes per stage, never exceeded. shape.weight_share, the part of a stash that
    stays from B to W, decides what 2p stashes can achieve: the last stage holds back up to
    (p-1)(F + B + 2c) / W of them so as to end with the first stage. The paper's models keep 0.37
    (1.5B) and 0.43 (6.2B): 32 s b h of the 34 s b h + 5 a s^2 b bytes of a layer, its table 1. With
    flash attention there is no second term, and the part is 0.94.
    """
    if memory_limit < 1:
        raise UserError(
            f"memory_limit={memory_limit} is less than one microbatch's stash; give at least 1, "
            f"and about stages={shape.stages} for stages that are seldom idle"
        )
    best, least, share = None, math.inf, shape.weight_share
    for make in (zb_h1, zb_h2):
        schedule = make(shape)
        run = simulate(schedule, shape.times, weight_share=share)
        if run.cost < least and run.peak_memory.max() <= memory_limit:
            best, least = schedule, run.cost
    kinds = automatic_kinds(shape, memory_limit=memory_limit, weight_share=share, below=least)
    if kinds is None:
        assert best is not None  # else any order would be below
        return best
    return Schedule.from_orders("automatic", Orders.from_kinds(kinds, shape.microbatches))


def aligned_zb(shape: Shape) -> Schedule:
    """1F1B in full ticks, where all stages run W of a microbatch in one tick, that of its last B.

    So W costs lock-step ticks no more than its own time, in which no stage is idle: the makespan is
    (m + (p-1)/v)(F + B) + m W in lock-step, and the bubble is (p-1)/v times F + B alone, while that
    of 1F1B is of F + B + W. Ticks: m v + (v+1) p - 2. In flight on stage s: as in 1F1B; and s + 1
    wait for W, this tick's included. With v > 1 chunks, all this holds if p divides m.
    """
    forward, backward = one_f_one_b_ticks(shape)
    return Schedule.from_ticks("aligned_zb", forward, backward, backward + np.arange(shape.stages))


def deferred_zb(shape: Shape) -> Schedule:
    """1F1B in full ticks, with every W in a tick in which all stages run W or which it does not
    lengthen: ZB-H1's bubble, in lock-step. Ours.

    A stage ends its Fs before the last stage does, and its Bs before the first does: in p - 1 ticks
    it has one op less than the longest stage, and W fits beside the others. So W lengthens only
    m v - (p-1) ticks, not m v as in `aligned_zb`: the makespan is
    (m + (p-1)/v)(F + B) + (m - (p-1)/v) W in lock-step, the bubble (p-1)/v times F + B - W, given
    W <= F and W <= B, m v >= (v+1) p - 2 and, with v > 1, that p divides m; for other shapes it is
    `aligned_zb`. With one chunk no table of full ticks is faster (the search's tests compare with
    all of them). Ticks: m v + (v+2) p - 3. In flight: as in 1F1B; at most 2p - 1 wait for W, and a
    stage keeps no more from F to W than 1F1B's first stage does from F to B.
    """
    m, p, v = shape.microbatches, shape.stages, shape.virtual
    if not _defers(shape):
        return aligned_zb(shape)
    # Ops of a stage, and ticks from the last stage's last F to its last B.
    ops, delay = m * v, v * p - 1
    forward, backward = one_f_one_b_ticks(shape)
    weight = np.empty_like(backward)
    for stage in range(p):
        ticks = [
            *range(delay + p - 1, ops),  # with all stages
            *range(ops + stage, ops + p - 1),  # it has B alone, the last stage F and B
            *range(ops + p - 1, ops + delay),  # with all stages: none has an F
            *range(ops + delay + p - 1 - stage, ops + delay + p - 1),  # it is idle, the first has B
            *range(ops + delay + p - 1, ops + delay + 2 * (p - 1)),  # with all stages: W alone
        ]
        weight[:, :, stage].flat[np.argsort(backward[:, :, stage], axis=None)] = ticks
    return Schedule.from_ticks("deferred_zb", forward, backward, weight)


def _defers(shape: Shape) -> bool:
    m, p, v = shape.microbatches, shape.stages, shape.virtual
    return m * v >= (v + 1) * p - 2 and (v == 1 or m % p == 0)


def _handcrafted(name: str, shape: Shape, warm_up: np.ndarray, delay: np.ndarray) -> Schedule:
    """Per stage: warm_up times F, then B, W from `delay` microbatches ago, and F in turn."""
    kinds, microbatches = [], shape.microbatches
    for begun, behind in zip(warm_up.tolist(), delay.tolist(), strict=True):
        row = [F] * min(begun, microbatches)
        for microbatch in range(microbatches):
            row += [B] + [W] * (microbatch >= behind) + [F] * (microbatch + begun < microbatches)
        kinds.append(row + [W] * min(behind, microbatches))
    return Schedule.from_orders(name, Orders.from_kinds(kinds, microbatches))


def _h1_bubble(shape: Shape) -> float | None:
    """Asynchronous, over ideal time: up to the end of the last stage, or of the first one."""
    m, p, t = shape.microbatches, shape.stages, shape.times
    holds = m > p and 2 * t.comm <= t.weight <= t.forward + 2 * t.comm
    if not holds or t.stage_factors is not None:
        return None
    first = t.forward + t.backward - t.weight + 4 * t.comm
    last = t.forward + 3 * t.comm
    return (p - 1) * max(first, last) / (m * t.work)


def _h2_bubble(shape: Shape) -> float | None:
    """Asynchronous, over ideal time: up to the end of the last stage, or of the first one."""
    m, p, t = shape.microbatches, shape.stages, shape.times
    first = t.forward + t.backward - 2 * t.weight + 2 * t.comm
    holds = m >= 2 * p - 1 and t.weight <= t.forward and 2 * t.comm <= t.forward + t.backward
    if not holds or first < 0 or t.stage_factors is not None:
        return None
    return (p - 1) * max(first, t.forward + t.comm) / (m * t.work)


def _aligned_bubble(shape: Shape) -> float | None:
    """In lock-step, over ideal time; every tick but the last one sends."""
    m, p, v, t = shape.microbatches, shape.stages, shape.virtual, shape.times
    if t.stage_factors is not None or (v > 1 and m % p):
        return None
    sends = m * v + (v + 1) * p - 3 if p > 1 else 0
    return ((p - 1) / v * (t.forward + t.backward) + sends * t.comm) / (m * t.work)


def _deferred_bubble(shape: Shape) -> float | None:
    """In lock-step, over ideal time; every tick sends except the last p: the first stage's last B,
    and W alone."""
    m, p, v, t = shape.microbatches, shape.stages, shape.virtual, shape.times
    if not _defers(shape):
        return _aligned_bubble(shape)
    if t.stage_factors is not None or t.weight > min(t.forward, t.backward):
        return None
    sends = m * v + (v + 1) * p - 3 if p > 1 else 0
    return ((p - 1) / v * (t.forward + t.backward - t.weight) + sends * t.comm) / (m * t.work)


_QI = "Qi et al., ICLR'24 (arXiv 2401.10241)"
MAKERS: dict[str, Maker] = {
    "zb_h1": Maker(
        make=zb_h1,
        source=f"{_QI}, section 2.1",
        lockstep=False,
        virtual=1,
        bubble_over_ideal=_h1_bubble,
        in_flight=lambda shape: np.minimum(
            shape.stages - np.arange(shape.stages), shape.microbatches
        ),
    ),
    "zb_h2": Maker(
        make=zb_h2,
        source=f"{_QI}, section 2.2",
        lockstep=False,
        virtual=1,
        bubble_over_ideal=_h2_bubble,
        in_flight=lambda shape: np.minimum(
            2 * (shape.stages - np.arange(shape.stages)) - 1, shape.microbatches
        ),
    ),
    "zb_1p": Maker(make=zb_1p, source=f"{_QI}, section 3.1", lockstep=False, virtual=1),
    "zb_2p": Maker(make=zb_2p, source=f"{_QI}, section 3.1", lockstep=False, virtual=1),
    "aligned_zb": Maker(
        make=aligned_zb,
        source="1F1B in full ticks, with W of all stages at once",
        bubble_over_ideal=_aligned_bubble,
        in_flight=in_flight,
    ),
    "deferred_zb": Maker(
        make=deferred_zb,
        source="1F1B in full ticks, with each W where it lengthens no tick",
        bubble_over_ideal=_deferred_bubble,
        in_flight=in_flight,
    ),
}
