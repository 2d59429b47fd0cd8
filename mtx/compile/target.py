"""What XLA needs to know about an absent accelerator to compile for it.

GPUs: the numbers of a GpuTargetConfigProto, as published with XLA itself
(github.com/openxla/xla, xla/backends/gpu/target_config/specs); the H200's memory, its rate and its
L2 cache are as XLA of jax 0.11.2 read them from a device. Leaving out `core_count`,
`clock_rate_ghz` or `device_memory_size` changes the compiled memory by GiBs; without
`runtime_version` cuBLAS is taken to be too old for float8, which is then computed in 16 bits. TPUs:
libtpu knows them and needs only the shape of the slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One NVIDIA GPU as XLA's cost models see it."""

    description: str
    capability: int  # major compute capability
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int  # with opt-in

    def text(self) -> str:
        """The GpuTargetConfigProto."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory_per_block}
              shared_memory_per_core: {self.shared_memory_per_core}
              core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bytes_per_s} l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
              cuda_compute_capability {{ major: {self.capability} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            runtime_version {{ major: 12 minor: 8 }} dnn_version_info {{ major: 9 minor: 8 }}
            device_description_str: "{self.description}"
        """


_AMPERE = partial(
    GpuTarget, capability=8, cores=108, fpus_per_core=64, clock_ghz=1.41, l2_bytes=41943040,
    shared_memory_per_core=167936, shared_memory_per_block=166912,
)  # fmt: skip
_HOPPER = partial(
    GpuTarget, capability=9, cores=132, fpus_per_core=128, clock_ghz=1.98, l2_bytes=52428800,
    shared_memory_per_core=233472, shared_memory_per_block=232448,
)  # fmt: skip
_BLACKWELL = partial(
    GpuTarget, capability=10, fpus_per_core=128, shared_memory_per_core=233472,
    shared_memory_per_block=232448,
)  # fmt: skip

GPU_TARGETS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        "a100-40gb": _AMPERE(
            description="NVIDIA A100-SXM4-40GB", memory_bytes=42331013120,
            memory_bytes_per_s=1555200000000,
        ),
        "a100-80gb": _AMPERE(
            description="NVIDIA A100-SXM4-80GB", memory_bytes=85100068864,
            memory_bytes_per_s=2039040000000,
        ),
        "h100": _HOPPER(
            description="NVIDIA H100 80GB HBM3", memory_bytes=84942979072,
            memory_bytes_per_s=3352320000000,
        ),
        "h800": _HOPPER(
            description="NVIDIA H800", memory_bytes=84942979072,
            memory_bytes_per_s=3352320000000,
        ),
        "h200": _HOPPER(
            description="NVIDIA H200 141GB HBM3e", memory_bytes=150109880320,
            memory_bytes_per_s=4814304000000, l2_bytes=62914560,
        ),
        "b200": _BLACKWELL(
            description="NVIDIA B200", cores=148, clock_ghz=1.965, memory_bytes=191514411008,
            memory_bytes_per_s=7672320000000, l2_bytes=132644864,
        ),
        "gb200": _BLACKWELL(
            description="NVIDIA GB200", cores=152, clock_ghz=2.062, memory_bytes=197897748480,
            memory_bytes_per_s=7928064000000, l2_bytes=135528448,
        ),
    }
)  # fmt: skip


def gpu_topology(devices: int, node_devices: int) -> str:
    """The cluster as XLA reads it: partitions x hosts x GPUs per host."""
    per_host = math.gcd(devices, node_devices)
    return f"1x{devices // per_host}x{per_host}"


@dataclass(frozen=True, kw_only=True)
class TpuTarget:
    """One generation of TPUs, and the slices that it comes in."""

    generation: str  # as libtpu names it
    dims: int  # of the torus
    least: int  # devices of the smallest slice
    most: int


TPU_TARGETS: Mapping[str, TpuTarget] = MappingProxyType(
    {
        "tpu-v5p": TpuTarget(generation="v5p", dims=3, least=4, most=8960),
        "tpu-v5e": TpuTarget(generation="v5e", dims=2, least=4, most=256),
        "tpu-v6e": TpuTarget(generation="v6e", dims=2, least=4, most=256),
    }
)


def tpu_topology(target: str, devices: int) -> str:
    """The slice of that many devices, as near to a cube or square as they allow: "v5p:8x16x24".

    UserError if there is none.
    """
    row = TPU_TARGETS[target]
    shapes = [shape for shape in _factor(devices, row.dims) if _is_slice(shape, row)]
    if not shapes:
        raise UserError(
            f"{target} has no slice of {devices} devices: use {_nearest_slices(devices, row)}"
        )
    shape = min(shapes, key=lambda shape: shape[-1] / shape[0])
    ordered = sorted(shape, key=lambda side: (side == 1, side))  # libtpu takes 2x2x1, not 1x2x2
    return f"{row.generation}:" + "x".join(map(str, ordered))


def _factor(number: int, dims: int, least: int = 1) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of `dims` factors, in ascending order."""
    if dims == 1:
        return [(number,)] if number >= least else []
    return [
        (first, *rest)
        for first in range(least, int(round(number ** (1 / dims))) + 2)
        if number % first == 0
        for rest in _factor(number // first, dims - 1, first)
    ]


def _is_slice(shape: tuple[int, ...], row: TpuTarget) -> bool:
    """Whether there is a slice of this shape. Two dims: powers of two, at most twice as long as
    wide. Three: parts of a cube of 4, and from 64 devices on whole cubes."""
    devices = math.prod(shape)
    if not row.least <= devices <= row.most:
        return False
    if row.dims == 2:
        return all(side in (2, 4, 8, 16) for side in shape) and shape[-1] <= 2 * shape[0]
    if devices >= 64:
        return all(side % 4 == 0 for side in shape)
    return all(side in (1, 2, 4) for side in shape) and sum(side % 2 == 0 for side in shape) >= 2


def _nearest_slices(devices: int, row: TpuTarget) -> str:
    def exists(count: int) -> bool:
        return any(_is_slice(shape, row) for shape in _factor(count, row.dims))

    below = next((n for n in range(min(devices, row.most + 1) - 1, 0, -1) if exists(n)), None)
    above = next((n for n in range(devices + 1, row.most + 1) if exists(n)), None)
    return " or ".join(str(count) for count in (below, above) if count)
