"""A device's share of a model: what decides its work on one microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypedDict

from mtx.config import ModelConfig, Recompute
from mtx.config.layout import ContextAttention
from mtx.costs.ask import layer_cost
from mtx.costs.cost import ITEM_BYTES, Cost, ExpertShards
from mtx.plan.calibration import Calibration
from mtx.plan.gemm import matmul_s
from mtx.plan.hardware import Hardware
from mtx.plan.network import Group, all_reduce_s, gather_s


class Machine(TypedDict):
    """What collectives and matmuls are timed on."""

    hardware: Hardware
    calibration: Calibration


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What decides the work of one device on one microbatch; hashable, for the caches."""

    model: ModelConfig
    microbatch: int
    tensor: int
    sequence_parallel: bool
    hardware: Hardware
    calibration: Calibration
    context: int = 1
    context_attention: ContextAttention = "gather"
    experts: ExpertShards | None = None
    expert_imbalance: float = 1.0  # tokens of the fullest expert, over the mean

    @property
    def tokens(self) -> int:
        return self.microbatch * self.model.sequence // self.context

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.model.compute_dtype]

    @property
    def hidden_bytes(self) -> int:
        """b s h: a whole microbatch between two layers."""
        return self.tokens * self.model.hidden * self.item_bytes

    @property
    def machine(self) -> Machine:
        return {"hardware": self.hardware, "calibration": self.calibration}

    @property
    def group(self) -> Group:
        return Group(size=self.tensor, stride=1)

    def product_s(self, m: int, n: int, k: int, batch: int = 1, *, dtype: str = "") -> float:
        """Seconds of `batch` products [m, k] x [k, n], by `mtx.plan.gemm.matmul_s`; dtype: of the
        operands, by default the compute type."""
        return matmul_s(
            m, n, k, batch=batch, dtype=dtype or self.model.compute_dtype,
            item_bytes=self.item_bytes, **self.machine,
        )  # fmt: skip

    def memory_s(self, moved_bytes: float, kernels: int = 0) -> float:
        """Seconds to read and write that many bytes in that many kernels."""
        rate = self.hardware.memory_gb_s * 1e9 * self.calibration.memory_share
        return moved_bytes / rate + kernels * self.calibration.kernel_s

    def cost(self, kind: str, recompute: Recompute = "none") -> Cost:
        """The cost of one layer. Its probabilities have no dropout here: that is priced with
        them."""
        dropout = self.model.dropout or (0.1 if self.calibration.software.dropout else 0.0)
        return layer_cost(
            _with_dropout(self.model, dropout), kind=kind,
            tensor=self.tensor, sequence_parallel=self.sequence_parallel, recompute=recompute,
            kernel="cudnn", context=self.context, context_attention=self.context_attention,
            experts=self.experts,
        )  # fmt: skip

    def all_reduce_s(self) -> float:
        """Seconds of an all-reduce of b s h over `tensor`; with sequence parallelism a gather and a
        scatter take as long."""
        return all_reduce_s(self.hidden_bytes, self.group, **self.machine)

    def gather_s(self) -> float:
        return gather_s(self.hidden_bytes, self.group, **self.machine)


@lru_cache(maxsize=256)  # a search asks for a few models thousands of times
def _with_dropout(model: ModelConfig, dropout: float) -> ModelConfig:
    """The model with that dropout, but none on its probabilities."""
    return replace(model, dropout=dropout, attention_dropout=0.0)
