"""What goes from tick to tick on a stage.

Legend: B rows · S sequence · C chunks · N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from mtx.pipeline.model import Stream

Tree = Any


class Messages(NamedTuple):
    """What goes from stage to stage, and what has come and waits for its tick."""

    x: tuple[Stream, ...]  # from the stage before, one for each route
    dx: Any  # is to be sent to the stage before; in a woven tick, has come, one for each route
    receives: tuple[Tree, ...]  # [slots, ...] of the stream, and so the next two; None: not needed
    gradient_receives: tuple[Tree, ...]
    outputs: Tree  # of the last virtual stage, for the head
    dy: Stream | None = None  # from the head, where it runs a tick before its B
    # of a woven tick, whose x have been delivered before it: the input of its F, and what has been
    # computed ahead of that one's first layer
    input: Any = None
    ahead: tuple[jax.Array, ...] = ()
    begun: tuple[jax.Array, ...] = ()  # of the embedding of what enters in the tick after
    left: Any = None  # the dx of the tick before, which the embedding may need


class Stash(NamedTuple):
    """What waits between a microbatch's F, B and W; {kind: ...} each."""

    layers: Tree  # [R, N, ...] residuals; or the stream [R, ...] that entered a chunk, of no kind
    deferred: Tree  # [R, N, ...] what waits for W
    caches: Tree  # [R, N, B, S, ...] keys and values of slices, and their gradients
    dcaches: Tree
    left: Tree = None  # of residuals that go to the host's memory: what F has not yet copied out
    ahead: Tree = None  # and {kind: what has come back for the next B}


class Gradients(NamedTuple):
    """Float32 sums over the microbatches so far."""

    of_b: Tree  # of the layers, those that B adds to, {kind: [C, N, ...] or [1, N, ...]}
    of_w: Tree  # those that W adds to
    reduced: Tree  # [C, N, ...] sums over `data`, sharded; None where they are made after the scan
    shared: Tree  # of embedding and head

    @property
    def of_layers(self) -> Tree:
        if self.reduced is not None:
            return self.reduced
        is_none = lambda a: a is None  # noqa: E731
        return jax.tree.map(lambda b, w: w if b is None else b, *self[:2], is_leaf=is_none)


class Carry(NamedTuple):
    """All of it."""

    messages: Messages
    stash: Stash
    weights: Tree  # [1, N, ...], of the chunk of F and of that of B; None where all are gathered
    gradients: Gradients
    losses: dict[str, jax.Array]  # float32 [] each
    moved: Any = None  # buckets that were gathered or scattered in a window of ticks, [K, ...]
