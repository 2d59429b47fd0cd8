"""F and B of a layer as equations, in parts: what is computed ahead, and what only weight gradients
need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from mtx.pipeline.costs import communicates, flops_of, is_nested
from mtx.pipeline.rounds import is_loop
from mtx.pipeline.shares import Division, Sends
from mtx.pipeline.slots import read
from mtx.strand import Strand, divide, needed_of, variables_of
from mtx.vjp import Arrays, Cut, LayerVJP

Tree = Any


@dataclass(frozen=True, kw_only=True, eq=False)
class KindStrands:
    """F and B of a layer of one kind, as equations."""

    vjp: LayerVJP
    split: bool
    in_place: bool  # whether weight gradients are added where they lie
    sends: Sends  # what lies beside the weight gradients of a tick's last layer

    @property
    def first(self) -> int:
        """The index of the stream's first leaf among F's inputs."""
        return len(jax.tree.leaves(self.vjp.params))

    @property
    def gradients(self) -> int:
        """The number of gradients of parameters that B gives."""
        return len(jax.tree.leaves(self.vjp.gradients))

    @cached_property
    def in_loops(self) -> set[int]:
        """The places of the parameters that a loop reads."""
        found: set[int] = set()
        for strand, before in zip(self.vjp.strands, (0, len(self.vjp.residuals)), strict=True):
            read = {v for e in strand.eqns if is_loop(e) for v in variables_of(e.invars)}
            of_params = strand.invars[before : before + self.first]
            found |= {place for place, var in enumerate(of_params) if var in read}
        return found

    @property
    def outputs(self) -> Any:
        """The structure of (stream, residuals)."""
        return jax.tree.structure((self.vjp.output, self.vjp.residuals))

    @cached_property
    def _of_f(self) -> tuple[Strand | None, Strand]:
        return split_ahead(self.vjp.strands[0]) or (None, self.vjp.strands[0])

    @property
    def ahead(self) -> Strand | None:
        """The part of F to be computed ahead: up to what its first matmul gathers."""
        return self._of_f[0]

    @property
    def rest(self) -> Strand:
        """The rest of F, which takes what `ahead` gives first."""
        return self._of_f[1]

    @cached_property
    def _of_b(self) -> dict[bool, tuple[Strand | None, Strand]]:
        """{whether B is cut: (the part to be computed ahead, from parameters alone; the rest)}."""
        first = len(self.vjp.residuals)

        def divided(strand: Strand) -> tuple[Strand | None, Strand]:
            there = slice(first, first + self.first)
            late = [v for v in strand.invars if v not in strand.invars[there]]
            return split_ahead(strand, late) or (None, strand)

        return {True: divided(self.cut.b), False: divided(self.vjp.strands[1])}

    @property
    def ahead_back(self) -> Strand | None:
        return self._of_b[self.split][0]

    def take(self, ring: Arrays, slot, index) -> tuple[Arrays, Arrays]:
        """(residuals, the ring). F writes to the ring as well, and XLA would copy it to keep its
        old contents. So the residuals that weight gradients read late, if those are added in place,
        are read first. (Otherwise F writes last, see `WovenLayers.pair`.)"""
        residuals = read(ring, slot, index)
        tied = [
            lax.optimization_barrier(pair) if place in self.late else pair
            for place, pair in enumerate(zip(residuals, ring, strict=True))
        ]
        return tuple(value for value, _ in tied), tuple(whole for _, whole in tied)

    @cached_property
    def late(self) -> set[int]:
        """The places of the residuals that weight gradients read, if these are added in place."""
        if not self.in_place:
            return set()
        strand = self.vjp.strands[1]
        read_by_w = {
            atom
            for place in weight_equations(strand, self.gradients)
            for atom in variables_of(strand.eqns[place].invars)
        }
        residuals = strand.invars[: len(self.vjp.residuals)]
        return {place for place, var in enumerate(residuals) if var in read_by_w}

    def have_read(self, dparams: Tree, d: Tree, ring: Arrays) -> tuple[Tree, Tree, Arrays]:
        """(gradients, dx, the ring) for a pair in which F writes to another kind's ring: its write
        to this one, in a later pair, must come after all that B reads from it. What reads it are dx
        and the gradients that no matmul makes, which are sums of residuals read in place; both are
        tied to the ring. (Sums that loops add to are not: XLA would copy them after a barrier.)"""
        leaves, structure = jax.tree.flatten(dparams, is_leaf=lambda leaf: leaf is None)
        sums = [leaves[place] for place in self._sums]
        d, ring, sums = lax.optimization_barrier((d, ring, sums))
        for place, made in zip(self._sums, sums, strict=True):
            leaves[place] = made
        return structure.unflatten(leaves), d, ring

    @cached_property
    def _sums(self) -> list[int]:
        """The places of the gradients that neither a matmul nor a loop of matmuls makes."""
        strand = self.vjp.strands[1]
        maker = {var: eqn for eqn in strand.eqns for var in eqn.outvars}

        def is_product(var) -> bool:
            eqn = None if isinstance(var, Literal) else maker.get(var)
            while eqn is not None and not (flops_of(eqn) or is_loop(eqn)):
                read = variables_of(eqn.invars)
                eqn = maker.get(read[0]) if len(read) == 1 else None
            return eqn is not None

        gradients = enumerate(strand.outvars[: self.gradients])
        return [place for place, var in gradients if not is_product(var)]

    @property
    def cut(self) -> Cut:
        """B and W; if W is only the last layer's, it has no collectives."""
        return self.vjp.cut if self.split else self.division.cut

    @cached_property
    def division(self) -> Division:
        """Where the weight gradients of a tick's last layer lie."""
        return Division.of(self.vjp, self.sends)

    def backward(self, *, cut: bool, alone: bool) -> tuple[Strand, frozenset]:
        """(B without what is computed ahead, the places of its equations that only weight gradients
        need and that lie beside nothing). alone: without an F, they lie beside collectives."""
        if alone:
            return once(self._of_b[cut][1]), frozenset()
        if self.split or not self.in_place:
            return self._of_b[cut or self.split][1], frozenset()
        return self._of_b[cut][1], self._later[cut]

    @cached_property
    def _later(self) -> dict[bool, frozenset]:
        """{whether B is cut: the places of the equations that only weight gradients need}."""
        gradients = {False: self.gradients, True: jax.tree.leaves(self.cut.made_by_w).count(False)}
        return {cut: weight_equations(self._of_b[cut][1], n) for cut, n in gradients.items()}

    def taken(self, values: list, *, cut: bool) -> tuple[Tree, Tree, Arrays]:
        """What B gives: (gradients of the parameters, that of the stream, what waits)"""
        if cut or self.split:
            given = self.cut if self.split else self.division
            dparams, others, waits = given.of_b(values)
            return dparams, others[0], waits
        structure = jax.tree.structure((self.vjp.gradients, (self.vjp.stream,)))
        dparams, (dstream,) = structure.unflatten(values)
        return dparams, dstream, ()


