"""Numbers that go wrong while a run trains, and what is done about them.

Gradients that are not finite: the step itself leaves them out, and counts them (`mtx.step.step`).
Many in a row, and the run ends: its parameters give no others; it saves none of them meanwhile.
A loss that is far above what is usual: back to the newest checkpoint, and past the batches that led
there (as for PaLM, Chowdhery et al. 2022, section 5.1); where that checkpoint leads to another
jump, to the one before it. Usual is the median of a window of steps, where it was lowest: so bad
data never become usual, however long they last. Memory that changed by itself, or replicas that
came apart: back to the newest checkpoint, with the same batches; replicas are compared before every
save, so no checkpoint holds what came apart.
All within a limit.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mtx.config import GuardConfig
from mtx.errors import UserError
from mtx.sharding.axes import AXES, RARE
from mtx.train.log import LogKind

_LEAST_LOSSES = 10  # before a loss is called high
_LEAST_WINDOW = 50  # steps whose median may be called the lowest: that of few is low by chance
_REMEMBERED = 10_000  # losses beyond the window: so far a run can roll back and know what was usual
_MOST_NAMED = 4


class RollBack(Exception):
    """The state is not to be trained on: the run rolls back to its newest checkpoint."""

    def __init__(self, kind: str, what: str, *, step: int, skip: bool):
        """kind: "spike", "corrupt" or "apart"; what: for people; skip: whether the batches since
        that checkpoint are left out from now on."""
        super().__init__(what)
        self.kind, self.what, self.step, self.skip = kind, what, step, skip
        self.consumed = 0  # samples trained on by then: who keeps count of them says so
        self.saved: int | None = None  # the step of the newest checkpoint by then, likewise


class Guard:
    """Watches the numbers of a run, step by step, and remembers them when it rolls back."""

    def __init__(self, config: GuardConfig):
        self._config = config
        # Steps, losses, and what was usual by then.
        self._losses: deque[tuple[int, float, float]] = deque(
            maxlen=config.spike_window + _REMEMBERED
        )
        self._before = math.inf  # usual, before all of them
        self.skipped = 0  # steps in a row whose gradients were not finite, up to now

    def start_from(self, step: int, usual: float = math.inf) -> None:
        """The run goes on after `step`, by which so much was usual, as its checkpoint says."""
        while self._losses and self._losses[-1][0] > step:
            self._losses.pop()
        if not self._losses:
            self._before = usual

    @property
    def usual(self) -> float:
        """The lowest median of a window so far; infinite where there has been no window."""
        return self._losses[-1][2] if self._losses else self._before

    def check(self, step: int, loss: float, corrupt: np.ndarray, *, finite: bool = True) -> None:
        """Raises RollBack where the loss of `step` is a spike, or where `corrupt`, float
        [P, D, C, T] or [], has a device whose masters or moments changed between two steps;
        UserError where the gradients, `finite` or not, have not been for too long."""
        if np.any(corrupt):
            raise RollBack(
                "corrupt",
                f"masters or moments changed between two steps on {name_devices(corrupt > 0)}",
                step=step, skip=False,
            )  # fmt: skip
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= self._config.most_skipped:
            raise UserError(
                f"step {step}: the gradients of {self.skipped} steps in a row were not finite "
                "(guard.most_skipped); nothing was saved meanwhile; lower optimizer.lr, or begin "
                "with a larger optimizer.warmup_steps"
            )
        most, window = self._config.spike_nats, self._config.spike_window
        lowest = self.usual
        if most:
            wide = max(window, _LEAST_WINDOW)
            last = [before for _, before, _ in itertools.islice(reversed(self._losses), wide)]
            median = math.inf
            if len(last) >= min(_LEAST_LOSSES, window):
                median = statistics.median(last[:window])
            if len(last) == wide:
                lowest = min(lowest, statistics.median(last))
            if loss > min(median, lowest) + most:
                what = f"{median:.3f}, the median of the last {len(last[:window])} steps"
                if lowest < median:
                    what = f"{lowest:.3f}, the lowest median of {wide} steps so far"
                raise RollBack(
                    "spike", f"the loss is {loss:.3f}, more than {most} above {what}", step=step,
                    skip=True,
                )  # fmt: skip
        if np.isfinite(loss):
            self._losses.append((step, loss, lowest))

    def compare(self, step: int, differences: Sequence[str]) -> None:
        """Raises RollBack where devices that hold the same differ."""
        if differences:
            named = "; ".join(differences[:_MOST_NAMED])
            more = len(differences) - _MOST_NAMED
            raise RollBack(
                "apart", named + (f"; and {more} more" if more > 0 else ""), step=step, skip=False
            )


@dataclass(kw_only=True)
class Faults:
    """What went wrong in a run so far, for those who go on with it."""

    guard: Guard
    events: list[tuple[LogKind, str]] = field(default_factory=list)  # not yet told
    rollbacks: int = 0
    consumed: int = 0  # samples that are left behind, where the checkpoint knows of fewer
    _spiked_from: int | None = None  # the checkpoint that the last spike rolled back to

    def go_back(self, fault: RollBack, distrust: Callable[[int, str], str]) -> None:
        """Counts it. A checkpoint that has led to two spikes is given to `distrust`, with why; what
        that says is said with the fault."""
        what = f"step {fault.step:,}: {fault.what}"
        if fault.skip:
            if fault.saved is not None and fault.saved == self._spiked_from:
                what = f"{what}; {distrust(fault.saved, 'has led to two spikes')}".removesuffix(
                    "; "
                )
            self._spiked_from = fault.saved
            self.consumed = fault.consumed
        self.events.append(("rollback", what))
        self.rollbacks += 1

    def tell(self) -> list[tuple[LogKind, str]]:
        """The events, once."""
        told, self.events = self.events, []
        return told


def name_devices(where: np.ndarray) -> str:
    """The devices of a mask, an axis of the mesh a dim, by their places on it."""
    shown = [axis for axis, size in zip(AXES, where.shape) if size > 1 or axis not in RARE]
    places = [
        " ".join(f"{axis} {at}" for axis, at in zip(AXES, place) if axis in shown)
        for place in np.argwhere(where)
    ]
    more = len(places) - _MOST_NAMED
    return ", ".join(places[:_MOST_NAMED]) + (f" and {more} more devices" if more > 0 else "")


def refuse_to_roll_back(fault: RollBack, config: GuardConfig) -> UserError:
    """What a run ends with that has rolled back too often."""
    remedy = {
        "spike": "lower optimizer.lr or optimizer.clip, or raise guard.spike_nats",
        "corrupt": "take the machine of that device out, and run its memory test",
        "apart": "take the machine of the device that differs out, and run its memory test",
    }[fault.kind]
    return UserError(
        f"step {fault.step}: {fault.what}; the run has rolled back guard.rollbacks="
        f"{config.rollbacks} times already; {remedy}"
    )
