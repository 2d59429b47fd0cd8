"""What a sublayer is: a frozen config, and the Flax module that it makes for the local shard.

A layer calls its sublayers in turn, each after a norm, and adds what they return to the residual
stream (`mtx.layers.layer`). A sublayer that looks at other positions defines itself how it handles
sequences in slices, and text that is generated token by token, for which it keeps what it needs of
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
# Takes own_nBgtK, to be kept, and returns held_nBgSK, all that is kept, with these included; a
# `State` instead replaces the one before. Given None it keeps nothing and returns what is held. It
# returns None if nothing is held of earlier positions.
Keep = Callable[[Tree | None], Tree | None]


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a module is made with, besides its own config."""

    hidden: int  # D
    init_std: float  # of weights that read the stream
    output_std: float  # of weights that write to it, as Megatron-LM scales them
    dtype: str  # of computation
    axes: Axes
    kernel: AttentionKernel
    site: int  # a number that no other place in the layer that draws random numbers has
    slices: int = 1  # of each sequence
    adapters: Adapters | None = None  # of its linears; given only to a sublayer that `adapts`


class Module(Protocol):
    """A sublayer's Flax module."""

    def __call__(self, x_BsD: jax.Array, context: Context | None) -> jax.Array:
        """What is added to the stream, x_BsD."""
        ...


class Balanced(Protocol):
    """The module of a sublayer that `has_aux`: it has its own losses, which keep it balanced."""

    def __call__(self, x_BsD: jax.Array, context: Context | None) -> tuple[jax.Array, jax.Array]:
        """(what is added to the stream, x_BsD; float32 [B, s]: what each token adds to the loss,
        weighted like the token's own loss)"""
        ...


class Positional(Module, Protocol):
    """A module that looks at other positions, and keeps what it needs of them."""

    def of_slice(self, x_BsD: jax.Array, context: Context, cache_BS: jax.Array) -> tuple:
        """(what is added, this slice's part of the cache), given the parts of earlier slices."""
        ...

    def of_text(self, x_BtD: jax.Array, context: Context | None, keep: Keep) -> jax.Array:
        """What is added, for the next t positions of texts; calls `keep` once, with what is to be
        kept."""
        ...


class Sublayer(Protocol):
    """A sublayer's config."""

    @property
    def looks_around(self) -> bool:
        """Whether a position's output depends on other positions; if so, the config is
        `LooksAround` and its module `Positional`."""
        ...

    def module(self, build: Build, rngs: nnx.Rngs) -> Module | Balanced:
        """The module, with parameters of global shapes; it is applied to local shards."""
        ...


def adapts(sublayer: Sublayer) -> bool:
    """Whether all matrices of a sublayer's module may have adapters."""
    return getattr(sublayer, "adapts", False)


def joins(sublayer: Sublayer) -> bool:
    """Whether a sublayer's module may leave its sum over `tensor` to the layer, which sums those of
    several at once (`mtx.sharding.linear`): its linears read `axes.joint`, and nothing but a sum
    follows the last of them."""
    return getattr(sublayer, "joins", False)


def has_aux(sublayer: Sublayer) -> bool:
    """Whether a sublayer's module is `Balanced`."""
    return getattr(sublayer, "has_aux", False)


def require_rule(rule: str, why: str, name: str, sublayer: Sublayer, *, remedy: str) -> None:
    """Raise UserError if a sublayer that looks around has no `rule`; `why` says what needs it."""
    if sublayer.looks_around and not getattr(sublayer, rule, False):
        raise UserError(
            f"{why}, and {name}, {type(sublayer).__name__}, looks at other positions and has no "
            f"{rule}; use {remedy}"
        )


def require_methods(name: str, sublayer: Sublayer, module: Any) -> None:
    """Raise UserError if a sublayer says what it keeps and its module has no method for it."""
    for rule, method in (("empty_cache", "of_slice"), ("empty_past", "of_text")):
        if sublayer.looks_around and hasattr(sublayer, rule) and not hasattr(module, method):
            raise UserError(
                f"{name}: {type(sublayer).__name__} has {rule}, and its module, "
                f"{type(module).__name__}, has no {method}; write it, or leave {rule} out"
            )


class LooksAround(Sublayer, Protocol):
    """A config whose module looks at other positions."""

    # Whether its module supports sequences that `context` cuts (`mtx.sharding.sequence`).
    over_context: bool

    def empty_cache(self, build: Build, rows: int, sequence: int) -> jax.Array:
        """Zeros [B, S, ...], for what slices of a sequence keep for later ones; [B, slices, ...]
        for what does not grow with positions."""
        ...

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        """Zeros [n, B, g, S, K], or a `State`, for what generated texts keep."""
        ...
