"""The memory use of this process's devices, for the log."""

from __future__ import annotations

from typing import Any

import jax

from mtx.launch.start import give_freed_memory_back
from mtx.plan.fit import machine_bytes

_HEAP_GROWTH = 3.5  # of a process that keeps freed memory, over its devices' temporary buffers


def device_memory(compiled: Any = None) -> dict:
    """{"devices": [{"id", "in_use_bytes", "peak_bytes", "limit_bytes"}, ...]} for devices that
    report it, and {"compiled_bytes"} on each device, from a compiled program's memory analysis; {}
    if neither is known."""
    found = {}
    if compiled is not None:
        sizes = compiled.argument_size_in_bytes + compiled.output_size_in_bytes
        held = sizes - compiled.alias_size_in_bytes
        found["compiled_bytes"] = held + compiled.temp_size_in_bytes
    stats = {device.id: device.memory_stats() for device in jax.local_devices()}
    devices = [
        {
            "id": number,
            "in_use_bytes": known.get("bytes_in_use"),
            "peak_bytes": known.get("peak_bytes_in_use"),
            "limit_bytes": known.get("bytes_limit"),
        }
        for number, known in stats.items()
        if known
    ]
    return found | ({"devices": devices} if devices else {})


def host_memory(compiled: Any, *, devices: int, room_bytes: int) -> str:
    """Says how much host memory a compiled program's activations take on a machine with `devices`
    of the devices, and whether `room_bytes` is enough; "" if none are kept there."""
    held = devices * compiled.host_temp_size_in_bytes
    if not held:
        return ""
    said = f"host       {held / 2**30:,.1f} GiB of activations, of {room_bytes / 2**30:,.1f} GiB"
    return said + (" that it has not: use less offload" if held > room_bytes else "")


def spare_memory(compiled: Any) -> bool:
    """Makes a process of virtual devices give freed memory back if keeping it could take more than
    half of the machine's memory; returns whether it could."""
    if jax.default_backend() != "cpu":
        return False
    temporary = compiled.temp_size_in_bytes * jax.local_device_count()
    if too_large := _HEAP_GROWTH * temporary > machine_bytes() / 2:
        give_freed_memory_back()
    return too_large
