"""A layout as one looks around in it: choices in, and out comes all that is shown of them.

No widgets here: `mtx.view.notebook.explore` puts sliders before `look`, and a page behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mtx.config import Layout, RunConfig
from mtx.plan.choose import schedule_for
from mtx.plan.compare import seconds
from mtx.plan.plan import Plan, make_plan
from mtx.plan.summary import title
from mtx.schedules.orders import KINDS
from mtx.sharding.axes import MESH
from mtx.view.explore_device import Held, Holdings
from mtx.view.memory import fill_bars
from mtx.view.mesh import Device, fill_mesh
from mtx.view.picture import IDLE, Picture, figure_title, new_figure, rgb, shade, split_figure
from mtx.view.plan import fill_time
from mtx.view.spans import runs_of, shares

CHOICES = ("data", "pipe", "tensor", "virtual", "microbatch")  # fields of the layout with a slider
_BATCHES = 4  # doublings and halvings of the run's own that the slider has
_MOST_SHARDS = 64
_MOST_OPS = 120_000  # of a schedule that is drawn
_BINS = 720  # of time, in the picture of a schedule
_SENT = {"layers": "pipeline_comm_s", "batch": "data_comm_s", "weights": "tensor_comm_s"}


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run on a target, seen from one device. In a notebook, the plan as a picture."""

    plan: Plan
    device: Device

    @property
    def layout(self) -> Layout:
        return self.plan.run.layout

    @property
    def sent_s(self) -> dict[str, float]:
        """What sends over each axis take of a step, by the plan."""
        time = self.plan.time
        return {axis.name: getattr(time, _SENT.get(axis.splits, ""), 0.0) for axis in MESH}

    @property
    def held(self) -> list[Held]:
        """What the device holds of each parameter."""
        return self.held_by(self.device)

    def held_by(self, device: Device) -> list[Held]:
        """The same of another one."""
        return _holdings(self.plan.run).of(device)

    @cached_property
    def timeline(self) -> np.ndarray | None:
        """float [P, kinds, N, 3]: what each stage does over time, as colours: of each kind of op
        a band, full where the stage does it as much as it ever does, light where it idles. None
        where the schedule is too long to be drawn."""
        layout, microbatches = self.layout, self.plan.run.microbatches
        if layout.pipe * layout.virtual * microbatches > _MOST_OPS:
            return None
        (run,) = runs_of(schedule_for(layout, microbatches))
        edges = np.linspace(run.start.min(), run.end.max(), _BINS + 1)
        kinds = len(run.schedule.halves)
        taken = shares(run, edges)[..., :kinds].swapaxes(1, 2)  # [P, kinds, N]
        usual = np.nanmedian(np.where(taken > 0.01, taken, np.nan), axis=2, keepdims=True)
        colours = np.stack([rgb(shade(kind)) for kind in range(kinds)])
        full = np.clip(taken / usual, 0, 1)[..., None]
        return full * colours[:, None] + (1 - full) * rgb(IDLE)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the timeline's bands."""
        return tuple(KINDS[: self.timeline.shape[1]]) if self.timeline is not None else ()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        plan, figure = self.plan, new_figure(9.5, 9.6)
        figure_title(
            figure, f"{title(plan)}: {seconds(plan.time.step_s)} a step, "
            f"bubble {plan.bubble_over_ideal:.2%} of ideal time",
        )  # fmt: skip
        mesh, memory, time = split_figure(figure, 4.4, 2.2, 3.0)
        fill_mesh(mesh, self.layout, plan.hardware)
        fill_bars(memory.add_subplot(), [plan])
        fill_time(time.add_subplot(), plan)
        return Picture(figure=figure)._repr_png_()


@functools.lru_cache(maxsize=16)
def _holdings(run: RunConfig) -> Holdings:
    return Holdings(run)


def look(
    run: RunConfig,
    *,
    target: str = "a100-80gb",
    device: Mapping[str, int] | int = 0,
    **choices: int,
) -> Look:
    """`run` with other numbers for `choices`, which are fields of its layout or `global_batch`.

    device: its rank, or its coordinates {"pipe": 0, "data": 0, "tensor": 0}; those beyond the mesh
    are taken for the last ones. Layers that the run places by hand are placed "balanced" where
    there are now other chunks. UserError where the choices do not go together.
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
    """What the sliders of a run can be set to: for each field alone what divides the model or the
    batch, and powers of two. Not all go together, which is then said."""
    model, batch, layout = run.model, run.global_batch, run.layout
    batches = [batch * 2**n for n in range(_BATCHES + 1)]
    batches += [batch // 2**n for n in range(1, _BATCHES + 1) if batch % 2**n == 0]
    most_data = max(layout.data, min(max(batches), 4 * layout.data, 8192))
    return {
        "data": _steps(max(batches), most_data, layout.data),
        "pipe": _steps(model.layers, model.layers, layout.pipe),
        "tensor": _steps(model.heads, min(model.heads, _MOST_SHARDS), layout.tensor),
        "virtual": _steps(model.layers, min(model.layers, 16), layout.virtual),
        "microbatch": _steps(max(batches), 16, layout.microbatch),
        "global_batch": tuple(sorted(batches)),
    }


def _steps(whole: int, most: int, own: int) -> tuple[int, ...]:
    divisors = {number for number in range(1, most + 1) if whole % number == 0}
    return tuple(sorted({own} | divisors | {2**n for n in range(most.bit_length())}))
