"""How long a run's processes wait for a sign of life. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.fields import settle_types
from mtx.sizes import Interval, Patience


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What counts as dead, and what as hung; in seconds."""

    heartbeat_s: Patience = 10.0  # without a sign of life, a process is lost
    hang_s: Patience = 300.0  # without a finished step, once there was one, the run hangs
    pause_s: Patience = 1800.0  # the same while it starts, compiles, evaluates or saves
    probe_every: Interval = 50  # steps between measurements of each process's own speed; 0: never

    def __post_init__(self):
        settle_types(self, prefix="watch.")
