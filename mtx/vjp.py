"""The VJP of one layer as plain arrays, so that it can wait in a ring between F, B and W.

`jax.vjp` returns a pytree whose leaves are what the backward pass needs. What is given again anyway
(weights, the layer's context, the cache of earlier slices) is taken out before it waits and put
back before it is called; what is left are the activations that the model's own recomputation policy
keeps.

Frozen parameters have no gradients: what would make them is left out, and so is what it would read.

Where B and W are split, the backward pass is traced once and cut in two (`LayerVJP.cut`): no layer
needs to be written for it, and no FLOP is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from mtx.sharding.fp8 import SCALED_DOT, arrays_of
from mtx.sharding.parameter import chosen

Arrays = tuple[jax.Array, ...]
Tree = Any
_STREAM = 1  # its position among the arguments of a layer


def _same(tree: Tree) -> Tree:
    return tree


class LayerVJP:
    """`layer(params, stream, *given)` and its VJP, cut at what waits in between.

    `given`: what F and B are both called with: the layer's context and, for slices, the cache.
    Parameters may be given as shards, which F and B each gather.
    """

    def __init__(
        self, layer: Callable, params, stream, *given,
        gather: Callable = _same, reduce_scatter: Callable = _same, trained: Tree | None = None,
    ):  # fmt: skip
        """params, stream, given: examples, only their shapes and dtypes count. gather: parameters
        from what is given of them; reduce_scatter: the same of gradients, back. trained: which of
        the parameters are, bool; None: all."""
        self._layer, self.params, self.stream = layer, params, stream
        self._gather, self._reduce_scatter, self._trained = gather, reduce_scatter, trained
        self._examples = params, stream, *given
        self._structure: Any = None
        self._unread: tuple = ()  # of all residuals, the shapes of those that B does not read
        self._trace()
        if trained is not None and not all(jax.tree.leaves(trained)):
            backward = Strand.of(self._backward, *self._of_backward)
            read, residuals = needed_by(backward), zip(backward.invars, self.residuals)
            self._unread = tuple(None if var in read else shape for var, shape in residuals)
            self._trace()

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
        """Without those that B does not read."""
        unread = self._unread or (None,) * len(residuals)
        return tuple(a for a, shape in zip(residuals, unread, strict=True) if shape is None)

    @property
    def gradients(self) -> Tree:
        """A tree like the gradients of parameters, which frozen ones are left out of."""
        return self._of_trained(arrays_of(self.params))

    def _of_trained(self, tree: Tree) -> Tree:
        return tree if self._trained is None else chosen(tree, self._trained)

    def forward(self, params, stream, *given) -> tuple[Tree, Arrays]:
        """(what the layer returns, residuals)"""
        y, (leaves, _) = self._vjp(params, stream, *given)
        return y, self._read(leaves)

    def backward(self, residuals: Arrays, params, given: tuple, dy: Tree):
        """The gradients of (params, stream, *given), one array a trained parameter; float0 or None
        where there is none."""
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
        dparams, *others = vjp(dy)
        return self._reduce_scatter(self._of_trained(arrays_of(dparams))), *others

    def _backward(self, residuals: Arrays, params, given: tuple, dy: Tree):
        """(the gradients of params, those of stream and cache)"""
        dparams, dstream, _, *dcache = self.backward(residuals, params, given, dy)
        return dparams, (dstream, *dcache)

    @cached_property
    def cut(self) -> Cut:
        """The backward pass in two parts."""
        return Cut.of(self.strands[1], *self.structures)

    @cached_property
    def structures(self) -> tuple:
        """Of the gradients of parameters, and of the other gradients."""
        return tuple(map(jax.tree.structure, jax.eval_shape(self._backward, *self._of_backward)))

    @property
    def _of_backward(self) -> tuple:
        params, _, *given = self._examples
        return self.residuals, params, tuple(given), self.output

    @cached_property
    def strands(self) -> tuple[Strand, Strand]:
        """`forward`, and the backward pass whole, (residuals, params, given, dy) -> (gradients of
        params, (that of stream, ...)), as equations over leaves."""
        backward = Strand.of(self._backward, *self._of_backward)
        return Strand.of(self.forward, *self._examples), backward


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A backward pass as B, what the rest of the pipeline waits for, and W, what can wait itself.

    W are the matmuls that only weight gradients need, and what follows from them; B is all else,
    small gradients (of norms and biases) included. Between the two wait W's inputs. Layers are
    pure: an equation without a use is left out.
    """

    deferred: tuple[jax.ShapeDtypeStruct, ...]  # of what waits
    made_by_w: Tree  # bool, like the gradients of parameters: which W makes
    b: Strand  # leaves of (residuals, params, given, dy) -> what `of_b` takes apart
    w: Strand  # what waits -> the gradients that W makes
    others: Any  # the structure of the gradients of what is no parameter

    @classmethod
    def of(cls, flat: Strand, parameters, others, *, stay=(), keep: Collection[int] = ()) -> Cut:
        """Of (residuals, params, given, dy) -> (gradients of parameters, others), with the
        structures of these. stay: names of primitives that B keeps; keep: the places of matmuls of
        W's that it keeps as well."""
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
        """B, of arrays."""
        return self.of_b(self.b(*jax.tree.leaves((residuals, params, given, dy))))

    def weight(self, deferred: Arrays):
        """W: the gradients of the parameters that have waited, None for the others."""
        return self.of_w(self.w(*deferred))

    def of_w(self, values: Sequence) -> Tree:
        """What W gives."""
        gradients = iter(values)
        return jax.tree.map(lambda w: next(gradients) if w else None, self.made_by_w)


