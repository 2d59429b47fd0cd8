"""Seconds of a matrix product from its sizes: a roofline with tiles, waves and depth.

A GPU computes the product in tiles, as many at a time as it has cores: what does not fill a tile,
and the cores that idle in the last wave, are lost. Each tile runs through all of k after a start
that does not depend on it, so that products with a small k are slow.
"""

from __future__ import annotations

from functools import lru_cache

from mtx.plan.calibration import Calibration
from mtx.plan.hardware import Hardware


@lru_cache(maxsize=65536)
def matmul_s(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    hardware: Hardware,
    calibration: Calibration,
    dtype: str,
    item_bytes: int = 2,
) -> float:
    """Seconds of `batch` products [m, k] x [k, n]: the longer of computing and of moving bytes."""
    flops = 2.0 * batch * m * n * k
    rate = hardware.peak_flops(dtype) * calibration.matmul_share
    rate *= filled(m, n, batch=batch, hardware=hardware) * k / (k + calibration.matmul_depth)
    moved = item_bytes * batch * (m * k + k * n + m * n)
    memory = hardware.memory_gb_s * 1e9 * calibration.memory_share
    return max(flops / rate, moved / memory) + calibration.kernel_s


def filled(m: int, n: int, *, batch: int, hardware: Hardware) -> float:
    """The part of the cores' time that goes into [m, n], with the better way to lay the tile."""
    rows, columns = hardware.tile
    return max(
        _filled(m, n, rows, columns, batch, hardware.cores),
        _filled(m, n, columns, rows, batch, hardware.cores),
    )


def _filled(m: int, n: int, rows: int, columns: int, batch: int, cores: int) -> float:
    tiles = -(-m // rows) * -(-n // columns) * batch
    waves = -(-tiles // cores)
    return m * n * batch / (waves * cores * rows * columns)
