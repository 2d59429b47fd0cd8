"""F and B of a layer when B recomputes what a policy does not keep: the passes that
`jax.checkpoint` would make of the layer, from a trace of the layer without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from mtx.costs.equations import Equations
from mtx.strand import variables_of
from mtx.vjp import LayerVJP

_CHECKPOINTS = "checkpoint", "remat", "remat2"  # as in `mtx.strand.NESTED`


class Passes(NamedTuple):
    """F and B. What waits between them comes last among F's outputs and first among B's inputs."""

    forward: Equations
    backward: Equations
    kept: list[Any]  # variables


class Both:
    """F and B of a function's VJP, where B reads what F has made."""

    def __init__(self, vjp: LayerVJP, params: Any, stream: Any, given: tuple):
        """params, stream, given: the examples that it was traced with."""
        self._forward, back = map(Equations.flat, (vjp.traced, vjp.traced_back))
        leaves = [len(jax.tree.leaves(each)) for each in (params, stream, given)]
        of_params, self._stream, of_given = _split(self._forward.invars, *leaves)
        end = len(self._forward.outvars) - len(vjp.residuals)
        self._outputs, residuals = _split(self._forward.outvars, end, len(vjp.residuals))
        self._given = [*of_params, *of_given]  # inputs of both passes
        same = [*residuals, *self._given]
        known = dict(zip(back.invars[: len(same)], same, strict=True))
        self._dy = back.invars[len(same) :]
        eqns = [eqn.replace(invars=_as(eqn.invars, known)) for eqn in back.eqns]
        self._back = _equations(back, eqns, back.invars, _as(back.outvars, known))

    def passes(self, policy: Callable[..., Any]) -> Passes:
        """F and B under a policy, which says, as in `jax.checkpoint`, whether an equation's outputs
        are kept."""
        forward, back = self._forward, self._back
        read = {*variables_of(back.outvars)}.union(*(variables_of(e.invars) for e in back.eqns))
        again = []
        for eqn in reversed(forward.eqns):
            if read.isdisjoint(eqn.outvars) or _keeps(policy, eqn):
                continue
            again.append(eqn)
            read.update(variables_of(eqn.invars))
        made_again = {var for eqn in again for var in eqn.outvars}
        made = [var for eqn in forward.eqns for var in eqn.outvars]
        values = (*forward.constvars, *self._stream, *made)
        kept = [var for var in values if var in read and var not in made_again]
        inputs = [*kept, *self._given, *self._dy]
        return Passes(
            _equations(forward, forward.eqns, forward.invars, [*self._outputs, *kept]),
            _equations(back, [*reversed(again), *back.eqns], inputs, back.outvars),
            kept,
        )


def has_checkpoints(traced: Any) -> bool:
    """Whether a traced function, or one that it calls, contains a `jax.checkpoint`."""
    for eqn in getattr(traced, "jaxpr", traced).eqns:
        inner = [
            each
            for value in eqn.params.values()
            for each in (value if isinstance(value, tuple | list) else (value,))
            if hasattr(getattr(each, "jaxpr", each), "eqns")
        ]
        if eqn.primitive.name in _CHECKPOINTS or any(map(has_checkpoints, inner)):
            return True
    return False


def _keeps(policy: Callable[..., Any], eqn) -> bool:
    return bool(policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params))


def _equations(of: Equations, eqns: list, inputs: Sequence, outputs: list) -> Equations:
    """Only the equations that the outputs need, inside loops and branches as well."""
    made = of.part(eqns, inputs, outputs)
    needed, _ = dce_jaxpr(made.jaxpr, [True] * len(outputs), instantiate=True)
    return Equations(needed, made.constants)


def _as(atoms: Sequence, known: dict) -> list:
    return [atom if isinstance(atom, Literal) else known.get(atom, atom) for atom in atoms]


def _split(values: Sequence, *lengths: int) -> list[Sequence]:
    parts, start = [], 0
    for length in lengths:
        parts.append(values[start : start + length])
        start += length
    return parts
