"""One call of a pipeline: what stays the same from tick to tick, and the carry before the first.

Legend: M microbatches · B rows · S sequence (s: shard) · C chunks · N layers of a kind in a chunk ·
R ring slots
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.carry import Carry, Gradients, Messages, Stash
from mtx.pipeline.model import Stream
from mtx.pipeline.parts import Parts
from mtx.pipeline.slots import read
from mtx.pipeline.stage import Stage, row_of, tables_of
from mtx.pipeline.ticks import Tick, ticks_of
from mtx.pipeline.trees import float_zeros
from mtx.pipeline.weights import LayerShards, Weights
from mtx.schedules.schedule import IDLE, Route
from mtx.sharding.fp8 import arrays_of
from mtx.sharding.parameter import chosen

Tree = Any


class Call:
    """One call of a pipeline, without its ticks, while it is traced."""

    def __init__(self, pipeline: Parts, params, batch, samples_MB=None, rng=None, loss_weight=1.0):
        self.model, self.schedule = pipeline.model, pipeline.schedule
        self.layout, self.axes = pipeline.layout, pipeline.axes
        self.shared, self.batch = {part: params[part] for part in ("embed", "head")}, batch
        shards, unit = pipeline.data_shards, self.layout.zero_unit
        chunks, layers = (shards if unit == wanted else None for wanted in ("chunk", "layer"))
        inputs = self.model.inputs["layers"]
        self.trained = self.model.trained
        of_layers = self.trained["layers"]
        self.samples_MB, self.rng, self.loss_weight = samples_MB, rng, loss_weight
        pipe, placement = self.axes.pipe, pipeline.placement
        self.placement = placement
        self.index = lax.axis_index(pipe) if pipe else jnp.zeros((), jnp.int32)
        tables = tables_of(placement, self.index)
        self.weights = Weights(
            layers=params["layers"], inputs=inputs, shards=chunks, trained=of_layers,
            row_of=partial(row_of, tables, placement),
        )  # fmt: skip
        self.first_chunk, first = self.schedule.first_virtual_stage
        self.last_chunk, last = self.schedule.last_virtual_stage
        self.holds_first, self.holds_last = self.index == first, self.index == last
        self.stream = jax.eval_shape(
            self.model.embed, self.shared, self.batch_of(0), self.context(0, 0)
        )
        self.stage = Stage(
            model=self.model, layer_params=self.weights.layer, placement=placement,
            tables=tables, context=self.context, stream=self.stream, slices=self.schedule.slices,
            split=self.schedule.split, offload_fraction=self.layout.offload_fraction,
            in_place=self.axes.in_place and self.schedule.slices == 1,
            shards=layers and {
                kind: LayerShards(own, inputs[kind], of_layers[kind])
                for kind, own in layers.items()
            },
        )  # fmt: skip

    # -- what lies where ------------------------------------------------------------------------

    def batch_of(self, item):
        """Leaves [B, S], or a slice of S."""
        slices = self.schedule.slices
        rows = read(self.batch, self._microbatch(item))
        if slices == 1:
            return rows

        def cut(a_BS):
            size = a_BS.shape[1] // slices
            return lax.dynamic_slice_in_dim(a_BS, item % slices * size, size, 1)

        return jax.tree.map(cut, rows)

    def _microbatch(self, item):
        return item if self.schedule.slices == 1 else item // self.schedule.slices

    def context(self, item, layer):
        """The model's context for the call of a layer, or of the embedding if `layer` is IDLE."""
        slices, samples_MB = self.schedule.slices, self.samples_MB
        part = item % slices if slices > 1 else 0
        samples_B = None if samples_MB is None else read(samples_MB, self._microbatch(item))
        busy = None if self.layout.idle == "skip" else item != IDLE
        return self.model.context(layer, self.batch_of(item), samples_B, self.rng, part, busy)

    def zeros(self) -> Stream:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stream)

    def ring(self, slots: int) -> Tree:
        return jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), self.stream)

    def rings(self, routes: tuple[Route, ...]) -> tuple[Tree, ...]:
        """A ring for each route; None if all its values are used in the tick they arrive in."""
        return tuple(self.ring(r.ring.slots) if r.ring.slots else None for r in routes)

    def no_arrivals(self) -> tuple[Stream, ...]:
        return tuple(self.zeros() for _ in self.schedule.receives)

    def start(self) -> Carry:
        schedule, stage = self.schedule, self.stage
        by_inputs = self.layout.stash == "inputs"
        made_by_w, held = stage.made_by_w(), self.weights.start()
        left = stage.offload.nothing_left() if stage.offload else None
        waits, cache, dcache = schedule.weight_stash, schedule.cache, schedule.gradient_cache

        def zeros(by_w: bool):
            return jax.tree.map(
                lambda a, is_by_w: float_zeros(a) if is_by_w == by_w else None,
                chosen(arrays_of(self.weights.gathered(held)), self.trained["layers"]),
                made_by_w,
            )

        return Carry(
            messages=Messages(
                x=self.no_arrivals(),
                dx=self.zeros(),
                receives=self.rings(schedule.receives),
                gradient_receives=self.rings(schedule.gradient_receives),
                outputs=self.ring(schedule.outputs.slots),
            ),
            stash=Stash(
                layers=(
                    self.ring(schedule.slots)
                    if by_inputs
                    else stage.stash(schedule.slots, written_first=self.written_first)
                ),
                deferred=stage.weight_stash(waits.slots + self.zero_slot if waits else 0),
                caches=stage.caches(cache.slots) if cache else None,
                dcaches=stage.caches(dcache.slots) if dcache else None,
                left=left,
                ahead=left and left.parts,
            ),
            weights=(held, held),
            gradients=Gradients(
                of_b=zeros(by_w=False),
                of_w=zeros(by_w=True),
                reduced=self.weights.sums(),
                shared=jax.tree.map(float_zeros, self.of_trained(self.shared)),
            ),
            losses=self.no_losses(),
        )

    def of_trained(self, shared: Tree) -> Tree:
        """The parameters of embedding and head that are trained."""
        return chosen(shared, {part: self.trained[part] for part in shared})

    def no_losses(self) -> dict[str, jax.Array]:
        """Zeros, float32 [] each."""
        losses = jax.eval_shape(self.model.losses, self.shared, self.stream, self.batch_of(0))
        return {name: jnp.zeros((), jnp.float32) for name in losses}

    @property
    def written_first(self) -> bool:
        """Whether every B that is computed reads what an F has written to the stash: no stage
        computes a B that it sits out."""
        busy, phases = self.schedule.backward.busy, self.schedule.phases
        computed = (busy[phase.start : phase.stop] for phase in phases if phase.backward)
        return self.layout.idle == "skip" or all(ticks.all() for ticks in computed)

    @property
    def zero_slot(self) -> bool:
        """Whether there is a slot of zeros, never written to, for an idle W that is not skipped."""
        return self.layout.idle != "skip"

    def ticks(self) -> Tick:
        one_chunk = self.weights.shards is not None
        return ticks_of(
            self.schedule, self.index, zero_slot=self.zero_slot, one_chunk=one_chunk,
            ahead=self.stage.offload is not None,
        )  # fmt: skip
