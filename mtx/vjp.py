"""The VJP of one layer as plain arrays, so that it can wait in a ring between F, B and W.

`jax.vjp` returns a pytree whose leaves are what the backward pass needs. What is given again anyway
(weights, the layer's context, the cache of earlier slices) is taken out before the pytree waits and
put back before it is called; what is left are the activations that the model's own recomputation
policy keeps.

Frozen parameters have no gradients: the equations that would make them are left out, and so is what
those would read.

If B and W are split, the backward pass is traced once and cut in two (`LayerVJP.cut`): no layer
needs to be written for it, and no FLOP is added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from mtx.sharding.fp8 import arrays_of
from mtx.sharding.parameter import chosen
from mtx.strand import Strand, divide, inputs_of, needed_by

Arrays = tuple[jax.Array, ...]
Tree = Any
_STREAM = 1  # its position among the arguments of a layer


def _same(tree: Tree) -> Tree:
    return tree


class LayerVJP:
    """`layer(params, stream, *given)` and its VJP, cut at what waits in between.

    `given`: the arguments of both F and B: the layer's context and, for slices, the cache.
    Parameters may be given as shards, which F and B each gather.
    """

    def __init__(
        self, layer: Callable, params, stream, *given,
        gather: Callable = _same, reduce_scatter: Callable = _same, trained: Tree | None = None,
    ):  # fmt: skip
        """params, stream, given: examples, of which only shapes and dtypes count. gather: makes
        parameters from the shards that are given; reduce_scatter: makes shards of their gradients.
        trained: which parameters are trained, bool; None: all."""
        self._layer, self.params, self.stream = layer, params, stream
        self._gather, self._reduce_scatter, self._trained = gather, reduce_scatter, trained
        self._examples = params, stream, *given
        self._structure: Any = None
        self._unread: tuple = ()  # for each residual, its shape if B does not read it, or None
        self._trace()
        if trained is not None and not all(jax.tree.leaves(trained)):
            backward = self.strands[1]
            read, residuals = needed_by(backward), zip(backward.invars, self.residuals)
            self._unread = tuple(None if var in read else shape for var, shape in residuals)
            self._trace()
            del self._back, self.strands

    def _trace(self) -> None:
        def trace(*args):
            y, (leaves, self._structure) = self._vjp(*args)
            return y, self._read(leaves)

        traced = jax.make_jaxpr(trace, return_shape=True)(*self._examples)
        self.traced, (self.output, self.residuals) = traced  # as `forward`

    def _vjp(self, params, *args):
        y, vjp = jax.vjp(self._layer, self._gather(params), *args)
        return y, jax.tree.flatten(_without_given(vjp))

    def _read(self, residuals: Sequence) -> Arrays:
        """The residuals without those that B does not read."""
        unread = self._unread or (None,) * len(residuals)
        return tuple(a for a, shape in zip(residuals, unread, strict=True) if shape is None)

    @property
    def gradients(self) -> Tree:
        """A tree like the gradients of the parameters, without frozen ones."""
        return self._of_trained(arrays_of(self.params))

    def _of_trained(self, tree: Tree) -> Tree:
        return tree if self._trained is None else chosen(tree, self._trained)

    def forward(self, params, stream, *given) -> tuple[Tree, Arrays]:
        """(what the layer returns, residuals)"""
        values = jaxpr_as_fun(self.traced)(*jax.tree.leaves((params, stream, given)))
        return jax.tree.structure((self.output, self.residuals)).unflatten(values)

    def backward(self, residuals: Arrays, params, given: tuple, dy: Tree) -> tuple[Tree, tuple]:
        """(the gradients of params, one array for each trained one; those of stream and, if it is
        given, of the cache)"""
        values = jaxpr_as_fun(self.traced_back)(*jax.tree.leaves((residuals, params, given, dy)))
        return jax.tree.unflatten(jax.tree.structure(self._back[1]), values)

    @property
    def traced_back(self):
        """`backward`, traced."""
        return self._back[0]

    @cached_property
    def _back(self) -> tuple[Any, tuple]:
        """`backward`, traced, and the shapes of what it gives."""
        params, _, *given = self._examples
        trace = jax.make_jaxpr(self._pull_back, return_shape=True)
        return trace(self.residuals, params, tuple(given), self.output)

    def _pull_back(self, residuals: Arrays, params, given: tuple, dy: Tree) -> tuple[Tree, tuple]:
        if self._unread:
            read = iter(residuals)
            residuals = tuple(
                next(read) if shape is None else jnp.zeros(shape.shape, shape.dtype)
                for shape in self._unread
            )
        vjp = jax.tree.unflatten(self._structure, residuals)
        arguments = self._gather(params), None, *given
        for position, value in enumerate(arguments):
            if position != _STREAM:
                vjp.args_res[position] = value
        dparams, dstream, _, *dcache = vjp(dy)
        dparams = self._reduce_scatter(self._of_trained(arrays_of(dparams)))
        return dparams, (dstream, *dcache)

    @cached_property
    def cut(self) -> Cut:
        """The backward pass in two parts."""
        return Cut.of(self.strands[1], *self.structures)

    @cached_property
    def structures(self) -> tuple:
        """(the structure of the gradients of parameters, that of the other gradients)"""
        return tuple(map(jax.tree.structure, self._back[1]))

    @cached_property
    def strands(self) -> tuple[Strand, Strand]:
        """`forward` and `backward` as equations over leaves."""
        return Strand.flat(self.traced), Strand.flat(self.traced_back)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A backward pass as B, which the rest of the pipeline waits for, and W, which can wait itself.

    W is the matmuls that only weight gradients need, and what follows from them; B is all else,
    including small gradients (of norms and biases). Between the two, W's inputs wait. Layers are
    pure: an equation that nothing uses is left out.
    """

    deferred: tuple[jax.ShapeDtypeStruct, ...]  # what waits
    made_by_w: Tree  # bool, like the gradients of parameters: which W makes
    b: Strand  # leaves of (residuals, params, given, dy) -> what `of_b` takes apart
    w: Strand  # what waits -> the gradients that W makes
    others: Any  # the structure of the gradients of all but parameters

    @classmethod
    def of(cls, flat: Strand, parameters, others, *, stay=(), keep: Collection[int] = ()) -> Cut:
        """Cut (residuals, params, given, dy) -> (gradients of parameters, others), given the
        structures of these two. stay: names of primitives that B keeps; keep: the places of W's
        matmuls that it keeps as well."""
        weights = parameters.num_leaves
        of_b, of_w = divide(flat, weights, stay, keep)
        from_w = {var for eqn in of_w for var in eqn.outvars}
        dweights, rest = flat.outvars[:weights], flat.outvars[weights:]
        waits = inputs_of(of_w, exclude=set(flat.constvars))
        made_by_w = [var in from_w if not isinstance(var, Literal) else False for var in dweights]
        in_b = [var for var, waits_for_w in zip(dweights, made_by_w) if not waits_for_w]
        in_w = [var for var, waits_for_w in zip(dweights, made_by_w) if waits_for_w]
        return cls(
            deferred=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in waits),
            made_by_w=parameters.unflatten(made_by_w),
            b=flat.part(of_b, flat.invars, [*in_b, *rest, *waits]),
            w=flat.part(of_w, waits, in_w),
            others=others,
        )

    def of_b(self, values: Sequence) -> tuple[Tree, Tree, Arrays]:
        """What B gives: (gradients of the parameters that need not wait, None for the others; the
        other gradients; what waits for W)"""
        gradients, structure = iter(values), jax.tree.structure(self.made_by_w)
        made_by_w = jax.tree.leaves(self.made_by_w)
        dparams = structure.unflatten(None if w else next(gradients) for w in made_by_w)
        rest = list(gradients)
        end = self.others.num_leaves
        return dparams, self.others.unflatten(rest[:end]), tuple(rest[end:])

    def backward(self, residuals: Arrays, params, given: tuple, dy):
        """B, applied to arrays."""
        return self.of_b(self.b(*jax.tree.leaves((residuals, params, given, dy))))

    def weight(self, deferred: Arrays):
        """W: the gradients of the parameters that have waited, None for the others."""
        return self.of_w(self.w(*deferred))

    def of_w(self, values: Sequence) -> Tree:
        """What W gives, as a tree."""
        gradients = iter(values)
        return jax.tree.map(lambda w: next(gradients) if w else None, self.made_by_w)


def _without_given(vjp):
    for position in range(len(vjp.args_res)):
        if position != _STREAM:
            vjp.args_res[position] = None
    return vjp
