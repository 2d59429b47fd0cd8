"""What a call of `run_training` has seen: its steps, its evaluations, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time of a run went."""

    compile: float  # of the step, of the evaluation and of what compares replicas
    train: float
    eval: float
    save: float


class Clock:
    """Seconds by part."""

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "train", "eval", "save"), 0.0)
        self._last_end_s = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[Callable[[], float]]:
        """Adds the time within to `part`; gives what it was, once it has ended."""
        start_s, before_s = time.perf_counter(), self.seconds[part]
        yield lambda: self.seconds[part] - before_s
        self.seconds[part] += time.perf_counter() - start_s

    def step(self, start_s: float) -> float:
        """The time of a step that has just ended: since its start, or since the end of the step
        before where that was later, as it is with a step in flight."""
        now_s = time.perf_counter()
        step_s = now_s - max(start_s, self._last_end_s)
        self._last_end_s = now_s
        self.seconds["train"] += step_s
        return step_s


@dataclass(kw_only=True)
class History:
    """Over all attempts: a run that goes back to a checkpoint forgets the steps that it takes
    again, and none of the time."""

    losses: dict[int, float] = field(default_factory=dict)  # by step
    skipped: set[int] = field(default_factory=set)  # steps whose gradients were not finite
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, held-out loss)
    clock: Clock = field(default_factory=Clock)

    def start_from(self, step: int) -> None:
        """An attempt begins after `step`."""
        self.losses = {earlier: loss for earlier, loss in self.losses.items() if earlier <= step}
        self.skipped = {earlier for earlier in self.skipped if earlier <= step}

    def add(self, step: int, loss: float, *, finite: bool) -> None:
        self.losses[step] = loss
        if not finite:
            self.skipped.add(step)

    @property
    def seconds(self) -> Seconds:
        return Seconds(**self.clock.seconds)
