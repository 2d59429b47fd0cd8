"""The schedule of a run, from what its layout says."""

from __future__ import annotations

from functools import lru_cache

from mtx.config import Layout
from mtx.pipeline.makers import make
from mtx.pipeline.schedule import Schedule


@lru_cache(maxsize=64)
def schedule_for(layout: Layout, microbatches: int) -> Schedule:
    """The table that a layout's name stands for.

    UserError where there is none that fits the layout's stages and chunks.
    """
    return make(
        layout.schedule, microbatches=microbatches, stages=layout.pipe, virtual=layout.virtual,
        slices=layout.slices,
    )  # fmt: skip
