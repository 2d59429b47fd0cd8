"""XLA's options for the training step: the only place that sets any.

Each has its reason and the first JAX whose XLA accepts it. An option that is named in XLA_FLAGS is
left as it is set there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Option:
    name: str
    value: bool | int | str
    since: tuple[int, int]  # of JAX
    reason: str


# From this version the matmul itself reads a weight at an offset into its stack and adds its
# gradient there, given float32 gradients in the weight's order, constant offsets of chunks, and
# the options below.
IN_PLACE = (0, 11)
GPU = (
    Option(
        "xla_gpu_enable_dynamic_slice_fusion", True, IN_PLACE,
        "matmuls read weights and add gradients at an offset; XLA of jax 0.10 fails to compile it",
    ),
    Option(
        "xla_gpu_enable_triton_gemm", False, IN_PLACE,
        "the autotuner may take a Triton kernel, which wants a copy of the weight",
    ),
    Option(
        "xla_gpu_dot_merger_threshold_mb", 0, (0, 10),
        "two gradients of which the same is an input would be one matmul, which adds to neither",
    ),
    Option(
        "xla_disable_hlo_passes", "collective-permute-motion", (0, 10),
        "the pass moves the send of a tick's F to the start of the next tick, where it is needed",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit", 8, (0, 10),
        "sends may be in flight while the layers beside them gather and scatter, several at a time",
    ),
    Option(
        "xla_gpu_collective_permute_combine_threshold_bytes", 0, (0, 10),
        "between two stages x and dx go the same way round: sent together, both wait for the later",
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes", 2**20, (0, 10),
        "sums over stages that a tick needs at different times would wait for each other; small "
        "ones, of losses and of norms, do go together",
    ),
)  # fmt: skip

OFFLOAD = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler", True, (0, 10),
        "else the copies to the host's memory and back stand one after the other, beside nothing",
    ),
    Option(
        "xla_gpu_experimental_parallel_async_compute_limit", 64, (0, 12),
        "copies of all arrays of a layer may be under way together",
    ),
    Option(
        "xla_gpu_memory_limit_slop_factor", 400, (0, 10),
        "in percent: XLA takes the host's rings for device memory, and would recompute for them",
    ),
)  # fmt: skip


def version() -> tuple[int, ...]:
    """The version of JAX, as (0, 12)."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2])


def options(platform: str, *, offload: bool = False) -> dict[str, bool | int | str]:
    """The options of a step compiled for platform "gpu", none for others. offload: residuals are
    moved to the host."""
    given = {flag.partition("=")[0].lstrip("-") for flag in os.environ.get("XLA_FLAGS", "").split()}
    wanted = GPU + (OFFLOAD if offload else ())
    return {
        option.name: option.value
        for option in (wanted if platform == "gpu" else ())
        if version() >= option.since and option.name not in given
    }
