"""One stage's chunks, a layer at a time: F, B and W of one op.

F writes what a layer's VJP needs into the layer's place of a ring slot; B reads it back in reverse
order and adds each weight gradient to its accumulator at once; where W is split from B, what W
needs goes through a second ring. Where sequences are cut into slices, a layer's keys and values
wait in a cache until the last slice has gone back, and their gradients beside them.

Legend: B rows · S sequence (s: shard of a slice) · D hidden · C chunks · N layers a chunk ·
R ring slots
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline import slots
from mtx.pipeline.model import PipelineModel
from mtx.pipeline.slots import read, read_each, write, write_each
from mtx.pipeline.ticks import Op
from mtx.pipeline.vjp import LayerVJP
from mtx.schedules.partition import Placement

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of this stage and the rules by which their ops run.

    Parameters and gradients are leaves [C, N, ...], or [1, N, ...] where a stage has one chunk of
    them gathered at a time.
    """

    model: PipelineModel
    layer_params: Tree  # one layer's; shapes and dtypes count only
    placement: Placement
    layer_CN: jax.Array  # int32, of this stage
    count_C: jax.Array
    place: Callable  # (item, layer) -> the model's third argument
    x_BsD: jax.ShapeDtypeStruct
    slices: int
    split: bool  # W is an op of its own

    @property
    def places(self) -> int:
        """N"""
        return self.placement.layer.shape[-1]

    @cached_property
    def layer_vjp(self) -> LayerVJP:
        given = (self.place(0, 0), *self._empty_cache())
        return LayerVJP(self.model.block, self.layer_params, self.x_BsD, *given)

    # -- what is kept -----------------------------------------------------------------------------

    def stash(self, slots: int) -> tuple[jax.Array, ...]:
        """Leaves [R, N, ...] for the residuals of each layer."""
        return self._ring(self.layer_vjp.residuals, slots)

    def weight_stash(self, slots: int) -> tuple[jax.Array, ...]:
        """Leaves [R, N, ...] for what waits between B and W."""
        return self._ring(self.layer_vjp.cut.deferred, slots) if self.split else ()

    def caches(self, slots: int):
        """[R, N, B, S, ...] for keys and values, or their gradients; None without slices."""
        if self.slices == 1:
            return None
        (cache,) = self._empty_cache()
        return jnp.zeros((slots, self.places, *cache.shape), cache.dtype)

    def _ring(self, residuals, slots: int):
        return tuple(jnp.zeros((slots, self.places, *r.shape), r.dtype) for r in residuals)

    def _empty_cache(self) -> tuple:
        return () if self.slices == 1 else (self.model.empty_cache(self.x_BsD.shape[0]),)

    # -- ops --------------------------------------------------------------------------------------

    def forward(self, op: Op, params, x_BsD, ring, cache, *, extend: bool = True):
        """(y_BsD, ring with the residuals of each layer at [slot, n], cache)"""

        def layer(n, carry):
            x_BsD, ring, cache = carry
            layer_params, given = self._layer(op, params, n, cache)
            y_BsD, residuals = self.layer_vjp.forward(layer_params, x_BsD, *given)
            ring = write_each(ring, residuals, op.slot, n)
            if cache is not None:
                y_BsD, own = y_BsD
                cache = self._extend(cache, own, op, n) if extend else cache
            return y_BsD, ring, cache

        return self._layers(op, layer, (x_BsD, ring, cache))

    def forward_only(self, op: Op, params, x_BsD, cache=None):
        """(y_BsD, cache); keeps no residuals."""

        def layer(n, carry):
            x_BsD, cache = carry
            layer_params, given = self._layer(op, params, n, cache)
            y_BsD = self.model.block(layer_params, x_BsD, *given)
            if cache is not None:
                y_BsD, own = y_BsD
                cache = self._extend(cache, own, op, n)
            return y_BsD, cache

        return self._layers(op, layer, (x_BsD, cache))

    def extend(self, op: Op, params, x_BtD, past, positions_B):
        """(y_BtD, past) of the next positions of this microbatch's texts.

        past [C, N, n, M*B, heads, S, K]: what the blocks have kept of earlier positions, and then
        of these: of one at positions_B of each row, int32; where that is None, of the first t.
        """
        rows = x_BtD.shape[0]

        def layer(n, carry):
            x_BtD, past = carry
            layer_params, (place,) = self._layer(op, params, n, None)
            start = op.chunk, n, 0, op.item * rows, 0, 0, 0

            # Written, then read: the other way round XLA copies all of past, for every layer.
            def keep(own_nBgtK):
                if positions_B is None:
                    return None, lax.dynamic_update_slice(past, own_nBgtK[None, None], start)
                at = past.at[op.chunk, n, :, start[3] + jnp.arange(rows), :, positions_B]
                kept = at.set(jnp.swapaxes(own_nBgtK[:, :, :, 0], 0, 1), unique_indices=True)
                shape = 1, 1, past.shape[2], rows, *past.shape[4:]
                return lax.dynamic_slice(kept, start, shape)[0, 0], kept

            return self.model.extend(layer_params, x_BtD, place, keep)

        return self._layers(op, layer, (x_BtD, past))

    def backward(self, op: Op, params, dy_BsD, ring, cache, kept: Kept) -> tuple[jax.Array, Kept]:
        """(dx_BsD, `kept` with this op's part): gradients added at [held, n] or, where W is split,
        what those of the weights need written at [deferred, n]."""
        last = read(self.count_C, op.chunk) - 1

        def layer(i, carry):
            dy_BsD, kept = carry
            n = last - i
            layer_params, given = self._layer(op, params, n, cache)
            residuals = read_each(ring, op.slot, n)
            dy = dy_BsD if cache is None else (dy_BsD, self._own(kept.dcache, op, n))
            deferred = kept.deferred
            if self.split:
                dparams, others, waits = self.layer_vjp.cut.backward(
                    residuals, layer_params, given, dy
                )
                deferred = write_each(deferred, waits, op.deferred, n)
            else:
                dparams, *others = self.layer_vjp.backward(residuals, layer_params, given, dy)
            gradients = _accumulate(kept.gradients, dparams, op.held, n)
            dcache = kept.dcache
            if cache is not None:
                dcache = self._add_to_cache(dcache, others[-1], op, n)
            kept = kept._replace(gradients=gradients, deferred=deferred, dcache=dcache)
            return others[0], kept

        return self._layers(op, layer, (dy_BsD, kept))

    def weight(self, op: Op, deferred, gradients):
        """The gradients, with those of the weights that have waited added at [held, n]."""

        def layer(n, gradients):
            dparams = self.layer_vjp.cut.weight(read_each(deferred, op.slot, n))
            return _accumulate(gradients, dparams, op.held, n)

        return self._layers(op, layer, gradients)

    def made_by_w(self) -> Tree:
        """Which gradients W makes; B makes the others. bool, like the parameters."""
        if not self.split:
            return jax.tree.map(lambda _: False, self.layer_params)
        return self.layer_vjp.cut.made_by_w

    # -- layers -----------------------------------------------------------------------------------

    def _layers(self, op: Op, body: Callable, start):
        """body(n, carry) over the layers of the op's chunk; a plain call where there is one."""
        if not self.placement.even:
            return lax.fori_loop(0, read(self.count_C, op.chunk), body, start)
        return body(0, start) if self.places == 1 else lax.fori_loop(0, self.places, body, start)

    def _layer(self, op: Op, params, n, cache):
        """(parameters, what else is given) of layer n of the op's chunk"""
        place = self.place(op.item, read(self.layer_CN, op.chunk, n))
        given = (place,) if cache is None else (place, read(cache, op.cache, n))
        return read_each(params, op.held, n), given

    # -- keys and values of slices ----------------------------------------------------------------

    def _start(self, op: Op, own: int):
        return op.item % self.slices * own

    def _extend(self, cache, own, op: Op, n):
        """The cache with this slice's keys and values in their place."""
        start = (op.cache, n, 0, self._start(op, own.shape[1]), *(0,) * (own.ndim - 2))
        return lax.dynamic_update_slice(cache, own[None, None], start)

    def _own(self, dcache, op: Op, n):
        """What the slices after this one have added to the gradients of its keys and values."""
        whole = read(dcache, op.cache_gradient, n)
        own = whole.shape[1] // self.slices
        is_last = op.item % self.slices == self.slices - 1
        part = lax.dynamic_slice_in_dim(whole, self._start(op, own), own, 1)
        return jnp.where(is_last, 0, part)

    def _add_to_cache(self, dcache, gradient, op: Op, n):
        is_last = op.item % self.slices == self.slices - 1
        total = jnp.where(is_last, 0, read(dcache, op.cache_gradient, n)) + gradient
        return write(dcache, total.astype(dcache.dtype), op.cache_gradient, n)


class Kept(NamedTuple):
    """What B changes beside its output."""

    gradients: Tree  # leaves [C, N, ...] float32, None for those that W makes
    deferred: tuple[jax.Array, ...]  # [R, N, ...]
    dcache: jax.Array | None  # [R, N, B, S, ...]


def _accumulate(totals, gradients, *index):
    """Adds the gradients that there are at that index."""

    def add(total, g):
        return total if total is None or g is None else slots.add(total, g, *index)

    return jax.tree.map(add, totals, gradients, is_leaf=lambda a: a is None)
