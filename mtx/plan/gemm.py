"""Seconds of a matrix product from its sizes: a roofline with tiles, waves and depth.

A GPU computes the product in tiles, as many at a time as it has cores: the unfilled parts of tiles,
and the cores that idle in the last wave, are lost. Each tile runs through all of k after a start
that does not depend on k, so products with a small k are slow. If tiles leave half of the cores
idle, as with a router's few columns, k is divided among them: cuBLAS's split-K.
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
    parts = depth_parts(m, n, k, batch=batch, hardware=hardware)
    each = k / parts
    rate *= filled(m, n, batch=batch, hardware=hardware) * parts
    rate *= each / (each + calibration.matmul_depth)
    moved = item_bytes * batch * (m * k + k * n + m * n)
    memory = hardware.memory_gb_s * 1e9 * calibration.memory_share
    return max(flops / rate, moved / memory) + calibration.kernel_s


def filled(m: int, n: int, *, batch: int, hardware: Hardware) -> float:
    """The fraction of the cores' time that goes into [m, n], with the tile laid the better way."""
    rows, columns = hardware.tile
    return max(
        _filled(m, n, rows, columns, batch, hardware.cores),
        _filled(m, n, columns, rows, batch, hardware.cores),
    )


_DEPTH = 512  # the least k of a part


def depth_parts(m: int, n: int, k: int, *, batch: int, hardware: Hardware) -> float:
    """The number of cores that the depth of each tile is divided among."""
    rows, columns = hardware.tile
    ways = (rows, columns), (columns, rows)
    tiles = min(-(-m // r) * -(-n // c) * batch for r, c in ways)
    return max(1.0, min(hardware.cores // tiles, k / _DEPTH))


def _filled(m: int, n: int, rows: int, columns: int, batch: int, cores: int) -> float:
    tiles = -(-m // rows) * -(-n // columns) * batch
    waves = -(-tiles // cores)
    return m * n * batch / (waves * cores * rows * columns)
