"""What of a layer's activations is kept on the device, on the host, or computed again.

MEMO (Zhao et al. 2024, section 4) solves a linear programme for it: of each layer's activations a
part alpha goes to the host, a part beta is computed again, the rest is kept, in the least time that
the memory of both allows. Here beta is one of the few that `recompute` knows, since a layer's
program computes all of its tokens alike, and all stages run one program with arrays of one size, so
that no stage can have an alpha of its own. For each beta the programme has one variable left, of
which time only grows and the device's memory only shrinks: its solution is the least alpha that
fits. The fastest of these few is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.plan.candidates import MEMORY_AT_MOST, RECOMPUTE
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Memory, Zero, layer_residual_bytes, predict_host_bytes, predict_memory
from mtx.plan.offload import HOST_AT_MOST
from mtx.plan.time import predict_step

_STEPS = 64  # of the fraction
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
        return (
            f"offload {layout.offload:g} with recompute={layout.recompute}: a step in "
            f"{self.step_s:.3g} s, {self.exposed_s:.3g} s of it for copies; "
            f"{self.device_bytes / _GIB:,.1f} GiB of the device, {self.host_bytes / _GIB:,.1f} GiB "
            f"of the host{'' if self.fits else ': does not fit'}"
        )


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """The programme: a run, and the memory that there is."""

    model: ModelConfig
    layout: Layout
    global_batch: int
    hardware: Hardware
    zero: Zero
    optimizer: OptimizerConfig

    def mixes(self) -> list[Mix]:
        """The solution for the layout's way to recompute, and for each that comes behind it; the
        fastest of those that fit first."""
        ways = RECOMPUTE[RECOMPUTE.index(self.layout.recompute) :]
        found = [self._solved(replace(self.layout, recompute=way)) for way in ways]
        return sorted(found, key=lambda mix: (not mix.fits, mix.fits and mix.step_s))

    def _solved(self, layout: Layout) -> Mix:
        """With the least fraction with which the device's memory does; 1 where none does."""
        for step in range(_STEPS + 1):
            tried = replace(layout, offload=step / _STEPS)
            memory = self._memory(tried)
            if fits := memory.total_bytes <= MEMORY_AT_MOST * self.hardware.memory_bytes:
                break
        host = predict_host_bytes(
            self.model, tried, self.global_batch, backend=self.hardware.backend
        )
        fits &= host <= HOST_AT_MOST * self.hardware.host_gib * _GIB
        time = predict_step(self.model, tried, self.global_batch, self.hardware, zero=self.zero)
        return Mix(
            layout=tried, step_s=time.step_s, exposed_s=time.host_comm_s,
            device_bytes=memory.total_bytes, host_bytes=host, fits=fits,
        )  # fmt: skip

    def _memory(self, layout: Layout) -> Memory:
        return predict_memory(
            self.model, layout, self.global_batch, backend=self.hardware.backend, zero=self.zero,
            optimizer=self.optimizer,
        )  # fmt: skip

    def parts(self, layout: Layout) -> str:
        """Of what one layer would keep of a microbatch with recompute="none"."""
        whole, kept = (
            layer_residual_bytes(self.model, layout, recompute=way, backend=self.hardware.backend)
            for way in ("none", layout.recompute)
        )
        host = layout.offload_fraction * kept / whole
        return (
            f"{host:.0%} of {whole / _GIB:.3g} GiB a layer to the host, "
            f"{1 - kept / whole:.0%} computed again, {kept / whole - host:.0%} on the device"
        )


def resolve_offload(
    layout: Layout, model: ModelConfig, global_batch: int, hardware: Hardware, *,
    zero: Zero, optimizer: OptimizerConfig,
) -> tuple[Layout, tuple[str, ...]]:  # fmt: skip
    """(the layout with offload="auto" chosen, and with it whether more is computed again; why); any
    other as it is, and ()."""
    if layout.offload != "auto":
        return layout, ()
    mixer = Mixer(
        model=model, layout=layout, global_batch=global_batch, hardware=hardware, zero=zero,
        optimizer=optimizer,
    )  # fmt: skip
    best, *others = mixer.mixes()
    why = f"activations: {mixer.parts(best.layout)}. {best.text()}"
    return best.layout, (why, *(f"not so: {other.text()}" for other in others))
