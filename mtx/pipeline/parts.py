"""What a pipeline is made of.

Legend: N layers of a kind in a chunk
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mtx.config import Layout
from mtx.pipeline.model import PipelineModel
from mtx.schedules.partition import Placement
from mtx.schedules.schedule import Schedule
from mtx.schedules.windows import Window, gather_windows, scatter_windows
from mtx.sharding.mesh import Axes

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model, where its layers lie, and the table that says when each runs."""

    model: PipelineModel
    schedule: Schedule
    placement: Placement
    layout: Layout
    axes: Axes
    # with zero=3: how the leaves of a chunk [N, ...], or of a layer, are sharded over the replicas
    data_shards: Tree = None
    # with zero=1, if the layers' parameters are gathered and their gradients scattered a chunk at a
    # time, in woven ticks: how a chunk's leaves [N, ...] are sharded
    chunk_shards: Tree = None

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The ticks in which that is done; none for the first chunk's gather or the last's
        scatter."""
        return (*gather_windows(self.schedule), *scatter_windows(self.schedule))
