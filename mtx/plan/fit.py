"""Whether a run fits the machine: checked before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtx.config import Layout, RunConfig
from mtx.errors import UserError
from mtx.plan.attention import Backend
from mtx.plan.candidates import divides, divisors
from mtx.plan.flops import parameters
from mtx.plan.memory import predict_memory, weights_bytes
from mtx.presets import NAMES, preset

_GIB = 2**30


def refuse_if_too_large(run: RunConfig, devices: Sequence) -> None:
    """UserError if the devices cannot hold the parameters, gradients and optimizer of `run`.

    These sizes are exact, so nothing is refused that could run; activations, which are predicted,
    come on top. The error names the largest preset that fits with all of it. `devices` are JAX's,
    of all processes together; if they are fewer than the layout asks for, the memory of all of them
    together counts.
    """
    room = _Room.of(devices)
    if room is None:
        return
    layout, backend = run.layout, room.backend
    memory = predict_memory(
        run.model, layout, run.global_batch, backend=backend, optimizer=run.optimizer
    )
    held = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    if room.holds(held, layout):
        return
    raise UserError(
        f"a model of {parameters(run.model):,} parameters needs at least "
        f"{held * layout.devices / _GIB:,.1f} GiB over {layout.devices:,} devices for parameters, "
        f"gradients and optimizer state, and {room.describe()}; {_nearest_preset(room)}"
    )


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The memory of some devices."""

    devices: int  # of all processes
    local_devices: int
    bytes: int  # of one device, or of all local ones if they share it
    shared: bool  # the local devices are virtual: they share the machine's memory
    backend: Backend

    @classmethod
    def of(cls, devices: Sequence) -> _Room | None:
        """The memory of these devices; None if they do not report it."""
        local = [d for d in devices if d.process_index == d.client.process_index()]
        shared = all(device.platform == "cpu" for device in local)
        if shared:
            size = machine_bytes()
        else:
            limits = [(device.memory_stats() or {}).get("bytes_limit") or 0 for device in local]
            if not all(limits):
                return None
            size = min(limits)
        return cls(
            devices=len(devices),
            local_devices=len(local),
            bytes=size,
            shared=shared,
            backend="cuda" if local and local[0].platform == "gpu" else "xla",
        )

    def holds(self, device_bytes: int, layout: Layout) -> bool:
        """Whether each device of `layout` can have that many bytes."""
        crowding = layout.devices / self.devices  # devices of the layout on each real one
        if self.shared:
            return device_bytes * crowding * self.local_devices <= self.bytes
        return device_bytes * max(crowding, 1) <= self.bytes

    def describe(self) -> str:
        if self.shared:
            return f"this machine has {self.bytes / _GIB:,.1f} GiB"
        return f"the {self.devices:,} devices have {self.bytes / _GIB:,.1f} GiB each"


def _nearest_preset(room: _Room) -> str:
    for name in sorted(NAMES, key=lambda name: parameters(preset(name).model), reverse=True):
        run = preset(name)
        layout = fit_layout(run.layout, room.devices)
        if not room.holds(weights_bytes(run.model, layout, layout.zero), layout):
            continue  # this check traces no layer
        memory = predict_memory(run.model, layout, run.global_batch, backend=room.backend)
        if room.holds(memory.total_bytes, layout):
            count = f"{room.devices:,} device{'s' if room.devices > 1 else ''}"
            return f"the largest preset that fits {count} is {name}"
    return "no preset fits: use smaller values of model.layers and model.hidden"


def fit_layout(layout: Layout, devices: int, given: Mapping[str, Any] | None = None) -> Layout:
    """The largest part of `layout` for at most `devices`: fewer replicas first, then fewer shards
    of experts, parts of sequences, tensor shards and stages, each a divisor of what it was, so that
    everything still divides. given: fields that must have these values, whatever the layout has."""
    given = given or {}
    layout = replace(layout, **_without_uneven_stages(layout, given), **given)
    for axis in ("data", "expert", "context", "tensor", "pipe"):
        if axis in given:
            continue
        size = getattr(layout, axis)
        room = max(devices * size // layout.devices, 1)
        fitting = {axis: max(n for n in divisors(size) if n <= room)}
        layout = replace(layout, **_without_uneven_stages(layout, fitting), **fitting)
    return layout


def _without_uneven_stages(layout: Layout, changes: Mapping[str, Any]) -> dict[str, str]:
    """What else must change if `stage_layers` lists the layers of another number of stages."""
    is_other = changes.get("pipe", layout.pipe) != layout.pipe
    uneven = isinstance(layout.stage_layers, tuple) and "stage_layers" not in changes
    return {"stage_layers": "balanced"} if uneven and is_other else {}


def spread_layout(run: RunConfig, devices: Sequence, *, kept: Collection[str] = ()) -> Layout:
    """The layout of `run` over all of `devices` (JAX's) with the fewest shards with which it is
    predicted to fit: tensor shards within a process first, then pipeline stages; the rest are
    replicas.

    Axes in `kept` stay as they are. If the model or the batch cannot be divided over all devices,
    some are left out.
    """
    room = _Room.of(devices)
    near = sum(device.process_index == devices[0].process_index for device in devices)
    for count in range(len(devices), 0, -1):
        layouts = [
            layout
            for layout in _layouts(run.layout, count, near)
            if all(getattr(layout, axis) == getattr(run.layout, axis) for axis in kept)
            and divides(layout, run.model, run.global_batch)
        ]
        for layout in layouts:
            backend = room.backend if room else "xla"
            memory = predict_memory(run.model, layout, run.global_batch, backend=backend)
            if room is None or room.holds(memory.total_bytes, layout) or layout is layouts[-1]:
                return layout
    return run.layout


def _layouts(layout: Layout, count: int, most_tensor: int) -> Iterator[Layout]:
    """All layouts over `count` devices, those with fewer and nearer shards first; the number of
    parts of a sequence stays the same."""
    parts, left = divmod(count, layout.context)
    for shards in divisors(parts) if not left else ():
        for tensor in reversed(divisors(shards)):
            if tensor <= most_tensor:
                pipe, data = shards // tensor, parts // shards
                yield replace(layout, data=data, pipe=pipe, tensor=tensor)


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
