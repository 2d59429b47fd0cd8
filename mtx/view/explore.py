"""Exploring a layout: choices go in, and everything that is shown for them comes out.

No widgets here: `mtx.view.notebook.explore` feeds `look` from sliders and shows it as a page.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtx.config import Layout, RunConfig
from mtx.plan.plan import Plan, make_plan
from mtx.sharding.axes import AXES, MESH
from mtx.view.explore_device import Held, Holdings
from mtx.view.mesh import Device
from mtx.view.picture import Picture
from mtx.view.plan import draw_plan

CHOICES = (*AXES, "virtual", "microbatch")  # fields of the layout with a slider
_BATCHES = 4  # doublings and halvings of the run's own batch on the slider
_MOST_SHARDS = 64
_SENT = {  # by an axis' name or what it splits; gradients are summed over data and expert at once
    "expert": "expert_comm_s", "layers": "pipeline_comm_s", "batch": "data_comm_s",
    "sequence": "context_comm_s", "weights": "tensor_comm_s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run on a target, seen from one device. In a notebook, it shows the plan as a picture."""

    plan: Plan
    device: Device

    @property
    def layout(self) -> Layout:
        return self.plan.run.layout

    @property
    def sent_s(self) -> dict[str, float]:
        """The time in a step that sends over each axis take, by the plan."""
        time = self.plan.time
        return {
            axis.name: getattr(time, _SENT.get(axis.name) or _SENT.get(axis.splits, ""), 0.0)
            for axis in MESH
            if axis.name in self.layout.shown
        }

    def held_by(self, device: Device) -> list[Held]:
        """What a device holds of each parameter."""
        return _holdings(self.plan.run).of(device)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return Picture(figure=draw_plan(self.plan))._repr_png_()


_holdings = functools.lru_cache(maxsize=16)(Holdings)


def look(
    run: RunConfig,
    *,
    target: str = "a100-80gb",
    device: Mapping[str, int] | int = 0,
    **choices: int,
) -> Look:
    """`run` with other numbers for `choices`, which are fields of its layout or `global_batch`.

    device: its rank, or its coordinates {"pipe": 0, "data": 0, "tensor": 0}; beyond the mesh, the
    last ones are taken. Layers that the run places by hand are placed "balanced" if the number of
    chunks has changed. UserError if the choices do not go together.
    """
    batch = choices.pop("global_batch", run.global_batch)
    layout = replace(run.layout, **choices)
    if isinstance(layout.stage_layers, tuple):
        if len(layout.stage_layers) != layout.pipe * layout.virtual:
            layout = replace(layout, stage_layers="balanced")
    plan = make_plan(replace(run, layout=layout, global_batch=batch), target=target)
    layout = plan.run.layout
    if isinstance(device, int):
        return Look(plan=plan, device=Device(layout=layout, rank=min(device, layout.devices - 1)))
    return Look(plan=plan, device=Device.at_place(layout, device))


def choices_of(run: RunConfig) -> dict[str, tuple[int, ...]]:
    """The values on the sliders of a run: for each field by itself, divisors of the model or the
    batch, and powers of two. Not all go together; then `look` says so. A single number if the model
    leaves no choice, as a dense model does for `expert`."""
    model, batch, layout = run.model, run.global_batch, run.layout
    experts = model.routed_experts
    batches = [batch * 2**n for n in range(_BATCHES + 1)]
    batches += [batch // 2**n for n in range(1, _BATCHES + 1) if batch % 2**n == 0]
    most_data = max(layout.data, min(max(batches), 4 * layout.data, 8192))
    shards = {
        "data": _steps(max(batches), most_data, layout.data),
        "pipe": _steps(model.layers, model.layers, layout.pipe),
        "expert": _steps(experts, min(experts, _MOST_SHARDS), layout.expert) if experts else (1,),
        "context": _steps(
            model.sequence // 2, min(model.sequence // 2, _MOST_SHARDS), layout.context
        ),
        "tensor": _steps(model.heads, min(model.heads, _MOST_SHARDS), layout.tensor),
    }
    return {axis: shards.get(axis, (layout.sizes[axis],)) for axis in AXES} | {
        "virtual": _steps(model.layers, min(model.layers, 16), layout.virtual),
        "microbatch": _steps(max(batches), 16, layout.microbatch),
        "global_batch": tuple(sorted(batches)),
    }


def _steps(whole: int, most: int, own: int) -> tuple[int, ...]:
    divisors = {number for number in range(1, most + 1) if whole % number == 0}
    return tuple(sorted({own} | divisors | {2**n for n in range(most.bit_length())}))
