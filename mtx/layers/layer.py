"""A layer: sublayers in turn, each after its norm and each added to the residual stream, or all in
parallel after one norm. A model is a pattern of kinds of layers (`Stack`).

Legend: B rows · S sequence (s: shard; t: the next positions) · D hidden
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import jax
from flax import nnx

from mtx.errors import UserError, unknown_name
from mtx.layers.context import Context, dropout
from mtx.layers.norm import Norm, scaled
from mtx.layers.sublayer import (
    Build,
    Keep,
    LooksAround,
    Sublayer,
    adapts,
    has_aux,
    joins,
    require_methods,
    require_rule,
)
from mtx.sharding.adapter import Adapters
from mtx.sharding.linear import enter_jointly, leave_jointly

# pre: x + f(norm(x)). post: norm(x + f(x)). both: x + norm(f(norm(x))), with two separate norms.
# output: x + norm(f(x))
NormPlacement = Literal["pre", "post", "both", "output"]
Tree = Any
Stream = dict[str, Any]  # {"x": x_BsD}, and any other leaves


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of layer: (name, sublayer) in order. The parameters have the same names."""

    sublayers: tuple[tuple[str, Sublayer], ...]
    norm: Norm
    norm_placement: NormPlacement = "pre"
    dropout: float = 0.0  # before each residual addition
    residual_scale: float = 1.0  # multiplies what is added to the residual stream (Granite)
    # x + f(norm(x)) + g(norm(x)), one norm for all (Wang and Komatsuzaki 2021; MegaScale, Jiang et
    # al. 2024): one reduction over `tensor` per layer. All sublayers must join and have no losses
    parallel: bool = False

    def __post_init__(self):
        if self.norm_placement not in (known := get_args(NormPlacement)):
            raise unknown_name("norm_placement", self.norm_placement, known)
        for name, sublayer in self.sublayers:
            if not hasattr(sublayer, "looks_around"):
                raise UserError(
                    f"{name}: {type(sublayer).__name__} does not say looks_around; use True where "
                    "a position's output depends on other positions, else False"
                )
            if self.parallel and not joins(sublayer):
                raise UserError(
                    f"parallel=True: {name}, {type(sublayer).__name__}, does not say joins = True: "
                    "it may need its own sum over tensor; use parallel=False"
                )
        assert not self.parallel or (self.norm_placement == "pre" and not self.has_aux)

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return Layer(self, build, rngs)

    def empty_cache(self, build: Build, rows: int, sequence: int) -> Tree:
        """Zeros [B, S, ...] by sublayer, for what slices of a sequence keep for later ones."""
        why = f"slices={build.slices} cut sequences"
        around = self._around("empty_cache", why, "slices=1").items()
        return {name: each.empty_cache(build, rows, sequence) for name, each in around}

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        """Zeros by sublayer, for what generated texts keep: [n, B, g, S, K], or a `State`."""
        around = self._around("empty_past", "texts go on", "a family without it").items()
        return {name: each.empty_past(build, rows, length) for name, each in around}

    @property
    def has_aux(self) -> bool:
        """Whether there are losses besides the head's: the stream's leaf "aux" [B, s] sums them."""
        return any(has_aux(each) for _, each in self.sublayers)

    def _around(self, rule: str, why: str, remedy: str) -> dict[str, LooksAround]:
        for name, each in self.sublayers:
            require_rule(rule, why, name, each, remedy=remedy)
        sublayers = [(name, each) for name, each in self.sublayers if each.looks_around]
        return {name: cast(LooksAround, each) for name, each in sublayers}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a model is made of."""

    kinds: dict[str, Kind]
    pattern: tuple[str, ...]  # the kind of each layer, in model order
    embedding: Any  # the config of the module that computes x_BsD from a batch
    head: Any  # and of the one that computes losses from x_BsD

    def __post_init__(self):
        """Leave out kinds that no layer has. UserError for a layer of a kind that is not there."""
        for kind in self.pattern:
            if kind not in self.kinds:
                raise unknown_name("pattern", kind, self.kinds)
        used = {name: kind for name, kind in self.kinds.items() if name in self.pattern}
        object.__setattr__(self, "kinds", used)

    @classmethod
    def uniform(cls, kind: Kind, layers: int, **others: Any) -> Stack:
        """All layers of one kind."""
        return cls(kinds={"block": kind}, pattern=("block",) * layers, **others)


class Layer(nnx.Module):
    """One layer, for the local shard."""

    def __init__(self, kind: Kind, build: Build, rngs: nnx.Rngs):
        self.kind, self.axes = kind, build.axes
        if kind.parallel:
            self.norm = kind.norm.module(build.hidden)
            build = replace(build, axes=replace(build.axes, joint=True))
        for number, (name, sublayer) in enumerate(kind.sublayers):
            if not kind.parallel:
                setattr(self, f"{name}_norm", kind.norm.module(build.hidden))
            if build.axes.context_shards > 1:
                why = f"context={build.axes.context_shards} cuts sequences"
                require_rule("over_context", why, name, sublayer, remedy="context=1")
            site = len(kind.sublayers) + number
            own = replace(build, site=site, adapters=_adapters_of(name, sublayer, build))
            module = sublayer.module(own, rngs)
            if type(self).of_text is Layer.of_text:  # which calls those of the modules
                require_methods(name, sublayer, module)
            setattr(self, name, module)
            if kind.norm_placement == "both":
                setattr(self, f"{name}_post_norm", kind.norm.module(build.hidden))

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        """The stream after the layer; for a slice of the sequence, (stream, its part of the cache),
        given the parts of earlier slices. Without a context there is no dropout."""
        own = {}

        def run(name, module, h_BsD):
            if cache is None or name not in cache:
                return module(h_BsD, context)
            h_BsD, own[name] = module.of_slice(h_BsD, context, cache[name])
            return h_BsD

        def applied(stream):
            return self._applied(stream, context, run), own

        if self.kind.parallel and self.axes.sequence_parallel:
            applied = jax.checkpoint(applied, policy=_is_not_gathered, prevent_cse=False)
        stream, own = applied(stream)
        return stream if cache is None else (stream, own)

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        """The stream after the layer, for the next t positions of texts. keep: takes what the
        sublayers keep, by name."""

        def run(name, module, h_BtD):
            if not hasattr(module, "of_text"):
                return module(h_BtD, context)
            return module.of_text(h_BtD, context, lambda own: _of(keep({name: own}), name))

        return self._applied(stream, context, run)

    def _applied(self, stream, context, run):
        """The stream after all sublayers; run(name, module, h) computes each from its input."""
        if self.kind.parallel:
            return self._beside(stream, context, run)
        placement, x_BsD, stream = self.kind.norm_placement, stream["x"], dict(stream)
        for number, (name, sublayer) in enumerate(self.kind.sublayers):
            norm, module = getattr(self, f"{name}_norm"), getattr(self, name)
            h_BsD = run(name, module, norm(x_BsD) if placement in ("pre", "both") else x_BsD)
            if has_aux(sublayer):
                h_BsD, aux_Bs = h_BsD
                stream["aux"] = stream["aux"] + aux_Bs
            if placement == "both":
                h_BsD = getattr(self, f"{name}_post_norm")(h_BsD)
            h_BsD = norm(h_BsD) if placement == "output" else h_BsD
            site = (context.layer, number) if context is not None else ()
            x_BsD = self._added(x_BsD, h_BsD, context, *site)
            x_BsD = norm(x_BsD) if placement == "post" else x_BsD
        return stream | {"x": x_BsD}

    def _beside(self, stream, context, run):
        x_BsD = stream["x"]
        h_BSD = enter_jointly(self.norm(x_BsD), self.axes)
        parts = [run(name, getattr(self, name), h_BSD) for name, _ in self.kind.sublayers]
        y_BsD = leave_jointly(sum(parts[1:], parts[0]), self.axes)
        site = (context.layer, 0) if context is not None else ()
        return stream | {"x": self._added(x_BsD, y_BsD, context, *site)}

    def _added(self, x_BsD, h_BsD, context, *site):
        h_BsD = scaled(h_BsD, self.kind.residual_scale)
        return x_BsD + dropout(h_BsD, self.kind.dropout, self.axes, context, *site)


def _adapters_of(name: str, sublayer: Sublayer, build: Build) -> Adapters | None:
    if build.adapters is None or name not in build.adapters.on:
        return None
    if not adapts(sublayer):
        others = [each for each in build.adapters.on if each != name]
        raise UserError(
            f"lora_on={name}: its sublayer, {type(sublayer).__name__}, takes no adapters; use "
            f"lora_on={' '.join(others) or 'another sublayer'}"
        )
    return build.adapters


def _is_not_gathered(primitive, *_, **__) -> bool:
    """Checkpoint policy: keep everything except gathered activations, whose shards are kept."""
    return primitive.name != "all_gather"


def _of(held: dict[str, Tree] | None, name: str) -> Tree:
    return None if held is None else held[name]
