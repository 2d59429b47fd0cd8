"""Seconds of a layer's products of queries, keys and values."""

from __future__ import annotations

from mtx.costs.cost import Cost
from mtx.plan.attention import kernel_of
from mtx.plan.shard import Shard


def attention_s(shard: Shard, cost: Cost) -> tuple[float, float]:
    """(F, B) seconds of the products of activations, such as those of queries and keys of b a / t
    heads.

    unfused: q k^T, softmax with scale and mask (`_softmax_passes`), dropout and the product with v,
    each through memory, for all of the square. fused: no score leaves the kernel, which skips what
    the mask hides and computes q k^T once more in B; there is one for NVIDIA's GPUs
    (`mtx.plan.attention`). Over `context` there are several such products, counted as often as they
    run.
    """
    model, rows = shard.model, shard.microbatch
    kernel = kernel_of(model, shard.hardware.backend)
    fused = shard.calibration.software.attention == "fused" and kernel == "cudnn"
    rate = shard.hardware.peak_flops(model.compute_dtype) * shard.calibration.attention_share
    forward_s = backward_s = 0.0
    apart = [each for each in cost.matmuls if not each.weight and not (fused and each.fused)]
    for each in cost.matmuls:
        if fused and each.fused:
            product_s = each.seen * each.flops(rows) / rate
            forward_s += product_s * (each.during == "F")
            backward_s += product_s * (each.during == "B")
    runs = {pass_: sum(each.times for each in cost.matmuls if each.fused and each.during == pass_)
            for pass_ in ("F", "B")}  # fmt: skip
    if fused:  # a kernel of two products forward, two kernels of five backward
        forward_s += runs["F"] / 2 * shard.calibration.kernel_s
        backward_s += 2 * runs["B"] / 5 * shard.calibration.kernel_s
    for each in apart:
        if not each.fused:
            batch, m, n, k = each.shape(rows)
            product_s = each.times * shard.product_s(m, n, k, batch)
            forward_s += product_s * (each.during == "F")
            backward_s += product_s * (each.during == "B")
    for scores in [each for each in apart if each.fused and each.during == "F"][::2]:
        unfused_s = _unfused_s(shard, *scores.shape(rows))
        forward_s += scores.times * unfused_s[0]
        backward_s += scores.times * unfused_s[1]
    return forward_s, backward_s


def _unfused_s(shard: Shard, batch: int, queries: int, keys: int, size: int) -> tuple[float, float]:
    scores_s = shard.product_s(queries, keys, size, batch)
    values_s = shard.product_s(queries, size, keys, batch)
    square_bytes = batch * queries * keys * shard.item_bytes
    mask = 1 / shard.item_bytes  # a byte
    drops = shard.model.attention_dropout > 0 or shard.calibration.software.dropout
    drop = 2 + mask if drops else 0.0
    forward, backward = _softmax_passes(shard)
    return (
        scores_s + values_s + shard.memory_s((forward + drop) * square_bytes, 2),
        scores_s + 3 * values_s + shard.memory_s((backward + drop) * square_bytes, 2),
    )


def _softmax_passes(shard: Shard) -> tuple[float, float]:
    """(F, B) of softmax with its scale and mask, in passes over the scores in the compute type.

    In one kernel, F reads and writes, and B reads two arrays and writes one. By torch's kernels,
    one after the other: in F, 2 each for the mask, in place, and softmax; in B, 3 for softmax's
    gradient and 2 for the mask's; and if softmax has a wider type, 2 for casts there and back and 2
    for the scale, both ways.
    """
    software = shard.calibration.software
    if software.operators == "fused":
        return 2.0, 3.0
    wide = software.softmax_bytes / shard.item_bytes
    around = 2 * (1 + wide) + 2 * wide if wide > 1 else 0.0
    return 4 * wide + around, 5 * wide + around
