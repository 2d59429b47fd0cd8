"""Which layer lives where: the only place that knows both model order and (stage, chunk) order.

Legend: L layers · P stages · C chunks per stage · N places for layers in one chunk.
Which virtual stage a chunk of a stage is says the schedule. In memory layers are stacked
[P, C, N, ...]; on disk and in every canonical tree they are [L, ...] in model order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mtx.errors import UserError

EMPTY = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Layers of a model on the chunks of a pipeline."""

    layer: np.ndarray  # int32 [P, C, N]: the layer in each place, or EMPTY

    @cached_property
    def count(self) -> np.ndarray:
        """int32 [P, C]: layers of each chunk; they fill its first places."""
        return (self.layer != EMPTY).sum(axis=-1).astype(np.int32)

    @property
    def even(self) -> bool:
        return bool((self.layer != EMPTY).all())

    @cached_property
    def place_of_layer(self) -> np.ndarray:
        """int [L]: where each layer lies in the stack seen as [P*C*N, ...]."""
        flat = self.layer.ravel()
        places = np.flatnonzero(flat != EMPTY)
        return places[np.argsort(flat[places])]

    def describe(self) -> str:
        """One line a stage: the layers of each of its chunks."""
        lines = []
        for stage, chunks in enumerate(self.layer):
            spans = [_span(layers[layers != EMPTY]) for layers in chunks]
            lines.append(f"stage {stage}: " + " | ".join(spans))
        return "\n".join(lines)


def place_layers(
    layers: int,
    *,
    pipe: int,
    virtual: int,
    stage_layers: tuple[int, ...] | Literal["even", "balanced"],
    virtual_stages: np.ndarray | None = None,
) -> Placement:
    """Places layers in model order on the virtual stages; `virtual_stages` int [C, P]: which one
    each chunk of each stage is, c*P + s where not given.

    "even": the same number on each, else a UserError. "balanced": counts differ by one at most,
    and the lighter ones stand first and last. A tuple: the number of layers of every virtual stage.
    """
    number = pipe * virtual
    if stage_layers == "even":
        if layers % number:
            below, above = layers // number * number, -(-layers // number) * number
            raise UserError(
                f"layers={layers} cannot be divided over pipe*virtual={pipe}*{virtual}; use layers="
                f"{f'{below} or ' if below else ''}{above}, another pipe or virtual, or "
                "stage_layers='balanced' to place them unevenly"
            )
        counts = np.full(number, layers // number)
    elif stage_layers == "balanced":
        counts = _balance(layers, number)
    else:
        counts = np.array(stage_layers)
        if len(counts) != number or counts.sum() != layers or counts.min() < 0:
            raise UserError(
                f"stage_layers={tuple(stage_layers)} must give the layers of each of the "
                f"pipe*virtual={pipe}*{virtual} virtual stages, {layers} in all; it gives "
                f"{len(counts)} counts with the sum {counts.sum()}"
            )
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    place = np.arange(counts.max())
    layer = np.where(place < counts[:, None], first[:, None] + place, EMPTY)
    if virtual_stages is None:
        virtual_stages = np.arange(pipe * virtual).reshape(virtual, pipe)
    by_chunk = layer[virtual_stages].swapaxes(0, 1)
    return Placement(layer=np.ascontiguousarray(by_chunk, np.int32))


def _balance(layers: int, virtual_stages: int) -> np.ndarray:
    if layers < virtual_stages:
        raise UserError(
            f"layers={layers} are fewer than the pipe*virtual={virtual_stages} virtual stages; use "
            f"pipe*virtual of at most {layers}, or give stage_layers with zeros where no layer "
            "shall be"
        )
    heavy = layers % virtual_stages  # virtual stages with one layer more, in the middle
    start = (virtual_stages - heavy + 1) // 2
    counts = np.full(virtual_stages, layers // virtual_stages)
    counts[start : start + heavy] += 1
    return counts


def _span(layers: np.ndarray) -> str:
    if len(layers) == 0:
        return "none"
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
