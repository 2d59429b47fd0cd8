"""What a step is measured by.

TFLOP/s are per device and come in two units that must not be mixed: `tflops_sc21` is the paper's
(full attention, recomputation counted), `tflops_model` that of MFU (causal attention, nothing
counted twice). See `mtx.plan.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtx.config import RunConfig
from mtx.plan.flops import model_flops, sc21_flops
from mtx.step.state import Metrics


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, as it is logged and shown."""

    step: int  # finished steps, this one included
    loss: float  # mean over the tokens of the global batch, before this step's update
    learning_rate: float
    gradient_norm: float  # before clipping
    loss_scale: float  # 1 but in float16
    finite: bool  # False: the gradients were not, and the update was skipped
    step_s: float
    tokens_per_s: float  # over all devices
    tflops_sc21: float  # per device, SC'21's formula
    tflops_model: float  # per device, model FLOPs
    mfu: float | None  # tflops_model over the device's peak; None where that is not known


class Meter:
    """Turns a step's metrics and its time into a record.

    peak_flops: FLOP/s of one device in the compute type, or None.
    """

    def __init__(self, run: RunConfig, *, peak_flops: float | None = None):
        self._tokens = run.global_batch * run.model.sequence
        self._devices = run.layout.devices
        self._sc21_flops = sc21_flops(run.model, run.global_batch)
        self._model_flops = model_flops(run.model, run.global_batch)
        self._peak_flops = peak_flops

    def measure(self, step: int, metrics: Metrics, step_s: float) -> StepRecord:
        """`metrics` on the host; `step_s` from the end of the step before to that of this one."""
        per_device = 1 / (step_s * self._devices)
        model = self._model_flops * per_device
        names = ("loss", "learning_rate", "gradient_norm", "loss_scale")
        return StepRecord(
            **{name: float(getattr(metrics, name)) for name in names},
            step=step, finite=bool(metrics.finite), step_s=step_s,
            tokens_per_s=self._tokens / step_s,
            tflops_sc21=self._sc21_flops * per_device / 1e12,
            tflops_model=model / 1e12,
            mfu=model / self._peak_flops if self._peak_flops else None,
        )  # fmt: skip
