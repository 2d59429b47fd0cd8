"""Weave several functions into one list of equations, so that the collectives of one overlap with
the matmuls of another.

XLA overlaps a collective with computation only if its schedule places some between the collective's
start and its done. It has no reason to: of the five collectives in a layer's F and B it leaves two
or three exposed, whatever its options. So we choose the order here: a collective, then matmuls of
another function that take as long, then a barrier over the results of both; everything that uses
either result comes after the barrier. What only weight gradients need is left out of barriers: XLA
adds a matmul's product in place only if nothing lies between the matmul and the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal

from mtx.pipeline.blocks import Turn
from mtx.pipeline.costs import communicates
from mtx.pipeline.nodes import (
    Asked,
    Node,
    Part,
    Pass,
    Sum,
    Write,
    before_loop,
    behind,
    can_wait,
    is_large,
    is_view,
    is_written_in_place,
    product_of,
    reads_in_place,
    way_to,
)
from mtx.pipeline.rounds import is_loop
from mtx.pipeline.values import Addition, Values
from mtx.strand import Strand

Tree = Any


class _Flight(NamedTuple):
    """A collective between its start and its done."""

    made: list
    alone: bool  # only memory operations lie beside it
    beside: set[int]  # what matmuls beside it have made


class Braid(Values):
    """Equations of F and of B, to be computed in an order that we choose."""

    def __init__(self):
        super().__init__()
        self._nodes: list[Node] = []
        self._writes: list[Write] = []
        self._sums: dict[int, Sum] = {}  # by the product from which alone a gradient is made
        self._sums_of_rest: list[Sum] = []
        self._at_once: dict[int, Write] = {}  # by the value they write
        self._read_there: set[int] = set()  # values written so, read after a barrier
        self._large: Sequence[Node] = ()
        self._memory: Sequence[Pass | Write] = ()
        self._pending: list[Node] = []  # what is computed on the way
        self._puts_off, self._is_timed = True, False
        self._front: set[int] = set()  # what matmuls and collectives have made last
        self._held: set[int] = set()  # and memory operations since, beside collectives
        self._came: set[int] = set()  # what collectives have given since the last matmul
        # What was made since a collective with only memory operations beside it, these included:
        # all of it comes before such a collective or after it, so that XLA moves none of it.
        self._last: set[int] = set()
        self._behind_alone = False
        self._outputs: set[int] = set()  # of functions

    def add(
        self, strand: Strand, inputs: list[int], *, side: str, later: frozenset = frozenset()
    ) -> list[int]:
        """Add a function, given its inputs' numbers; returns its outputs' numbers. Nothing runs
        yet. side: F or B. later: the places of its equations that only weight gradients need."""
        known = dict(zip(strand.jaxpr.invars, self.given(strand.constants) + inputs, strict=True))
        for place, eqn in enumerate(strand.eqns):
            outputs = self.given([None] * len(eqn.outvars))
            reads = [known[v] for v in eqn.invars if not isinstance(v, Literal)]
            self._nodes.append(Node(strand.jaxpr, eqn, reads, outputs, side, place in later))
            if is_view(eqn) and reads and self.weights.issuperset(reads):
                self.weights.update(outputs)
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
        """Write a value to array[index] of each array; returns the arrays' numbers. taken: the
        number of what was read from each before, None if nothing depends on that: nothing is
        written until all that is made of it is there, or XLA would copy the array to keep its old
        contents. last: in a tick's last pair of layers."""
        written: list[int] = []
        at_once: set[int] = set()
        for array, value, read_of in zip(arrays, values, taken or (None,) * len(values)):
            behind = () if read_of is None else self._made_of(read_of)
            size = math.prod(array.shape[len(index) :]) * array.dtype.itemsize
            number, made = self.given([array, None])
            source = self._source(value)
            free = len(array) == 1 and not (behind or source in at_once)
            if now := free and self._lies(source, size):
                at_once.add(value := source)
            self._writes.append(Write(index, [number, value], [made], behind, size, last, now))
            written.append(made)
        return written

    def add_up(self, totals: Tree, values: Tree, *index) -> Tree:
        """Add gradients to array[index] of each array, as soon as matmuls have made them; returns
        the numbers of the arrays. The matmuls may lie beside collectives, see `_tie`. values: the
        gradients' numbers, None where an array has no gradient; arrays may be None, too."""

        def of(total, value):
            if total is None:
                return None
            (number,) = self.given([total])
            if value is not None:
                loop, output, start = before_loop(value, total.dtype, self._nodes)
                product, between = product_of(start, [n for n in self._nodes if n is not loop])
                if product is None or product in self._sums:
                    self._sums_of_rest.append(Sum(index, value, number, between))
                else:
                    self._sums[product] = Sum(index, start, number, between, loop)
                    if loop is not None:
                        self.loops.setdefault(loop, {})[output] = Addition(product, number, index)
            return number

        return jax.tree.map(of, totals, values, is_leaf=lambda a: a is None)

    def _lies(self, value: int, size: int) -> bool:
        """Whether the pass or matmul that makes a value can write it where it is kept, and those
        that need it can read it there: one copy less."""
        if not is_large(size):
            return False
        made_by = {number: node for node in self._nodes for number in node.outputs}
        return is_written_in_place(value, made_by) and all(map(reads_in_place, self._uses(value)))

    def _source(self, value: int) -> int:
        """The value that this one equals, barriers and names apart."""
        made_by = {number: node for node in self._nodes for number in node.outputs}
        while (node := made_by.get(value)) and node.is_same:
            value = node.inputs[node.outputs.index(value)]
        return value

    def _uses(self, value: int) -> list[Node]:
        """The nodes that read a value, also behind such barriers and names."""
        uses: list[Node] = []
        for node in self._nodes:
            if value in node.inputs:
                same = node.outputs[node.inputs.index(value)] if node.is_same else None
                uses += [node] if same is None else self._uses(same)
        return uses

    def _made_of(self, number: int) -> tuple[int, ...]:
        """A value and what is computed from it on the way, as far as matmuls or collectives read it
        or it is an output. What follows from such an operand that depends on a matmul as well does
        not count: XLA computes that operand once."""
        reads = {n for node in self._nodes if node.op is not None for n in node.inputs}
        known, behind = {number}, set()  # behind: what waits for a matmul or a collective
        for node in self._nodes:
            if node.op is not None or behind.intersection(node.inputs):
                behind.update(node.outputs)
            if node.op is None and (known - (reads & behind)).intersection(node.inputs):
                known.update(node.outputs)
        return tuple(sorted(known & (reads | self._outputs)))

    def run(self, last: Sequence[int] = ()) -> None:
        """Compute everything. last: the writes that lie beside no collective come after these."""
        written = {node.inputs[1] for node in self._writes}
        written.update((each.value for each in self._sums.values()), self.added_up)
        self._at_once = {node.inputs[1]: node for node in self._writes if node.at_once}
        self._writes = [node for node in self._writes if not node.at_once]
        self._nodes = self.behind_loops(self._nodes)
        outputs = self._outputs - written
        asked = Asked(self._nodes, outputs, self._writes, self._sums.keys(), self.loops.keys())
        self._large, self._memory, found = asked.large, asked.memory, asked.order
        self._is_timed = found.is_timed
        moved = [self._memory[number] for what, number in found.turns if what == "move"]
        placed = {node for op in moved for node in op.own}
        placed.update(self.loops, (node for each in self._sums.values() for node in each.nodes))
        self._pending = [node for node in self._nodes if not (node.op or node in placed)]
        self._puts_off = not asked.joins
        self._follow(found.turns)
        self._compute_ready()
        for each in self._sums_of_rest:
            self._add(each)
        writes = [node for node in self._writes if node not in placed]
        for node in writes:
            self._hold_back(node)
        if writes and last:
            self.barrier({*last, *(node.inputs[0] for node in writes)})
        for node in writes:
            self.set(node.outputs, node.compute(self.read(node.inputs)))
        self._nodes, self._writes, self.loops = [], [], {}

    # -- in turn -----------------------------------------------------------------------------------

    def _follow(self, turns: Sequence[Turn]) -> None:
        """Compute in turn. A collective and what lies beside it: neither runs before what the other
        needs, nor after what needs the other. What only weight gradients need may come later."""
        flying: dict[int, _Flight] = {}
        starting: list[int] = []
        previous = ""
        for at, (what, number) in enumerate(turns):
            if what == "start":
                starting.append(number)
                continue
            if starting and (what != "done" or number in starting):
                self._start(starting, turns[at:], flying)
                starting, previous = [], "start"
            if what == "done":
                self._done(self._large[number], flying.pop(number))
            elif what == "move":
                self._move(self._memory[number], behind=previous in ("compute", "done"))
            elif flying:
                self._compute_beside(self._large[number], flying)
            else:
                self._compute_alone(self._large[number])
            previous = what

    def _start(
        self, places: Sequence[int], coming: Sequence[Turn], flying: dict[int, _Flight]
    ) -> None:  # fmt: skip
        """Start collectives after what was last computed beside others, before what comes next."""
        nodes = [self._large[place] for place in places]
        inputs = {n for node in nodes for n in node.inputs}
        if came := self._after_done():
            self._compute_way(inputs)
            self.barrier(inputs | came)
        self._compute_ready()
        memory = [self._memory[n] for _, n in takewhile(lambda turn: turn.what == "move", coming)]
        done = coming.index(Turn("done", places[-1]))
        beside = [self._large[n] for what, n in coming[:done] if what == "compute"]
        first = next((each for each in beside if not each.later), None)
        begins = {n for op in memory for n in op.begins} | self._held
        if flying:
            begins |= self._still_read(self._front)
        if first is not None and self._is_ready(first):
            begins.update(first.inputs)
            self._held = set()
        alone = bool(memory) and not beside
        self._hold(nodes, begins, alone)
        for place, node in zip(places, nodes, strict=True):
            flying[place] = _Flight(self._computed(node), alone, set())

    def _hold(self, nodes: Sequence[Node], begins: set[int], alone: bool) -> None:
        """Hold equations back until all of `begins` is there, and `begins` until their inputs are.
        alone: only memory operations lie beside them."""
        if (alone or self._behind_alone) and not all(node.later for node in nodes):
            begins = begins | self._still_read(self._last)
        if begins:  # otherwise XLA would begin to gather weights long before
            inputs = {n for node in nodes for n in node.inputs}
            kept = inputs if communicates(nodes[0].eqn) else ()
            self.barrier({*kept, *({*inputs, *begins} - self.weights)})

    def _done(self, node: Node, flight: _Flight) -> None:
        self._finish(node, flight.made)
        beside, self._held = flight.beside | self._held, set()
        made = beside.difference(self._sums) | (set() if node.later else {*node.outputs})
        self._last, self._behind_alone = made if flight.alone else self._last | made, flight.alone
        if beside:
            self._tie(node, beside)
        self._came.update(node.outputs if self._is_timed else ())

    def _after_done(self) -> set[int]:
        """What collectives have given since the last matmul: XLA waits for it here at the latest,
        and so begins it that much earlier."""
        came, self._came = self._still_read(self._came), set()
        return came

    def _move(self, op: Pass | Write, *, behind: bool) -> None:
        """Move memory. behind: only after what was computed last."""
        held = self._after_done()
        if behind and self._front.isdisjoint(op.begins):
            held |= self._still_read(self._front)
        if not held <= {*op.begins}:
            self.barrier({*op.begins, *held})
        self._compute_way(n for node in op.nodes for n in node.inputs)
        self._compute_all([node for node in op.nodes if not self._is_done(node)])
        self._pending = [node for node in self._pending if node not in op.nodes]
        self._compute_ready()
        self._held.update(op.ends)

    def _compute_beside(self, node: Node, flying: dict[int, _Flight]) -> None:
        """A matmul beside collectives."""
        self._held |= self._after_done().difference(node.inputs)
        if self._held and self._is_ready(node):
            self.barrier({*node.inputs, *self._held} - self.weights)
            self._held = set()
        self._compute_for(node)
        if not node.later:
            self._front = set(node.outputs)
            for flight in flying.values():
                flight.beside.update(node.outputs)

    def _compute_alone(self, node: Node) -> None:
        self._compute_ready()
        self._hold([node], self._after_done() - {*node.inputs}, False)
        self._compute_all([node])
        self._behind_alone = False
        self._front = set() if node.later else {*node.outputs}
        self._last = self._last | self._front

    def _tie(self, first: Node, made: set[int]) -> None:
        """Make all that needs the collective, or what was made beside it, wait for both; if that is
        a gradient that is added up, for an element of the sum: XLA adds a matmul's product in place
        only if neither a barrier nor another sum comes after it. That goes before the barrier, or
        the collective would be waited for there. XLA may copy sums of loops for it: only what
        leaves the node is worth that."""
        sums = [self._sums[product] for product in sorted(made & self._sums.keys())]
        for total in [self.values[s.total] for s in sums if first.network or not s.loop]:
            values = self.read(first.outputs)
            self.set(first.outputs, [behind(a, total) if can_wait(a) else a for a in values])
        if others := made - self._sums.keys():
            self.barrier({*first.outputs, *others})

    def _still_read(self, numbers: set[int]) -> set[int]:
        read = [n for n in self._nodes if not (numbers.isdisjoint(n.inputs) or self._is_done(n))]
        return numbers & self._outputs.union(*(node.inputs for node in read))

    def _compute_for(self, node: Node) -> None:
        """Compute an equation and what leads to it; the rest comes after the next barrier."""
        if not self._puts_off:
            self._compute_ready()
        self._compute_way(node.inputs)
        self._compute_all([node])

    def _compute_way(self, numbers: Iterable[int]) -> None:
        """Compute what is still missing for these values."""
        made_by = {number: each for each in self._pending for number in each.outputs}
        found = way_to(numbers, made_by)
        first = [each for each in self._pending if each in found]
        self._pending = [each for each in self._pending if each not in found]
        self._compute_all(first)

    def _compute_ready(self) -> None:
        """Compute all that is ready and is neither a matmul nor a collective."""
        while ready := [node for node in self._pending if self._is_ready(node)]:
            found = {*ready}
            self._pending = [node for node in self._pending if node not in found]
            self._compute_all(ready)

    def _compute_all(self, nodes: Sequence[Node | Write]) -> None:
        for node in nodes:
            self._finish(node, self._computed(node))

    def _finish(self, node: Node | Write, values: Sequence) -> None:
        self.set(node.outputs, values)
        for number in node.outputs:
            if summed := self._sums.get(number):
                self._compute_all(summed.nodes)
                self._add(summed)
            if kept := self._at_once.get(number):
                written = kept.compute(self.read(kept.inputs))
                self.set(kept.outputs, written)
                # Without a barrier XLA would read the value that was written; one in front of the
                # kept array would prevent a matmul from writing there.
                (array,) = self.given(lax.optimization_barrier(written))
                self.values[number] = Part(array, kept.index)
                self._read_there.add(number)

    def _add(self, summed: Sum) -> None:
        if (loop := summed.loop) and not self._is_done(loop):
            self._compute_way(self.given_to(loop))
            self.set(loop.outputs, self.of_loop(loop))
        total, value = self.read((summed.total, summed.value))
        self.values[summed.total] = summed.compute(total, value)

    def _computed(self, node: Node | Write) -> list:
        if node.is_same and self._read_there.intersection(node.inputs):
            self._read_there.update(node.outputs)
            return [self.values[number] for number in node.inputs]
        self._hold_back(node)
        if isinstance(node, Node) and is_loop(node.eqn):
            return self.of_loop(node)
        return node.compute(self.read(node.inputs))

    def _hold_back(self, node: Node | Write) -> None:
        if node.behind:
            self.barrier({node.inputs[0], *node.behind})

    def _is_done(self, node: Node | Write) -> bool:
        return self.missing.isdisjoint(node.outputs)

    def _is_ready(self, node: Node | Write) -> bool:
        return self.missing.isdisjoint(node.inputs) and self.missing.isdisjoint(node.behind)
