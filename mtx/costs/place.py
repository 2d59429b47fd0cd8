"""Which layers each stage has: "balanced" weighs them by the FLOPs that a trace finds in them, of
F, of B, and of W if there is something to train.

Embedding and head need no weight, as they are the same for all stages: the vocabulary is split over
`pipe`, so that each stage computes as much of them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mtx.config import Layout, ModelConfig, Recompute
from mtx.costs.ask import layer_cost, pattern_of
from mtx.schedules.makers import MAKERS
from mtx.schedules.partition import Placement, place_layers
from mtx.schedules.schedule import vee_placement
from mtx.sizes import StageLayers


def placement_of(
    model: ModelConfig, layout: Layout, virtual_stages: np.ndarray | None = None
) -> Placement:
    """The placement of a model's layers on the chunks of a layout. virtual_stages: as in
    `place_layers`; None: in order, or up the stages and down again for tables that are made for two
    chunks."""
    recompute = "full" if layout.stash == "inputs" else layout.recompute
    shape = layout.pipe, layout.virtual, layout.stage_layers
    row_a_chunk = layout.weave == "on"
    if virtual_stages is None:
        maker = MAKERS.get(layout.schedule)
        return _placed(
            model, *shape, recompute, row_a_chunk, maker is not None and maker.virtual == 2
        )
    return _place(model, *shape, recompute, row_a_chunk, virtual_stages)


@lru_cache(maxsize=4096)
def _placed(
    model: ModelConfig, pipe: int, virtual: int, stage_layers: StageLayers, recompute: Recompute,
    row_a_chunk: bool, vee: bool,
) -> Placement:  # fmt: skip
    virtual_stages = vee_placement(pipe) if vee else None
    return _place(model, pipe, virtual, stage_layers, recompute, row_a_chunk, virtual_stages)


def _place(
    model: ModelConfig, pipe: int, virtual: int, stage_layers: StageLayers, recompute: Recompute,
    row_a_chunk: bool, virtual_stages: np.ndarray | None,
) -> Placement:  # fmt: skip
    weighed = stage_layers == "balanced" and pipe * virtual > 1
    return place_layers(
        pattern_of(model), pipe=pipe, virtual=virtual, stage_layers=stage_layers,
        virtual_stages=virtual_stages, row_a_chunk=row_a_chunk,
        costs=layer_flops(model, recompute) if weighed else None,
    )  # fmt: skip


def heaviest(model: ModelConfig, layout: Layout) -> float:
    """FLOPs per sequence of the layers on the virtual stage that has the most."""
    costs, placement = np.array(layer_flops(model)), placement_of(model, layout)
    return float(np.where(placement.layer < 0, 0.0, costs[placement.layer]).sum(axis=-1).max())


def layer_flops(model: ModelConfig, recompute: Recompute = "none") -> tuple[float, ...]:
    """FLOPs of the matmuls of each layer, in model order, for one sequence, forward and
    backward."""
    pattern = pattern_of(model)
    kinds = dict.fromkeys(pattern)
    if len(kinds) == 1:  # they are alike, and need not be traced
        return (1.0,) * len(pattern)
    costs = {
        kind: layer_cost(model, kind=kind, recompute=recompute, kernel="cudnn").flops("FBW", 1)
        for kind in kinds
    }
    return tuple(costs[kind] for kind in pattern)
