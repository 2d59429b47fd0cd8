"""The table of accelerators, and finding a device in it."""

import pytest

from mtx.errors import UserError
from mtx.plan.hardware import HARDWARE, find_hardware, hardware


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5 lite", "tpu-v5e"),
        ("tpu v6 LITE", "tpu-v6e"),
    ],
)
def test_devices_are_found_by_what_jax_calls_them(device_kind, name):
    assert find_hardware(device_kind) is hardware(name)


@pytest.mark.parametrize("device_kind", ["cpu", "", "NVIDIA H100 PCIe", "NVIDIA A100 80GB PCIe"])
def test_other_devices_are_not_guessed(device_kind):
    assert find_hardware(device_kind) is None


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'a100-80gb'"):
        hardware("a100-80")


def test_the_papers_machine():
    a100 = hardware("a100-80gb")
    assert a100.peak_tflops["float16"] == 312
    assert (a100.memory_gib, a100.node_devices) == (80, 8)
    assert a100.network_gb_s * 8 == 200  # HDR InfiniBand, Gb/s


@pytest.mark.parametrize("row", HARDWARE.values(), ids=lambda row: row.name)
def test_rows_are_consistent(row):
    assert HARDWARE[row.name] is row
    assert row.peak_tflops["bfloat16"] > 2 * row.peak_tflops.get("float32", 0)
    assert row.memory_bytes == row.memory_gib * 2**30
    assert row.memory_gb_s > row.link_gb_s > row.network_gb_s > 0
    assert row.backend == ("cuda" if "NVIDIA" in row.device_kinds[0] else "xla")
    assert row.source


def test_a_device_kind_names_one_row():
    kinds = [kind for row in HARDWARE.values() for kind in row.device_kinds]
    assert len(set(kinds)) == len(kinds)
