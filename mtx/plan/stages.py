"""For each stage of a pipeline: where its residuals wait, and how much of them it would have to
offload if it were on its own.

Early stages have more in flight. But all run one program, whose arrays are as large on each stage
as on the one that needs the most, and in each tick all wait for the slowest. So a separate fraction
for each stage would free no memory of the program, and would save time only when the stage with the
most in flight, whose copies are the longest, sits out a tick.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtx.config import Layout, ModelConfig
from mtx.plan.attention import Backend
from mtx.plan.choose import schedule_for
from mtx.plan.memory import offloaded_layers, stash_slot_bytes

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Residuals of one stage, at the moment when it has the most of them."""

    in_flight: int  # microbatches of a chunk
    device_bytes: int
    host_bytes: int
    alone: float  # the least fraction with which its own residuals would fit


def residuals_of_stages(
    model: ModelConfig, layout: Layout, global_batch: int, *, backend: Backend, room_bytes: float
) -> tuple[Waits, ...]:
    """The residuals of each stage. room_bytes: what a device has for residuals. `alone` is the
    solution of MEMO's programme (Zhao et al. 2024) for that stage: only the device's memory asks
    for a larger alpha, and time, the link and the host for a smaller one, so it is the least that
    fits."""
    whole = stash_slot_bytes(model, layout, backend=backend)
    layers = offloaded_layers(model, layout, backend=backend).values()
    gone = sum(places * each for places, each in layers)
    in_flight = schedule_for(layout, layout.microbatches(global_batch)).in_flight.tolist()
    return tuple(
        Waits(
            in_flight=most, device_bytes=most * (whole - gone), host_bytes=most * gone,
            alone=max(0.0, 1 - room_bytes / (most * whole)),
        )
        for most in in_flight
    )  # fmt: skip


def stages_text(stages: tuple[Waits, ...]) -> str:
    """For people; the first stage first."""

    def of_all(form: str, values) -> str:
        return ", ".join(format(value, form) for value in values)

    device = of_all(".1f", (each.device_bytes / _GIB for each in stages))
    host = of_all(".1f", (each.host_bytes / _GIB for each in stages))
    alone = of_all(".2f", (each.alone for each in stages))
    return (
        f"{of_all('d', (each.in_flight for each in stages))} in flight: {device} GiB on the "
        f"device, {host} GiB on the host; alone each would need {alone} of its own there"
    )
