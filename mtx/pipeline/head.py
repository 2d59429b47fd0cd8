"""Head and loss, some positions of a microbatch at a time, so that its logits are never whole.

The backward pass of a part runs before the forward pass of the next one, so nothing of it is kept,
no logit is computed twice, and gradients of embedding and head are added up in place. The model
says how many positions it takes at once: all of them, if their logits are few.

Legend: B rows · S sequence (s: shard) · n positions of a shard that are taken at once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.model import PipelineModel, Stream
from mtx.pipeline.trees import add_up
from mtx.sharding.parameter import chosen, with_chosen

Tree = Any


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The positions of a shard: a part of `first`, and then `others` parts of n."""

    positions: int  # s
    first: int
    size: int  # n
    others: int

    @classmethod
    def of(cls, model: PipelineModel, shared: Tree, stream: Stream) -> _Parts:
        positions = stream["x"].shape[1]
        size = model.head_positions(shared, stream)
        others = -(-positions // size) - 1
        first = positions - others * size
        return cls(positions=positions, first=first, size=size, others=others)

    def start(self, number):
        """Where one of the other parts begins."""
        return self.first + number * self.size

    def of_stream(self, stream: Stream, start, size: int) -> Stream:
        """The stream with leaves of these positions cut; others, which no head reads, stay
        whole."""

        def cut(a):
            whole = a.shape[1] != self.positions
            return a if whole else lax.dynamic_slice_in_dim(a, start, size, axis=1)

        return jax.tree.map(cut, stream)

    def of_batch(self, batch: Tree, start, size: int) -> Tree:
        """The batch with arrays [B, S] cut to the same positions of each shard. Arrays with one
        value a row come with the first part only; arrays of other positions stay whole."""
        shape = batch["targets"].shape

        def cut(a):
            if a.shape != shape:
                return a
            by_shard = a.reshape(a.shape[0], -1, self.positions)
            part = lax.dynamic_slice_in_dim(by_shard, start, size, axis=2)
            return part.reshape(a.shape[0], -1)

        is_first = isinstance(start, int)
        return {n: cut(a) if a.ndim > 1 else a for n, a in batch.items() if a.ndim > 1 or is_first}

    def written(self, whole, part, start):
        """A leaf [B, s, ...], or [B, S], with a part written at its start."""
        if whole.ndim > 2:
            return lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)
        rows = whole.shape[0]
        by_shard = whole.reshape(rows, -1, self.positions)
        part = part.reshape(rows, by_shard.shape[1], -1)
        return lax.dynamic_update_slice_in_dim(by_shard, part, start, axis=2).reshape(whole.shape)


def gradients(
    model: PipelineModel, shared: Tree, y: Stream, batch: Tree, weight
) -> tuple[dict[str, jax.Array], Tree, Stream]:  # fmt: skip
    """(losses by name, gradients of `shared`, dy); gradients are those of `weight` times the sum of
    the losses."""
    trained = chosen(shared, {part: model.trained[part] for part in shared})
    values, vjp = jax.vjp(
        lambda trained, y: model.losses(with_chosen(shared, trained), y, batch), trained, y
    )
    return values, *vjp({name: jnp.asarray(weight, a.dtype) for name, a in values.items()})


def added(sums: tuple[Any, Tree], losses: dict[str, jax.Array], dshared: Tree) -> tuple[Any, Tree]:
    """(sums of the losses, sums of the gradients), with these added."""
    before, total = sums
    return {name: before[name] + value for name, value in losses.items()}, add_up(total, dshared)


def is_whole(model: PipelineModel, shared: Tree, stream: Stream) -> bool:
    """Whether all positions are taken at once."""
    return not _Parts.of(model, shared, stream).others


def add_gradients(
    model: PipelineModel, shared: Tree, y: Stream, batch: Tree, weight, sums: tuple[Any, Tree]
) -> tuple[tuple[Any, Tree], Stream]:
    """(sums, dy): sums of the losses, by name, and of their gradients of `shared`, with those of
    this microbatch added. Gradients are `weight` times those of the losses."""

    def add(sums, y, batch):
        *made, dy = gradients(model, shared, y, batch, weight)
        return added(sums, *made), dy

    parts = _Parts.of(model, shared, y)
    if not parts.others:
        return add(sums, y, batch)

    def add_part(carry, number, *, size: int):
        sums, whole = carry
        start = 0 if number is None else parts.start(number)
        sums, dy = add(sums, parts.of_stream(y, start, size), parts.of_batch(batch, start, size))
        return (sums, jax.tree.map(partial(parts.written, start=start), whole, dy)), None

    carry = add_part((sums, jax.tree.map(jnp.zeros_like, y)), None, size=parts.first)[0]
    (losses, total), whole = carry
    # XLA unrolls a loop of one part, and would then hold the logits of both parts at once. The
    # embedding's gradients stay out of the barrier: of a table of its own they are zeros as yet,
    # and behind a barrier XLA would not see that, and keep the zeros until they are added to.
    losses, of_head, whole, y = lax.optimization_barrier((losses, total["head"], whole, y))
    carry = (losses, total | {"head": of_head}), whole
    numbers = jnp.arange(parts.others)
    return lax.scan(partial(add_part, size=parts.size), carry, numbers)[0]


def by_parts(model: PipelineModel, function: Callable) -> Callable:
    """`model.loss` or `model.scores`, without gradients, a part at a time."""

    def run(shared: Tree, y: Stream, batch: Tree):
        parts = _Parts.of(model, shared, y)
        if not parts.others:
            return function(shared, y, batch)

        def of_part(start, size: int):
            return function(
                shared, parts.of_stream(y, start, size), parts.of_batch(batch, start, size)
            )

        def join(whole, part, start):
            return whole + part if not part.ndim else parts.written(whole, part, start)

        def add_part(whole, number):
            start = parts.start(number)
            part = of_part(start, parts.size)
            return jax.tree.map(partial(join, start=start), whole, part), None

        whole = jax.eval_shape(function, shared, y, batch)
        whole = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), whole)
        whole = jax.tree.map(partial(join, start=0), whole, of_part(0, parts.first))
        return lax.scan(add_part, whole, jnp.arange(parts.others))[0]

    return run
