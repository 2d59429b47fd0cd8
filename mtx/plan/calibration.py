"""How close a machine comes to its data sheet, and what its software does: data, with sources.

A `Calibration` is a handful of constants of a machine and a `Software`, which says by counting, not
by fitting, what its kernels read and write and what it overlaps. Four of the A100's constants are
fitted to what SC'21 published, by `experiments/fit_time.py`, which prints them with all residuals;
other accelerators are assumed to have the A100's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from mtx.config import Layout, ModelConfig
from mtx.errors import unknown_name
from mtx.plan.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training program does besides its matmuls. Bytes are those read and written."""

    name: str
    source: str
    attention: Literal["unfused", "fused"]  # fused: in one kernel, if the hardware has one
    # Softmax with scale and mask, biases with GELU, biases with dropout and residual: in one kernel
    # each (SC'21, section 4.2), or in torch's own, one for every operation.
    operators: Literal["fused", "torch"] = "fused"
    softmax_bytes: int = 4  # per element of torch's softmax
    dropout: bool  # even if the model's config has none: its published runs had 0.1
    accumulate_bytes: int  # per parameter and microbatch: adding its gradient to the sum
    optimizer_bytes: int  # per parameter: zeroing, unscaling, norm, clipping, Adam, casts
    gradient_bytes: int  # per parameter: what is reduced over `data`
    parameter_bytes: int  # per parameter: what is gathered over `data`, if it is sharded
    loss_bytes: int  # per logit: the cross-entropy, forward and backward
    head: Literal["last stage", "all stages"]  # which compute the logits
    # One program per stage, or one for all: see `mtx.schedules.simulate`.
    pipeline: Literal["asynchronous", "lockstep"]
    overlaps_tensor: bool  # B's collectives over `tensor` run under its matmuls
    overlaps_data: bool  # gradients are reduced under the B of the last microbatch
    reduction_bytes: int  # per parameter: copying its gradient to what is reduced, and back
    stash_copies: int = 0  # passes over what waits for B, besides the one that makes it
    # For rings that share their nodes with others: cards of a node that each ring takes, if it has
    # that many, and the share of a card's rate; None: as for a ring that has its nodes to itself.
    ring_cards: int = 1
    ring_share: float | None = None


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
    overlaps_data=False,
    reduction_bytes=12,  # flattening 4, dividing by the replicas 4, copying back 4
    # Assumed: a ring enters a node by one card and leaves it by another. NCCL could not yet lend it
    # the cards next to other groups' GPUs (PXN came in 2022, with 2.12). SC'21's figure 15 would
    # tell, but only its layouts are known here, not its numbers.
    ring_cards=2,
    # SC'21, section 5.9: all-reduces of the largest run cross a cut through the machine at 12.9
    # TB/s. Its 512 rings, of six nodes each, cross it twice: of a card's 25 GB/s they reach 12.6
    # with the copies above, 13.0 without.
    ring_share=0.52,
)
SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        software.name: software
        for software in (
            _MEGATRON_2021,
            replace(
                _MEGATRON_2021,
                name="megatron-2021-torch-ddp",
                source="the same with --DDP-impl torch, by which SC'21's scripts run the models of "
                "table 1 that have one stage: gradients are reduced while B makes them",
                overlaps_data=True,
            ),
            replace(
                _MEGATRON_2021,
                name="megatron-2021-torch-operators",
                source="the same without the fused operators of section 4.2; softmax in float32, "
                "as its input is scaled by the layer's number",
                operators="torch",
            ),
            replace(
                _MEGATRON_2021,
                name="megatron-2021-torch-operators-fp16",
                source="the same, with softmax in fp16",
                operators="torch",
                softmax_bytes=2,
            ),
            replace(
                _MEGATRON_2021,
                name="megatron-2022",
                source="Megatron-LM as Korthikanti et al. 2022 (arXiv 2205.05198) ran it: "
                "gradients are added up inside of the matmuls, collectives overlapped in B",
                accumulate_bytes=0,
                overlaps_tensor=True,
            ),
            replace(
                _MEGATRON_2021,
                name="megatron-2023",
                source="Megatron-LM as MegaScale (Jiang et al. 2024, arXiv 2402.15627) ran it: the "
                "same in bfloat16 with FlashAttention-2, gradients reduced in float32",
                attention="fused",
                accumulate_bytes=0,
                gradient_bytes=4,
                overlaps_tensor=True,
            ),
            Software(
                name="mtx",
                source="this program, counted: fused attention, float32 "
                "gradients added inside of the matmuls (GPUs, jax 0.11), logits over pipe and "
                "tensor, collectives overlapped in B",
                attention="fused",
                dropout=False,
                accumulate_bytes=0,
                optimizer_bytes=40,  # zeroing 4, norm 4, Adam 28, a cast 4
                gradient_bytes=4,
                parameter_bytes=2,
                loss_bytes=16,
                head="all stages",
                pipeline="lockstep",
                overlaps_tensor=True,
                overlaps_data=False,
                reduction_bytes=12,  # reordering gradients 8, and parameters back 4
                stash_copies=2,  # XLA writes few of its arrays directly to where they wait
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
    # Of host_gb_s, by copies of pinned memory: PCIe 4 x16 is 31.5 GB/s on the wire, of which
    # headers and acknowledgements leave some 26.
    host_share: float = 0.8
    matmul_depth: float = 64.0  # the k that takes as long as a tile's start and end
    kernel_s: float = 5e-6  # to start a kernel
    link_latency_s: float = 3e-6  # of a collective's step inside a node
    network_latency_s: float = 1e-5  # and between nodes
    attention_share: float = 0.5  # of the peak, by a fused attention kernel (FlashAttention-2)
    # Of one device's network, by ZeRO-3's gathers: DeepSpeed in SC'21's table 2.
    zero3_share: float = 0.66
    # Of the cores, the share that matmuls lose to collectives that run under them: also by table 2;
    # NCCL takes up to 32 of the A100's 108.
    comm_cores: float = 0.3


_A100 = Calibration(
    source="fitted to SC'21 by experiments/fit_time.py",
    software=SOFTWARE["megatron-2021"],
    matmul_share=0.7705,
    memory_share=0.7258,
    network_share=0.7697,
    send_share=0.5721,
)
FITTED = ("matmul_share", "memory_share", "network_share", "send_share")


def calibration_for(layout: Layout, model: ModelConfig, hardware: Hardware) -> Calibration:
    """The constants of a run: with our software if sequences are cut over devices, as SC'21's never
    were."""
    software = "mtx" if layout.context > 1 else None
    return calibration_of(hardware, software, family=model.family)


@lru_cache(maxsize=64)
def calibration_of(
    hardware: Hardware, software: str | None = None, *, family: str = "gpt"
) -> Calibration:
    """The constants of a machine with a software of `SOFTWARE`: by default SC'21's for a GPT on an
    A100, which it ran, and ours otherwise. UserError with the nearest name if there is no such
    software."""
    fitted = any(kind.startswith("NVIDIA A100") for kind in hardware.device_kinds)
    name = software or ("megatron-2021" if fitted and family == "gpt" else "mtx")
    if name not in SOFTWARE:
        raise unknown_name("software", name, SOFTWARE)
    source = _A100.source if fitted else "assumed: the shares that are fitted on the A100"
    return replace(_A100, source=source, software=SOFTWARE[name])
