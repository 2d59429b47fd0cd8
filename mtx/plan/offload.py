"""What of the residuals goes to the host's memory, and what copying it costs.

MEMO (Zhao et al. 2024) chooses its fraction by a linear programme: as little time as possible, in
the memory that there is. Here what does not go stays on the device, or is computed again as the
layout says, so that one variable is left, and the programme's solution is the least fraction with
which the device's memory suffices: more copies can only take longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.plan.block import Shard, layer_work
from mtx.plan.calibration import calibration_of
from mtx.plan.candidates import MEMORY_AT_MOST
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Zero, offloaded_layers, predict_host_bytes, predict_memory

_STEPS = 64  # of the fraction: with these, most numbers of tokens are cut where memory is aligned


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Of one device in one step."""

    host_bytes: int  # that wait in the host's memory at once
    moved_bytes: int  # out, and as many back
    seconds: float  # of both, by the link's rate
    exposed_s: float  # of them, those longer than the layers that they are copied beside

    def text(self) -> str:
        """For people."""
        gib = 2**30
        return (
            f"{self.host_bytes / gib:,.2f} GiB wait there; {self.moved_bytes / gib:,.1f} GiB a "
            f"step out, as many back, in {self.seconds:.3g} s, {self.exposed_s:.3g} s of it exposed"
        )


def predict_copies(
    model: ModelConfig, layout: Layout, global_batch: int, hardware: Hardware
) -> Copies:
    """A layer's copy lies beside another layer's F or B. At host_gb_s, both ways at once."""
    shard = Shard(
        model=model, microbatch=layout.microbatch, tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel, hardware=hardware,
        calibration=calibration_of(hardware, family=model.family),
    )  # fmt: skip
    layers = offloaded_layers(model, layout, backend=hardware.backend)
    moved, exposed_s, rate = 0, 0.0, hardware.host_gb_s * 1e9
    chunks = layout.virtual * layout.microbatches(global_batch)
    for kind, (places, layer_bytes) in layers.items():
        copy_s, work = layer_bytes / rate, layer_work(shard, kind, layout.recompute)
        beside = work.forward.total_s, (work.backward + work.weight).total_s
        moved += chunks * places * layer_bytes
        exposed_s += chunks * places * sum(max(0.0, copy_s - each_s) for each_s in beside)
    backend = hardware.backend
    return Copies(
        host_bytes=predict_host_bytes(model, layout, global_batch, backend=backend),
        moved_bytes=moved, seconds=2 * moved / rate, exposed_s=exposed_s,
    )  # fmt: skip


def resolve_offload(
    layout: Layout, model: ModelConfig, global_batch: int, hardware: Hardware, *,
    zero: Zero, optimizer: OptimizerConfig,
) -> tuple[Layout, str]:  # fmt: skip
    """(the layout with offload="auto" chosen, why); any other as it is, and ""."""
    if layout.offload != "auto":
        return layout, ""
    room = MEMORY_AT_MOST * hardware.memory_bytes
    for step in range(_STEPS + 1):
        tried = replace(layout, offload=step / _STEPS)
        memory = predict_memory(
            model, tried, global_batch, backend=hardware.backend, zero=zero, optimizer=optimizer
        )
        if memory.total_bytes <= room:
            return tried, f"offload {tried.offload:g}: the least with which a device's memory does"
    return tried, "offload 1: all that can go, and a device's memory still does not do"
