"""What kernels other than matmuls, collectives and attention read and write, by one rule.

Stored in memory are the arguments and the results of a pass, what matmuls and the like read and
make, and sums over rows. Everything else is computed where it is read, once for each reader; so are
sums along a row, even if they are stored. A kernel makes stored arrays from stored arrays. Kernels
that read the same arrays are one, and so are sums over rows if one reads some of the arrays that
another reads. A matmul, or a sum over rows, also writes what follows from its result together with
parameters and numbers only, such as a bias or a scale. A sum over rows in two steps is one. A
reshaped, transposed or sliced array counts as the array itself; if it is sliced at an offset, only
the slice is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from jax.extend.core import Literal

_SAME = {
    "reshape", "squeeze", "expand_dims", "transpose", "slice", "dynamic_slice", "copy", "name",
    "optimization_barrier", "layout_constraint",
}  # fmt: skip


class Kernels:
    """The kernels of a pass; own: the names of equations that are not part of any."""

    def __init__(self, eqns: Sequence, outputs: Sequence, tags, own: frozenset[str]):
        self.made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
        self.own, self.tags = own, tags
        atoms = [*(a for eqn in eqns for a in eqn.invars), *outputs]
        self.uses = Counter(self._array(a) for a in atoms if not isinstance(a, Literal))
        apart = [eqn for eqn in eqns if eqn.primitive.name in own]
        read = [a for eqn in apart for a in eqn.invars]
        arrays = [self._array(a) for a in (*read, *outputs) if not isinstance(a, Literal)]
        sums = [eqn.outvars[0] for eqn in eqns if _is_over_rows(eqn)]
        made = [var for eqn in apart for var in eqn.outvars]
        self.stored = set(arrays) | set(sums) | set(made)
        self.groups: dict[frozenset, tuple[set, list]] = {}  # by the arrays that are read
        for var in sorted(dict.fromkeys((*arrays, *sums)), key=self._inputs, reverse=True):
            self._add(var)

    def _inputs(self, var) -> int:
        """How many stored arrays a variable is made from."""
        eqn = self.made_by.get(var)
        return 0 if eqn is None else len(self._reads(eqn))

    def _views(self, var) -> Iterator:
        """A variable, the one that it is a view of, and so on down to an array."""
        while True:
            yield var
            eqn = self.made_by.get(var)
            if eqn is None or eqn.primitive.name not in _SAME:
                return
            at = eqn.outvars.index(var) if eqn.primitive.name == "optimization_barrier" else 0
            if isinstance(var := eqn.invars[at], Literal):
                return

    def _array(self, var):
        """The array that a variable is a view of."""
        *_, array = self._views(var)
        return array

    def _part(self, var):
        """The part that is read of the array under a view: all of it, or a slice at an offset."""
        for view in self._views(var):
            made = self.made_by.get(view)
            if made is not None and made.primitive.name == "dynamic_slice":
                break
        return view

    def _add(self, var) -> None:
        eqn = self.made_by.get(var)
        if eqn is None or eqn.primitive.name in self.own:
            return
        reads = self._reads(eqn)
        arrays = frozenset(a for a in reads if not self.tags.get(a) and a.aval.ndim)
        if len(arrays) == 1:
            (only,) = arrays
            made = self.made_by.get(only)
            ends = made and (made.primitive.name == "dot_general" or _is_over_rows(made))
            second = ends and _is_over_rows(made) and _is_over_rows(eqn)
            if second or ends and self.uses[only] == 1 and only.aval.size == var.aval.size:
                return  # written along with that result
        if _is_over_rows(eqn):
            for others, (_, made) in self.groups.items():
                if arrays <= others and all(_is_over_rows(self.made_by[each]) for each in made):
                    arrays = others
        if reads:
            read, made = self.groups.setdefault(arrays, (set(), []))
            read.update(reads.values())
            made.append(var)

    def _reads(self, eqn) -> dict:
        """The stored arrays from which an equation's result is computed, each with the part that is
        read."""
        found, seen, waiting = {}, set(), list(eqn.invars)
        while waiting:
            atom = waiting.pop()
            if isinstance(atom, Literal) or atom in seen:
                continue
            seen.add(atom)
            array = self._array(atom)
            made = self.made_by.get(array)
            along = {array} if array.aval.shape[-1:] == (1,) else set()
            if made is None or made.primitive.name in self.own or array in self.stored - along:
                part = self._part(atom)
                found[array] = part if found.get(array, part) is part else array
            else:
                waiting.extend(made.invars)
        return found

    @property
    def arrays(self) -> list:
        """All arrays that the kernels read and write, each as often as it is read or written."""
        return [var.aval for read, made in self.groups.values() for var in (*read, *made)]


def _is_over_rows(eqn) -> bool:
    """Whether an equation is a sum over dims other than the last ones."""
    axes = eqn.params.get("axes")
    if not eqn.primitive.name.startswith("reduce_") or not axes:
        return False
    ndim = eqn.invars[0].aval.ndim
    return sorted(axes) != list(range(ndim - len(axes), ndim))
