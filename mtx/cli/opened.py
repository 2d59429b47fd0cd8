"""A trained run that a command reads, with the changes that its options make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtx.cli.options import Line, part
from mtx.config import Layout, ModelConfig, RunConfig

ComputedIn = part(ModelConfig, "compute_dtype", "fp8")  # checkpoints hold float32
AnyLayout = part(Layout)


def changed(run: RunConfig, line: Line[Any], devices: int) -> tuple[RunConfig, Layout]:
    """(`run` with the given fields of its model, the layout to read it on). The layout is the run's
    own, reduced if there are fewer devices, with the fields that are given."""
    from mtx.plan.fit import fit_layout

    layout = fit_layout(run.layout, devices, line.changes("layout"))
    changes = line.changes("model")
    model = run.model.without_fp8() if changes.get("fp8") == "off" else run.model
    return replace(run, model=replace(model, **changes)), layout
