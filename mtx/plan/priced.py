"""A run with a price: what it needs and how fast it will be on a target, in numbers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from mtx.config import Layout, Recompute, RunConfig
from mtx.config.layout import ContextAttention
from mtx.plan import flops
from mtx.plan.calibration import Calibration, calibration_for, calibration_of
from mtx.plan.candidates import CONTEXT_WAYS, MEMORY_AT_MOST, RECOMPUTE, divides
from mtx.plan.compiled import Compiled, Tick
from mtx.plan.hardware import Hardware
from mtx.plan.memory import Memory, Zero, predict_memory
from mtx.plan.time import StepTime, later_rounds, predict_step

GIB = 2**30
DAY_S = 86400
MEMORY_BY_DEFAULT = 0.75  # of a GPU's memory: what JAX takes unless told otherwise


def memory_share() -> float:
    """The part of a GPU's memory that JAX takes, by the environment; at most MEMORY_AT_MOST."""
    names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    told = next(filter(None, map(os.environ.get, names)), None)
    return min(float(told or MEMORY_BY_DEFAULT), MEMORY_AT_MOST)


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run on a target: what it needs and how fast it will be. Time and memory are predicted."""

    run: RunConfig
    target: str  # a name in `mtx.plan.hardware`, or the path of a TOML file
    hardware: Hardware
    zero: Zero  # sharded over data: 0 nothing (only priced), 1 the optimizer, 3 parameters as well
    scatter_gather: bool  # messages between stages are cut over `tensor`
    expert_imbalance: float = 1.0  # tokens of the fullest expert, over the mean
    time: StepTime
    memory: Memory
    chosen: tuple[str, ...] = ()  # choices that nobody asked for, and their reasons
    compiled: Compiled | None = None

    @property
    def later_rounds(self) -> int:
        """Rounds after the first, for tokens whose experts have no room in the first."""
        return later_rounds(
            self.run.model, self.run.layout, self.hardware, expert_imbalance=self.expert_imbalance
        )

    @property
    def compiled_tick(self) -> Tick | None:
        """The steady tick of the compiled step; None if none was compiled for a GPU."""
        times = self.compiled and self.compiled.timeline
        return times.tick if times else None

    @property
    def calibration(self) -> Calibration:
        """The machine's constants and the software for which time is predicted."""
        return calibration_for(self.run.layout, self.run.model, self.hardware)

    def time_of(self, software: str) -> StepTime:
        """The step with other software; a name in `mtx.plan.calibration.SOFTWARE`."""
        return self.time_with(calibration_of(self.hardware, software))

    def time_with(self, calibration: Calibration) -> StepTime:
        """The step with other constants."""
        return self._step(self.run.layout, calibration)

    @property
    def better_recompute(self) -> tuple[Recompute, StepTime, Memory] | None:
        """The fastest other way to recompute that fits: one faster than the layout's, or any if the
        layout's does not fit. None if there is no such way, or nothing to recompute."""
        layout, fits, found = self.run.layout, self._fits(self.memory), []
        if layout.stash == "inputs" or (layout.recompute == "none" and fits):
            return None
        for way in RECOMPUTE[1:]:
            if way == layout.recompute or (fits and way == "full"):  # which is slower than any
                continue
            other = replace(layout, recompute=way)
            memory = predict_memory(
                self.run.model, other, self.run.global_batch, backend=self.hardware.backend,
                zero=self.zero, optimizer=self.run.optimizer,
            )  # fmt: skip
            if self._fits(memory):
                found.append((way, self._step(other, self.calibration), memory))
        best = min(found, key=lambda one: one[1].step_s, default=None)
        return best if best and (not fits or best[1].step_s < self.time.step_s) else None

    @property
    def context_ways(self) -> dict[ContextAttention, StepTime]:
        """The step with each way of attention over `context` that the layout allows."""
        found = {}
        for way in CONTEXT_WAYS if self.run.layout.context > 1 else ():
            other = replace(self.run.layout, context_attention=way)
            if divides(other, self.run.model, self.run.global_batch):
                found[way] = self._step(other, self.calibration)
        return found

    def chose(self, *names: str) -> bool:
        """Whether one of these fields is among the choices that nobody asked for, which are texts
        such as "heads=8, vocab=512: ..." or "weave on: ..."."""
        said = ", ".join(choice.partition(":")[0] for choice in self.chosen)
        return not {re.split("[= ]", each)[0] for each in said.split(", ")}.isdisjoint(names)

    def _fits(self, memory: Memory) -> bool:
        return memory.total_bytes <= MEMORY_AT_MOST * self.hardware.memory_bytes

    def _step(self, layout: Layout, calibration: Calibration) -> StepTime:
        return predict_step(
            self.run.model, layout, self.run.global_batch, self.hardware, zero=self.zero,
            scatter_gather=self.scatter_gather, calibration=calibration,
            expert_imbalance=self.expert_imbalance,
        )  # fmt: skip

    @property
    def gpus(self) -> int:
        return self.run.layout.devices

    @property
    def tokens_per_step(self) -> int:
        return self.run.global_batch * self.run.model.sequence

    @property
    def sequences_per_s(self) -> float:
        return self.run.global_batch / self.time.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.time.step_s

    @property
    def tflops_per_gpu_sc21(self) -> float:
        """In the unit of SC'21: every block forward twice, attention not halved."""
        done = flops.sc21_flops(self.run.model, self.run.global_batch)
        return done / self.time.step_s / self.gpus / 1e12

    @property
    def tflops_per_gpu_model(self) -> float:
        """In the unit of today's MFU."""
        done = flops.model_flops(self.run.model, self.run.global_batch)
        return done / self.time.step_s / self.gpus / 1e12

    @property
    def mfu(self) -> float:
        peak = self.hardware.peak_flops(self.run.model.compute_dtype)
        return self.tflops_per_gpu_model * 1e12 / peak

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over ideal time in the pipeline, of the average device, as predicted."""
        return self.time.bubble_over_ideal

    @property
    def memory_share(self) -> float:
        return self.memory.total_bytes / self.hardware.memory_bytes

    @property
    def fits(self) -> bool:
        return self.memory_share <= MEMORY_AT_MOST

    @property
    def memory_fraction(self) -> float | None:
        """What XLA_PYTHON_CLIENT_MEM_FRACTION must be; None if JAX's default will do."""
        return MEMORY_AT_MOST if self.memory_share > MEMORY_BY_DEFAULT else None

    def days(self, tokens: float) -> float:
        """Days to train on that many tokens at the predicted speed, without a break."""
        return tokens / self.tokens_per_s / DAY_S

    def gpu_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.gpus
