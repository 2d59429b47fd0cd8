"""Moments of a layer's backward pass that may need the most memory, as XLA:GPU orders it: read off
the live ranges of programs compiled for A100s and H100s (jax 0.12.0.1).

Legend: F the numbers in the widest activations of the MLP
"""

from __future__ import annotations

from mtx.costs.cost import Cost, Matmul, total

_SUM_BYTES = 4  # per element of the gradients of keys and values


def of_mlp(cost: Cost, rows: int, again_bytes: int, item: int) -> int:
    """Bytes held while the gradients of the widest activations are made: these gradients, and what
    must be recomputed for them; the layer's input, its gradient, and attention's output.

    A gated MLP is up to 2F wide, and for a moment takes the product of both halves.
    """
    up, down = _widest(cost, rows, item)
    gradients = up + down * (2 if up > down else 1)
    return min(again_bytes, up + down) + gradients + 3 * total(cost.stream, rows)


def of_attention(cost: Cost, rows: int, context: int, item: int) -> int:
    """Bytes held in the backward pass of attention over `context`, with a ring or with all keys
    gathered; 0 without either.

    Queries, output and its gradient in chunks, once more those that a step is given, with a
    gradient of queries, and the sum of these in float32. The keys and values that a step is given
    or makes, and the gradients of this device's own pairs. A ring has two sets of keys and values
    under way and two of their sums, and makes its last step's queries before it begins. Without a
    ring, the keys and values of all devices are gathered, then all gradients in float32; and XLA
    leaves the MLP's weight gradients, with what they need, for later.
    """
    sent = [
        each for each in cost.collectives
        if each.axes == ("context",) and each.during == "F"
        and each.kind in ("all_gather", "ppermute")
    ]  # fmt: skip
    if not sent:
        return 0
    wide, gathers = _SUM_BYTES / item, sent[0].kind == "all_gather"
    products = (each for each in cost.matmuls if each.during == "F" and not each.weight)
    queries = 2 * _bytes(next(products), rows, item, "k")  # of both chunks
    of_all = sum(sorted(each.bytes.at(rows) for each in sent)[-2:])
    keys = of_all / context if gathers else of_all
    held = total(cost.stream, rows) + (5 + wide) * queries + 3 * keys
    if gathers:
        held += (context + (context - 1) * wide) * keys
        return round(held + sum(_widest(cost, rows, item)) + 2 * total(cost.stream, rows))
    return round(held + 1.5 * queries + (2 + 2 * wide) * keys)


def _widest(cost: Cost, rows: int, item: int) -> tuple[int, int]:
    """Bytes of the largest output of a matrix, and of the largest input."""
    weights = [each for each in cost.matmuls if each.during == "F" and each.weight]
    up, down = (max((_bytes(w, rows, item, dim) for w in weights), default=0) for dim in "nk")
    return up, down


def _bytes(matmul: Matmul, rows: int, item: int, dim: str) -> int:
    """Bytes of a product's output ("n") or of its left operand ("k")."""
    batch, m, n, k = matmul.shape(rows)
    return batch * m * (n if dim == "n" else k) * item
