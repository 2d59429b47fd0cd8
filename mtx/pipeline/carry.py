"""What a stage carries from tick to tick.

Legend: B rows · S sequence · C chunks · N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from mtx.pipeline.model import Stream

Tree = Any


class Messages(NamedTuple):
    """What is sent from stage to stage, and what has arrived and waits for its tick."""

    x: tuple[Stream, ...]  # from the stage before, one for each route
    dx: Any  # to be sent to the stage before; in a woven tick, what has arrived, one for each route
    receives: tuple[Tree, ...]  # [slots, ...] of the stream, like the next two; None: not needed
    gradient_receives: tuple[Tree, ...]
    outputs: Tree  # of the last virtual stage, for the head
    dy: Stream | None = None  # from the head, if it runs a tick before its B
    # woven ticks, whose x is delivered the tick before: the input of F, and what has been computed
    # ahead of its first layer
    input: Any = None
    ahead: tuple[jax.Array, ...] = ()
    begun: tuple[jax.Array, ...] = ()  # of the embedding of what enters in the next tick
    left: Any = None  # the dx of the tick before, which the embedding may need


class Stash(NamedTuple):
    """What waits between a microbatch's F, B and W; {kind: ...} each."""

    layers: Tree  # [R, N, ...] residuals; or the stream [R, ...] that entered a chunk, of no kind
    deferred: Tree  # [R, N, ...] what waits for W
    caches: Tree  # [R, N, B, S, ...] keys and values of slices, and their gradients
    dcaches: Tree
    left: Tree = None  # residuals that F has not yet copied out to the host's memory
    ahead: Tree = None  # {kind: residuals copied back from there for the next B}


class Gradients(NamedTuple):
    """Float32 sums over the microbatches so far."""

    of_b: Tree  # of the layers, what B adds to, {kind: [C, N, ...] or [1, N, ...]}
    of_w: Tree  # and what W adds to
    reduced: Tree  # [C, N, ...] sums over `data`, sharded; None if they are made after the scan
    shared: Tree  # of embedding and head

    @property
    def of_layers(self) -> Tree:
        if self.reduced is not None:
            return self.reduced
        is_none = lambda a: a is None  # noqa: E731
        return jax.tree.map(lambda b, w: w if b is None else b, *self[:2], is_leaf=is_none)


class Carry(NamedTuple):
    """Everything that goes from tick to tick."""

    messages: Messages
    stash: Stash
    weights: Tree  # [1, N, ...], of F's chunk and of B's; None if all chunks are gathered
    gradients: Gradients
    losses: dict[str, jax.Array]  # float32 [] each
    moved: Any = None  # buckets that were gathered or scattered in a window of ticks, [K, ...]
