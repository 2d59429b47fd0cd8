"""The seconds of a matrix product: tiles, waves, and never faster than the machine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.plan.calibration import calibration_of
from mtx.plan.gemm import depth_parts, filled, matmul_s
from mtx.plan.hardware import hardware

A100 = hardware("a100-80gb")
SC21 = calibration_of(A100)


def test_tiles_and_waves():
    a100 = A100  # 108 cores, tiles of 256 x 128
    assert filled(256 * 12, 128 * 9, batch=1, hardware=a100) == 1  # one full wave
    assert filled(256 * 12, 128 * 10, batch=1, hardware=a100) == pytest.approx(120 / 216)
    assert filled(255, 128, batch=108, hardware=a100) == pytest.approx(255 / 256)
    assert filled(128, 256, batch=108, hardware=a100) == 1  # the tile lies the other way


def test_idle_cores_share_the_depth_of_few_tiles():
    """A router's eight columns: 16 tiles on 132 cores, each in eight parts."""
    h100 = hardware("h100")
    machine = dict(hardware=h100, calibration=calibration_of(h100), dtype="float32", item_bytes=4)
    tiles = matmul_s(2048, 8, 512, **machine)
    assert matmul_s(2048, 8, 4096, **machine) == pytest.approx(tiles, rel=1e-9)
    assert depth_parts(2048, 8, 4096, batch=1, hardware=h100) == 8
    assert depth_parts(2048, 4096, 4096, batch=1, hardware=h100) == 1


def test_small_matmuls_are_bound_by_memory_and_launch():
    machine = dict(hardware=A100, calibration=SC21, dtype="float16")
    thin = matmul_s(2048, 2048, 16, batch=512, **machine)
    moved_bytes = 2 * 512 * (2 * 2048 * 16 + 2048**2)
    memory_s = moved_bytes / (2039e9 * SC21.memory_share)
    assert thin == pytest.approx(memory_s + SC21.kernel_s)
    assert SC21.kernel_s < matmul_s(1, 1, 1, **machine) < 1.5 * SC21.kernel_s  # plus a tile
    large = 2 * 8192**3 / matmul_s(8192, 8192, 8192, **machine)
    assert 0.7 * 312e12 < large < 312e12 * SC21.matmul_share


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 64))
def test_matmuls_never_beat_the_machine(m, n, k, batch):
    seconds = matmul_s(m, n, k, batch=batch, hardware=A100, calibration=SC21, dtype="float16")
    assert seconds >= 2 * m * n * k * batch / 312e12
    assert seconds >= 2 * batch * (m * k + k * n + m * n) / 2039e9
    assert seconds <= matmul_s(
        m, n, 2 * k, batch=batch, hardware=A100, calibration=SC21, dtype="float16"
    )
