"""What this process's devices have in memory, for the log."""

from __future__ import annotations

from typing import Any

import jax


def device_memory(compiled: Any = None) -> dict:
    """{"devices": [{"id", "in_use_bytes", "peak_bytes", "limit_bytes"}, ...]} of those that say,
    and, of a compiled program's memory analysis, {"compiled_bytes"} on each device; {} where
    neither is known."""
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
