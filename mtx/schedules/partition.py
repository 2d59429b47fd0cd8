"""Which layer is where: the only module that knows both model order and (stage, chunk) order.

A model's layers are of one or more kinds. In memory the layers of a kind are stacked
[P, C_kind, N_kind, ...], with zeros where a chunk has fewer of them than another; on disk and in
every canonical tree they are [L_kind, ...] in model order. A chunk without layers of a kind has no
row in its stack: if an encoder and a decoder take two chunks, each stage holds one row of either.

Legend: L layers (L_kind: of a kind) · P stages · C chunks per stage (C_kind: those that have layers
of a kind, on the stage with most of them) · N places for layers in one chunk (N_kind: for those of
a kind)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from mtx.errors import UserError
from mtx.schedules.stretches import Stretch, stretches

EMPTY = -1


class KindRun(NamedTuple):
    """Layers of one kind that follow each other in a chunk."""

    kind: str
    place: int  # of the first, among the chunk's layers
    index: int  # of the first, among the chunk's layers of its kind
    count: int


class Period(NamedTuple):
    """A part of a chunk: the same runs of kinds, `repeats` times."""

    repeats: int
    layers: int
    runs: tuple[KindRun, ...]

    def of_kind(self, kind: str) -> int:
        """The number of layers of a kind in one repeat."""
        return sum(run.count for run in self.runs if run.kind == kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Layers of a model on the chunks of a pipeline."""

    layer: np.ndarray  # int32 [P, C, N]: the layer in each place, or EMPTY
    pattern: tuple[str, ...]  # the kind of each layer, in model order
    row_a_chunk: bool = False  # in every kind's stack, even for chunks that have none of it

    @cached_property
    def count(self) -> np.ndarray:
        """int32 [P, C]: layers of each chunk; they fill its first places."""
        return (self.layer != EMPTY).sum(axis=-1).astype(np.int32)

    @property
    def even(self) -> bool:
        return bool((self.layer != EMPTY).all())

    @property
    def some_empty(self) -> bool:
        """Whether there are chunks without layers."""
        return not self.count.all()

    # -- kinds ------------------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers, in the order in which they first occur in the model."""
        return tuple(dict.fromkeys(self.pattern))

    @cached_property
    def kind(self) -> np.ndarray:
        """int32 [P, C, N]: the index in `kinds` of the layer in each place, or EMPTY."""
        of_layer = np.array([*map(self.kinds.index, self.pattern), EMPTY])
        return of_layer[self.layer].astype(np.int32)  # EMPTY, which is -1, reads the last

    @cached_property
    def chunk_kinds(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """[P][C]: the kinds of the layers of each chunk, in their order."""
        return tuple(
            tuple(tuple(self.kinds[n] for n in chunk if n != EMPTY) for chunk in stage)
            for stage in self.kind
        )

    @cached_property
    def first_kind(self) -> str | None:
        """The kind of every chunk's first layer; None if they differ, or a chunk has no layers."""
        first, *others = {kinds[:1] for chunks in self.chunk_kinds for kinds in chunks}
        return None if others or not first else first[0]

    @cached_property
    def index(self) -> np.ndarray:
        """int32 [P, C, N]: the index of each layer among those of its kind in its chunk."""
        index = np.zeros_like(self.layer)
        for number in range(len(self.kinds)):
            same = self.kind == number
            index[same] = (np.cumsum(same, axis=-1) - 1)[same]
        return index

    def layers_of(self, kind: str) -> np.ndarray:
        """int [L_kind]: the layers of a kind."""
        return np.flatnonzero(np.array(self.pattern) == kind)

    def rows_of(self, kind: str) -> np.ndarray:
        """int [P, C]: the row of each chunk in a kind's stack; arbitrary if it has none of it."""
        there = (self.kind == self.kinds.index(kind)).any(axis=-1)
        if self.row_a_chunk or there.all(axis=1).any():
            return np.broadcast_to(np.arange(there.shape[1]), there.shape)
        return np.maximum(there.cumsum(axis=1) - 1, 0)

    @cached_property
    def row(self) -> np.ndarray | None:
        """int32 [P, kinds, C]: `rows_of` each kind; None if every row is its chunk's number."""
        rows = np.stack([self.rows_of(kind) for kind in self.kinds], axis=1).astype(np.int32)
        return None if (rows == np.arange(rows.shape[-1])).all() else rows

    def slots_of(self, kind: str) -> np.ndarray:
        """int32 [P, C_kind, N_kind]: which of a kind's layers is in each place, or EMPTY."""
        same, rows = self.kind == self.kinds.index(kind), self.rows_of(kind)
        shape = len(rows), rows.max() + 1, same.sum(axis=-1).max()
        slots = np.full(shape, EMPTY, np.int32)
        stage, chunk, _ = np.nonzero(same)
        numbers = np.searchsorted(self.layers_of(kind), self.layer[same])
        slots[stage, rows[stage, chunk], self.index[same]] = numbers
        return slots

    def place_of_layer(self, kind: str) -> np.ndarray:
        """int [L_kind]: where a kind's layers lie in their stack, [P*C_kind*N_kind, ...]."""
        flat = self.slots_of(kind).ravel()
        places = np.flatnonzero(flat != EMPTY)
        return places[np.argsort(flat[places])]

    @cached_property
    def periods(self) -> tuple[Period, ...] | None:
        """The periods that every chunk of every stage consists of, in the fewest runs; None if
        chunks differ."""
        chunks = self.kind.reshape(-1, self.kind.shape[-1])
        if not self.even or (chunks != chunks[0]).any():
            return None
        chunk = [self.kinds[number] for number in chunks[0]]
        return tuple(_period(chunk, stretch) for stretch in stretches(chunk))

    def describe(self) -> str:
        """One line per stage: the layers of each of its chunks."""
        lines = []
        for stage, chunks in enumerate(self.layer):
            spans = [_span(layers[layers != EMPTY]) for layers in chunks]
            lines.append(f"stage {stage}: " + " | ".join(spans))
        return "\n".join(lines)


def _period(chunk: Sequence[str], stretch: Stretch) -> Period:
    runs = (
        KindRun(chunk[place], place, chunk[:place].count(chunk[place]), count)
        for place, count in stretch.runs
    )
    return Period(stretch.times, stretch.size, tuple(runs))


def place_layers(
    layers: int | Sequence[str],
    *,
    pipe: int,
    virtual: int,
    stage_layers: tuple[int, ...] | Literal["even", "balanced"],
    virtual_stages: np.ndarray | None = None,
    costs: Sequence[float] | None = None,
    row_a_chunk: bool = False,
) -> Placement:
    """Places layers in model order on the pipe*virtual virtual stages. layers: the kind of each, or
    their number if all are of one kind, "block". virtual_stages: int [C, P], the virtual stage of
    each chunk of each stage, by default c*P + s. row_a_chunk: see `Placement`.

    stage_layers: "even": the same number on each, else a UserError. "balanced": the heaviest is as
    light as possible, by the `costs` of layers in any unit; if these are equal or not given, counts
    differ by at most one, and the lighter ones come first and last. A tuple: the number of layers
    of each.
    """
    pattern = ("block",) * layers if isinstance(layers, int) else tuple(layers)
    number, layers = pipe * virtual, len(pattern)
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
        if costs is not None and len(set(costs)) > 1:
            counts = _weigh(np.array(costs, float), number)
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
    layer = np.ascontiguousarray(by_chunk, np.int32)
    return Placement(layer=layer, pattern=pattern, row_a_chunk=row_a_chunk)


def _balance(layers: int, number: int) -> np.ndarray:
    if layers < number:
        raise UserError(
            f"layers={layers} are fewer than the pipe*virtual={number} virtual stages; use "
            f"pipe*virtual of at most {layers}, or give stage_layers with zeros where no layer "
            "shall be"
        )
    heavy = layers % number  # virtual stages with one layer more, in the middle
    start = (number - heavy + 1) // 2
    counts = np.full(number, layers // number)
    counts[start : start + heavy] += 1
    return counts


def _weigh(costs: np.ndarray, number: int) -> np.ndarray:
    """The numbers of layers in `number` parts of one or more, cut so that the heaviest part is as
    light as possible and, among such cuts, the sum of squares is least: by dynamic programming over
    (parts, layers in them)."""
    ends = np.concatenate([[0.0], costs.cumsum()])
    part = ends[None] - ends[:, None]  # [i, j]: of layers i to j - 1
    part[np.tril_indices(len(ends))] = np.inf
    heaviest = part[0]
    for _ in range(number - 1):
        heaviest = np.maximum(heaviest[:, None], part).min(axis=0)
    within = np.where(part <= heaviest[-1] * (1 + 1e-9), part**2, np.inf)
    total, cuts = within[0], []
    for _ in range(number - 1):
        sums = total[:, None] + within
        cuts.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    places = [len(costs)]
    for cut in reversed(cuts):
        places.append(int(cut[places[-1]]))
    return np.diff([0, *reversed(places)])


def _span(layers: np.ndarray) -> str:
    if len(layers) == 0:
        return "none"
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
