"""How long a run's processes wait for a sign of life. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What counts as dead, and what as hung; in seconds."""

    heartbeat_s: float = 10.0  # without a sign of life, a process is lost
    hang_s: float = 300.0  # without a finished step, once there was one, the run hangs
    pause_s: float = 1800.0  # the same while it starts, compiles, evaluates or saves
    probe_every: int = 50  # steps between measurements of each process's own speed; 0: never

    def __post_init__(self):
        for name in ("heartbeat_s", "hang_s", "pause_s"):
            if not getattr(self, name) >= 1:
                raise UserError(f"watch.{name}={getattr(self, name)} must be at least 1")
        if self.probe_every < 0:
            raise UserError(f"watch.probe_every={self.probe_every} must be at least 0")
