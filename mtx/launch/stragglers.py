"""Finds slow processes: each times what it does alone, since a step takes equally long for all.

Three measures, in seconds: the time of a step that it spends outside its devices (reading and
placing the batch); a matrix product on its first device, always the same; and how late a sleeping
thread wakes up, which reveals a process that is stopped or starved now and then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Probe(NamedTuple):
    """What one process measured about itself."""

    step: int  # finished steps
    host_s: float  # per step, outside its devices
    device_s: float  # the matrix product
    late_s: float  # of each second


class Record(NamedTuple):
    """The probes of all processes at one step, in their order; "processes" in `log.jsonl`."""

    step: int
    host_s: list[float]
    device_s: list[float]
    late_s: list[float]


def gather(probes: Mapping[int, tuple | None], processes: int, after: int) -> Record | None:
    """The record of all processes' newest probes, once each has one beyond the step `after`.

    If steps are shorter than heartbeats, the probes may be of different steps; the earliest counts.
    """
    known = [probe for _, probe in sorted(probes.items()) if probe]
    step = min((probe[0] for probe in known), default=0)
    if len(known) < processes or step <= after:
        return None
    _, host_s, device_s, late_s = map(list, zip(*known, strict=True))
    return Record(step, host_s, device_s, late_s)


@dataclass(kw_only=True)
class Stragglers:
    """Names a process that stands out twice in a row, and again when it no longer does."""

    step_s: float = 0.0  # a typical step; time outside the devices counts relative to it
    _suspects: frozenset[int] = frozenset()
    _named: frozenset[int] = frozenset()

    def see(self, record: Record, names: Mapping[int, str]) -> list[str]:
        """The lines to print about `record`, one for each process concerned."""
        reasons = slow_processes(record, step_s=self.step_s)
        twice = self._suspects & reasons.keys()
        lines = [f"slow: {names[p]}: {reasons[p]}" for p in sorted(twice - self._named)]
        better = sorted(self._named - reasons.keys())
        lines += [f"no longer slow: {names[p]}" for p in better]
        self._suspects = frozenset(reasons)
        self._named = (self._named | twice) & reasons.keys()
        return lines


def slow_processes(record: Record, *, step_s: float) -> dict[int, str]:
    """{process: reason} for each process that stands out against the median of the others."""
    reasons = {}
    for process in range(len(record.host_s)):
        host_s, device_s, late_s = (
            (values[process], statistics.median(values[:process] + values[process + 1 :]))
            for values in record[1:]
        )
        ratio = device_s[0] / max(device_s[1], 1e-9)
        found = {
            f"its matrix product takes {ratio:.1f} times as long as the others'": ratio > 1.5,
            f"it spends {host_s[0]:.3f} s of a step outside of its devices, the others "
            f"{host_s[1]:.3f} s": host_s[0] - host_s[1] > 0.2 * step_s,
            f"it stands still for {late_s[0]:.0%} of the time": late_s[0] - late_s[1] > 0.2,
        }
        if any(found.values()):
            reasons[process] = ", ".join(reason for reason, holds in found.items() if holds)
    return reasons


def make_device_probe() -> Callable[[], float]:
    """A function that times a matrix product on this process's first device: the median of five,
    in seconds. To be called while nothing else runs there."""
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]
    size = 256 if device.platform == "cpu" else 4096
    product = jax.jit(lambda x: x @ x)
    x = jax.device_put(jnp.full((size, size), 1 / size, jnp.float32), device)
    product(x).block_until_ready()

    def probe() -> float:
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            product(x).block_until_ready()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    return probe
