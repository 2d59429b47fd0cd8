"""Lets schedules and simulations show themselves in a notebook: `%load_ext mtx.view.notebook`."""

from __future__ import annotations

from typing import Any

from mtx.pipeline.schedule import Schedule
from mtx.pipeline.simulate import Simulation
from mtx.view.schedule import show


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext` calls: registers the pictures with IPython's display."""
    svg = ipython.display_formatter.formatters["image/svg+xml"]
    for shown in (Schedule, Simulation):
        svg.for_type(shown, lambda one: show(one)._repr_svg_())


def unload_ipython_extension(ipython: Any) -> None:
    """What `%unload_ext` calls."""
    svg = ipython.display_formatter.formatters["image/svg+xml"]
    for shown in (Schedule, Simulation):
        svg.pop(shown)
