"""Accelerators as data: peak rates, memory and links, from their vendors' data sheets.

Peaks are dense (without structured sparsity). Links count one direction. Memory is the vendor's
number, read as GiB; the driver keeps some of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mtx.errors import unknown_name
from mtx.plan.attention import Backend


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, in the node and the network that it is usually sold with."""

    name: str
    device_kinds: tuple[str, ...]  # as `jax.Device.device_kind` says them
    peak_tflops: Mapping[str, float]  # by type of the operands; absent where there is no such unit
    memory_gib: float
    memory_gb_s: float
    node_devices: int  # joined by the fast link: a node, a rack, or a TPU pod
    link_gb_s: float  # one device to the others of its node
    network_gb_s: float  # one device's share of the node's network
    source: str

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    @property
    def backend(self) -> Backend:
        """Which attention kernels it has; see `mtx.plan.attention`."""
        return "cuda" if self.device_kinds[0].startswith("NVIDIA") else "xla"


def _row(
    name, device_kinds, *, b16, fp16=True, fp32=None, fp8=None, memory, node, source
) -> tuple[str, Hardware]:
    peaks = {"bfloat16": b16, "float16": b16 if fp16 else None, "float32": fp32, "float8": fp8}
    memory_gib, memory_gb_s = memory
    node_devices, link_gb_s, network_gb_s = node
    return name, Hardware(
        name=name,
        device_kinds=device_kinds,
        peak_tflops=MappingProxyType({dtype: peak for dtype, peak in peaks.items() if peak}),
        memory_gib=memory_gib,
        memory_gb_s=memory_gb_s,
        node_devices=node_devices,
        link_gb_s=link_gb_s,
        network_gb_s=network_gb_s,
        source=source,
    )


_HOPPER = dict(b16=989.4, fp32=66.9, fp8=1978.9)
_HOPPER_NODE = (8, 450, 50)  # NVLink 4; 400 Gb/s NDR InfiniBand a GPU
_AMPERE = dict(b16=312, fp32=19.5)
_AMPERE_NODE = (8, 300, 25)  # NVLink 3; 200 Gb/s HDR InfiniBand a GPU, as in SC'21

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    dict(
        (
            _row(
                "a100-40gb", ("NVIDIA A100-SXM4-40GB",), **_AMPERE, memory=(40, 1555),
                node=_AMPERE_NODE, source="NVIDIA A100 data sheet, SXM",
            ),
            _row(
                "a100-80gb", ("NVIDIA A100-SXM4-80GB",), **_AMPERE, memory=(80, 2039),
                node=_AMPERE_NODE, source="NVIDIA A100 data sheet, SXM",
            ),
            _row(
                "h100", ("NVIDIA H100 80GB HBM3",), **_HOPPER, memory=(80, 3352),
                node=_HOPPER_NODE, source="NVIDIA H100 data sheet, SXM",
            ),
            _row(
                "h200", ("NVIDIA H200",), **_HOPPER, memory=(141, 4800), node=_HOPPER_NODE,
                source="NVIDIA H200 data sheet, SXM",
            ),
            _row(
                "b200", ("NVIDIA B200",), b16=2250, fp32=80, fp8=4500, memory=(180, 8000),
                node=(8, 900, 50), source="NVIDIA Blackwell technical brief, HGX B200",
            ),
            _row(
                "gb200", ("NVIDIA GB200",), b16=2500, fp32=80, fp8=5000, memory=(186, 8000),
                node=(72, 900, 50), source="NVIDIA GB200 NVL72 data sheet, per GPU",
            ),
            _row(
                "mi300x", ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), b16=1307.4,
                fp32=163.4, fp8=2614.9, memory=(192, 5300), node=(8, 448, 50),
                source="AMD Instinct MI300X data sheet; 7 Infinity Fabric links of 64 GB/s",
            ),
            _row(
                "tpu-v5p", ("TPU v5p", "TPU v5"), b16=459, fp16=False, memory=(95, 2765),
                node=(8960, 600, 6.25), source="Google Cloud TPU v5p documentation",
            ),
            _row(
                "tpu-v5e", ("TPU v5e", "TPU v5 lite"), b16=197, fp16=False, memory=(16, 819),
                node=(256, 200, 3.125), source="Google Cloud TPU v5e documentation",
            ),
            _row(
                "tpu-v6e", ("TPU v6e", "TPU v6 lite"), b16=918, fp16=False, memory=(32, 1640),
                node=(256, 400, 12.5), source="Google Cloud TPU v6e documentation",
            ),
        )
    )
)  # fmt: skip


def hardware(name: str) -> Hardware:
    """The row of that name; UserError with the nearest name where there is none."""
    if name not in HARDWARE:
        raise unknown_name("hardware", name, HARDWARE)
    return HARDWARE[name]


def find_hardware(device_kind: str) -> Hardware | None:
    """The row whose devices call themselves so (`jax.devices()[0].device_kind`), or None.

    Only exact names count: a PCIe card is not the SXM module of the same name.
    """
    wanted = device_kind.strip().lower()
    for row in HARDWARE.values():
        if wanted in (kind.lower() for kind in row.device_kinds):
            return row
    return None
