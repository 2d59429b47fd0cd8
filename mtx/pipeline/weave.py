"""Functions woven into one list of equations, so that the collectives of one lie beside the matmuls
of another.

XLA runs a collective beside computation where its schedule has some between the collective's start
and its done. It has no reason to put it there, and of the five collectives in a layer's F and B it
leaves two or three alone, whatever its options. So the order is made here: a collective, matmuls of
another function that take as long, and a barrier over what both give, behind which all that needs
the one or the other stands. What only weight gradients need is left out of barriers: XLA has a
matmul add its product in place only where nothing stands between it and the sum.

Costs decide what lies beside what, and no more: they are an H100's, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend.core import Literal

from mtx.vjp import Strand, bind, divide, inputs_of, needed_of

COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "ppermute", "all_to_all")
_FLOPS, _LINK, _MEMORY = 600e12, 330e9, 2.8e12  # a second: of bfloat16 matmuls; bytes of NVLink, HBM


class Braid:
    """Equations of several functions, to be computed in an order of our own."""

    def __init__(self):
        self._values: list[Any] = []  # by number; None: still to be computed
        self._pending: list[_Equation] = []
        self.exposed_s, self.collective_s = 0.0, 0.0  # of collectives, by the costs used here

    def given(self, arrays: Sequence[Any]) -> list[int]:
        """The numbers under which arrays are known from now on."""
        first = len(self._values)
        self._values.extend(arrays)
        return list(range(first, len(self._values)))

    def add(self, strand: Strand, inputs: Sequence[int], later: frozenset = frozenset()) -> list:
        """The numbers of a function's outputs, of inputs by their numbers; nothing runs yet. later:
        of its equations, by their place, those that only weight gradients need."""
        jaxpr = strand.jaxpr
        known = dict(zip(jaxpr.constvars, self.given(strand.constants), strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))
        for place, eqn in enumerate(jaxpr.eqns):
            outputs = self.given([None] * len(eqn.outvars))
            needs = [known[v] for v in eqn.invars if not isinstance(v, Literal)]
            self._pending.append(_Equation.of(jaxpr, eqn, needs, outputs, place in later))
            known.update(zip(eqn.outvars, outputs))
        return [
            self.given([atom.val])[0] if isinstance(atom, Literal) else known[atom]
            for atom in jaxpr.outvars
        ]

    def read(self, numbers: Sequence[int]) -> list:
        """Values, computed or given."""
        return [self._values[number] for number in numbers]

    def run(self) -> None:
        """Computes all that is pending."""
        self._rank()
        while self._pending:
            while cheap := [e for e in self._pending if e.is_cheap and self._is_ready(e)]:
                for each in cheap:
                    self._compute(each)
            ready = sorted(filter(self._is_ready, self._pending), key=_Equation.order)
            if ready and ready[0].communicates:
                self._cover(ready[0])
            elif ready:
                self._compute(ready[0])

    def _rank(self) -> None:
        """The longest way from each equation to an end."""
        longest: dict[int, float] = {}
        for each in reversed(self._pending):
            each.rank = each.seconds + max((longest.get(n, 0.0) for n in each.outputs), default=0)
            for number in each.inputs:
                longest[number] = max(longest.get(number, 0.0), each.rank)

    def _cover(self, collective: _Equation) -> None:
        """Computes a collective and, beside it, what takes as long."""
        left, beside = collective.seconds, []
        self._pending.remove(collective)
        made = collective.run(self._values)
        while left > 0 and (work := [e for e in self._pending if e.covers and self._is_ready(e)]):
            chosen = min(work, key=_Equation.order)
            self._compute(chosen)
            left -= chosen.seconds
            beside += () if chosen.later else chosen.outputs
        self.collective_s += collective.seconds
        self.exposed_s += max(0.0, left)
        tied = made, self.read(beside)
        if beside:
            tied = lax.optimization_barrier(tied)
        for numbers, values in zip((collective.outputs, beside), tied, strict=True):
            for number, value in zip(numbers, values, strict=True):
                self._values[number] = value

    def _compute(self, equation: _Equation) -> None:
        self._pending.remove(equation)
        values = equation.run(self._values)
        for number, value in zip(equation.outputs, values, strict=True):
            self._values[number] = value

    def _is_ready(self, equation: _Equation) -> bool:
        return all(self._values[number] is not None for number in equation.inputs)


@dataclass(eq=False)
class _Equation:
    """One equation, with its inputs and outputs by their numbers."""

    jaxpr: Any
    eqn: Any
    inputs: list[int]
    outputs: list[int]
    seconds: float
    communicates: bool
    covers: bool  # there is a matmul in it
    later: bool
    rank: float = field(default=0.0)

    @classmethod
    def of(cls, jaxpr, eqn, inputs, outputs, later: bool) -> _Equation:
        communicates, flops = eqn.primitive.name in COLLECTIVES, _flops(eqn)
        if communicates:
            seconds = max(map(_bytes, (eqn.invars, eqn.outvars))) / _LINK
        else:
            seconds = max(flops / _FLOPS, (_bytes(eqn.invars) + _bytes(eqn.outvars)) / _MEMORY)
        return cls(jaxpr, eqn, inputs, outputs, seconds, communicates, flops > 0, later)

    @property
    def is_cheap(self) -> bool:
        return not self.communicates and not self.covers

    def order(self) -> tuple:
        """Collectives first, weight gradients last, else by what waits for it."""
        return not self.communicates, self.later, -self.rank

    def run(self, values: Sequence) -> list:
        known = iter(self.inputs)
        inputs = [
            v.val if isinstance(v, Literal) else values[next(known)] for v in self.eqn.invars
        ]
        return bind(self.jaxpr, self.eqn, inputs)


def weight_equations(strand: Strand, weights: int) -> frozenset[int]:
    """The places of the equations that only weight gradients need, of a backward pass whose first
    `weights` outputs they are."""
    _, later = divide(strand.jaxpr, weights)
    ids = set(map(id, later))
    return frozenset(i for i, eqn in enumerate(strand.jaxpr.eqns) if id(eqn) in ids)


def split_ahead(strand: Strand) -> tuple[Strand, Strand] | None:
    """A function in two: up to its first collective, to be computed ahead, and the rest, which
    takes what the first part gives before its own inputs. None where a matmul comes before it."""
    jaxpr = strand.jaxpr
    eqns, free = jaxpr.eqns, set(jaxpr.constvars)
    first = next((eqn for eqn in eqns if eqn.primitive.name in COLLECTIVES), None)
    if first is None:
        return None
    ahead = needed_of(eqns, first.outvars)
    if any(_flops(eqns[i]) for i in ahead):
        return None
    before = [eqn for i, eqn in enumerate(eqns) if i in ahead]
    rest = [eqn for i, eqn in enumerate(eqns) if i not in ahead]
    made = {var for eqn in before for var in eqn.outvars}
    outputs = [v for v in jaxpr.outvars if not isinstance(v, Literal) and v in made]
    reads = [v for v in inputs_of(rest, exclude=free) if v in made]
    crossing = list(dict.fromkeys([*reads, *outputs]))
    return (
        strand.part(before, jaxpr.invars, crossing),
        strand.part(rest, [*crossing, *jaxpr.invars], jaxpr.outvars),
    )


def _bytes(atoms) -> int:
    return sum(
        math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms if hasattr(a.aval, "shape")
    )


def _flops(eqn) -> float:
    """Of the matmuls in an equation, those of its loops and branches included."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        shared = math.prod(eqn.invars[0].aval.shape[dim] for dim in contract)
        return 2.0 * shared * math.prod(eqn.outvars[0].aval.shape)
    if "attention" in name:  # a fused kernel: q, k, ..., and two products, or five
        products = 5 if "bwd" in name or "backward" in name else 2
        rows, keys, *_ = eqn.invars[1].aval.shape
        return products * 2.0 * math.prod(eqn.invars[0].aval.shape) * keys
    if name == "cond":
        return max(_flops_of(branch) for branch in params["branches"])
    if name == "while":
        return _flops_of(params["body_jaxpr"])
    inner = [value for value in params.values() if hasattr(value, "jaxpr")]
    return params.get("length", 1) * sum(map(_flops_of, inner))


def _flops_of(closed) -> float:
    return sum(map(_flops, closed.jaxpr.eqns))

