"""One stage's chunks, a layer at a time: F, B and W of one op.

F writes what a layer's VJP needs into the layer's place of a ring slot; B reads it back in reverse
order and adds each weight gradient to its accumulator at once. If W is split from B, what W needs
goes through a second ring. If sequences are cut into slices, a layer's keys and values wait in a
cache until the sequence's last B, and their gradients beside them. Every kind of layer has its own
rings, accumulators and caches, {kind: [.., N, ...]}.

Legend: B rows · S sequence (s: shard of a slice) · C chunks · N layers of a kind in a chunk ·
R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.errors import UserError
from mtx.pipeline import alone
from mtx.pipeline.model import PipelineModel
from mtx.pipeline.offload import Left, Offload
from mtx.pipeline.own import Kept, Own, entry_of
from mtx.pipeline.past import Past
from mtx.pipeline.slots import read, write
from mtx.pipeline.ticks import Op
from mtx.pipeline.turns import through
from mtx.pipeline.weights import LayerShards
from mtx.schedules.partition import Placement
from mtx.sharding.mesh import Axes
from mtx.vjp import Arrays, LayerVJP

Tree = Any
_BY_CHUNK = "gradients", "past"  # kept by chunk; all else has slots of microbatches


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of this stage and the rules by which their ops run.

    Parameters, and gradients of those that are trained, are {kind: leaves [C, N, ...]}, where C
    counts chunks that have layers of the kind, or [1, N, ...] if a stage gathers one chunk at a
    time.
    """

    model: PipelineModel
    layer_params: Tree  # {kind: those of a layer}; only shapes and dtypes count
    placement: Placement
    tables: dict[str, jax.Array]  # from `tables_of`
    context: Callable  # (item, layer) -> the model's context for it
    stream: Tree  # shapes and dtypes
    slices: int
    split: bool  # W is an op of its own
    in_place: bool = False  # F's residuals and B's sums are made in place: `mtx.pipeline.alone`
    shards: dict[str, LayerShards] | None = None  # {kind: ...} if F and B gather each layer
    offload_fraction: float = 0.0  # the part of residuals that waits in the host's memory

    @cached_property
    def vjps(self) -> dict[str, LayerVJP]:
        """The VJP of a layer of each kind."""
        context = jax.eval_shape(lambda: self.context(0, 0))

        def of(kind: str, params: Tree) -> LayerVJP:
            arguments = params, self.stream, context, *self._empty_cache(kind)
            layer, trained = partial(self.model.layer, kind), self.model.trained["layers"][kind]
            if self.shards is None:
                return LayerVJP(layer, *arguments, trained=trained)
            own = self.shards[kind]
            return LayerVJP(
                layer, *arguments, gather=own.gather, reduce_scatter=own.reduce_scatter,
                trained=trained,
            )  # fmt: skip

        return {kind: of(kind, params) for kind, params in self.layer_params.items()}

    # -- what is kept -----------------------------------------------------------------------------

    def stash(self, slots: int, *, written_first: bool = False) -> Tree:
        """{kind: leaves [R, N, ...]} for the residuals of each layer; with offload, their parts.
        written_first: nothing is read before it is written, so it need not be zeros."""
        if self.offload:
            return self.offload.rings(partial(self._rings, slots))
        make = lax.empty if written_first else jnp.zeros
        return self._rings(slots, lambda kind: self.vjps[kind].residuals, make)

    @cached_property
    def offload(self) -> Offload | None:
        """The offload of residuals to the host's memory; None without."""
        if not self.offload_fraction:
            return None
        if self.placement.periods is None and len(self.placement.kinds) > 1:
            raise UserError(
                f"offload={self.offload_fraction} is not made for uneven stages of several kinds "
                f"of layers, {', '.join(self.placement.kinds)}; use stage_layers='even' or "
                "offload=0"
            )
        return Offload(
            fraction=self.offload_fraction, last=self._last, some_empty=self.placement.some_empty,
            residuals={kind: vjp.residuals for kind, vjp in self.vjps.items()},
        )  # fmt: skip

    def _last(self, chunk, kind: str):
        """The index of a chunk's last layer of a kind."""
        if self.placement.periods is None:  # then all layers are of this kind
            return read(self.tables["count"], chunk) - 1
        return self.placement.slots_of(kind).shape[-1] - 1

    def weight_stash(self, slots: int) -> Tree:
        """{kind: leaves [R, N, ...]} for what waits between B and W; None if they are not split."""
        return self._rings(slots, lambda kind: self.vjps[kind].cut.deferred) if self.split else None

    def caches(self, slots: int) -> Tree:
        """{kind: leaves [R, N, B, S, ...]} of the caches of slices, or of their gradients; None
        without slices."""
        if self.slices == 1:
            return None
        return self._rings(slots, lambda kind: self._empty_cache(kind)[0])

    def _rings(self, slots: int, of_layer: Callable[[str], Tree], make=jnp.zeros) -> Tree:
        def ring(kind: str) -> Tree:
            shape = slots, self.placement.slots_of(kind).shape[-1]
            return jax.tree.map(lambda a: make((*shape, *a.shape), a.dtype), of_layer(kind))

        return {kind: ring(kind) for kind in self.layer_params}

    def _empty_cache(self, kind: str) -> tuple:
        if self.slices == 1:
            return ()
        rows = self.stream["x"].shape[0]
        return (jax.eval_shape(lambda: self.model.empty_cache(kind, rows)),)

    # -- ops --------------------------------------------------------------------------------------

    def forward(self, op: Op, params, stream, rings, caches, left=None, *, extend: bool = True):
        """(stream, rings with the residuals of each layer at [slot, n], caches, left)"""

        def layer(own: Own, stream):
            layer_params, given = self._given(op, params, own, caches is not None)
            if self.offload and left is not None:
                stream = self.offload.copy_out(own, op, left, stream)
            vjp = self.vjps[own.kind]
            if self.offload:
                stream, residuals = vjp.forward(layer_params, stream, *given)
                stream = self.offload.leave(own, residuals, stream)
            else:
                stream = alone.forward(
                    vjp, own, layer_params, stream, given, in_place=self.in_place
                )
            if caches is not None:
                stream, part = stream
                if extend:
                    self._extend(own, part, op)
            return stream

        kept = {"ring": (rings, op.slot), "cache": (caches, op.cache)}
        kept["left"] = left and left.parts, None
        stream, kept = self._layers(op, layer, stream, kept)
        left = self.offload and left and self.offload.left_after(op, left, kept["left"])
        return stream, kept["ring"], kept["cache"], left

    def forward_only(self, op: Op, params, stream, caches=None):
        """(stream, caches); keeps no residuals."""

        def layer(own: Own, stream):
            layer_params, given = self._given(op, params, own, caches is not None)
            stream = self.model.layer(own.kind, self._whole(own, layer_params), stream, *given)
            if caches is not None:
                stream, part = stream
                self._extend(own, part, op)
            return stream

        stream, kept = self._layers(op, layer, stream, {"cache": (caches, op.cache)})
        return stream, kept["cache"]

    def extend(self, op: Op, params, stream, past, positions_B, axes: Axes):
        """(stream, past) of the next positions of this microbatch's texts.

        past: {kind: {name: leaves [C, N, n, M*B, h, S, K]}}, what the layers have kept of earlier
        positions and, when returned, of these: the one at positions_B of each row, int32, or if
        that is None, the first t. A `State` has leaves [C, N, n, M*B, h, ...].
        """
        rows = stream["x"].shape[0]

        def layer(own: Own, stream):
            layer_params, (context,) = self._given(op, params, own, False)
            entries = Past(
                layer=own.at["past"], first_row=op.item * rows, rows=rows, positions_B=positions_B,
                axes=axes,
            )  # fmt: skip

            def keep(parts):
                own.trees["past"], held = entries.keep(own.trees["past"], parts)
                return held

            whole = self._whole(own, layer_params)
            return self.model.extend(own.kind, whole, stream, context, keep)

        stream, kept = self._layers(op, layer, stream, {"past": (past, op.chunk)})
        return stream, kept["past"]

    def backward(
        self, op: Op, params, dstream, rings, caches, kept: Kept, left: Left | None = None,
        coming: Op | None = None,
    ) -> tuple[Tree, Kept]:  # fmt: skip
        """(dstream, `kept` with this op's part). Gradients are added at [held, n]; if W is split,
        what the weight gradients need is written at [deferred, n]. coming: the B of the next
        tick."""

        def layer(own: Own, dstream):
            layer_params, given = self._given(op, params, own, caches is not None, caches)
            fetched: Arrays = ()
            if self.offload and coming is not None:
                dstream, residuals, fetched = self.offload.copy_back(
                    own, op, coming, rings[own.kind], dstream
                )
            else:
                residuals = read(rings[own.kind], op.slot, own.index)
            if caches is not None:
                dstream = dstream, self._later(own, op)
            others = alone.backward(
                self.vjps[own.kind], own, residuals, layer_params, given, dstream,
                split=self.split, beside=self.in_place,
            )  # fmt: skip
            if caches is not None:
                self._add_to_cache(own, others[-1], op)
            dstream = others[0]
            if self.offload and coming is not None and left is not None:
                dstream = self.offload.keep(own, coming, left, fetched, dstream)
            return dstream

        places = op.held, op.deferred, op.cache_gradient, None
        trees = {name: (tree, at) for (name, tree), at in zip(kept._asdict().items(), places)}
        dstream, trees = self._layers(op, layer, dstream, trees, backward=True)
        if self.offload and coming is not None and left is not None:
            trees["ahead"] = self.offload.ahead_after(op, coming, rings, left, trees["ahead"])
        return dstream, Kept(**trees)

    def weight(self, op: Op, deferred, gradients):
        """The gradients, with the weight gradients that have waited added at [held, n]."""

        def layer(own: Own, _):
            waited = read(deferred[own.kind], op.slot, own.index)
            own.add("gradients", self.vjps[own.kind].cut.weight(waited))

        _, kept = self._layers(op, layer, None, {"gradients": (gradients, op.held)})
        return kept["gradients"]

    def made_by_w(self) -> Tree:
        """Which gradients W makes; B makes the others. bool, like the gradients."""
        if not self.split:
            return {k: jax.tree.map(lambda _: False, v.gradients) for k, v in self.vjps.items()}
        return {kind: vjp.cut.made_by_w for kind, vjp in self.vjps.items()}

    # -- layers -----------------------------------------------------------------------------------

    def _layers(self, op: Op, body: Callable, stream, kept: dict, *, backward: bool = False):
        """(stream, kept) after stream = body(own, stream) for the layers of the op's chunk, from
        the last to the first if `backward`.

        kept: {name: ({kind: leaves [.., N, ...]}, index of the first dim)}, what the layers change,
        each its own entry; None instead of the leaves if there are none.

        If all chunks of all stages are alike, kinds are known while tracing: periods are written
        out, and looped over. Otherwise each layer's kind is read from a table; all devices that
        share a collective of a layer run the same kind.
        """
        first = {
            kind: {
                name: row_of(self.tables, self.placement, kind, at) if name in _BY_CHUNK else at
                for name, (tree, at) in kept.items()
                if tree is not None
            }
            for kind in self.placement.kinds
        }
        trees = {name: tree for name, (tree, _) in kept.items()}
        if (periods := self.placement.periods) is None:
            return self._switched(op, body, (stream, trees), first, backward)

        def layer(kind: str, n, index, carry):
            stream, trees = carry
            own = Own.of(kind, n, index, trees, first[kind])
            return body(own, stream), own.put_into(trees)

        return through(periods, layer, (stream, trees), backward=backward)

    def _switched(self, op: Op, body: Callable, start: Tree, first: dict, backward: bool):
        """`_layers` if a layer's kind is read from a table. A branch takes and returns the entries
        of one layer of each kind: XLA would copy whole rings that go through a branch."""
        kinds, count = self.placement.kinds, read(self.tables["count"], op.chunk)

        def layer(i, carry):
            n = count - 1 - i if backward else i
            stream, trees = carry
            if len(kinds) == 1:
                own = Own.of(kinds[0], n, n, trees, first[kinds[0]])
                return body(own, stream), own.put_into(trees)
            number = read(self.tables["kind"], op.chunk, n)
            index = read(self.tables["index"], op.chunk, n)
            places = {k: jnp.where(number == j, index, 0) for j, k in enumerate(kinds)}
            entries = {
                name: tree and {k: entry_of(tree[k], first[k][name], places[k]) for k in kinds}
                for name, tree in trees.items()
            }

            def branch(kind, stream, entries):
                own = Own.of(kind, n, index, entries, dict.fromkeys(entries, 0), entry=0)
                return body(own, stream), own.put_into(entries)

            branches = [partial(branch, kind) for kind in kinds]
            stream, entries = lax.switch(number, branches, stream, entries)
            return stream, {
                name: tree and {
                    k: write(tree[k], read(entries[name][k], 0, 0), first[k][name], places[k])
                    for k in kinds
                }
                for name, tree in trees.items()
            }  # fmt: skip

        return lax.fori_loop(0, count, layer, start)

    def _given(self, op: Op, params, own: Own, sliced: bool, caches=None) -> tuple[Tree, tuple]:
        """(parameters, the layer's other arguments). Its cache is read from `caches`, by default
        from its own entry."""
        given = (self.context(op.item, read(self.tables["layer"], op.chunk, own.n)),)
        if sliced:
            cache = read(caches[own.kind], op.cache, own.index) if caches else own.read("cache")
            given += (cache,)
        row = row_of(self.tables, self.placement, own.kind, op.held)
        return read(params[own.kind], row, own.index), given

    def _whole(self, own: Own, layer_params: Tree) -> Tree:
        return self.shards[own.kind].gather(layer_params) if self.shards else layer_params

    # -- caches of slices -------------------------------------------------------------------------

    def _start(self, op: Op, own: int):
        return op.item % self.slices * own

    def _extend(self, own: Own, part, op: Op) -> None:
        """Puts this slice's part into the layer's cache."""

        def put(cache, part):
            start = *own.at["cache"], 0, self._start(op, part.shape[1]), *(0,) * (part.ndim - 2)
            return lax.dynamic_update_slice(cache, part[None, None], start)

        own.trees["cache"] = jax.tree.map(put, own.trees["cache"], part)

    def _later(self, own: Own, op: Op):
        """What the slices after this one have added to the gradients of its part of the cache."""
        is_last = op.item % self.slices == self.slices - 1

        def part(whole):
            size = whole.shape[1] // self.slices
            part = lax.dynamic_slice_in_dim(whole, self._start(op, size), size, 1)
            return jnp.where(is_last, 0, part)

        return jax.tree.map(part, own.read("dcaches"))

    def _add_to_cache(self, own: Own, gradient, op: Op) -> None:
        is_last = op.item % self.slices == self.slices - 1

        def total(before, gradient):
            return (jnp.where(is_last, 0, before) + gradient).astype(before.dtype)

        own.write("dcaches", jax.tree.map(total, own.read("dcaches"), gradient))


def tables_of(placement: Placement, stage) -> dict[str, jax.Array]:
    """The placement's tables that a stage, int32 [], needs: int32 [C, ...] each."""
    even = placement.periods is not None
    names = ("layer",) if even else ("layer", "count", "kind", "index")
    names += () if placement.row is None else ("row",)
    return {name: read(jnp.asarray(getattr(placement, name)), stage) for name in names}


def row_of(tables: dict[str, jax.Array], placement: Placement, kind: str, chunk):
    """The row of a chunk's layers of a kind in their stack; 0 for a gathered chunk."""
    if placement.row is None:
        return chunk
    return read(tables["row"], placement.kinds.index(kind), chunk)
