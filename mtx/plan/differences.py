"""The closed form of a step's time against the timeline of the compiled program, part by part."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from typing import NamedTuple

from mtx.plan.calibration import calibration_of
from mtx.plan.compiled import HOST, Spent
from mtx.plan.priced import PricedRun
from mtx.plan.time import StepTime

_PARTS = {
    "head": "embedding_and_head_s", "embed": "embedding_and_head_s",
    "embed_backward": "embedding_and_head_s", "reduce": "data_comm_s",
    "gather_params": "data_comm_s", "": "optimizer_s", "clip": "optimizer_s",
    "update": "optimizer_s",
}  # fmt: skip
_KINDS = {"matmul": "matmul_s", "attention": "attention_s", "other": "elementwise_s"}


_EXPLAINED = 0.1  # of the compiled seconds: if the closed form is farther off, a reason is given
_WHY = {
    "attention_s": "the kernel compiled is another than the one priced",
    "elementwise_s": "XLA's kernels read and write more than the trace's chains need: the costliest"
    " are listed",
    "embedding_and_head_s": "XLA's kernels, and collectives that wait for no matmul",
    "tensor_comm_s": "XLA's order of them; in ticks of F or B alone it hides other ones",
    "context_comm_s": "XLA's order of them; where memory is short it sends nothing beside anything",
    "expert_comm_s": "XLA's order of them; in ticks of F or B alone nothing lies beside them",
    "host_comm_s": "XLA's order of them, and what else a layer has to hide them beside",
    "pipeline_comm_s": "what XLA puts beside the sends; the head's collectives share their links",
    "bubble_s": "ticks last as long as the slowest stage's, with all that XLA leaves in sight",
    "data_comm_s": "what XLA puts beside them",
    "optimizer_s": "with it what sets buffers to zero and copies arguments, once a step",
    "kernel_starts_s": "counted for each kernel that the trace has; the timeline counts none",
}


class Difference(NamedTuple):
    """Seconds that a step spends on one of its parts."""

    part: str  # a field of StepTime; "kernel_starts_s"; "step_s", the whole
    predicted_s: float
    compiled_s: float

    @property
    def share(self) -> float:
        """How much more was predicted than compiled, as a share of what was compiled."""
        return self.predicted_s / self.compiled_s - 1 if self.compiled_s else float("inf")

    @property
    def why(self) -> str:
        """The reason, if the two differ by more than a tenth; "" otherwise."""
        far = abs(self.predicted_s - self.compiled_s) > _EXPLAINED * self.compiled_s
        return _WHY.get(self.part, "") if far else ""


def differences(plan: PricedRun) -> tuple[Difference, ...]:
    """The differences in a plan with a compiled timeline; () without one. Both times are of this
    program on the plan's machine. What the timeline has beyond the mean stage's own work is idle
    time."""
    times = plan.compiled and plan.compiled.timeline
    if not times:
        return ()
    whole = calibration_of(plan.hardware, "mtx")
    predicted = plan.time_with(replace(whole, kernel_s=0.0))
    step_s = plan.time_with(whole).step_s
    compiled_s: dict[str, float] = defaultdict(float)
    for one in times.spent:
        compiled_s[_field(one)] += one.seconds
    compiled_s["bubble_s"] = times.step_s - sum(compiled_s.values())
    rows = [
        Difference(each.name, getattr(predicted, each.name), compiled_s[each.name])
        for each in fields(StepTime)
    ]
    return (
        *rows,
        Difference("kernel_starts_s", step_s - predicted.step_s, 0.0),
        Difference("step_s", step_s, times.step_s),
    )


def _field(one: Spent) -> str:
    """The field of StepTime that the seconds belong to. Those of the embedding's and head's
    collectives over `pipe` or `tensor` count as `tensor`'s."""
    axes = one.what.removeprefix("exposed over ")
    if axes == one.what:
        return _PARTS.get(one.part) or _KINDS[one.what]
    if axes == HOST:
        return "host_comm_s"
    if "data" in axes.split(" x "):
        return "data_comm_s"
    outside = _PARTS.get(one.part) == "embedding_and_head_s"
    if axes in ("expert", "expert x tensor"):
        return "data_comm_s" if one.part in _PARTS and not outside else "expert_comm_s"
    if axes == "context":
        return "data_comm_s" if one.part in _PARTS and not outside else "context_comm_s"
    return "pipeline_comm_s" if axes == "pipe" and not outside else "tensor_comm_s"
