"""Seconds of one block, of the embedding and of the head, for one microbatch on one device.

A block is its matmuls (`mtx.plan.gemm`), its attention, what else reads and writes memory, and the
collectives over `tensor`. The bytes are counted operation by operation below, in passes over an
array: a pass is one read or one write of all its elements.

Letters: b microbatch · s sequence · h hidden · t tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from mtx.config import ModelConfig, Recompute
from mtx.plan.attention import attention_of
from mtx.plan.calibration import Calibration
from mtx.plan.families import Linear, ends_of, family_of, layer_of
from mtx.plan.gemm import matmul_s
from mtx.plan.hardware import Hardware
from mtx.plan.network import Group, all_reduce_s, gather_s

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the compute type


class Work(NamedTuple):
    """Seconds of one device, by what they are spent on."""

    matmul_s: float = 0.0  # weights
    attention_s: float = 0.0  # scores: matmuls, softmax, dropout
    elementwise_s: float = 0.0  # norms, GELU, residuals, dropout, adding up gradients, the loss
    tensor_comm_s: float = 0.0  # collectives over `tensor` that nothing hides

    @property
    def total_s(self) -> float:
        return sum(self)

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, self, other))

    def __mul__(self, times: float) -> Work:
        return Work(*(part * times for part in self))


class Passes(NamedTuple):
    """The work of F, of B and of W; recomputation is part of B."""

    forward: Work = Work()
    backward: Work = Work()
    weight: Work = Work()

    @property
    def all(self) -> Work:
        return self.forward + self.backward + self.weight

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.forward.total_s, self.backward.total_s, self.weight.total_s

    def __add__(self, other: Passes) -> Passes:
        return Passes(*map(add, self, other))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What decides the work of one device on one microbatch; hashable, for the caches."""

    model: ModelConfig
    microbatch: int
    tensor: int
    sequence_parallel: bool
    hardware: Hardware
    calibration: Calibration

    @property
    def tokens(self) -> int:
        return self.microbatch * self.model.sequence

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.model.compute_dtype]

    @property
    def hidden_bytes(self) -> int:
        """b s h: a microbatch between two layers, whole."""
        return self.tokens * self.model.hidden * self.item_bytes

    @property
    def group(self) -> Group:
        return Group(size=self.tensor, stride=1)

    def product_s(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """`batch` products [m, k] x [k, n] in the compute type, by `mtx.plan.gemm.matmul_s`."""
        return matmul_s(
            m, n, k, batch=batch, hardware=self.hardware, calibration=self.calibration,
            dtype=self.model.compute_dtype, item_bytes=self.item_bytes,
        )  # fmt: skip

    def memory_s(self, moved_bytes: float, kernels: int = 0) -> float:
        """Reading and writing so many bytes in so many kernels."""
        rate = self.hardware.memory_gb_s * 1e9 * self.calibration.memory_share
        return moved_bytes / rate + kernels * self.calibration.kernel_s

    def drops(self, probability: float) -> bool:
        """Whether there is dropout where the model's config says `probability`."""
        return probability > 0 or self.calibration.software.dropout

    def all_reduce_s(self) -> float:
        """Of b s h over `tensor`; a gather and a scatter with sequence parallelism take as long."""
        return all_reduce_s(
            self.hidden_bytes, self.group, hardware=self.hardware, calibration=self.calibration
        )

    def gather_s(self) -> float:
        return gather_s(
            self.hidden_bytes, self.group, hardware=self.hardware, calibration=self.calibration
        )


@lru_cache(maxsize=16384)
def block_work(shard: Shard, recompute: Recompute) -> Passes:
    """One block. recompute: "selective" is the attention's scores again, "full" the block."""
    linears = layer_of(shard.model).linears
    weights = [linear.product(shard.tensor) for linear in linears]
    attention_forward_s, attention_backward_s = _attention_s(shard)
    passes_forward_s, passes_backward_s = _passes_s(shard)
    forward = Work(
        matmul_s=sum(shard.product_s(shard.tokens, n, k) for k, n in weights),
        attention_s=attention_forward_s,
        elementwise_s=passes_forward_s,
        tensor_comm_s=2 * shard.all_reduce_s(),
    )
    inputs_s = [shard.product_s(shard.tokens, k, n) for k, n in weights]
    weights_s = [shard.product_s(k, n, shard.tokens) for k, n in weights]
    backward = Work(
        matmul_s=sum(inputs_s),
        attention_s=attention_backward_s,
        elementwise_s=passes_backward_s,
        # Those before attention and before the MLP, of column-parallel layers, can be hidden.
        tensor_comm_s=_backward_comm_s(
            shard, *(_by_part(linears, times_s) for times_s in (inputs_s, weights_s))
        ),
    )
    if recompute == "full":
        backward += forward
    elif recompute == "selective":
        backward += Work(attention_s=attention_forward_s)
    size = sum(k * n for k, n in weights)
    weight = Work(matmul_s=sum(weights_s), elementwise_s=_accumulate_s(shard, size, len(weights)))
    return Passes(forward=forward, backward=backward, weight=weight)


def _by_part(linears: Sequence[Linear], times_s: Sequence[float]) -> list[float]:
    """Seconds of the column-parallel linears, those that read the same together."""
    parts: dict[str, float] = {}
    for linear, time_s in zip(linears, times_s, strict=True):
        if linear.is_column:
            parts[linear.reads.name] = parts.get(linear.reads.name, 0.0) + time_s
    return list(parts.values())


def _accumulate_s(shard: Shard, parameters: float, kernels: int = 1) -> float:
    """Adding gradients to the sum over the microbatches; nothing where the matmul does it."""
    software = shard.calibration.software
    if not software.accumulate_bytes:
        return 0.0
    return shard.memory_s(parameters * software.accumulate_bytes, kernels)


def _backward_comm_s(shard: Shard, inputs_s: list[float], weights_s: list[float]) -> float:
    """The collectives of a block's backward pass that its matmuls do not hide.

    Without sequence parallelism an all-reduce of each column-parallel layer's input gradient; with
    it a gather before each row-parallel one, a second gather of each column-parallel layer's input,
    which was kept in shards, and a scatter of its gradient.
    """
    overlaps = shard.calibration.software.overlaps_tensor
    if not shard.sequence_parallel:
        return sum(max(0.0, shard.all_reduce_s() - overlaps * under_s) for under_s in weights_s)
    hidden = (max(0.0, shard.gather_s() - overlaps * s) for s in (*inputs_s, *weights_s))
    return 2 * shard.gather_s() + sum(hidden)


def _attention_s(shard: Shard) -> tuple[float, float]:
    """(F, B) of the scores of b a / t heads.

    unfused: q k^T, softmax with scale and mask (`_softmax_passes`), dropout and the product with v,
    each through memory; all of the square. fused: no score leaves the kernel, which skips what the
    mask hides and computes q k^T once more in B; there is one for NVIDIA's GPUs
    (`mtx.plan.attention`).
    """
    model = shard.model
    heads = shard.microbatch * model.heads / shard.tensor
    sequence, size = model.sequence, model.head_size
    kernel = attention_of(model, shard.hardware.backend).name
    if shard.calibration.software.attention == "fused" and kernel == "cudnn":
        rate = shard.hardware.peak_flops(model.compute_dtype) * shard.calibration.attention_share
        seen = 1 if model.causal else 2
        product_s = seen * heads * sequence**2 * size / rate  # 2 s^2 size, half under the mask
        launch_s = shard.calibration.kernel_s
        return 2 * product_s + launch_s, 5 * product_s + 2 * launch_s
    batch = max(1, round(heads))
    scores_s = shard.product_s(sequence, sequence, size, batch)
    values_s = shard.product_s(sequence, size, sequence, batch)
    square_bytes = heads * sequence**2 * shard.item_bytes
    mask = 1 / shard.item_bytes  # a byte
    drop = 2 + mask if shard.drops(model.attention_dropout) else 0.0
    forward, backward = _softmax_passes(shard)
    return (
        scores_s + values_s + shard.memory_s((forward + drop) * square_bytes, 2),
        scores_s + 3 * values_s + shard.memory_s((backward + drop) * square_bytes, 2),
    )


def _softmax_passes(shard: Shard) -> tuple[float, float]:
    """(F, B) of softmax with its scale and mask, in passes over the scores in the compute type.

    In one kernel F reads and writes, B reads two and writes. By torch, one after the other: in F
    the mask, in place, and softmax 2 each, in B softmax's gradient 3 and the mask's 2; and where
    softmax has a wider type, casts there and back 2, and the scale 2, both ways.
    """
    software = shard.calibration.software
    if software.operators == "fused":
        return 2.0, 3.0
    wide = software.softmax_bytes / shard.item_bytes
    around = 2 * (1 + wide) + 2 * wide if wide > 1 else 0.0
    return 4 * wide + around, 5 * wide + around


def _passes_s(shard: Shard) -> tuple[float, float]:
    """(F, B) of what else a block does, in passes over [tokens, width].

    Over b s h, whole on every device unless sequence parallelism shards them:
      F  two norms 2, two residual additions with bias 3 and dropout's mask
      B  two norms 5 (their weights' gradients read again), two sums of gradients 3, two of
         dropout 2 and mask, two gradients of biases 1 where there are any
    Over what `tensor` cuts:
      F  the MLP's activation reads what goes in, and writes; attention's output in another order 2;
         rotary positions turn queries and keys 2
      B  the activation reads and writes what went in, and reads a gradient; gradients of biases 1;
         joining those of q, k and v 2; attention's 2; rotary positions 2
    torch's operators read and write once more in F for the activation's bias, and, for each
    residual addition, for its bias and its dropout.
    """
    model, family, layer = shard.model, family_of(shard.model), layer_of(shard.model)
    mask = 1 / shard.item_bytes  # a byte
    dropout = shard.drops(model.dropout)
    biases = 1 if family.biases else 0
    whole_forward = 2 * (2 + 3 + (mask if dropout else 0))
    whole_backward = 2 * (5 + 3 + biases + (2 + mask if dropout else 0))

    def width(name: str) -> int:
        return layer.array(name).local_width(shard.tensor)

    made = sum(linear.product(shard.tensor)[1] for linear in layer.linears if linear.is_column)
    projected = made - width("up")
    turned = width("q") + width("kv") // 2 if family.rotary else 0
    split_forward = width("up") + width("active") + 2 * width("attended") + 2 * turned
    split_backward = 2 * width("up") + width("active") + biases * made
    split_backward += 2 * projected + 2 * width("attended") + 2 * turned
    if shard.calibration.software.operators == "torch":
        whole_forward += 2 * (2 + 2)
        split_forward += 2 * width("up")
    whole_bytes = shard.hidden_bytes / (shard.tensor if shard.sequence_parallel else 1)
    split_bytes = shard.tokens * shard.item_bytes
    return (
        shard.memory_s(whole_forward * whole_bytes + split_forward * split_bytes, 6),
        shard.memory_s(whole_backward * whole_bytes + split_backward * split_bytes, 14),
    )


@lru_cache(maxsize=4096)
def embedding_work(shard: Shard) -> Passes:
    """The lookup, positions, dropout, the sum of its shards, and the table's dense gradient."""
    rows = shard.model.padded_vocab(shard.tensor) // shard.tensor
    table = rows * shard.model.hidden
    return Passes(
        forward=Work(
            elementwise_s=shard.memory_s(6 * shard.hidden_bytes, 6),
            tensor_comm_s=shard.all_reduce_s(),
        ),
        weight=Work(
            elementwise_s=shard.memory_s(4 * shard.hidden_bytes + table * shard.item_bytes, 6)
            + _accumulate_s(shard, table)
        ),
    )


@lru_cache(maxsize=4096)
def head_work(shard: Shard, shards: int) -> Passes:
    """The last norm, what else stands before the logits, the logits of a `shards`-th of the
    vocabulary, and the loss.

    Its input's gradient is summed over `tensor`; with sequence parallelism it is scattered, and the
    input gathered in F and once more in B.
    """
    model = shard.model
    columns = model.padded_vocab(shards) // shards
    tokens, hidden = shard.tokens, model.hidden
    own = tokens // shard.tensor if shard.sequence_parallel else tokens
    products = [(tokens, columns, hidden)]  # (tokens, outputs, inputs)
    products += [(own, outputs, inputs) for inputs, outputs in ends_of(model).on_tokens]
    loss_s = shard.memory_s(shard.calibration.software.loss_bytes * tokens * columns, 10)
    norm_s = shard.memory_s(shard.hidden_bytes) * len(products)
    return Passes(
        forward=Work(
            matmul_s=sum(shard.product_s(m, n, k) for m, n, k in products),
            elementwise_s=loss_s * 2 / 3 + 2 * norm_s,
            tensor_comm_s=shard.gather_s() if shard.sequence_parallel else 0.0,
        ),
        backward=Work(
            matmul_s=sum(shard.product_s(m, k, n) for m, n, k in products),
            elementwise_s=loss_s / 3 + 5 * norm_s,
            tensor_comm_s=shard.all_reduce_s(),
        ),
        weight=Work(
            matmul_s=sum(shard.product_s(k, n, m) for m, n, k in products),
            elementwise_s=_accumulate_s(shard, sum(n * k for _, n, k in products)),
        ),
    )
