"""Which of a layer's activations are kept on the device, on the host, or recomputed.

MEMO (Zhao et al. 2024, section 4) solves a linear programme for this: a part alpha of each layer's
activations goes to the host, a part beta is recomputed, and the rest is kept, in the least time
that the memory of both allows. Here beta is one of the few values that `recompute` knows, since a
layer's program computes all of its tokens alike; and all stages run one program with arrays of one
size, so no stage can have an alpha of its own. For each beta the programme has one variable left,
with which time only grows and the device's memory only shrinks: its solution is the least alpha
that fits. The fastest of these few solutions is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.plan.candidates import MEMORY_AT_MOST, RECOMPUTE
from mtx.plan.choose import context_ways
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Zero, layer_residual_bytes, predict_host_bytes, predict_memory
from mtx.plan.offload import HOST_AT_MOST
from mtx.plan.time import predict_step

_STEPS = 64  # in which the fraction is tried
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A way to keep activations, and what it costs."""

    layout: Layout
    step_s: float
    exposed_s: float  # of the copies
    device_bytes: int
    host_bytes: int
    fits: bool

    def text(self) -> str:
        """For people: what goes where."""
        layout = self.layout
        over = f", {layout.context_attention} over context" if layout.context > 1 else ""
        return (
            f"offload {layout.offload:g}, recompute {layout.recompute}{over}: a step in "
            f"{self.step_s:.4g} s, {self.exposed_s:.3g} s of it for copies; "
            f"{self.device_bytes / _GIB:,.1f} GiB of the device, {self.host_bytes / _GIB:,.1f} GiB "
            f"of the host{'' if self.fits else ': does not fit'}"
        )


def _fits_and_fast(mix: Mix) -> tuple[bool, float]:
    """Sort key: mixes that fit come first, and then the fastest."""
    return not mix.fits, mix.step_s


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that a run has on a device and on its host, and the choices made to fit it."""

    model: ModelConfig
    global_batch: int
    hardware: Hardware
    zero: Zero
    optimizer: OptimizerConfig

    def resolve(self, layout: Layout) -> tuple[Layout, tuple[str, ...]]:
        """(the layout with context_attention="auto" resolved to the fastest way that fits, and
        offload="auto" together with how much is recomputed; the reasons for offload)"""
        if layout.offload != "auto":
            ways = self._over_context(layout)
            fit = filter(self._fits, ways if len(ways) > 1 else ())
            return next(fit, ways[0]), ()
        best, *others = self.mixes(layout)
        why = f"activations: {self._parts(best.layout)}. {best.text()}"
        return best.layout, (why, *(f"not so: {other.text()}" for other in others))

    def mixes(self, layout: Layout) -> list[Mix]:
        """The programme's solution for the layout's way to recompute and for each way after it in
        RECOMPUTE: first those that fit, then by time."""
        ways = RECOMPUTE[RECOMPUTE.index(layout.recompute) :]
        asked = (replace(layout, recompute=way) for way in ways)
        found = [
            min(map(self._solved, self._over_context(one)), key=_fits_and_fast) for one in asked
        ]
        return sorted(found, key=_fits_and_fast)

    def _over_context(self, layout: Layout) -> list[Layout]:
        """The layout with each way of attention that context_attention leaves open, the fastest
        first."""
        if layout.context == 1 or layout.context_attention != "auto":
            return [layout]
        ways = context_ways(layout, self.model, self.hardware)
        return [replace(layout, context_attention=way) for way in ways]

    def _solved(self, layout: Layout) -> Mix:
        """The mix with the least fraction for which the device's memory suffices; with 1 if none
        does."""
        tried = (replace(layout, offload=step / _STEPS) for step in range(_STEPS))
        layout = next(filter(self._fits, tried), replace(layout, offload=1.0))
        host = predict_host_bytes(
            self.model, layout, self.global_batch, backend=self.hardware.backend
        )
        time = predict_step(self.model, layout, self.global_batch, self.hardware, zero=self.zero)
        return Mix(
            layout=layout, step_s=time.step_s, exposed_s=time.host_comm_s,
            device_bytes=self._device_bytes(layout), host_bytes=host,
            fits=self._fits(layout) and host <= HOST_AT_MOST * self.hardware.host_gib * _GIB,
        )  # fmt: skip

    def _fits(self, layout: Layout) -> bool:
        return self._device_bytes(layout) <= MEMORY_AT_MOST * self.hardware.memory_bytes

    def _device_bytes(self, layout: Layout) -> int:
        return predict_memory(
            self.model, layout, self.global_batch, backend=self.hardware.backend, zero=self.zero,
            optimizer=self.optimizer,
        ).total_bytes  # fmt: skip

    def _parts(self, layout: Layout) -> str:
        """Where the activations go that one layer would keep of a microbatch with
        recompute="none"."""
        whole, kept = (
            layer_residual_bytes(self.model, layout, recompute=way, backend=self.hardware.backend)
            for way in ("none", layout.recompute)
        )
        host = layout.offload_fraction * kept / whole
        return (
            f"{host:.0%} of {whole / _GIB:.3g} GiB a layer to the host, "
            f"{1 - kept / whole:.0%} computed again, {kept / whole - host:.0%} on the device"
        )