def _without_given(vjp):
    for position in range(len(vjp.args_res)):
        if position != _STREAM:
            vjp.args_res[position] = None
    return vjp


# -- equations -------------------------------------------------------------------------------------

COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "ppermute", "all_to_all")
NESTED = {  # primitives whose equations are taken out of them, and where they keep them
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # a closed call, from jax 0.12 on
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Strand:
    """A function of arrays as equations, without nested functions among them."""

    jaxpr: Any  # its first inputs are the constants
    constants: Sequence

    @classmethod
    def of(cls, f: Callable, *arguments) -> Strand:
        """`f` over the leaves of its arguments, of which shapes count only."""
        structure = jax.tree.structure(arguments)

        def run(*leaves):
            outer = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(f(*structure.unflatten(leaves))))
            closed = outer(*leaves)
            return _evaluate(closed.jaxpr, closed.consts, leaves)

        flat = jax.make_jaxpr(run)(*jax.tree.leaves(arguments))
        inputs = [*flat.jaxpr.constvars, *flat.jaxpr.invars]
        return cls(_replaced(flat.jaxpr, invars=inputs), flat.consts)

    @property
    def constvars(self) -> list:
        return self.jaxpr.invars[: len(self.constants)]

    @property
    def invars(self) -> list:
        return self.jaxpr.invars[len(self.constants) :]

    @property
    def outvars(self) -> list:
        return self.jaxpr.outvars

    @property
    def eqns(self) -> list:
        return self.jaxpr.eqns

    def part(self, eqns, invars, outvars) -> Strand:
        """Some of the equations."""
        inputs = [*self.constvars, *invars]
        part = _replaced(self.jaxpr, eqns=list(eqns), invars=inputs, outvars=list(outvars))
        return Strand(part, self.constants)

    def choose(self, wanted: Sequence[bool]) -> Strand:
        """The same function with some of its outputs."""
        outvars = [var for var, one in zip(self.outvars, wanted, strict=True) if one]
        needed = needed_of(self.eqns, outvars)
        eqns = [eqn for place, eqn in enumerate(self.eqns) if place in needed]
        return self.part(eqns, self.invars, outvars)

    def divided(self, places: Collection[int]) -> tuple[Strand, Strand]:
        """Its equations at these places, which wait for no others, and the rest, which takes what
        the first part gives before the inputs of both."""
        before = [eqn for place, eqn in enumerate(self.eqns) if place in places]
        rest = [eqn for place, eqn in enumerate(self.eqns) if place not in places]
        read = {*inputs_of(rest, exclude=set(self.constvars)), *variables_of(self.outvars)}
        crossing = [var for eqn in before for var in eqn.outvars if var in read]
        return (
            self.part(before, self.invars, crossing),
            self.part(rest, [*crossing, *self.invars], self.outvars),
        )

    def __call__(self, *arrays) -> list:
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))(*self.constants, *arrays)


