"""One layer of a chunk while an op runs it, with its own entries in all that is kept.

Legend: B rows · S sequence · C chunks · N layers of a kind in a chunk · R ring slots
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from mtx.pipeline.slots import add, read, write

Tree = Any


@dataclass(eq=False)
class Own:
    """A layer of a chunk, and its entries in what is kept of the layers of its kind."""

    kind: str
    n: Any  # among the chunk's layers
    index: Any  # among those of its kind
    trees: dict[str, Tree]  # leaves [.., N, ...]
    at: dict[str, tuple]  # the first two indices of its entries

    @classmethod
    def of(cls, kind: str, n, index, trees: dict, first: dict, *, entry=None) -> Own:
        """entry: its index in the trees, if that is not `index`."""
        entry = index if entry is None else entry
        own = {name: tree[kind] for name, tree in trees.items() if tree is not None}
        return cls(kind, n, index, own, {name: (first[name], entry) for name in own})

    def put_into(self, trees: dict) -> dict:
        """The trees with this kind's as they are now."""
        return {
            name: tree if tree is None else tree | {self.kind: self.trees[name]}
            for name, tree in trees.items()
        }

    def has_one_slot(self, name: str) -> bool:
        """Whether what is kept under that name has a single slot."""
        return all(len(ring) == 1 for ring in jax.tree.leaves(self.trees[name]))

    def read(self, name: str) -> Tree:
        return read(self.trees[name], *self.at[name])

    def write(self, name: str, value: Tree) -> None:
        self.trees[name] = write(self.trees[name], value, *self.at[name])

    def add(self, name: str, value: Tree) -> None:
        self.trees[name] = add(self.trees[name], value, *self.at[name])


def entry_of(tree: Tree, *index) -> Tree:
    """[1, 1, ...] of each leaf."""
    return jax.tree.map(lambda a: a[None, None], read(tree, *index))


class Kept(NamedTuple):
    """What B changes besides its output; {kind: ...} each."""

    gradients: Tree  # leaves [C, N, ...] float32, None for those that W makes
    deferred: Tree  # [R, N, ...]; None if W is not split
    dcaches: Tree  # [R, N, B, S, ...]; None without slices
    ahead: Tree  # the host's part of the next layers' residuals; None without offload
