"""Which way attention is computed, for who only wants to know: no JAX."""

from __future__ import annotations

from typing import Literal

AttentionKernel = Literal["blocked", "cudnn", "described"]


def query_blocks(sequence: int) -> int:
    """n, the blocks into which `mtx.layers.attend.blocked_attention` cuts that many queries."""
    return 4 if sequence % 4 == 0 and sequence >= 64 else 1


def cudnn_takes(*, head_size: int, sequence: int, dtype: str) -> bool:
    """Whether cuDNN's fused attention takes such heads, as `jax.nn.dot_product_attention` asks:
    the sequence is even for the sake of masks."""
    heads = head_size <= 128 and head_size % 8 == 0
    return heads and sequence % 2 == 0 and dtype != "float32"