def _replaced(jaxpr, **changes):
    """The jaxpr with other equations, inputs or outputs, and without constants."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], debug_info=debug_info, **changes)


def bind(jaxpr, eqn, inputs: Sequence) -> list:
    """The outputs of one equation of a jaxpr."""
    known = {v: x for v, x in zip(eqn.invars, inputs) if not isinstance(v, Literal)}
    return Strand(jaxpr, ()).part([eqn], known, eqn.outvars)(*known.values())


def _evaluate(jaxpr, constants, arguments) -> list:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments]))

    def read(var):
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        inputs = [read(var) for var in eqn.invars]
        inner = eqn.params.get(NESTED.get(eqn.primitive.name, ""))
        if inner is not None and not is_matmul(eqn):
            constants = inner.consts if isinstance(inner, ClosedJaxpr) else ()
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            outputs = _evaluate(body, constants, inputs)
        else:
            outputs = bind(jaxpr, eqn, inputs)
        values.update(zip(eqn.outvars, outputs))
    return [read(var) for var in jaxpr.outvars]


def is_matmul(eqn) -> bool:
    """Whether an equation is a product alone, or one of float8 tensors with its scale, which stays
    one equation."""
    return eqn.primitive.name == "dot_general" or eqn.params.get("name") == SCALED_DOT


def divide(
    flat, weights: int, stay: Collection[str] = (), keep: Collection[int] = ()
) -> tuple[list, list]:
    """The equations of B and of W, each in their order; the first `weights` outputs are weight
    gradients. stay, keep: as in `Cut.of`."""
    needed = needed_of(flat.eqns, flat.outvars[weights:])
    wanted = needed_of(flat.eqns, flat.outvars)
    later, made_later = set(), set()
    for i, eqn in enumerate(flat.eqns):
        if i in wanted and i not in needed:
            follows = any(not isinstance(v, Literal) and v in made_later for v in eqn.invars)
            if follows or (is_matmul(eqn) and i not in keep):
                later.add(i)
                made_later.update(eqn.outvars)
    # What only W uses moves there too, where that leaves less, or no more, to wait.
    free = set(flat.constvars)
    waiting = set(inputs_of([flat.eqns[i] for i in sorted(later)], exclude=free))
    readers = {var: {-1} for var in variables_of(flat.outvars)}  # -1: an output is no equation's
    for i in wanted:
        for var in variables_of(flat.eqns[i].invars):
            readers.setdefault(var, set()).add(i)
    for i in sorted(wanted - needed - later, reverse=True):
        eqn = flat.eqns[i]
        users = set().union(*(readers.get(var, ()) for var in eqn.outvars))
        if not users or not users <= later or eqn.primitive.name in stay:
            continue
        inputs = set(variables_of(eqn.invars)) - free - waiting
        if _bytes(inputs) <= _bytes(eqn.outvars):
            later.add(i)
            waiting = (waiting - set(eqn.outvars)) | inputs
    now = [eqn for i, eqn in enumerate(flat.eqns) if i in wanted and i not in later]
    return now, [flat.eqns[i] for i in sorted(later)]


def needed_of(eqns, outvars) -> set[int]:
    """The indices of the equations that these outputs need."""
    live, found = set(variables_of(outvars)), set()
    for i in range(len(eqns) - 1, -1, -1):
        if live & set(eqns[i].outvars):
            found.add(i)
            live.update(variables_of(eqns[i].invars))
    return found


def needed_by(strand: Strand) -> set:
    """The variables that its outputs are made of."""
    needed = needed_of(strand.eqns, strand.outvars)
    read = [strand.outvars, *(strand.eqns[i].invars for i in needed)]
    return {var for atoms in read for var in variables_of(atoms)}


def axes_of(eqn) -> tuple[str, ...]:
    """The axes of the mesh that a collective is over; () of other equations."""
    over = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    if eqn.primitive.name not in COLLECTIVES:
        return ()
    return over if isinstance(over, tuple) else (over,)


def variables_of(atoms) -> list:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def inputs_of(eqns, *, exclude) -> list:
    """The variables that these equations read and do not make, each once."""
    made = {var for eqn in eqns for var in eqn.outvars} | exclude
    read = dict.fromkeys(var for eqn in eqns for var in variables_of(eqn.invars))
    return [var for var in read if var not in made]


def _bytes(variables) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)
