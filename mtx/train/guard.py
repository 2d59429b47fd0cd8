"""Numbers that go wrong while a run trains, and what is done about them.

Gradients that are not finite: the step itself skips its update and counts it (`mtx.step.step`).
After many such steps in a row the run ends, because its parameters give no other gradients; nothing
is saved meanwhile. A loss far above the usual: the run rolls back to the newest checkpoint and
skips the batches that led there (as for PaLM, Chowdhery et al. 2022, section 5.1); if that
checkpoint leads to another spike, it rolls back to the one before it. The usual loss is the lowest
median of a window of steps so far, so bad data never become usual, however long they last. Memory
that changed by itself, or replicas that came apart: the run rolls back to the newest checkpoint and
takes the same batches; replicas are compared before every save, so no checkpoint holds replicas
that differ. A run rolls back only a limited number of times.
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

_LEAST_LOSSES = 10  # needed before a loss is called high
_LEAST_WINDOW = 50  # steps whose median may be the lowest: that of fewer is low by chance
_REMEMBERED = 10_000  # losses beyond the window: how far a rollback still knows the usual loss
_MOST_NAMED = 4


class RollBack(Exception):
    """The state must not be trained further: the run rolls back to its newest checkpoint."""

    def __init__(self, kind: str, what: str, *, step: int, skip: bool):
        """kind: "spike", "corrupt" or "apart"; what: a message for people; skip: whether the
        batches since that checkpoint are left out from now on."""
        super().__init__(what)
        self.kind, self.what, self.step, self.skip = kind, what, step, skip
        self.consumed = 0  # samples trained on by then; set by the caller, which counts them
        self.saved: int | None = None  # the step of the newest checkpoint by then; set likewise


class Guard:
    """Watches the numbers of a run, step by step, and remembers them across rollbacks."""

    def __init__(self, config: GuardConfig):
        self._config = config
        # (step, loss, the usual loss by then)
        self._losses: deque[tuple[int, float, float]] = deque(
            maxlen=config.spike_window + _REMEMBERED
        )
        self._before = math.inf  # the usual loss before all of these
        self.skipped = 0  # steps in a row whose gradients were not finite, up to now

    def start_from(self, step: int, usual: float = math.inf) -> None:
        """The run continues after `step`; `usual` is the usual loss in its checkpoint."""
        while self._losses and self._losses[-1][0] > step:
            self._losses.pop()
        if not self._losses:
            self._before = usual

    @property
    def usual(self) -> float:
        """The lowest median of a window so far; infinite before the first full window."""
        return self._losses[-1][2] if self._losses else self._before

    def check(self, step: int, loss: float, corrupt: np.ndarray, *, finite: bool = True) -> None:
        """Raises RollBack if the loss of `step` is a spike, or if `corrupt`, float [P, D, C, T] or
        [], shows a device whose masters or moments changed between two steps; UserError if the
        gradients have not been `finite` for too many steps in a row."""
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
        """Raises RollBack if devices that must hold the same values differ."""
        if differences:
            named = "; ".join(differences[:_MOST_NAMED])
            more = len(differences) - _MOST_NAMED
            raise RollBack(
                "apart", named + (f"; and {more} more" if more > 0 else ""), step=step, skip=False
            )


@dataclass(kw_only=True)
class Faults:
    """What went wrong in a run so far, for the attempts that follow."""

    guard: Guard
    events: list[tuple[LogKind, str]] = field(default_factory=list)  # not yet reported
    rollbacks: int = 0
    consumed: int = 0  # samples to leave behind, if the checkpoint counts fewer
    _spiked_from: int | None = None  # the checkpoint that the last spike rolled back to

    def go_back(self, fault: RollBack, distrust: Callable[[int, str], str]) -> None:
        """Records a fault. A checkpoint that has led to two spikes is passed to `distrust` with the
        reason; what it returns is added to the fault's message."""
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
        """The events not yet reported; each is returned once."""
        told, self.events = self.events, []
        return told


def name_devices(where: np.ndarray) -> str:
    """Names the devices of a mask (one dim for each axis of the mesh) by their places on the
    mesh."""
    shown = [axis for axis, size in zip(AXES, where.shape) if size > 1 or axis not in RARE]
    places = [
        " ".join(f"{axis} {at}" for axis, at in zip(AXES, place) if axis in shown)
        for place in np.argwhere(where)
    ]
    more = len(places) - _MOST_NAMED
    return ", ".join(places[:_MOST_NAMED]) + (f" and {more} more devices" if more > 0 else "")


def refuse_to_roll_back(fault: RollBack, config: GuardConfig) -> UserError:
    """The error that ends a run that has rolled back too often."""
    remedy = {
        "spike": "lower optimizer.lr or optimizer.clip, or raise guard.spike_nats",
        "corrupt": "take the machine of that device out, and run its memory test",
        "apart": "take the machine of the device that differs out, and run its memory test",
    }[fault.kind]
    return UserError(
        f"step {fault.step}: {fault.what}; the run has rolled back guard.rollbacks="
        f"{config.rollbacks} times already; {remedy}"
    )
