"""What a sublayer is: a config, frozen, and the Flax module that it makes for the local shard.

A layer calls its sublayers in turn, each behind a norm, and adds what they return to the residual
stream (`mtx.layers.layer`). A sublayer that looks at other positions says itself what it does with
sequences in slices, and with texts that go on token by token: there it keeps what it needs of
earlier positions.

Legend: B rows · S sequence (s: shard, t: the next positions) · D hidden
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx

from mtx.errors import UserError
from mtx.layers.context import Context
from mtx.layers.kernels import AttentionKernel
from mtx.sharding.adapter import Adapters
from mtx.sharding.mesh import Axes

Tree = Any
# Takes own_nBgtK, to be kept; gives held_nBgSK, all that is kept, these included, or a `State` in
# place of another. Given None it keeps nothing, and gives what is held. It gives None where there
# is nothing of earlier positions.
Keep = Callable[[Tree | None], Tree | None]


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a module is made with, beside its own config."""

    hidden: int  # D
    init_std: float  # of weights that read the stream
    output_std: float  # of weights that write to it, as Megatron-LM scales them
    dtype: str  # of what is computed
    axes: Axes
    kernel: AttentionKernel
    site: int  # a number of its own among the layer's places that draw random numbers
    slices: int = 1  # of each sequence
    adapters: Adapters | None = None  # of its linears; a sublayer that `adapts` is given them


class Module(Protocol):
    """A sublayer's Flax module."""

    def __call__(self, x_BsD: jax.Array, context: Context | None) -> jax.Array:
        """What is added to the stream, x_BsD."""
        ...


class Balanced(Protocol):
    """The module of a sublayer that `has_aux`: losses of its own, which keep it balanced."""

    def __call__(self, x_BsD: jax.Array, context: Context | None) -> tuple[jax.Array, jax.Array]:
        """(what is added to the stream, x_BsD; float32 [B, s]: what each token adds to the loss,
        weighed as its own loss is)"""
        ...


class Positional(Module, Protocol):
    """A module that looks at other positions, and keeps what it needs of them."""

    def of_slice(self, x_BsD: jax.Array, context: Context, cache_BS: jax.Array) -> tuple:
        """(what is added, this slice's part of a cache), given those of earlier slices."""
        ...

    def of_text(self, x_BtD: jax.Array, context: Context | None, keep: Keep) -> jax.Array:
        """What is added, of the next t positions of texts; gives `keep` once what is to be kept."""
        ...


class Sublayer(Protocol):
    """A sublayer's config."""

    @property
    def looks_around(self) -> bool:
        """Whether a position's output depends on other positions: a config that `LooksAround`,
        whose module is `Positional`."""
        ...

    def module(self, build: Build, rngs: nnx.Rngs) -> Module | Balanced:
        """With parameters of global shapes; applied to local shards."""
        ...


def adapts(sublayer: Sublayer) -> bool:
    """Whether all matrices of a sublayer's module may have adapters."""
    return getattr(sublayer, "adapts", False)


def joins(sublayer: Sublayer) -> bool:
    """Whether a sublayer's module may leave its sum over `tensor` to the layer, which sums those of
    several at once (`mtx.sharding.linear`): its linears read `axes.joint`, and nothing but a sum
    stands behind the last of them."""
    return getattr(sublayer, "joins", False)


def has_aux(sublayer: Sublayer) -> bool:
    """Whether a sublayer's module is `Balanced`."""
    return getattr(sublayer, "has_aux", False)


def require_rule(rule: str, why: str, name: str, sublayer: Sublayer, *, remedy: str) -> None:
    """UserError where a sublayer that looks around has no such rule, which is asked for here."""
    if sublayer.looks_around and not getattr(sublayer, rule, False):
        raise UserError(
            f"{why}, and {name}, {type(sublayer).__name__}, looks at other positions and has no "
            f"{rule}; use {remedy}"
        )


def require_methods(name: str, sublayer: Sublayer, module: Any) -> None:
    """UserError where a sublayer says what it keeps, and its module does not know what to do with
    it."""
    for rule, method in (("empty_cache", "of_slice"), ("empty_past", "of_text")):
        if sublayer.looks_around and hasattr(sublayer, rule) and not hasattr(module, method):
            raise UserError(
                f"{name}: {type(sublayer).__name__} has {rule}, and its module, "
                f"{type(module).__name__}, has no {method}; write it, or leave {rule} out"
            )


class LooksAround(Sublayer, Protocol):
    """A config whose module looks at other positions."""

    # Whether its module knows of sequences that `context` cuts (`mtx.sharding.sequence`).
    over_context: bool

    def empty_cache(self, build: Build, rows: int, sequence: int) -> jax.Array:
        """[B, S, ...] of zeros: what slices of a sequence keep for later ones; [B, slices, ...] of
        what does not grow with them."""
        ...

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        """[n, B, g, S, K] of zeros, or a `State`: what texts keep that go on."""
        ...
