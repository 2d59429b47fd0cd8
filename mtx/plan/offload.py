"""How much of the residuals goes to the host's memory, and what copying it costs.

A layer's part is copied once each way: out during the next layer's F, and back during the B of the
layer that runs before it (`mtx.pipeline.offload`). A PCIe link serves both directions at once, so
each counts by itself; everything waits for a copy that takes longer than the layer beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtx.config import Layout, ModelConfig
from mtx.plan.block import Passes, Work
from mtx.plan.hardware import Hardware
from mtx.plan.makespan import LOOPED
from mtx.plan.memory import offloaded_layers, predict_host_bytes
from mtx.plan.shard import Shard

HOST_AT_MOST = 0.9  # of a host's memory: the rest is for the system and for reading data


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of one device in one step."""

    host_bytes: int  # that wait in the host's memory at once
    moved_bytes: int  # out, and as many back
    each_way_s: float  # for either direction, by the link's rate
    room_bytes: float  # the device's part of the host's memory

    @property
    def fits(self) -> bool:
        return self.host_bytes <= HOST_AT_MOST * self.room_bytes

    def text(self, exposed_s: float) -> str:
        """For people. exposed_s: seconds of the copies that nothing hides."""
        gib = 2**30
        text = f"{self.host_bytes / gib:,.2f} GiB of the device's {self.room_bytes / gib:,.0f} GiB"
        text += "" if self.fits else f": does not fit (at most {HOST_AT_MOST:.0%} can be had)"
        return (
            f"{text}; {self.moved_bytes / gib:,.1f} GiB a step out, as many back, in "
            f"{self.each_way_s:.3g} s each, {exposed_s:.3g} s of it exposed"
        )


def predict_copies(
    model: ModelConfig, layout: Layout, global_batch: int, hardware: Hardware, *, share: float
) -> Copies:
    """The copies of a layout. share: the part of host_gb_s that copies reach."""
    backend = hardware.backend
    layers = offloaded_layers(model, layout, backend=backend)
    chunks = layout.virtual * layout.microbatches(global_batch)
    moved = chunks * sum(places * layer_bytes for places, layer_bytes in layers.values())
    return Copies(
        host_bytes=predict_host_bytes(model, layout, global_batch, backend=backend),
        moved_bytes=moved, each_way_s=moved / (hardware.host_gb_s * 1e9 * share),
        room_bytes=hardware.host_gib * 2**30,
    )  # fmt: skip


def with_copies(
    work: Mapping[str, Passes], model: ModelConfig, layout: Layout, shard: Shard
) -> dict[str, Passes]:
    """The work of a layer of each kind, and the seconds by which its copies outlast it."""
    if not layout.offload_fraction:
        return dict(work)
    hardware = shard.hardware
    rate = hardware.host_gb_s * 1e9 * shard.calibration.host_share
    layers = offloaded_layers(model, layout, backend=hardware.backend)
    return {kind: _beside(each, layers[kind][1] / rate, layout) for kind, each in work.items()}


def _beside(work: Passes, copy_s: float, layout: Layout) -> Passes:
    forward_s, backward_s, weight_s = work.seconds
    if layout.schedule in LOOPED:  # elsewhere W may be an op of its own, which no copy overlaps
        backward_s += weight_s
    exposed = (Work(host_comm_s=max(0.0, copy_s - each_s)) for each_s in (forward_s, backward_s))
    return work + Passes(*exposed)
