"""Who makes schedules: each maker says in which tick every F and B runs, and nothing else.

A maker takes (microbatches M, stages P, virtual C) and returns two int arrays of ticks [M, C, P].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mtx.errors import unknown_name
from mtx.pipeline.schedule import Schedule

Ticks = tuple[np.ndarray, np.ndarray]


def one_f_one_b(microbatches: int, stages: int, virtual: int) -> Ticks:
    """1F1B, interleaved where virtual > 1 (Narayanan et al., SC'21, section 2.2).

    Microbatches go in groups of P through chunk after chunk. Ticks: m v + (v+1) p - 2 where p
    divides m, and fewer ops than that leave gaps where it does not. Bubble over ideal time:
    (p-1)/(v m). In flight on stage s: 2(p-1-s) + (v-1) p + 1, Megatron's interleaved count; at v=1
    that is 2(p-1-s) + 1, against p - s in Megatron's own non-interleaved 1F1B, whose stages do not
    run F and B in the same tick.
    """
    group, position, chunk, stage = _indices(microbatches, stages, virtual)
    start = group * virtual * stages + position
    forward = start + chunk * stages + stage
    backward = start + (2 * virtual - 1 - chunk) * stages - 1 + (stages - 1 - stage)
    return forward, backward


def gpipe(microbatches: int, stages: int, virtual: int) -> Ticks:
    """GPipe (Huang et al. 2019): every F, then every B, both in the order of interleaved 1F1B.

    Bubble over ideal time: (p-1)/(v m), as 1F1B; in flight on every stage: m v.
    """
    forward, backward = one_f_one_b(microbatches, stages, virtual)
    return forward, backward + int(forward.max()) + 1 - int(backward.min())


def _indices(microbatches: int, stages: int, virtual: int):
    """(group, position in the group, chunk, stage) of every op [M, C, P]."""
    microbatch, chunk, stage = np.indices((microbatches, virtual, stages))
    return microbatch // stages, microbatch % stages, chunk, stage


MAKERS: dict[str, Callable[[int, int, int], Ticks]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def make(name: str, *, microbatches: int, stages: int, virtual: int = 1) -> Schedule:
    """The schedule of that name; UserError names the nearest where there is none."""
    if name not in MAKERS:
        raise unknown_name("schedule", name, MAKERS)
    return Schedule.from_ticks(name, *MAKERS[name](microbatches, stages, virtual))
