"""Walks the equations of a program for a mesh without running them, and says what kind of value
each one is along each axis (`kinds`).

Loops are walked until nothing changes; if devices choose different branches, the outputs differ.
The rules for primitives are in `elementwise`, `arrays` and `collectives`; a program within another
(jit, checkpoint, custom_vjp) is walked in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.lax import optimization_barrier_p
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr, dce_rules

from mtx.certify.kinds import DIFFERENT, SAME, ZERO, Kind, Value, different, either_value
from mtx.pipeline.nodes import BEHIND
from mtx.sharding.fp8 import SCALED_DOT
from mtx.strand import NESTED, is_matmul, opened

Rule = Callable[["Walk", Any, list[Value]], list[Value]]
_OWN_FOLDER = Path(__file__).parents[1]
_SMALL = 4096  # the most elements of a constant that is looked at


class Finding(NamedTuple):
    """What is wrong with a value along an axis, and where."""

    axis: str
    what: str
    where: str
    hangs: bool = False  # whether devices would wait for others that never come

    def __str__(self) -> str:
        return f"along {self.axis}: {self.what} ({self.where})"


@dataclass(kw_only=True, eq=False)
class Walk:
    """One walk over a program."""

    sizes: dict[str, int]  # of the axes with more than one device
    rules: Mapping[str, Rule]  # by primitive, and "unknown"
    # axes along which devices run other layers: an index that differs there chooses no shard
    stages: frozenset[str] = frozenset()
    findings: list[Finding] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # primitives without a rule
    mixed: int = 0  # values that were made of mixed buffers
    equations: int = 0
    _diverged: frozenset[str] = frozenset()  # axes whose devices may not be here together
    _within: list = field(default_factory=list)  # equations whose programs are being walked
    _quiet: int = 0
    _known: dict = field(default_factory=dict)
    _read_alone: dict = field(default_factory=dict)  # programs as they are, and without the unread

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def value(self, kind: Kind = SAME, **others: Any) -> Value:
        return Value((kind,) * len(self.sizes), **others)

    def report(self, eqn: Any, axis: str, what: str, *, hangs: bool = False) -> None:
        if self._quiet:
            return
        near = (where(each) for each in (eqn, *reversed(self._within)))
        found = Finding(axis, what, next(filter(None, near), ""), hangs)
        if found not in self.findings:
            self.findings.append(found)

    def check_together(self, eqn: Any, axis: str) -> None:
        """Report a collective that not all devices along an axis come to."""
        if axis in self._diverged:
            what = f"{eqn.primitive.name} in a branch that only some devices take"
            self.report(eqn, axis, what, hangs=True)

    # -- programs ---------------------------------------------------------------------------------

    def run(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        """The values of a jaxpr's outputs."""
        body, constants = opened(program)
        key = id(body), tuple(inputs), self._diverged
        if self._quiet and key in self._known:
            return self._known[key][1]
        known = dict(zip(body.constvars, map(self._constant, constants)))
        known |= dict(zip(body.invars, inputs, strict=True))
        for eqn in body.eqns:
            outputs = self.equation(eqn, [self._read(known, atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
        outputs = [self._read(known, atom) for atom in body.outvars]
        self._known[key] = body, outputs  # the body is kept: ids are those of living objects
        return outputs

    def body_of_while(self, program: Any) -> Any:
        """`without_unread` of a closed jaxpr; of the program around it, JAX leaves it as it is."""
        if id(program) not in self._read_alone:
            body = without_unread(program.jaxpr)
            self._read_alone[id(program)] = program, program.replace(jaxpr=body)
        return self._read_alone[id(program)][1]

    def equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        self.equations += not self._quiet
        if is_matmul(eqn) and name != "dot_general":
            name = SCALED_DOT  # one equation, though JAX has it as a function
        elif eqn.params.get("name") == BEHIND:
            name = BEHIND
        inner = eqn.params.get(NESTED.get(name, ""))
        if inner is None and name not in CONTROL:
            if name not in self.rules:
                self.unknown.add(name)
                name = "unknown"
            return self.rules[name](self, eqn, inputs)
        self._within.append(eqn)
        outputs = self.run(inner, inputs) if inner else CONTROL[name](self, eqn, inputs)
        self._within.pop()
        return outputs

    def _read(self, known: dict, atom: Any) -> Value:
        return self._constant(atom.val) if isinstance(atom, Literal) else known[atom]

    def _constant(self, value: Any) -> Value:
        dtype: Any = np.result_type(value) if np.isscalar(value) else value.dtype
        if dtype == jax.dtypes.float0:
            return self.value(ZERO)
        if np.size(value) > _SMALL or jnp.issubdtype(dtype, jax.dtypes.extended):
            return self.value()
        elements = np.asarray(value).astype(np.float64).ravel()
        if not elements.size or (elements != elements[0]).any():
            return self.value()
        first = elements[0]
        return self.value(SAME if first else ZERO, constant=float(first))

    # -- control ----------------------------------------------------------------------------------

    def choose(self, eqn: Any, chooser: Value, branches: Sequence, inputs: list[Value]):
        """The outputs of `branches`, of which `chooser` chooses one."""
        axes = self.axes
        chosen = frozenset(a for a, kind in zip(axes, chooser.kinds) if not kind.is_same)
        for axis, kind in zip(axes, chooser.kinds):
            if kind.name == "partial":
                self.report(eqn, axis, "a branch is chosen by an unsummed partial value")
        before, self._diverged = self._diverged, self._diverged | chosen
        each = [self.run(branch, inputs) for branch in branches]
        self._diverged = before
        found = each[0]
        for other in each[1:]:
            for one, two in zip(found, other):
                self._check_alternatives(eqn, one, two)
            found = [either_value(one, two) for one, two in zip(found, other, strict=True)]
        return [self.differing(value, chosen) for value in found]

    def _check_alternatives(self, eqn: Any, one: Value, two: Value) -> None:
        for axis, a, b in zip(self.axes, one.kinds, two.kinds):
            if {a.name, b.name} == {"partial", "same"}:
                self.report(eqn, axis, "one branch gives a sum, another an unsummed partial value")

    def differing(self, value: Value, axes: frozenset[str]) -> Value:
        """The value, if devices along `axes` have made different choices."""
        kinds = tuple(
            DIFFERENT if axis in axes and kind.is_same else kind
            for axis, kind in zip(self.axes, value.kinds)
        )
        return value if kinds == value.kinds else Value(kinds, parts=value.parts)

    def fixpoint(self, step: Callable[[list[Value]], list[Value]], start: list[Value]):
        """The values of a loop's carry after any number of turns."""
        self._quiet += 1
        carry = start
        while True:
            after = step(carry)
            merged = [either_value(one, two) for one, two in zip(carry, after, strict=True)]
            if merged == carry:
                break
            carry = merged
        self._quiet -= 1
        return carry


def without_unread(jaxpr: Any) -> Any:
    """A jaxpr without what nothing reads, as XLA leaves it out: a frozen layer's backward pass,
    even where barriers tie it to what is read."""
    other = dce_rules.get(optimization_barrier_p)
    dce_rules[optimization_barrier_p] = _without_unread_ties
    try:
        return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    finally:
        del dce_rules[optimization_barrier_p]
        dce_rules.update({} if other is None else {optimization_barrier_p: other})


def _without_unread_ties(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """JAX's rule for a barrier: (which inputs are read, the barrier of these alone, or None)."""
    if not any(used):
        return [False] * len(eqn.invars), None
    read = {
        name: [var for var, is_read in zip(getattr(eqn, name), used, strict=True) if is_read]
        for name in ("invars", "outvars")
    }
    return used, eqn.replace(**read)


def scan(walk: Walk, eqn: Any, inputs: list[Value]) -> list[Value]:
    consts, carried = _counts(eqn)
    given, start, rows = _cut(inputs, consts, carried)
    rows = [_without_first_dim(row) for row in rows]
    body = eqn.params["jaxpr"]

    def step(carry: list[Value]) -> list[Value]:
        return walk.run(body, [*given, *carry, *rows])

    carry = walk.fixpoint(lambda carry: step(carry)[:carried], start)
    outputs = step(carry)
    return [*carry, *(_with_first_dim(row) for row in outputs[carried:])]


def _counts(eqn: Any) -> tuple[int, int]:
    """How many constants a scan has, and how long its carry is."""
    if "num_carry" in eqn.params:  # up to JAX 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def while_loop(walk: Walk, eqn: Any, inputs: list[Value]) -> list[Value]:
    of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    for_test, given, start = _cut(inputs, of_test, of_body)
    test, body = eqn.params["cond_jaxpr"], walk.body_of_while(eqn.params["body_jaxpr"])
    unchanged = [out is into for out, into in zip(body.jaxpr.outvars, body.jaxpr.invars[of_body:])]

    def chosen(carry: list[Value]) -> frozenset[str]:
        (goes_on,) = walk.run(test, [*for_test, *carry])
        return frozenset(a for a, kind in zip(walk.axes, goes_on.kinds) if not kind.is_same)

    def step(carry: list[Value]) -> list[Value]:
        axes, before = chosen(carry), walk._diverged
        walk._diverged = before | axes
        after = walk.run(body, [*given, *carry])
        walk._diverged = before
        return [
            value if same else walk.differing(value, axes)
            for value, same in zip(after, unchanged, strict=True)
        ]

    carry = walk.fixpoint(step, start)
    step(carry)
    return carry


def cond(walk: Walk, eqn: Any, inputs: list[Value]) -> list[Value]:
    return walk.choose(eqn, inputs[0], eqn.params["branches"], inputs[1:])


CONTROL: dict[str, Rule] = {"scan": scan, "while": while_loop, "cond": cond}


def _cut(values: list[Value], first: int, second: int) -> tuple[list, list, list]:
    return values[:first], values[first : first + second], values[first + second :]


def _without_first_dim(value: Value) -> Value:
    def kind(of: Kind) -> Kind:
        return different(dim - 1 for dim in of.dims if dim) if of.dims else of

    return value._replace(kinds=tuple(map(kind, value.kinds)))


def _with_first_dim(value: Value) -> Value:
    def kind(of: Kind) -> Kind:
        return different(dim + 1 for dim in of.dims) if of.dims else of

    return value._replace(kinds=tuple(map(kind, value.kinds)))


def where(eqn: Any) -> str:
    """The line of this project that made an equation, and its named scope."""
    scope = str(eqn.source_info.name_stack)
    line = next(_own_lines(eqn), "")
    return ", ".join(filter(None, (line, scope)))


def _own_lines(eqn: Any) -> Iterator[str]:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = Path(frame.file_name)
        if path.is_relative_to(_OWN_FOLDER):
            yield f"{path.relative_to(_OWN_FOLDER.parent)}:{frame.line_num}"
