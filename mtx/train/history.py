"""What a call of `run_training` has seen: its steps, its evaluations, and where the time went."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_STEPS = 10_000  # kept, so that a run of weeks takes no more memory than one of hours


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time of a run went."""

    compile: float  # of the step, the evaluation and the comparison of replicas
    train: float
    eval: float
    save: float


class Clock:
    """Seconds by part."""

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(("compile", "train", "eval", "save"), 0.0)
        self._last_end_s = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[Callable[[], float]]:
        """Adds the block's time to `part`; yields a function that returns it once the block has
        ended."""
        start_s, before_s = time.perf_counter(), self.seconds[part]
        yield lambda: self.seconds[part] - before_s
        self.seconds[part] += time.perf_counter() - start_s

    def step(self, start_s: float) -> float:
        """The time of a step that has just ended: since its start, or since the end of the
        previous step if that was later, as it is with a step in flight."""
        now_s = time.perf_counter()
        step_s = now_s - max(start_s, self._last_end_s)
        self._last_end_s = now_s
        self.seconds["train"] += step_s
        return step_s


@dataclass(kw_only=True)
class History:
    """The history of all attempts. A run that rolls back to a checkpoint forgets the steps that it
    takes again, but none of the time. Only the newest steps are remembered; log.jsonl has all."""

    steps: deque[tuple[int, float, bool]] = field(
        default_factory=lambda: deque(maxlen=MOST_STEPS)
    )  # step, loss, whether its gradients were finite
    skipped: int = 0  # steps whose gradients were not finite
    first_evaluation: tuple[int, float] = (-1, math.nan)  # step, held-out loss
    last_evaluation: tuple[int, float] = (-1, math.nan)
    clock: Clock = field(default_factory=Clock)

    def start_from(self, step: int) -> None:
        """An attempt begins after `step`."""
        while self.steps and self.steps[-1][0] > step:
            _, _, finite = self.steps.pop()
            self.skipped -= not finite

    def add(self, step: int, loss: float, *, finite: bool) -> None:
        self.steps.append((step, loss, finite))
        self.skipped += not finite

    def evaluated(self, step: int, loss: float) -> None:
        self.last_evaluation = step, loss
        if self.first_evaluation[0] < 0:
            self.first_evaluation = step, loss

    @property
    def losses(self) -> list[float]:
        """The losses of the steps that are remembered, in order."""
        return [loss for _, loss, _ in self.steps]

    @property
    def seconds(self) -> Seconds:
        return Seconds(**self.clock.seconds)
