"""The ways in which our models compute attention, as the planner sees them.

Which one runs follows from the model and the backend (`mtx.layers.attend.attention`); each
computes another part of the square of scores, and keeps other things for its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtx.config import ModelConfig
from mtx.layers.kernels import cudnn_takes, query_blocks

Backend = Literal["cuda", "xla"]
Kernel = Literal["cudnn", "blocked", "sliced", "dropout"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One kernel. A matmul here is one of attention's own: q k^T, or p v, or one of a gradient."""

    name: Kernel
    square: float  # the part of the s x s scores that it computes
    at_once: float  # and of that square, what stands in memory at once; fused kernels have none
    backward_matmuls: int  # 4, and 5 where it computes the scores again
    selective_matmuls: int  # what recompute="selective" makes it compute again before that
    full_matmuls: int  # and what recompute="full" does
    row_bytes: int  # kept for each query and head
    mask_bytes: int  # kept for each score, where nothing is recomputed
    softmax_bytes: int  # the same, but the probabilities, which are of the compute type
    output_survives: bool  # recompute="selective" keeps its output
    pair_bytes: int = 0  # kept for each two positions of a row, as a mask that all heads share


def attention_of(model: ModelConfig, backend: Backend, slices: int = 1) -> Attention:
    """The kernel that runs this model's attention on NVIDIA GPUs ("cuda") or elsewhere ("xla").

    dropout: on its probabilities. The full square, in float32, all of it kept.
    cudnn: the fused kernel, where `cudnn_serves`. The full square is counted; its
    causal mask lets it skip nearly half of that. What hides padding it takes as a bias, and keeps.
    blocked: n blocks of queries with the keys that they see, (n+1)/2n of the square where causal.
    It keeps a number a row; computed again, its q k^T is the one that its gradient needs, and XLA
    sees that.
    sliced: where the schedule cuts sequences; each slice with the keys up to its end.
    """
    if model.attention_dropout:
        return Attention(
            name="dropout", square=1.0, at_once=1.0, backward_matmuls=4, selective_matmuls=2,
            full_matmuls=2, row_bytes=8, mask_bytes=2, softmax_bytes=4, output_survives=False,
        )  # fmt: skip
    if slices > 1:
        return Attention(
            name="sliced", square=(slices + 1) / (2 * slices), at_once=1.0, backward_matmuls=5,
            selective_matmuls=0, full_matmuls=2, row_bytes=4, mask_bytes=0, softmax_bytes=0,
            output_survives=True,
        )  # fmt: skip
    if backend == "cuda" and cudnn_serves(model):
        return Attention(
            name="cudnn", square=1.0, at_once=0.0, backward_matmuls=5, selective_matmuls=2,
            full_matmuls=2, row_bytes=4, mask_bytes=0, softmax_bytes=0, output_survives=False,
            pair_bytes=0 if model.causal else 2,
        )  # fmt: skip
    blocks = query_blocks(model.sequence)
    return Attention(
        name="blocked", square=(blocks + 1) / (2 * blocks) if model.causal else 1.0,
        at_once=1 / blocks, backward_matmuls=5, selective_matmuls=0, full_matmuls=1, row_bytes=4,
        mask_bytes=0, softmax_bytes=0, output_survives=True,
    )  # fmt: skip


def cudnn_serves(model: ModelConfig) -> bool:
    """Whether cuDNN's fused attention takes this model's heads, sequence and compute type."""
    return cudnn_takes(
        head_size=model.head_size, sequence=model.sequence, dtype=model.compute_dtype
    )
