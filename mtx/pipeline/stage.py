"""One stage's chunks, a layer at a time: F, B and W of one op.

F writes what a layer's VJP needs into the layer's place of a ring slot; B reads it back in reverse
order and adds each weight gradient to its accumulator at once; where W is split from B, what W
needs goes through a second ring. Where sequences are cut into slices, a layer's keys and values
wait in a cache until the last slice's B, and their gradients beside them. Of all of these every
kind of layer has its own, {kind: [.., N, ...]}.

Legend: B rows · S sequence (s: shard of a slice) · C chunks · N layers of a kind in a chunk ·
R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.model import PipelineModel
from mtx.pipeline.slots import add, read, write
from mtx.pipeline.ticks import Op
from mtx.pipeline.vjp import LayerVJP
from mtx.schedules.partition import Placement

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of this stage and the rules by which their ops run.

    Parameters and gradients are {kind: leaves [C, N, ...]}, or [1, N, ...] where a stage has one
    chunk of them gathered at a time.
    """

    model: PipelineModel
    layer_params: Tree  # {kind: those of a layer}; shapes and dtypes count only
    placement: Placement
    tables: dict[str, jax.Array]  # the placement's, of this stage: int32 [C, ...]
    context: Callable  # (item, layer) -> what the model says of it
    stream: Tree  # shapes and dtypes
    slices: int
    split: bool  # W is an op of its own

    @cached_property
    def vjps(self) -> dict[str, LayerVJP]:
        """Of a layer of each kind."""
        context = jax.eval_shape(lambda: self.context(0, 0))
        return {
            kind: LayerVJP(
                partial(self.model.layer, kind), params, self.stream, context,
                *self._empty_cache(kind),
            )
            for kind, params in self.layer_params.items()
        }  # fmt: skip

    # -- what is kept -----------------------------------------------------------------------------

    def stash(self, slots: int) -> Tree:
        """{kind: leaves [R, N, ...]} for the residuals of each layer."""
        return self._rings(slots, lambda kind: self.vjps[kind].residuals)

    def weight_stash(self, slots: int) -> Tree:
        """{kind: leaves [R, N, ...]} for what waits between B and W; None where they are one."""
        return self._rings(slots, lambda kind: self.vjps[kind].cut.deferred) if self.split else None

    def caches(self, slots: int) -> Tree:
        """{kind: leaves [R, N, B, S, ...]} of the caches of slices, or of their gradients; None
        without slices."""
        if self.slices == 1:
            return None
        return self._rings(slots, lambda kind: self._empty_cache(kind)[0])

    def _rings(self, slots: int, of_layer: Callable[[str], Tree]) -> Tree:
        def ring(kind: str) -> Tree:
            shape = slots, self.placement.slots_of(kind).shape[-1]
            return jax.tree.map(lambda a: jnp.zeros((*shape, *a.shape), a.dtype), of_layer(kind))

        return {kind: ring(kind) for kind in self.layer_params}

    def _empty_cache(self, kind: str) -> tuple:
        if self.slices == 1:
            return ()
        rows = jax.tree.leaves(self.stream)[0].shape[0]
        return (jax.eval_shape(lambda: self.model.empty_cache(kind, rows)),)

    # -- ops --------------------------------------------------------------------------------------

    def forward(self, op: Op, params, stream, rings, caches, *, extend: bool = True):
        """(stream, rings with the residuals of each layer at [slot, n], caches)"""

        def layer(kind, n, index, carry):
            stream, rings, caches = carry
            layer_params, given = self._layer(op, params, kind, n, index, caches)
            stream, residuals = self.vjps[kind].forward(layer_params, stream, *given)
            rings = rings | {kind: write(rings[kind], residuals, op.slot, index)}
            if caches is not None:
                stream, own = stream
                caches = self._extend(caches, kind, own, op, index) if extend else caches
            return stream, rings, caches

        return self._layers(op, layer, (stream, rings, caches))

    def forward_only(self, op: Op, params, stream, caches=None):
        """(stream, caches); keeps no residuals."""

        def layer(kind, n, index, carry):
            stream, caches = carry
            layer_params, given = self._layer(op, params, kind, n, index, caches)
            stream = self.model.layer(kind, layer_params, stream, *given)
            if caches is not None:
                stream, own = stream
                caches = self._extend(caches, kind, own, op, index)
            return stream, caches

        return self._layers(op, layer, (stream, caches))

    def extend(self, op: Op, params, stream, past, positions_B):
        """(stream, past) of the next positions of this microbatch's texts.

        past {kind: {name: leaves [C, N, n, M*B, h, S, K]}}: what the layers have kept of earlier
        positions, and then of these: of one at positions_B of each row, int32; where that is None,
        of the first t.
        """
        rows = jax.tree.leaves(stream)[0].shape[0]
        first_row = op.item * rows

        def layer(kind, n, index, carry):
            stream, past = carry
            layer_params, (context,) = self._layer(op, params, kind, n, index, None)
            start = op.chunk, index, 0, first_row, 0, 0, 0

            def first(past, own_nBhtK):
                return lax.dynamic_update_slice(past, own_nBhtK[None, None], start)

            # Written, then read: the other way round XLA copies all of past, for every layer.
            def at_positions(past, own_nBhtK):
                at = past.at[op.chunk, index, :, first_row + jnp.arange(rows), :, positions_B]
                return at.set(jnp.swapaxes(own_nBhtK[:, :, :, 0], 0, 1), unique_indices=True)

            def held(past):
                shape = 1, 1, past.shape[2], rows, *past.shape[4:]
                return lax.dynamic_slice(past, start, shape)[0, 0]

            kept = dict(past[kind])

            def keep(own):
                wrote = first if positions_B is None else at_positions
                now = {name: jax.tree.map(wrote, kept[name], each) for name, each in own.items()}
                kept.update(now)
                return None if positions_B is None else jax.tree.map(held, now)

            stream = self.model.extend(kind, layer_params, stream, context, keep)
            return stream, past | {kind: kept}

        return self._layers(op, layer, (stream, past))

    def backward(self, op: Op, params, dstream, rings, caches, kept: Kept) -> tuple[Tree, Kept]:
        """(dstream, `kept` with this op's part): gradients added at [held, n] or, where W is split,
        what those of the weights need written at [deferred, n]."""

        def layer(kind, n, index, carry):
            dstream, (gradients, deferred, dcaches) = carry
            vjp = self.vjps[kind]
            layer_params, given = self._layer(op, params, kind, n, index, caches)
            residuals = read(rings[kind], op.slot, index)
            if caches is not None:
                dstream = dstream, self._own(dcaches[kind], op, index)
            if self.split:
                dparams, others, waits = vjp.cut.backward(residuals, layer_params, given, dstream)
                deferred = deferred | {kind: write(deferred[kind], waits, op.deferred, index)}
            else:
                dparams, *others = vjp.backward(residuals, layer_params, given, dstream)
            gradients = gradients | {kind: add(gradients[kind], dparams, op.held, index)}
            if caches is not None:
                dcaches = dcaches | {kind: self._add(dcaches[kind], others[-1], op, index)}
            return others[0], Kept(gradients, deferred, dcaches)

        return self._layers(op, layer, (dstream, kept), backward=True)

    def weight(self, op: Op, deferred, gradients):
        """The gradients, with those of the weights that have waited added at [held, n]."""

        def layer(kind, n, index, gradients):
            dparams = self.vjps[kind].cut.weight(read(deferred[kind], op.slot, index))
            return gradients | {kind: add(gradients[kind], dparams, op.held, index)}

        return self._layers(op, layer, gradients)

    def made_by_w(self) -> Tree:
        """Which gradients W makes; B makes the others. bool, like the parameters."""
        if not self.split:
            return jax.tree.map(lambda _: False, self.layer_params)
        return {kind: vjp.cut.made_by_w for kind, vjp in self.vjps.items()}

    # -- layers -----------------------------------------------------------------------------------

    def _layers(self, op: Op, body: Callable, start: Tree, *, backward: bool = False) -> Tree:
        """body(kind, n, index, carry) over the layers of the op's chunk, of which a layer is the
        nth, and of its kind the one at `index`; from the last to the first where `backward`.

        Where all chunks of all stages are alike, kinds are known while tracing: the smallest period
        is written out, and looped over. Else each layer's kind is read from a table; all devices
        that have a collective of a layer in common run the same one.
        """
        period = self.placement.period
        if period is None:
            return self._switched(op, body, start, backward)

        def repeat(k, carry):
            k = period.repeats - 1 - k if backward else k
            for run in reversed(period.runs) if backward else period.runs:
                n, index = k * period.layers + run.place, k * period.of_kind(run.kind) + run.index

                def layer(i, carry, run=run, n=n, index=index):
                    i = run.count - 1 - i if backward else i
                    return body(run.kind, _plus(n, i), _plus(index, i), carry)

                carry = _loop(run.count, layer, carry)
            return carry

        return _loop(period.repeats, repeat, start)

    def _switched(self, op: Op, body: Callable, start: Tree, backward: bool) -> Tree:
        kinds, count = self.placement.kinds, read(self.tables["count"], op.chunk)

        def layer(i, carry):
            n = count - 1 - i if backward else i
            if len(kinds) == 1:
                return body(kinds[0], n, n, carry)
            kind = read(self.tables["kind"], op.chunk, n)
            index = read(self.tables["index"], op.chunk, n)
            return lax.switch(kind, [partial(body, kind) for kind in kinds], n, index, carry)

        return lax.fori_loop(0, count, layer, start)

    def _layer(self, op: Op, params, kind: str, n, index, caches):
        """(parameters, what else is given) of layer n of the op's chunk"""
        context = self.context(op.item, read(self.tables["layer"], op.chunk, n))
        given = (context,) if caches is None else (context, read(caches[kind], op.cache, index))
        return read(params[kind], op.held, index), given

    # -- caches of slices -------------------------------------------------------------------------

    def _start(self, op: Op, own: int):
        return op.item % self.slices * own

    def _extend(self, caches, kind: str, own, op: Op, index):
        """The caches with this slice's part in its place."""

        def put(cache, own):
            start = (op.cache, index, 0, self._start(op, own.shape[1]), *(0,) * (own.ndim - 2))
            return lax.dynamic_update_slice(cache, own[None, None], start)

        return caches | {kind: jax.tree.map(put, caches[kind], own)}

    def _own(self, dcache, op: Op, index):
        """What the slices after this one have added to the gradients of its part of the cache."""
        is_last = op.item % self.slices == self.slices - 1

        def part(dcache):
            whole = read(dcache, op.cache_gradient, index)
            own = whole.shape[1] // self.slices
            part = lax.dynamic_slice_in_dim(whole, self._start(op, own), own, 1)
            return jnp.where(is_last, 0, part)

        return jax.tree.map(part, dcache)

    def _add(self, dcache, gradient, op: Op, index):
        is_last = op.item % self.slices == self.slices - 1

        def total(dcache, gradient):
            total = jnp.where(is_last, 0, read(dcache, op.cache_gradient, index)) + gradient
            return write(dcache, total.astype(dcache.dtype), op.cache_gradient, index)

        return jax.tree.map(total, dcache, gradient)


class Kept(NamedTuple):
    """What B changes beside its output; {kind: ...} each."""

    gradients: Tree  # leaves [C, N, ...] float32, None for those that W makes
    deferred: Tree  # [R, N, ...]; None where W is not split
    dcaches: Tree  # [R, N, B, S, ...]; None without slices


def _loop(count: int, body: Callable, start: Tree) -> Tree:
    return body(0, start) if count == 1 else lax.fori_loop(0, count, body, start)


def _plus(base, i):
    """base + i; where that is i, without an op."""
    return i if isinstance(base, int) and base == 0 else base + i
