"""Values by number: computed, given, or still to come; and barriers over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax import lax

from mtx.pipeline.nodes import Node, Part
from mtx.pipeline.rounds import Entry, first_carried, run
from mtx.pipeline.slots import read


class Addition(NamedTuple):
    """What a loop adds to a gradient."""

    product: int  # the number of the matmul's product that makes the rest of it
    total: int  # the number of the array that it is added to
    index: tuple  # where in it


class Values:
    def __init__(self):
        self.values: list[Any] = []  # or the `Part` where it lies; None: still to be computed
        self.missing: set[int] = set()  # the numbers of these
        self.weights: set[int] = set()
        self.loops: dict[Node, dict[int, Addition]] = {}  # those that add to gradients, by output

    def given(self, arrays: Sequence[Any], *, weights: bool = False) -> list[int]:
        """The numbers under which arrays are known from now on. weights: no barrier is put on them,
        so that matmuls read them in place."""
        first = len(self.values)
        self.values.extend(arrays)
        numbers = list(range(first, len(self.values)))
        self.missing.update(n for n in numbers if self.values[n] is None)
        self.weights.update(numbers if weights else ())
        return numbers

    def parts(self, arrays: Sequence[Any], *index, weights: bool = False) -> list[int]:
        """The numbers of array[index] of each array, which is read where it is needed. weights: as
        in `given`."""
        parts = [Part(number, index) for number in self.given(arrays, weights=weights)]
        return self.given(parts, weights=weights)

    def value(self, number: int) -> Any:
        """A number's value, computed or given."""
        value = self.entry(number)
        return read(value.array, *value.index) if isinstance(value, Entry) else value

    def entry(self, number: int) -> Any:
        """The value, or the entry where it lies."""
        value = self.values[number]
        return Entry(self.values[value.array], value.index) if isinstance(value, Part) else value

    def read(self, numbers: Sequence[int]) -> list:
        return [self.value(number) for number in numbers]

    # -- loops ------------------------------------------------------------------------------------

    def behind_loops(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, in which products that a loop adds more to wait for what the loop needs:
        nothing may come right after such a product, or no matmul would add it in place. XLA would
        copy the whole sum if it were tied to a collective that does not leave the node. So if the
        longest collective does not, these products are `later`: XLA computes them when it likes."""
        sent = (node.op for node in nodes if node.op is not None and node.op.communicates)
        longest = max(sent, key=lambda op: op.seconds, default=None)
        free = longest is None or not longest.network
        read = {number for node in nodes for number in node.inputs}
        found = list(nodes)
        for loop, sums in self.loops.items():
            products = {one.product for one in sums.values()}
            later = free and read.isdisjoint(loop.outputs)
            for place, node in enumerate(found):
                if not products.isdisjoint(node.outputs):
                    after = (*node.after, *self.given_to(loop))
                    found[place] = replace(node, after=after, later=node.later or later)
        return found

    @property
    def added_up(self) -> Iterator[int]:
        """The outputs of loops that are gradients which the loops add to an array."""
        return (loop.outputs[output] for loop, sums in self.loops.items() for output in sums)

    def given_to(self, loop: Node) -> list[int]:
        """What a loop needs, except the gradients that it adds to."""
        first = first_carried(loop.eqn)
        own = {loop.given[first + output] for output in self.loops[loop]}
        return [number for number in loop.inputs if number not in own]

    def of_loop(self, loop: Node) -> list:
        """A loop's outputs; for a gradient that it adds to an array, the array."""
        values: list = [
            atom.val if number is None else self.entry(number)
            for number, atom in zip(loop.given, loop.eqn.invars, strict=True)
        ]
        sums = self.loops.get(loop, {})
        for output, one in sums.items():
            values[first_carried(loop.eqn) + output] = Entry(self.values[one.total], one.index)
        made = run(loop.eqn, values)
        self.set([one.total for one in sums.values()], [made[output] for output in sums])
        return made

    # -- barriers ---------------------------------------------------------------------------------

    def barrier(self, numbers: set[int]) -> None:
        """Tie values: none of them can be read before all that have been computed are there."""
        parts = {n: value for n in numbers if isinstance(value := self.values[n], Part)}
        arrays = {part.array for part in parts.values()}
        held = sorted((numbers - parts.keys() | arrays) - self.missing)
        self.set(held, lax.optimization_barrier(self.read(held)))

    def set(self, numbers: Sequence[int], values: Sequence) -> None:
        for number, value in zip(numbers, values, strict=True):
            self.values[number] = value
        self.missing.difference_update(numbers)
