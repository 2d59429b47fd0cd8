"""Which kernel computes a run's attention; what each kernel costs is read off its trace."""

from __future__ import annotations

from typing import Literal

from mtx.config import ModelConfig
from mtx.layers.kernels import cudnn_takes

Backend = Literal["cuda", "xla"]
Kernel = Literal["cudnn", "blocked", "sliced"]


def kernel_of(model: ModelConfig, backend: Backend, slices: int = 1) -> Kernel:
    """The kernel that runs this model's attention on NVIDIA GPUs ("cuda") or elsewhere ("xla").

    cudnn: the fused kernel, if `cudnn_takes` such heads.
    blocked: blocks of queries with the keys that they see; it keeps one number per row. Only this
    one has dropout on the probabilities.
    sliced: if the schedule cuts sequences; each slice with the keys up to its end.
    """
    if slices > 1:
        return "sliced"
    fused = backend == "cuda" and not model.attention_dropout and cudnn_takes(
        head_size=model.head_size, value_size=model.value_size, sequence=model.sequence,
        dtype=model.compute_dtype,
    )  # fmt: skip
    return "cudnn" if fused else "blocked"
