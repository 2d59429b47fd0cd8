"""How a training step is measured.

TFLOP/s are per device and come in two units that must not be mixed: `tflops_sc21` is the paper's
(full attention, recomputation counted), `tflops_model` that of MFU (causal attention, nothing
counted twice). See `mtx.plan.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mtx.config import RunConfig
from mtx.plan.flops import model_flops, sc21_flops
from mtx.schedules.partition import Placement
from mtx.step.state import Metrics


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, as it is logged and shown."""

    step: int  # finished steps, this one included
    loss: float  # mean over the tokens of the global batch, before this step's update
    aux_loss: float | None  # what layers add to the loss: experts' balance; None without any
    second_loss: float | None  # of the tokens after the next, times its weight; None without any
    learning_rate: float
    gradient_norm: float  # before clipping
    loss_scale: float  # 1 except in float16
    imbalance: float | None  # of experts: how often the fullest is chosen, over its layer's mean
    finite: bool  # False if the gradients were not; the update was then skipped
    step_s: float
    tokens_per_s: float  # over all devices
    tflops_sc21: float  # per device, SC'21's formula
    tflops_model: float  # per device, model FLOPs
    mfu: float | None  # tflops_model over the device's peak; None if that is not known


def loads_of(counted: Any) -> dict[str, np.ndarray]:
    """{kind: [P, C, N, E]} of a step's metrics: how often experts were chosen."""
    found = {
        kind: [a for path, a in leaves.items() if path.endswith("router.load")]
        for kind, leaves in (counted or {}).items()
    }
    return {kind: np.sum(loads, axis=0) for kind, loads in found.items() if loads}


def shares_of(loads: dict[str, np.ndarray], placement: Placement) -> dict[str, list]:
    """{"layers": their numbers, "load": for each layer, how often each expert was chosen over the
    layer's mean}, in model order."""
    rows = {}
    for kind, load in loads.items():
        of_layers = load.reshape(-1, load.shape[-1])[placement.place_of_layer(kind)]
        of_layers = of_layers / np.maximum(of_layers.mean(axis=1, keepdims=True), 1e-9)
        rows |= dict(zip(placement.layers_of(kind).tolist(), of_layers.round(3).tolist()))
    layers = sorted(rows)
    return {"layers": layers, "load": [rows[layer] for layer in layers]}


def imbalance_of(counted: Any) -> float | None:
    """How often the fullest expert was chosen, over its layer's mean; the highest of all layers."""
    loads = [load.reshape(-1, load.shape[-1]) for load in loads_of(counted).values()]
    ratios = [load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9) for load in loads]
    return float(max(ratio.max() for ratio in ratios)) if ratios else None


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
        """The record of a step. `metrics` are on the host; `step_s` is the time from the end of the
        previous step to the end of this one."""
        per_device = 1 / (step_s * self._devices)
        model = self._model_flops * per_device
        names = ("loss", "learning_rate", "gradient_norm", "loss_scale")
        return StepRecord(
            **{name: float(getattr(metrics, name)) for name in names},
            aux_loss=None if metrics.aux_loss is None else float(metrics.aux_loss),
            second_loss=None if metrics.second_loss is None else float(metrics.second_loss),
            imbalance=imbalance_of(metrics.counted),
            step=step, finite=bool(metrics.finite), step_s=step_s,
            tokens_per_s=self._tokens / step_s,
            tflops_sc21=self._sc21_flops * per_device / 1e12,
            tflops_model=model / 1e12,
            mfu=model / self._peak_flops if self._peak_flops else None,
        )  # fmt: skip
