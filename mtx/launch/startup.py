"""The time from a launch, or another origin, to the first finished step: where it goes, and a
compilation cache that shortens it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mtx.errors import UserError
from mtx.paths import user_path

_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


class StartUp:
    """Seconds by part, each ending at its `mark`; the first starts at `origin`, `ago_s` before
    now."""

    def __init__(self, origin: str, *, ago_s: float = 0.0):
        self.parts: dict[str, float] = {}
        self._origin = origin
        self._last_s = time.monotonic() - ago_s
        self._open = True

    @classmethod
    def of_process(cls) -> StartUp:
        """Starts at this process's own beginning."""
        return cls("launch", ago_s=process_age_s())

    def mark(self, part: str) -> None:
        """Counts the time since the last mark as `part`."""
        if not self._open:
            return
        now_s = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def end(self, part: str) -> bool:
        """Makes the last mark; does nothing, and returns False, if that was made already."""
        self.mark(part)
        was_open, self._open = self._open, False
        return was_open

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    def describe(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"{self.total_s:.1f} s from {self._origin} to the first step: {parts}"


def process_age_s() -> float:
    """Seconds since this process began; 0 if the system does not say (only Linux does)."""
    try:
        # Field 22, after a name in parentheses that may hold anything: clock ticks since boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s, 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def use_compile_cache(directory: str) -> Path | None:
    """Makes XLA keep what it compiles in `directory`, for the next process that compiles the same;
    returns the directory. To be called before anything is compiled.

    "auto" is JAX_COMPILATION_CACHE_DIR, or else mtx/compiled in the user's cache; "none" turns it
    off. It must be the user's alone: whoever can write there can have their code run. UserError if
    it cannot be written. It is also off if several processes compute on CPUs: only process 0 finds
    what was kept, and gloo's first meeting (30 s) would end before the others have compiled.
    """
    import jax

    if directory == "none" or (jax.process_count() > 1 and jax.default_backend() == "cpu"):
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    if directory == "auto":
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        directory = os.environ.get(_CACHE_VARIABLE) or f"{home}/mtx/compiled"
    path = user_path(directory, "compile_cache")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(
            f"compile_cache={path} cannot be written ({error.strerror}); use another, or none"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path
