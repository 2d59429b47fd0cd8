"""Canonical form, in which layouts are compared: each kind's layers [L, ...] in model order, global
shapes, no padding; and its inverse, to the order in which a layout holds layers, [P, C, N, ...].

Legend: P stages · C chunks · N layers of a kind in a chunk · L layers of a kind
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from mtx.sharding.axes import axes_of
from mtx.sharding.optimizer import namespace
from mtx.step.state import States, stacked

Tree = Any


def to_canonical(tree: Tree, states: States) -> Tree:
    """A tree like the parameters, or like the trained ones (gradients, moments) -> layers
    [L, ...], no padding. Host arrays give host arrays."""
    tree = jax.tree.map(lambda a, shard: shard.unpad(a), tree, _like(tree, states.shards))
    vocab = states.run.model.vocab

    def unstack(kind: str, leaves: Tree) -> Tree:
        places = states.placement.place_of_layer(kind)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[places], leaves)

    shared = _shared(lambda a, spec: a[:vocab] if _is_vocab(spec) else a, tree, states)
    return shared | {"layers": {kind: unstack(kind, a) for kind, a in tree["layers"].items()}}


def from_canonical(tree: Tree, states: States) -> Tree:
    """The inverse of `to_canonical`."""

    def stack(kind: str, leaves: Tree) -> Tree:
        slots = states.placement.slots_of(kind)
        return jax.tree.map(lambda a: stacked(a[slots.ravel()], slots=slots), leaves)

    def pad_vocab(a, spec):
        rows = states.model.vocab_rows - len(a) if _is_vocab(spec) else 0
        return namespace(a).pad(a, ((0, rows), *((0, 0),) * (a.ndim - 1))) if rows else a

    layers = {kind: stack(kind, leaves) for kind, leaves in tree["layers"].items()}
    tree = _shared(pad_vocab, tree, states) | {"layers": layers}
    return jax.tree.map(lambda a, shard: shard.pad(a), tree, _like(tree, states.shards))


def _like(tree: Tree, whole: Tree) -> Tree:
    """`whole` with only the leaves that `tree` has as well; both are nested dicts."""
    return {k: _like(v, whole[k]) if isinstance(v, dict) else whole[k] for k, v in tree.items()}


def _shared(change: Callable, tree: Tree, states: States) -> Tree:
    """{"embed": ..., "head": ...} with change(a, spec) for each leaf."""
    shared = {part: tree[part] for part in ("embed", "head")}
    return jax.tree.map(change, shared, _like(shared, states.param_specs))


def _is_vocab(spec: P) -> bool:
    return "pipe" in axes_of(spec)
