"""Functions woven into one list of equations, so that the collectives of one lie beside the matmuls
of another.

XLA runs a collective beside computation where its schedule has some between the collective's start
and its done. It has no reason to put it there, and of the five collectives in a layer's F and B it
leaves two or three alone, whatever its options. So the order is made here: a collective, matmuls of
another function that take as long, and a barrier over what both give, behind which all that needs
the one or the other stands. What only weight gradients need is left out of barriers: XLA has a
matmul add its product in place only where nothing stands between it and the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from mtx.pipeline.nodes import (
    Asked,
    Node,
    Part,
    Pass,
    Sum,
    Write,
    behind,
    communicates,
    flops_of,
    is_large,
    is_written_in_place,
    product_of,
    reads_in_place,
    way_to,
)
from mtx.pipeline.order import Block, Order, places_in
from mtx.pipeline.slots import read
from mtx.vjp import Strand, divide, needed_of, variables_of

Tree = Any


class Braid:
    """Equations of F and of B, to be computed in an order of our own."""

    def __init__(self):
        self._values: list[Any] = []  # by number; None: still to be computed; or where it lies
        self._nodes: list[Node] = []
        self._writes: list[Write] = []
        self._sums: dict[int, Sum] = {}  # by the product that alone makes the gradient
        self._sums_of_rest: list[Sum] = []
        self._at_once: dict[int, Write] = {}  # by what they write
        self._read_there: set[int] = set()  # what has been written so, behind a barrier
        self._beside: dict[int, list[Pass | Write]] = {}  # by the place of a collective
        self._puts_off = True
        # What has been made since a collective had only beside it what moves memory, that included:
        # lest XLA moves the one or the other, all lies before such a collective, or behind it.
        self._last: set[int] = set()
        self._behind_alone = False
        self._weights: set[int] = set()
        self._outputs: set[int] = set()  # of functions

    def given(self, arrays: Sequence[Any], *, weights: bool = False) -> list[int]:
        """The numbers under which arrays are known from now on. weights: no barrier is put before
        them, so that matmuls read them where they lie."""
        first = len(self._values)
        self._values.extend(arrays)
        numbers = list(range(first, len(self._values)))
        self._weights.update(numbers if weights else ())
        return numbers

    def parts(self, arrays: Sequence[Any], *index) -> list[int]:
        """The numbers of array[index] of each, which is read where it is needed."""
        return self.given([Part(number, index) for number in self.given(arrays)])

    def add(
        self, strand: Strand, inputs: list[int], *, side: str, later: frozenset = frozenset()
    ) -> list[int]:
        """The numbers of a function's outputs, of inputs by their numbers; nothing runs yet. side:
        F or B. later: of its equations, by their place, those that only weight gradients need."""
        known = dict(zip(strand.jaxpr.invars, self.given(strand.constants) + inputs, strict=True))
        for place, eqn in enumerate(strand.eqns):
            outputs = self.given([None] * len(eqn.outvars))
            reads = [known[v] for v in eqn.invars if not isinstance(v, Literal)]
            self._nodes.append(Node(strand.jaxpr, eqn, reads, outputs, side, place in later))
            known.update(zip(eqn.outvars, outputs))
        given = [
            self.given([atom.val])[0] if isinstance(atom, Literal) else known[atom]
            for atom in strand.outvars
        ]
        self._outputs.update(given)
        return given

    def write(
        self, arrays: Sequence, values: Sequence[int], *index, taken: Sequence | None, last: bool
    ) -> list[int]:
        """The numbers of arrays with a value written to array[index] of each. taken: the numbers
        of what was read of each before, None where nothing hangs on it: nothing is written until
        all that is made of it is there, else XLA would copy the array to keep what it was. last:
        none lies beside a collective, see `run`."""
        written: list[int] = []
        at_once: set[int] = set()
        for array, value, read_of in zip(arrays, values, taken or (None,) * len(values)):
            behind = () if last or read_of is None else self._made_of(read_of)
            size = math.prod(array.shape[len(index) :]) * array.dtype.itemsize
            number, made = self.given([array, None])
            source = self._source(value)
            free = len(array) == 1 and not (last or behind or source in at_once)
            if now := free and self._lies(source, size):
                at_once.add(value := source)
            self._writes.append(Write(index, [number, value], [made], behind, size, last, now))
            written.append(made)
        return written

    def add_up(self, totals: Tree, values: Tree, *index) -> Tree:
        """The numbers of arrays with gradients added to array[index] of each, as soon as matmuls
        have made them: these may lie beside collectives, see `_tie`. values: the gradients'
        numbers; None where there is none, as among the arrays."""

        def of(total, value):
            if total is None:
                return None
            (number,) = self.given([total])
            if value is not None:
                product, between = product_of(value, self._nodes)
                made = Sum(index, value, number, between)
                if product is None or product in self._sums:
                    self._sums_of_rest.append(made)
                else:
                    self._sums[product] = made
            return number

        return jax.tree.map(of, totals, values, is_leaf=lambda a: a is None)

    def _lies(self, value: int, size: int) -> bool:
        """Whether a pass or a matmul makes a value, which can write it where it is kept, and what
        needs it can read it there: one copy less."""
        if not is_large(size):
            return False
        made_by = {number: node for node in self._nodes for number in node.outputs}
        return is_written_in_place(value, made_by) and all(map(reads_in_place, self._uses(value)))

    def _source(self, value: int) -> int:
        """What a value is that barriers and names leave as it is."""
        made_by = {number: node for node in self._nodes for number in node.outputs}
        while (node := made_by.get(value)) and node.is_same:
            value = node.inputs[node.outputs.index(value)]
        return value

    def _uses(self, value: int) -> list[Node]:
        """Behind such barriers and names, too."""
        uses: list[Node] = []
        for node in self._nodes:
            if value in node.inputs:
                same = node.outputs[node.inputs.index(value)] if node.is_same else None
                uses += [node] if same is None else self._uses(same)
        return uses

    def _made_of(self, number: int) -> tuple[int, ...]:
        """What has been computed of a value in passing, and itself, as far as a matmul or a
        collective reads it or it is an output. What follows from an input of such a one that comes
        of a matmul as well does not count: XLA computes that input once."""
        reads = {n for node in self._nodes if node.op is not None for n in node.inputs}
        known, behind = {number}, set()  # behind: what waits for a matmul or a collective
        for node in self._nodes:
            if node.op is not None or behind.intersection(node.inputs):
                behind.update(node.outputs)
            if node.op is None and (known - (reads & behind)).intersection(node.inputs):
                known.update(node.outputs)
        return tuple(sorted(known & (reads | self._outputs)))

    def value(self, number: int) -> Any:
        """Computed or given."""
        value = self._values[number]
        return read(self._values[value.array], *value.index) if isinstance(value, Part) else value

    def read(self, numbers: Sequence[int]) -> list:
        return [self.value(number) for number in numbers]

    def run(self, last: Sequence[int] = ()) -> Order:
        """Computes all; the order in which that was done. last: behind these lie the writes that
        lie beside no collective."""
        written = {node.inputs[1] for node in self._writes}
        written.update(each.value for each in self._sums.values())
        self._at_once = {node.inputs[1]: node for node in self._writes if node.at_once}
        self._writes = [node for node in self._writes if not node.at_once]
        asked = Asked(self._nodes, self._outputs - written, self._writes)
        found, memory = asked.order, asked.memory
        self._beside = {at: [memory[n] for n in numbers] for at, numbers in found.beside.items()}
        placed = {node for each in self._beside.values() for op in each for node in op.nodes}
        placed.update(node for each in self._sums.values() for node in each.nodes)
        pending = [node for node in self._nodes if not (node.op or node in placed)]
        self._puts_off = not asked.joins
        for block in found.blocks:
            self._compute_ready(pending)
            self._together(block, asked.large, pending)
        self._compute_ready(pending)
        for each in self._sums_of_rest:
            self._add(each)
        writes = [node for node in self._writes if node not in placed]
        for node in writes:
            self._hold_back(node)
        if writes and last:
            self._barrier({*last, *(node.inputs[0] for node in writes)})
        for node in writes:
            self._set(node.outputs, node.compute(self.read(node.inputs)))
        self._nodes, self._writes = [], []
        return found

    def _together(self, block: Block, large: Sequence[Node], pending: list) -> None:
        """A collective and what lies beside it: neither runs before what the other waits for, nor
        after what needs the other; what only moves memory comes first, then matmuls. What only
        weight gradients need is free."""
        first, beside = large[block[0]], block[1:]
        tied = [node for node in (large[at] for at in places_in(beside)) if not node.later]
        memory = self._beside.get(block[0], [])
        begins = {n for op in memory for n in op.begins}
        if tied and self._is_ready(tied[0]):
            begins.update(tied[0].inputs)
        alone = bool(memory) and not beside
        if (alone or self._behind_alone) and not first.later:
            begins.update(self._still_read(self._last))
        if begins:  # XLA would begin to gather weights long before
            kept = first.inputs if communicates(first.eqn) else ()
            self._barrier({*kept, *({*first.inputs, *begins} - self._weights)})
        made = self._computed(first)
        for op in memory:
            self._compute_all(op.nodes)
            self._compute_ready(pending)
        held = {n for op in memory for n in op.ends}
        if held and tied and self._is_ready(tied[0]):
            self._barrier({*tied[0].inputs, *held} - self._weights)
            held = set()
        for each in beside:
            if isinstance(each, tuple):
                self._compute_ready(pending)
                self._together(each, large, pending)
            else:
                self._compute_for(large[each], pending)
        self._finish(first, made)
        beside_it = held.union(*(node.outputs for node in tied))
        made = beside_it.difference(self._sums) | (set() if first.later else {*first.outputs})
        self._last, self._behind_alone = made if alone else self._last | made, alone
        if beside_it:
            self._tie(first, beside_it)

    def _tie(self, first: Node, made: set[int]) -> None:
        """What needs the collective, or what was made beside it, waits for both. Where a gradient
        is added up, for the sum's first element: XLA has a matmul add its product in place only
        where neither a barrier nor a further sum stands behind it. That comes before the barrier,
        or else the collective would be waited for there."""
        for product in sorted(made & self._sums.keys()):
            summed = self._sums[product]
            element = summed.first(self._values[summed.total])
            self._set(first.outputs, [behind(each, element) for each in self.read(first.outputs)])
        if others := made - self._sums.keys():
            self._barrier({*first.outputs, *others})

    def _still_read(self, numbers: set[int]) -> set[int]:
        waiting = (node.inputs for node in self._nodes if not self._is_done(node))
        return numbers & self._outputs.union(*waiting)

    def _compute_for(self, node: Node, pending: list) -> None:
        """An equation, and what is still to be computed on the way to it; the rest lies behind the
        barrier to come."""
        if not self._puts_off:
            self._compute_ready(pending)
        made_by = {number: each for each in pending for number in each.outputs}
        found = way_to(node.inputs, made_by)
        first = [each for each in pending if each in found]
        pending[:] = [each for each in pending if each not in found]
        self._compute_all(first)
        # Of two that read the same part XLA would make one, of joined arrays.
        if parts := {n for n in node.inputs if isinstance(self._values[n], Part)}:
            self._barrier(parts)
        self._compute_all([node])

    def _compute_ready(self, pending: list) -> None:
        """Of what is neither a matmul nor a collective, all that can be computed."""
        while ready := [node for node in pending if self._is_ready(node)]:
            for node in ready:
                pending.remove(node)
                self._compute_all([node])

    def _compute_all(self, nodes: Sequence[Node | Write]) -> None:
        for node in nodes:
            self._finish(node, self._computed(node))

    def _finish(self, node: Node | Write, values: Sequence) -> None:
        self._set(node.outputs, values)
        for number in node.outputs:
            if summed := self._sums.get(number):
                self._compute_all(summed.nodes)
                self._add(summed)
            if kept := self._at_once.get(number):
                written = kept.compute(self.read(kept.inputs))
                self._set(kept.outputs, written)
                # Without a barrier XLA would read what has been written; in front of what is kept,
                # it would keep a matmul from writing there.
                (array,) = self.given(lax.optimization_barrier(written))
                self._values[number] = Part(array, kept.index)
                self._read_there.add(number)

    def _add(self, summed: Sum) -> None:
        total, value = self.read((summed.total, summed.value))
        self._values[summed.total] = summed.compute(total, value)

    def _computed(self, node: Node | Write) -> list:
        if node.is_same and self._read_there.intersection(node.inputs):
            self._read_there.update(node.outputs)
            return [self._values[number] for number in node.inputs]
        self._hold_back(node)
        return node.compute(self.read(node.inputs))

    def _hold_back(self, node: Node | Write) -> None:
        if node.behind:
            self._barrier({node.inputs[0], *node.behind})

    def _barrier(self, numbers: set[int]) -> None:
        parts = {n: value for n in numbers if isinstance(value := self._values[n], Part)}
        held = sorted(numbers - parts.keys() | {part.array for part in parts.values()})
        self._set(held, lax.optimization_barrier(self.read(held)))

    def _set(self, numbers: Sequence[int], values: Sequence) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._values[number] = value

    def _is_done(self, node: Node) -> bool:
        return all(self._values[number] is not None for number in node.outputs)

    def _is_ready(self, node: Node | Write) -> bool:
        return all(self._values[number] is not None for number in (*node.inputs, *node.behind))


# -- of functions ----------------------------------------------------------------------------------


def weight_equations(strand: Strand, weights: int) -> frozenset[int]:
    """The places of the equations that only weight gradients need, of a backward pass whose first
    `weights` outputs they are: of those that matmuls can add in place. What goes through a loop,
    as experts' gradients do, cannot be, and is as any other."""
    _, later = divide(strand, weights)
    loops = [eqn for eqn in later if eqn.primitive.name == "while"]
    read = [atom for eqn in loops for atom in variables_of(eqn.invars)]
    through = [later[place] for place in needed_of(later, read)]
    ids = set(map(id, later)) - set(map(id, [*loops, *through]))
    return frozenset(i for i, eqn in enumerate(strand.eqns) if id(eqn) in ids)


def split_ahead(strand: Strand, after: Sequence = ()) -> tuple[Strand, Strand] | None:
    """The way to the gathers that a function's first matmul needs, to be computed ahead, and the
    rest, which takes what the first part gives before its own inputs. after: inputs that are not
    there yet. None where there is no such gather."""
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
    """The same function, where no equation computes what another one does: what was recomputed is
    gathered again for the weight gradient. XLA does not see that where barriers stand between."""
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


def is_nested(eqn) -> bool:
    """Whether an equation has a function of its own: a loop, a conditional."""
    return any("jaxpr" in name or name == "branches" for name in eqn.params)
