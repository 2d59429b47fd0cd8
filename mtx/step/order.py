"""Model order: the form in which layouts are compared, layers [L, ...] as the model has them,
global shapes, no padding; and back to the order in which a layout holds them, [P, C, N, ...].

Legend: P stages · C chunks · N layers a chunk · L layers
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mtx.schedules.partition import EMPTY
from mtx.sharding.axes import axes_of
from mtx.step.state import States

Tree = Any


def to_canonical(tree: Tree, states: States) -> Tree:
    """A tree like the masters (gradients, moments) -> layers [L, ...], no padding."""
    tree = jax.tree.map(lambda a, shard: shard.unpad(a), tree, states.shards)
    places = states.placement.place_of_layer
    blocks = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[places], tree["block"])
    vocab = states.run.model.vocab
    ends = jax.tree.map(
        lambda a, spec: a[:vocab] if _is_vocab(spec) else a,
        tree["ends"],
        states.param_specs["ends"],
    )
    return {"ends": ends, "block": blocks}


def from_canonical(tree: Tree, states: States) -> Tree:
    """The inverse of `to_canonical`."""
    layers = states.placement.layer
    flat = layers.ravel()

    def stack(a):
        used = jnp.asarray(flat != EMPTY).reshape(-1, *(1,) * (a.ndim - 1))
        return jnp.where(used, a[flat], 0).reshape(*layers.shape, *a.shape[1:])

    def pad_vocab(a, spec):
        rows = states.model.vocab_rows - len(a) if _is_vocab(spec) else 0
        return jnp.pad(a, ((0, rows), *((0, 0),) * (a.ndim - 1))) if rows else a

    ends = jax.tree.map(pad_vocab, tree["ends"], states.param_specs["ends"])
    stacked = {"ends": ends, "block": jax.tree.map(stack, tree["block"])}
    return jax.tree.map(lambda a, shard: shard.pad(a), stacked, states.shards)


def _is_vocab(spec: P) -> bool:
    return "pipe" in axes_of(spec)