def weight_equations(strand: Strand, weights: int) -> frozenset[int]:
    """The places of the equations that only weight gradients need, if matmuls alone make these;
    they are a backward pass's first `weights` outputs. What goes through a loop, as experts'
    gradients do, is treated like any other equation here (see `Values.behind_loops`)."""
    _, later = divide(strand, weights)
    loops = [eqn for eqn in later if is_loop(eqn)]
    read = [atom for eqn in loops for atom in variables_of(eqn.invars)]
    through = [later[place] for place in needed_of(later, read)]
    ids = set(map(id, later)) - set(map(id, [*loops, *through]))
    return frozenset(i for i, eqn in enumerate(strand.eqns) if id(eqn) in ids)


def split_ahead(strand: Strand, after: Sequence = ()) -> tuple[Strand, Strand] | None:
    """(the way to the gathers that a function's first matmul needs, to be computed ahead; the rest,
    which takes the first part's outputs before its own inputs). after: inputs that are not there
    yet. None if there is no such gather."""
    eqns = strand.eqns
    first = next((eqn for eqn in eqns if flops_of(eqn)), None)
    if first is None:
        return None
    late = set(after)
    for eqn in eqns:
        if late.intersection(variables_of(eqn.invars)):
            late.update(eqn.outvars)
    needed = (eqns[place] for place in needed_of(eqns, variables_of(first.invars)))
    gathers = [eqn for eqn in needed if communicates(eqn) and late.isdisjoint(eqn.outvars)]
    if not gathers:
        return None
    ahead = needed_of(eqns, [var for eqn in gathers for var in eqn.outvars])
    return strand.divided(ahead)


def once(strand: Strand) -> Strand:
    """The same function, with equations that compute the same merged: recomputed values are
    gathered again for the weight gradient, and XLA does not see that if barriers lie in between."""
    known: dict[Any, list] = {}
    same: dict[Any, Any] = {}
    eqns = []
    for eqn in strand.eqns:
        atoms = [atom if isinstance(atom, Literal) else same.get(atom, atom) for atom in eqn.invars]
        read = tuple(str(atom) if isinstance(atom, Literal) else atom for atom in atoms)
        key = eqn.primitive, read, str(eqn.params), str([var.aval for var in eqn.outvars])
        if key in known and not is_nested(eqn):
            same.update(zip(eqn.outvars, known[key]))
        else:
            known[key] = eqn.outvars
            eqns.append(eqn.replace(invars=atoms))
    outvars = [
        atom if isinstance(atom, Literal) else same.get(atom, atom) for atom in strand.outvars
    ]
    return strand.part(eqns, strand.invars, outvars)
