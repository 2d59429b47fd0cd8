"""A profile of some steps, for TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax


class ProfileWindow:
    """Traces the steps `first` to `last` into a directory; (0, 0) traces none."""

    def __init__(self, steps: tuple[int, int], directory: Path):
        self._first, self._last = steps
        self._directory = directory
        self._running = False

    def before(self, step: int) -> None:
        """To be called before each step."""
        if step == self._first and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def ends(self, step: int) -> bool:
        """Whether `step` is the last traced step, whose results the caller then waits for."""
        return self._running and step >= self._last

    def stop(self) -> Path:
        """Writes the trace, if one is running; returns the directory."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
        return self._directory
