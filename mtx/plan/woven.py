"""Whether a step's ticks are woven, if a layout leaves that open."""

from __future__ import annotations

from dataclasses import replace

from mtx.config import Layout, RunConfig
from mtx.plan.calibration import Calibration, calibration_for
from mtx.plan.candidates import MEMORY_AT_MOST
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Zero, predict_memory
from mtx.plan.time import predict_step

# The most that a woven step may take, of the plain step's seconds: with little to hide, weaving
# costs 3 to 10 % on a GPU (docs/results.md, "One GPU"), in barriers that no prediction knows of.
_AT_MOST = 0.97
_GIB = 2**30


def choose_weave(
    run: RunConfig, device: Hardware, *, zero: Zero | None = None,
    calibration: Calibration | None = None, scatter_gather: bool = True,
    expert_imbalance: float = 1.0, share: float = MEMORY_AT_MOST,
) -> tuple[Layout, str]:  # fmt: skip
    """(the layout of `run`, its weave="auto" now "on" if the rest of it allows that, it takes less
    time on `device`, and it fits its memory; why, or "" if there is nothing to say). Left "auto",
    it runs as "off" does.

    zero, calibration, scatter_gather, expert_imbalance: as in `predict_step`; with another
    program's calibration nothing is woven. share: the part of the device's memory that JAX takes.
    """
    plain = run.layout
    calibration = calibration or calibration_for(plain, run.model, device)
    ours = calibration.software.pipeline == "lockstep"
    if plain.weave != "auto" or not plain.weaves or not ours:
        return plain, ""
    woven = replace(plain, weave="on")
    plain_s, woven_s = (
        predict_step(
            run.model, each, run.global_batch, device, zero=zero, calibration=calibration,
            scatter_gather=scatter_gather, expert_imbalance=expert_imbalance,
        ).step_s
        for each in (plain, woven)
    )  # fmt: skip
    if woven_s > _AT_MOST * plain_s:
        return plain, ""
    seconds = f"a step in {woven_s:.4g} s, {plain_s:.4g} without"
    held = predict_memory(
        run.model, woven, run.global_batch, backend=device.backend, zero=zero,
        optimizer=run.optimizer,
    ).total_bytes  # fmt: skip
    if held > share * device.memory_bytes:
        return plain, f"weave off: {seconds}, but {held / _GIB:,.1f} GiB do not fit"
    return woven, f"weave on: {seconds}, as predicted"
