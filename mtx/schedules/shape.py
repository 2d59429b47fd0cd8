"""The input of a schedule's maker: microbatches, stages and chunks, and how long ops take.

Letters as in the papers: m microbatches · p stages · v chunks a stage · F, B, W times
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtx.errors import UserError
from mtx.fields import resolve_types
from mtx.sizes import Layers, Sequences, Slices, Stages

if TYPE_CHECKING:
    from mtx.schedules.schedule import Schedule


# The share of a stash that stays from B to W, if they are split. In Qi et al., ICLR'24, 0.37 and
# 0.43 (their table 1, for the models of tables 5 and 6).
WEIGHT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long the ops of one microbatch take, in any unit, summed over the chunks of a stage.

    An op of one chunk takes 1/v of it, and an op of one slice 1/slices of that. If B and W are not
    split, B takes the sum of both.
    """

    forward: float = 1.0
    backward: float = 1.0  # of the input gradient
    weight: float = 1.0
    comm: float = 0.0  # from the end of an op to its output's arrival at another stage
    stage_factors: tuple[float, ...] | None = None  # of each stage; None: all are equal
    # F, B and W of every stage, in place of all but `comm`: for simulation, not for makers.
    stage_times: tuple[tuple[float, float, float], ...] | None = None

    def __post_init__(self):
        for name in ("forward", "backward", "weight", "comm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name}={value} must be a time of at least 0")
        if self.forward + self.backward + self.weight <= 0:
            raise UserError("forward, backward and weight are all 0: give one of them a time")
        if any(not (math.isfinite(f) and f > 0) for f in self.stage_factors or ()):
            raise UserError(f"stage_factors={self.stage_factors} must all be above 0")
        if not all(math.isfinite(t) and t >= 0 for own in self.stage_times or () for t in own):
            raise UserError(f"stage_times={self.stage_times} must be times of at least 0")

    @property
    def work(self) -> float:
        """F + B + W: one microbatch on one stage."""
        return self.forward + self.backward + self.weight

    @property
    def only_ops(self) -> bool:
        """Whether stages are equal and sends take no time, as most closed forms assume."""
        return self.comm == 0 and len(set(self.stage_factors or (1.0,))) == 1

    def of_stages(self, stages: int) -> np.ndarray:
        """float [P, 3]: F, B and W on every stage."""
        if self.stage_times is not None:
            return np.array(self.stage_times, float)
        factors = self.stage_factors or (1.0,) * stages
        return np.outer(factors, (self.forward, self.backward, self.weight))


MOST_OPS = 2**18  # F of all stages: twice those of 64 stages of 4 chunks, 512 microbatches


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The arguments of a maker."""

    microbatches: Sequences
    stages: Stages
    virtual: Layers = 1
    slices: Slices = 1  # of each microbatch's sequences
    times: Times = Times()
    # stashes of a whole stage: 1.0 is what one microbatch keeps on one stage, all chunks together
    memory_limit: float | None = None
    weight_share: float = WEIGHT_SHARE

    def __post_init__(self):
        resolve_types(self)
        sizes = ("stages", "microbatches", "virtual", "slices")
        product = " * ".join(f"{name}={getattr(self, name)}" for name in sizes)
        if math.prod(getattr(self, name) for name in sizes) > MOST_OPS:
            raise UserError(f"{product} is too large a table; use at most {MOST_OPS:,} in all")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise UserError(f"memory_limit={self.memory_limit} must be above 0")
        if not 0 <= self.weight_share <= 1:
            raise UserError(f"weight_share={self.weight_share} must lie in [0, 1]")
        if self.times.stage_times is not None:
            raise UserError("stage_times are to be simulated; make schedules for stage_factors")
        factors = self.times.stage_factors
        if factors is not None and len(factors) != self.stages:
            raise UserError(
                f"stage_factors has {len(factors)} values for stages={self.stages}; give one a "
                "stage"
            )


@dataclass(frozen=True, kw_only=True)
class Maker:
    """One way to make schedules, and what its authors state about it."""

    make: Callable[[Shape], Schedule]
    source: str
    # Whether it is made for one program in lock-step, like ours. One made for a program per stage
    # is for comparison: it runs and gives the same gradients, but takes longer than its authors'
    # price.
    lockstep: bool = True
    virtual: int | None = None  # the only number of chunks it knows; None: any
    sliced: bool = False  # may cut sequences into slices
    default_virtual: int = 1
    default_slices: int = 1
    # Closed forms; None if there are none that hold for the shape.
    bubble_over_ideal: Callable[[Shape], float | None] = lambda shape: None
    in_flight: Callable[[Shape], np.ndarray | None] = lambda shape: None  # per stage
