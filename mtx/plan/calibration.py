"""How much of its data sheet a machine gives, and what the software on it does: data, with sources.

A `Calibration` is a handful of constants of a machine and a `Software`, which says by counting, not
by fitting, what its kernels read and write and what it overlaps. Of the A100 four constants are
fitted to what SC'21 published, by `experiments/fit_time.py`, which prints them with all residuals;
those of other accelerators are the A100's, assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from mtx.config import Family
from mtx.errors import unknown_name
from mtx.plan.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training program does beside its matmuls. Bytes are those read and written."""

    name: str
    source: str
    attention: Literal["unfused", "fused"]  # fused: in one kernel, where the hardware has one
    dropout: bool  # even where the model's config has none: its published runs had 0.1
    accumulate_bytes: int  # a parameter and microbatch: adding its gradient to the sum
    optimizer_bytes: int  # a parameter: zeroing, unscaling, norm, clipping, Adam, casts
    gradient_bytes: int  # a parameter: what is reduced over `data`
    parameter_bytes: int  # a parameter: what is gathered over `data`, where it is sharded
    loss_bytes: int  # a logit: the cross-entropy, forward and backward
    head: Literal["last stage", "all stages"]  # who computes the logits
    # A program a stage, or one for all: see `mtx.pipeline.simulate`.
    pipeline: Literal["asynchronous", "lockstep"]
    overlaps_tensor: bool  # B's collectives over `tensor` run under its matmuls


_MEGATRON_2021 = Software(
    name="megatron-2021",
    source="Megatron-LM as SC'21 ran it: fp16, fused softmax but no fused attention, gradients "
    "reduced in fp16 after the last B",
    attention="unfused",
    dropout=True,
    accumulate_bytes=6,  # sum += gradient, all fp16: two reads and a write
    # Zeroing 2, copying gradients to fp32 6, looking for infinities 8, norm 4, clipping 8, Adam on
    # fp32 masters and two moments 28, casting the parameters 6.
    optimizer_bytes=62,
    gradient_bytes=2,
    parameter_bytes=2,
    # Cast to fp32 6, maximum 4, subtract 8, exp 8, sum 4; backward 8 and a cast.
    loss_bytes=40,
    head="last stage",
    pipeline="asynchronous",
    overlaps_tensor=False,
)
SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        software.name: software
        for software in (
            _MEGATRON_2021,
            replace(
                _MEGATRON_2021,
                name="megatron-2022",
                source="Megatron-LM as Korthikanti et al. 2022 (arXiv 2205.05198) ran it: "
                "gradients are added up inside of the matmuls, collectives overlapped in B",
                accumulate_bytes=0,
                overlaps_tensor=True,
            ),
            Software(
                name="mtx",
                source="this program, counted and never measured: fused attention, float32 "
                "gradients, logits over pipe and tensor",
                attention="fused",
                dropout=False,
                accumulate_bytes=10,  # reads 2 and 4, writes 4
                optimizer_bytes=40,  # zeroing 4, norm 4, Adam 28, a cast 4
                gradient_bytes=4,
                parameter_bytes=2,
                loss_bytes=16,
                head="all stages",
                pipeline="lockstep",
                overlaps_tensor=False,
            ),
        )
    }
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of the data sheet's rates that are reached, latencies, and the software."""

    source: str
    software: Software
    # Fitted, by experiments/fit_time.py:
    matmul_share: float  # of the peak, by a deep matmul that fills all cores
    memory_share: float  # of the memory's bandwidth
    network_share: float  # of the network between nodes, by collectives
    send_share: float  # of one device's network, by messages between stages
    # Assumed:
    link_share: float = 0.78  # of the links in a node: NCCL's 230 to 240 of the A100's 300 GB/s
    matmul_depth: float = 64.0  # k that a tile's start and end take as long as
    kernel_s: float = 5e-6  # of starting a kernel
    link_latency_s: float = 3e-6  # of a collective's step inside a node
    network_latency_s: float = 1e-5  # and between nodes
    attention_share: float = 0.5  # of the peak, by a fused attention kernel (FlashAttention-2)
    # Of one device's network, by ZeRO-3's gathers, and of its cores, which they keep from matmuls
    # meanwhile: DeepSpeed in SC'21's table 2; NCCL takes up to 32 of the A100's 108.
    zero3_share: float = 0.66
    zero3_cores: float = 0.3


_A100 = Calibration(
    source="fitted to SC'21 by experiments/fit_time.py",
    software=SOFTWARE["megatron-2021"],
    matmul_share=0.7782,
    memory_share=0.7164,
    network_share=0.747,
    send_share=0.6556,
)
FITTED = ("matmul_share", "memory_share", "network_share", "send_share")


@lru_cache(maxsize=64)
def calibration_of(
    hardware: Hardware, software: str | None = None, *, family: Family = "gpt"
) -> Calibration:
    """The constants of a machine with a software of `SOFTWARE`: by default SC'21's for a GPT on an
    A100, which it ran, and ours elsewhere. UserError with the nearest name where there is no such
    software."""
    fitted = any(kind.startswith("NVIDIA A100") for kind in hardware.device_kinds)
    name = software or ("megatron-2021" if fitted and family == "gpt" else "mtx")
    if name not in SOFTWARE:
        raise unknown_name("software", name, SOFTWARE)
    source = _A100.source if fitted else "assumed: the shares that are fitted on the A100"
    return replace(_A100, source=source, software=SOFTWARE[name])
