"""Which way of computing attention a run has; what each costs is read off its trace."""

from __future__ import annotations

from typing import Literal

from mtx.config import ModelConfig

Backend = Literal["cuda", "xla"]
Kernel = Literal["cudnn", "blocked", "sliced", "dropout"]


def kernel_of(model: ModelConfig, backend: Backend, slices: int = 1) -> Kernel:
    """The kernel that runs this model's attention on NVIDIA GPUs ("cuda") or elsewhere ("xla").

    dropout: on the probabilities; the full square of scores, in float32, all of it kept.
    cudnn: the fused kernel, where `cudnn_serves`.
    blocked: blocks of queries with the keys that they see; it keeps a number a row.
    sliced: where the schedule cuts sequences; each slice with the keys up to its end.
    """
    if model.attention_dropout:
        return "dropout"
    if slices > 1:
        return "sliced"
    return "cudnn" if backend == "cuda" and cudnn_serves(model) else "blocked"


def cudnn_serves(model: ModelConfig) -> bool:
    """Whether cuDNN's fused attention takes this model's heads, sequence and compute type, as
    `jax.nn.dot_product_attention` asks: the sequence is even for the sake of masks."""
    heads = model.head_size <= 128 and model.head_size % 8 == 0
    return heads and model.sequence % 2 == 0 and model.compute_dtype != "float32"


def query_blocks(sequence: int) -> int:
    """n, the blocks into which `mtx.models.attention.blocked_attention` cuts that many queries."""
    return 4 if sequence % 4 == 0 and sequence >= 64 else 1
