"""The equations of a traced function: without nesting, in passes, and what they compute and move.

Equations without use are not counted, and identical ones are counted once, as in XLA.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from mtx.costs.cost import Collective, Later, Matmul, Moved, Pass, Size
from mtx.costs.fusion import Kernels
from mtx.layers import fused
from mtx.strand import Strand, divide, inputs_of, needed_of

# Primes, larger than the factors of any model's numbers, so that an array's size says how it grows.
ROWS, VOCAB = 16_381, 8_191
_COLLECTIVES = {  # each with the parameter that holds its axes
    "psum": "axes", "pmax": "axes", "pmin": "axes", "all_gather": "axis_name",
    "reduce_scatter": "axis_name", "ppermute": "axis_name", "all_to_all": "axis_name",
}  # fmt: skip
_FUSED = (fused.FORWARD.name, fused.BACKWARD.name)
_LATER = "while"  # a loop of unknown length: that of mtx.sharding.experts
_NESTING = ("cond", "scan", _LATER)
_ALIASES = {"name", "layout_constraint"}  # they return their input
_OWN = frozenset(("dot_general", *_COLLECTIVES, *_FUSED, *_NESTING))
Part = tuple[list, list]  # equations, and their outputs
Tags = dict[Var, frozenset[str]]  # which parameters a value follows from, if from nothing else


def size_of(number: int) -> Size:
    rows = vocab = 0
    while number and number % ROWS == 0:
        number, rows = number // ROWS, rows + 1
    while number and number % VOCAB == 0:
        number, vocab = number // VOCAB, vocab + 1
    return Size(number, rows, vocab)


def bytes_of(arrays: Iterable) -> tuple[Size, ...]:
    """Total bytes of the arrays, one `Size` for each way in which they grow."""
    found: Counter = Counter()
    for array in arrays:
        number, *powers = size_of(array.size)
        found[tuple(powers)] += number * array.dtype.itemsize
    return tuple(Size(number, *powers) for powers, number in sorted(found.items()))


@dataclass(frozen=True, eq=False)
class Equations(Strand):
    """A strand without any nested functions, not even whole ones: a scaled product is several
    equations."""

    @staticmethod
    def is_whole(eqn) -> bool:
        return False

    def divided(self, weights: int) -> tuple[Part, Part, list[Var]]:
        """B, W, and what waits between them; the first `weights` outputs are weight gradients."""
        of_b, of_w = divide(self, weights)
        made = {var for eqn in of_w for var in eqn.outvars}
        waits = inputs_of(of_w, exclude=set(self.constvars))
        outputs = [var for var in self.outvars if not isinstance(var, Literal)]
        in_b = [var for var in outputs if var not in made]
        return (of_b, in_b + waits), (of_w, [var for var in outputs if var in made]), waits

    def tags(self, names: Mapping[int, str]) -> Tags:
        """The parameters that each value follows from, if it follows from nothing else; none for
        constants. names: of parameters, by their position among the inputs."""
        tags: Tags = dict.fromkeys(self.constvars, frozenset())
        tags |= {self.invars[at]: frozenset({name}) for at, name in names.items()}
        for eqn in self.eqns:
            _follow(eqn, tags)
        return tags

    def made(self, names: Mapping[int, str]) -> dict[Var, str]:
        """For each value, the parameter whose gradient it becomes. names: of parameters, by the
        position of their gradients among the outputs, as in `divided`."""
        made = {
            self.outvars[at]: name
            for at, name in names.items()
            if not isinstance(self.outvars[at], Literal)
        }
        for eqn in reversed(self.eqns):
            if eqn.primitive.name == _LATER:  # each output continues an input
                carried = eqn.invars[-len(eqn.outvars) :]
                pairs = zip(carried, eqn.outvars, strict=True)
                made |= {a: made[v] for a, v in pairs if v in made and not isinstance(a, Literal)}
            name = next((made[var] for var in eqn.outvars if var in made), None)
            if name is not None:
                for atom in eqn.invars:
                    if not isinstance(atom, Literal):
                        made.setdefault(atom, name)
        return made


def _follow(eqn, tags: Tags) -> None:
    inputs = [a for a in eqn.invars if not isinstance(a, Literal)]
    if all(a in tags for a in inputs):
        tags.update(dict.fromkeys(eqn.outvars, frozenset().union(*(tags[a] for a in inputs))))


class Reader:
    """Add up what passes compute and move."""

    def __init__(self):
        self.matmuls: list[Matmul] = []
        self.collectives: list[Collective] = []
        self.scores = Size(0)
        self.kernels: dict[Pass, float] = defaultdict(int)
        self.moved: dict[tuple[Pass, int, int], Any] = defaultdict(int)  # means over branches
        self.later: Reader | None = None  # of one iteration of each loop of unknown length

    def add(
        self, during: Pass, eqns: Sequence, outputs: Sequence, tags: Tags, *,
        made: Mapping[Var, str] | None = None, times: float = 1,
    ) -> None:  # fmt: skip
        """Add the equations of a pass. made: for W, the parameter whose gradient each value
        becomes."""
        eqns, same = _each_once(eqns)
        for eqn in eqns:
            name = eqn.primitive.name
            if name == "dot_general":
                self._matmul(during, eqn, tags, made or {}, times)
            elif name in _FUSED:
                self._fused(during, eqn, times)
            elif name in _COLLECTIVES:
                self._collective(during, eqn, times)
            elif name in _NESTING:
                self._within(during, eqn, tags, times)
        outputs = [a if isinstance(a, Literal) else same.get(a, a) for a in outputs]
        kernels = Kernels(eqns, outputs, tags, own=_OWN)
        self.kernels[during] += times * len(kernels.groups)
        for size in bytes_of(kernels.arrays):
            self.moved[during, size.rows, size.vocab] += times * size.number

    def _within(self, during: Pass, eqn, tags: Tags, times: float) -> None:
        """Add the bodies of branches, all equally likely, and of loops; those of unknown length
        count once, and separately."""
        reader = self
        bodies, inputs = eqn.params.get("branches", ()), eqn.invars[1:]
        share = times / max(1, len(bodies))
        if eqn.primitive.name == "scan":
            bodies, inputs = (eqn.params["jaxpr"],), eqn.invars
            share = times * eqn.params["length"]
        elif eqn.primitive.name == _LATER:
            bodies, inputs = (eqn.params["body_jaxpr"],), eqn.invars[eqn.params["cond_nconsts"] :]
            reader = self.later = self.later or Reader()
        for body in bodies:
            flat = Equations.flat(body)
            names = {at: tags.get(a) for at, a in enumerate(inputs) if not isinstance(a, Literal)}
            known = {at: min(tag) for at, tag in names.items() if tag}
            needed = needed_of(flat.eqns, flat.outvars)
            wanted = [flat.eqns[i] for i in sorted(needed)]
            reader.add(during, wanted, flat.outvars, flat.tags(known), times=share)

    @property
    def found(self) -> dict[str, Any]:
        """The fields of a cost."""
        later = self.later.found if self.later else {}
        return self._found | {
            "scores": self.scores,
            "later": Later(*(later[name] for name in Later._fields)) if later else Later(),
        }

    @property
    def _found(self) -> dict[str, Any]:
        moved: dict[Pass, list[Size]] = {during: [] for during in self.kernels}
        for (during, rows, vocab), number in self.moved.items():
            moved[during].append(Size(number, rows, vocab))
        return {
            "matmuls": tuple(self.matmuls), "collectives": tuple(self.collectives),
            "moved": tuple(Moved(d, self.kernels[d], tuple(sizes)) for d, sizes in moved.items()),
        }  # fmt: skip

    def _matmul(self, during: Pass, eqn, tags: Tags, made: Mapping[Var, str], times) -> None:
        (contract, _), (batch, _) = eqn.params["dimension_numbers"]
        (k_right, batch_right) = (each[1] for each in eqn.params["dimension_numbers"])
        left, right = (atom.aval.shape for atom in eqn.invars)
        names = [tags.get(a) for a in eqn.invars if not isinstance(a, Literal)]
        weight = next((min(tag) for tag in names if tag), made.get(eqn.outvars[0], ""))
        matmul = Matmul(
            during, weight,
            batch=_product(left[dim] for dim in batch),
            m=_product(n for dim, n in enumerate(left) if dim not in (*contract, *batch)),
            n=_product(n for dim, n in enumerate(right) if dim not in (*k_right, *batch_right)),
            k=_product(left[dim] for dim in contract),
            times=times, float8=eqn.invars[0].aval.dtype.itemsize == 1,
        )  # fmt: skip
        self.matmuls.append(matmul)
        if not weight:
            self.scores = max(self.scores, size_of(int(np.prod(eqn.outvars[0].aval.shape))))

    def _fused(self, during: Pass, eqn, times: float) -> None:
        rows, queries, heads, size = eqn.invars[0].aval.shape
        keys, _, of_values = eqn.invars[2].aval.shape[1:]
        batch, queries, keys = map(size_of, (rows * heads, queries, keys))
        size, of_values = size_of(size), size_of(of_values)
        products = [(queries, keys, size), (queries, of_values, keys)]
        if eqn.primitive is fused.BACKWARD:  # scores again; gradients of probabilities, q, k, v
            products = [
                (queries, keys, size), (queries, keys, of_values), (queries, size, keys),
                (keys, size, queries), (keys, of_values, queries),
            ]  # fmt: skip
        seen = 0.5 if eqn.params["causal"] else 1.0
        if window := eqn.params["window"]:
            share = min(1.0, window / eqn.invars[1].aval.shape[1])
            seen = share * (1 - share / 2)
        self.matmuls += [
            Matmul(during, "", batch, *shape, times=times, seen=seen, fused=True)
            for shape in products
        ]

    def _collective(self, during: Pass, eqn, times: float) -> None:
        name = eqn.primitive.name
        axes = eqn.params[_COLLECTIVES[name]]
        axes = tuple(axes) if isinstance(axes, tuple) else (axes,)
        groups = eqn.params.get("axis_index_groups")
        group = len(groups[0]) if groups else 0
        for atoms in zip(eqn.invars, eqn.outvars, strict=True):
            whole = max((atom.aval for atom in atoms), key=lambda aval: aval.size)
            number, *powers = size_of(whole.size)
            bytes_ = Size(number * whole.dtype.itemsize, *powers)
            self.collectives.append(Collective(during, name, axes, bytes_, times, group))


def _product(numbers: Iterable[int]) -> Size:
    product = 1
    for number in numbers:
        product *= number
    return size_of(product)


def _each_once(eqns: Sequence) -> tuple[list, dict]:
    """The equations without those that repeat an earlier one, and for each output of those left out
    the variable that replaces it."""
    found, same, kept = {}, {}, []
    for eqn in eqns:
        inputs = [a if isinstance(a, Literal) else same.get(a, a) for a in eqn.invars]
        if eqn.primitive.name in _ALIASES:
            same[eqn.outvars[0]] = inputs[0]
            continue
        key = (
            eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda item: item[0])),
            tuple(str(a) if isinstance(a, Literal) else id(a) for a in inputs),
        )  # fmt: skip
        try:
            first = found.setdefault(key, eqn)
        except TypeError:  # parameters without a hash
            first = eqn
        if first is eqn:
            kept.append(eqn.replace(invars=inputs))
        else:
            same.update(zip(eqn.outvars, first.outvars, strict=True))
    return kept, same
