"""How attention, activations and head are computed, for code that only needs to know: no JAX."""

from __future__ import annotations

from typing import Literal

MOST_LOGITS_BYTES = 1 << 30  # of the float32 logits that a head computes at once on one device
_TILE = 128  # rows of a matmul
AttentionKernel = Literal["blocked", "cudnn", "described"]
CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0  # of gpt-oss's gated activation (`mtx.layers.mlp`)


def query_blocks(sequence: int) -> int:
    """n, how many blocks `mtx.layers.attend.blocked_attention` cuts that many queries into."""
    return 4 if sequence % 4 == 0 and sequence >= 64 else 1


def cudnn_takes(*, head_size: int, value_size: int, sequence: int, dtype: str) -> bool:
    """Whether cuDNN's fused attention supports such heads, as JAX's functions for it check: the
    sequence must be even because of masks. Values of another size than queries and keys are
    supported on Hopper and later (from cuDNN 9.10 on), with queries and keys of up to 256."""
    most = 128 if head_size == value_size else 256
    heads = head_size <= most and head_size % 8 == 0 and value_size <= 128 and value_size % 8 == 0
    return heads and sequence % 2 == 0 and dtype != "float32"


def head_positions(rows: int, positions: int, vocab: int) -> int:
    """How many positions a head takes at once, for that many rows and that part of the vocabulary.

    All, up to MOST_LOGITS_BYTES of logits. That is 2,048 of one row with Llama 3's 128,256 tokens
    on one device. Each part adds to the table's gradient, 8 bytes read and written for 6 FLOPs per
    position; with fewer positions this would cost more than a tenth of the head's time.
    """
    most = max(1, MOST_LOGITS_BYTES // (4 * rows * vocab))
    if most >= positions:
        return positions
    unit = _TILE if most >= _TILE else 1
    most -= most % unit
    even = -(-positions // -(-positions // most))
    return min(most, -(-even // unit) * unit)
