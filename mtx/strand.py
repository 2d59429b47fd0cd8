"""A traced function as equations over arrays, and which of them need which. The weave, the cut of a
backward pass and the costs of layers read functions in this form."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal, Var

from mtx.sharding.fp8 import SCALED_DOT

COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "ppermute", "all_to_all")
NESTED = {  # primitives that are inlined, and the parameter that holds their equations
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # a closed call, from jax 0.12 on
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Strand:
    """A function of arrays as equations. Nested functions are inlined, except those that stay
    whole."""

    jaxpr: Any  # its first inputs are the constants
    constants: Sequence

    @classmethod
    def of(cls, f: Callable, *arguments) -> Self:
        """`f` over the leaves of its arguments, of which only shapes and dtypes count."""
        return cls.flat(jax.make_jaxpr(f)(*arguments))

    @classmethod
    def flat(cls, program: Any) -> Self:
        """The equations of a traced function."""
        eqns: list = []
        constants: dict = {}

        def outputs(of: Any, inputs: Sequence) -> list:
            body, values = opened(of)
            known = dict(zip(body.invars, inputs, strict=True))
            for var, value in zip(body.constvars, values, strict=True):
                known[var] = Var(var.aval)
                constants[known[var]] = value

            def read(atoms) -> list:
                return [atom if isinstance(atom, Literal) else known[atom] for atom in atoms]

            for eqn in body.eqns:
                inner = eqn.params.get(NESTED.get(eqn.primitive.name, ""))
                if inner is not None and not cls.is_whole(eqn):
                    made = outputs(inner, read(eqn.invars))
                else:
                    made = [Var(var.aval) for var in eqn.outvars]
                    eqns.append(eqn.replace(invars=read(eqn.invars), outvars=made))
                known.update(zip(eqn.outvars, made, strict=True))
            return read(body.outvars)

        body, _ = opened(program)
        outvars = outputs(program, body.invars)
        inputs = [*constants, *body.invars]
        changed = _replaced(body, eqns=eqns, invars=inputs, outvars=outvars)
        return cls(changed, list(constants.values()))

    @staticmethod
    def is_whole(eqn) -> bool:
        """Whether an equation with a function of its own stays one equation."""
        return is_matmul(eqn)

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
        """Some of the equations, as a function of other inputs and outputs."""
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
        """(the equations at these places, which wait for no others; the rest, which takes what the
        first part gives and then the inputs of both)"""
        before = [eqn for place, eqn in enumerate(self.eqns) if place in places]
        rest = [eqn for place, eqn in enumerate(self.eqns) if place not in places]
        read = {*inputs_of(rest, exclude=set(self.constvars)), *variables_of(self.outvars)}
        crossing = [var for eqn in before for var in eqn.outvars if var in read]
        return (
            self.part(before, self.invars, crossing),
            self.part(rest, [*crossing, *self.invars], self.outvars),
        )

    def __call__(self, *arrays) -> list:
        return eval_jaxpr(self.jaxpr, (), *self.constants, *arrays)


def opened(program: Any) -> tuple[Any, Sequence]:
    """A traced function's jaxpr and constants. JAX 0.10 has jaxprs that are closed over their
    constants, and others that have none; 0.12 has one kind."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def _replaced(jaxpr, **changes):
    """The jaxpr with other equations, inputs or outputs, and without constants."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], debug_info=debug_info, **changes)


def bind(jaxpr, eqn, inputs: Sequence) -> list:
    """The outputs of one equation of a jaxpr."""
    known = {v: x for v, x in zip(eqn.invars, inputs) if not isinstance(v, Literal)}
    return Strand(jaxpr, ()).part([eqn], known, eqn.outvars)(*known.values())


def is_matmul(eqn) -> bool:
    """Whether an equation is just a product, or a product of float8 tensors with its scale, which
    stays one equation."""
    return eqn.primitive.name == "dot_general" or eqn.params.get("name") == SCALED_DOT


def divide(
    flat, weights: int, stay: Collection[str] = (), keep: Collection[int] = ()
) -> tuple[list, list]:
    """The equations of B and of W (`mtx.vjp.Cut`), each in their order; the first `weights` outputs
    are weight gradients. stay: names of primitives that B keeps; keep: the places of W's matmuls
    that it keeps as well."""
    needed = needed_of(flat.eqns, flat.outvars[weights:])
    wanted = needed_of(flat.eqns, flat.outvars)
    later, made_later = set(), set()
    for i, eqn in enumerate(flat.eqns):
        if i in wanted and i not in needed:
            follows = any(not isinstance(v, Literal) and v in made_later for v in eqn.invars)
            if follows or (is_matmul(eqn) and i not in keep):
                later.add(i)
                made_later.update(eqn.outvars)
    # What only W uses moves there too, if less, or no more, has to wait then.
    free = set(flat.constvars)
    waiting = set(inputs_of([flat.eqns[i] for i in sorted(later)], exclude=free))
    readers = {var: {-1} for var in variables_of(flat.outvars)}  # -1: read as an output
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
    """The variables that its outputs depend on."""
    needed = needed_of(strand.eqns, strand.outvars)
    read = [strand.outvars, *(strand.eqns[i].invars for i in needed)]
    return {var for atoms in read for var in variables_of(atoms)}


def axes_of(eqn) -> tuple[str, ...]:
    """The axes of the mesh that a collective is over; () for other equations."""
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
