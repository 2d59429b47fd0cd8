"""What a braid computes: equations, passes of several that only move memory, and writes; how long
each takes, and which waits for which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal

from mtx.pipeline.blocks import MemoryOp, Step
from mtx.pipeline.costs import collective_s, communicates, flops_of, matmul_s, moved_s, size_of
from mtx.pipeline.order import Order, order
from mtx.pipeline.rounds import first_carried, is_loop, only_adds
from mtx.pipeline.slots import add, read, write
from mtx.strand import bind, is_matmul, variables_of

_SHORT = 5e-6  # collectives that take less are not worth a matmul
_BRIEF = 3e-6  # passes that take less are not worth a place of their own
BEHIND = "behind"  # the name of `behind` in JAX's equations
_SAME = "name", "optimization_barrier", "layout_constraint"
_VIEWS = ("reshape", "squeeze", "expand_dims", *_SAME)  # move nothing
# XLA begins a collective as late as its estimates of what lies beside it allow. It takes a product
# that reads a weight in place to need no time, and a float32 one in blocked attention up to forty
# times what it needs. Here all products are said to need none, so that collectives begin where the
# order says. (In nanoseconds; XLA reads it in xla/service/gpu/model/sol_latency_estimator.cc.)
_NO_TIME = {"latency_metadata": "1"}


class Part(NamedTuple):
    """A value that lies in an array and is read there, with no barrier in between."""

    array: int  # its number
    index: tuple


@dataclass(frozen=True, eq=False)
class Write:
    """A value to be written to a part of an array, after all that is made of its old contents."""

    index: tuple
    inputs: list[int]  # array, value
    outputs: list[int]
    behind: tuple[int, ...]
    size: int  # of the value, bytes
    last: bool  # in a tick's last pair of layers
    at_once: bool = False  # written as soon as it is made, and read from the array
    is_same = False

    @property
    def nodes(self) -> list[Write]:
        return [self]

    @property
    def own(self) -> frozenset[Write]:
        return frozenset([self])

    @property
    def begins(self) -> list[int]:
        """The values that a barrier before it holds."""
        return self.inputs[:1]

    @property
    def ends(self) -> list[int]:
        """The values that a barrier after it holds."""
        return self.outputs

    @property
    def seconds(self) -> float:
        return moved_s(2 * self.size)

    def compute(self, values: Sequence) -> list:
        array, value = values
        return [write(array, value, *self.index)]


@dataclass(frozen=True, eq=False)
class Node:
    """An equation, with the numbers of its inputs and outputs."""

    jaxpr: Any
    eqn: Any
    inputs: list[int]
    outputs: list[int]
    side: str
    later: bool
    after: tuple[int, ...] = ()  # values that must be there first, though it does not read them
    behind = ()

    @property
    def is_same(self) -> bool:
        """Whether its outputs equal its inputs, at most rounded to their own type."""
        if self.eqn.primitive.name == "reduce_precision":
            kept = self.eqn.params["exponent_bits"], self.eqn.params["mantissa_bits"]
            found = jnp.finfo(self.eqn.outvars[0].aval.dtype)
            return kept == (found.nexp, found.nmant)
        return self.eqn.primitive.name in _SAME

    @cached_property
    def op(self) -> Step | None:
        """The step to be ordered; None if the equation is computed on the way."""
        if communicates(self.eqn):
            seconds, network = collective_s(self.eqn)
            step = Step(seconds, True, self.later, self.side, network=network)
            return step if seconds > _SHORT else None
        if not flops_of(self.eqn):
            return None
        return Step(matmul_s(self.eqn), False, self.later, self.side)

    @property
    def network(self) -> bool:
        """Whether it is a collective that leaves the node."""
        return self.op is not None and self.op.network

    @property
    def given(self) -> list[int | None]:
        """The number of each of the equation's inputs; None for a literal."""
        numbers = iter(self.inputs)
        return [None if isinstance(v, Literal) else next(numbers) for v in self.eqn.invars]

    def compute(self, values: Sequence) -> list:
        given = iter(values)
        atoms = [v.val if isinstance(v, Literal) else next(given) for v in self.eqn.invars]
        with set_xla_metadata(**_NO_TIME) if is_matmul(self.eqn) else nullcontext():
            return bind(self.jaxpr, self.eqn, atoms)


@dataclass(frozen=True, eq=False)
class Sum:
    """A gradient to be added to a part of an array."""

    index: tuple
    value: int
    total: int  # the array
    nodes: list[Node]  # from the matmul to the gradient
    loop: Node | None = None  # one that adds more to it

    def compute(self, total, value):
        return add(total, value, *self.index)


def can_wait(array) -> bool:
    """Whether `behind` can take an array: neither a single number nor integers."""
    return array.ndim > 0 and jnp.issubdtype(array.dtype, jnp.floating)


@jax.jit
def behind(array, total):
    """The array, tied to the total: nothing of it can be read before the total is there. If an
    element of the total is NaN, one of the array becomes NaN. The array itself decides which
    element is read: otherwise XLA would read it from the last gradient, and no matmul would then
    add that one in place. (Jitted, so that it is one equation to whoever reads a step's.)"""
    own = read(array, *(0,) * array.ndim)
    element = read(total, *(0,) * (total.ndim - 1), jnp.isnan(own).astype(jnp.int32))
    is_nan = jnp.isnan(element)
    place = *(0,) * (array.ndim - 1), is_nan.astype(jnp.int32)
    return write(array, jnp.where(is_nan, element.astype(array.dtype), read(array, *place)), *place)


def product_of(value: int, nodes: Sequence[Node]) -> tuple[int | None, list[Node]]:
    """(the matmul's product from which alone a value is made, the nodes in between); (None, []) if
    there is no such product, or others read it or what is in between."""
    made_by = {number: node for node in nodes for number in node.outputs}
    way = way_to([value], made_by)
    between = [node for node in nodes if node in way]
    made = {number for node in between for number in node.outputs}
    given = {number for node in between for number in node.inputs} - made or {value}
    product, *others = given
    maker = made_by.get(product)
    if others or maker is None or not (maker.op and is_matmul(maker.eqn)):
        return None, []
    if any(made.union(given).intersection(node.inputs) for node in nodes if node not in way):
        return None, []
    return product, between


def before_loop(value: int, dtype, nodes: Sequence[Node]) -> tuple[Node | None, int, int]:
    """What a gradient of this type is before a loop that adds more to it: (the loop, which of its
    outputs the gradient is, the number of that output's initial value); (None, 0, the gradient) if
    there is no such loop."""
    node = next((node for node in nodes if value in node.outputs), None)
    if node is not None and is_loop(node.eqn):
        output = node.outputs.index(value)
        start = node.given[first_carried(node.eqn) + output]
        same = node.eqn.outvars[output].aval.dtype == dtype
        if start is not None and same and only_adds(node.eqn, output):
            return node, output, start
    return None, 0, value


@dataclass(frozen=True, eq=False)
class Pass:
    """Equations that lead from outputs of matmuls and collectives to another one of these."""

    nodes: list[Node]
    begins: list[int]  # its inputs that matmuls, collectives and other passes have made
    ends: list[int]  # its values that matmuls and collectives read, and outputs
    seconds: float
    own: frozenset[Node] = frozenset()  # the other nodes lead to these and to earlier ones


def passes_of(
    nodes: Sequence[Node], outputs: Collection[int], sums: Collection[Node],
    loops: Collection[Node],
) -> list[Pass]:  # fmt: skip
    """The passes that lead to matmuls and collectives, then those that lead only to sums' matmuls
    and to outputs. An equation is in the first pass that needs it. Brief passes are left out, as
    are equations that only lead to weight gradients made by matmuls, and loops that add to
    gradients. What sums need joins the pass that reads the same: XLA makes one pass of both."""
    made_by = {number: node for node in nodes for number in node.outputs}
    stored = {number for node in nodes if node.op or node in loops for number in node.outputs}
    ends = {number for node in nodes if node.op for number in node.inputs}.union(outputs)
    found: list[Pass] = []
    taken: set[Node] = set(loops)
    early: set[Node] = set()

    to_sums = way_to((number for node in sums for number in node.inputs), made_by)

    def take(numbers: Iterable[int]) -> None:
        group = way_to(numbers, made_by, taken)
        known = {number for node in group for number in (*node.inputs, *node.outputs)}
        for node in nodes:
            if node in to_sums - taken and known.issuperset(node.inputs):
                group.add(node)
                known.update(node.outputs)
        own = frozenset(group - early)
        group = own | way_to((number for node in own for number in node.inputs), made_by, taken)
        made = _pass([node for node in nodes if node in group], stored, ends)
        if own and _is_kernel(group, ends) and made.begins and made.seconds > _BRIEF:
            found.append(replace(made, own=own))
            taken.update(group)
            stored.update(made.ends)
        else:
            early.update(group)

    wanted = [node for node in nodes if node.op and not node.later]
    for node in sorted(wanted, key=lambda node: node in sums):
        take(node.inputs)
    for number in sorted(outputs):
        take([number])
    return found


def moves(nodes: Iterable[Node]) -> bool:
    """Whether any node is not a view."""
    return any(not is_view(node.eqn) for node in nodes)


def is_view(eqn) -> bool:
    """Whether an equation only gives a value another shape or name, or moves dims of size 1."""
    if eqn.primitive.name == "transpose":
        shape = eqn.invars[0].aval.shape
        order = [dim for dim in eqn.params["permutation"] if shape[dim] > 1]
        return order == sorted(order)
    return eqn.primitive.name in _VIEWS


def _is_kernel(nodes: Collection[Node], ends: Collection[int]) -> bool:
    """Whether any node is left once XLA has dropped conversions of type there and back. ends: the
    values that others may read."""
    if any(not is_view(n.eqn) and n.eqn.primitive.name != "convert_element_type" for n in nodes):
        return True
    made: dict[int, Any] = {}
    for node in nodes:
        made |= zip(node.outputs, (var.aval.dtype for var in node.eqn.outvars), strict=True)
    given = {
        var.aval.dtype
        for node in nodes
        for number, var in zip(node.inputs, variables_of(node.eqn.invars), strict=True)
        if number not in made
    }
    return not {made[number] for number in made.keys() & set(ends)} <= given


def way_to(
    numbers: Iterable[int], made_by: Mapping[int, Node], taken: Collection[Node] = ()
) -> set[Node]:
    """The equations on the way to values, back to matmuls, collectives and what is `taken`."""
    found: set[Node] = set()
    waiting = list(numbers)
    while waiting:
        made = made_by.get(waiting.pop())
        if made and not (made.op or made in taken or made in found):
            found.add(made)
            waiting.extend(made.inputs)
    return found


def _pass(nodes: list[Node], stored: Collection[int], ends: Collection[int]) -> Pass:
    sizes: dict[int, int] = {}
    own: dict[int, int] = {}
    for node in nodes:
        sizes |= zip(node.inputs, map(size_of, variables_of(node.eqn.invars)), strict=True)
        own |= zip(node.outputs, map(size_of, node.eqn.outvars), strict=True)
    given = sorted(sizes.keys() - own.keys())
    read = sorted(own.keys() & set(ends))
    moved = sum((sizes | own)[number] for number in (*given, *read))
    return Pass(nodes, [n for n in given if n in stored], read, moved_s(moved))


class Asked:
    """What is to be ordered: matmuls and collectives, and the memory operations beside them."""

    def __init__(
        self, nodes: Sequence[Node], outputs: Collection[int], writes: Sequence[Write],
        summed: Collection[int], loops: Collection[Node],
    ):  # fmt: skip
        """summed: the products of matmuls that are weight gradients, and added up; loops: those
        that add to the same gradients."""
        # Short collectives have no place of their own; if there are any, passes have none either.
        # If a function has several, which XLA joins when they are ready at once (as those of FP8's
        # largest magnitudes), nothing is put off.
        short = [node for node in nodes if communicates(node.eqn) and not node.op]
        joined = [node.side for node in short if node.eqn.primitive.name != "all_to_all"]
        self.joins = len(joined) > len(set(joined))
        self._sums = {
            node for node in nodes if node.op and not set(node.outputs).isdisjoint(summed)
        }
        passes = [] if short else passes_of(nodes, outputs, self._sums, loops)
        # The last pair's writes have none either, or XLA copies rings (Bamba: 6.37 s, not 6.27).
        writes = [each for each in writes if not (short and each.last)]
        self.large = [node for node in nodes if node.op]
        self.memory: list[Pass | Write] = [*passes, *writes]
        self.steps: list[Step] = []
        self._before = [set[int]() for _ in self.memory]  # the places of steps
        self._until = [set[int]() for _ in self.memory]
        self._after = [set[int]() for _ in self.memory]  # numbers of passes
        of_node = {node: number for number, each in enumerate(passes) for node in each.own}
        self._waits: dict[int, frozenset[int]] = {}  # the steps that each value waits for
        self._needs: dict[int, frozenset[int]] = {}  # and the passes
        for node in nodes:
            self._follow(node, of_node.get(node))
        for number, each in enumerate(writes, len(passes)):
            read = (*each.inputs, *each.behind)
            self._before[number] |= self._union(self._waits, read)
            self._after[number] |= self._union(self._needs, read)

    def _follow(self, node: Node, number: int | None) -> None:
        """number: of the pass that the node is in."""
        before = self._union(self._waits, (*node.inputs, *node.after))
        after = self._union(self._needs, (*node.inputs, *node.after))
        if node.op:
            place = len(self.steps)
            self.steps.append(node.op._replace(before=before, summed=node in self._sums))
            for each in after:
                self._until[each].add(place)
            before, after = frozenset({place}), frozenset()
        elif number is not None:
            self._before[number] |= before
            self._after[number] |= after - {number}
            after |= {number}
        self._waits |= dict.fromkeys(node.outputs, before)
        self._needs |= dict.fromkeys(node.outputs, after)

    @staticmethod
    def _union(of: dict[int, frozenset[int]], numbers: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(of.get(number, frozenset()) for number in numbers))

    @property
    def order(self) -> Order:
        memory = (
            MemoryOp(each.seconds, *map(frozenset, sets))
            for each, *sets in zip(self.memory, self._before, self._until, self._after, strict=True)
        )
        return order(tuple(self.steps), tuple(memory))


def is_large(size: int) -> bool:
    """Whether it is worth a place of its own to read and write this many bytes."""
    return moved_s(2 * size) > _BRIEF


def is_written_in_place(value: int, made_by: Mapping[int, Node]) -> bool:
    """Whether XLA:GPU can have what makes a value, a pass or a matmul, write it straight to a part
    of an array."""
    way = way_to([value], made_by)
    if moves(way):
        return True
    first = {number for node in way for number in node.inputs} - {
        number for node in way for number in node.outputs
    }
    made = {made_by.get(number) for number in first or {value}}
    return all(node is not None and is_matmul(node.eqn) for node in made)


def reads_in_place(node: Node) -> bool:
    """Whether XLA:GPU reads parts of arrays in place in that equation: not in kernels that it knows
    nothing about, nor in loops."""
    return is_matmul(node.eqn) or not (flops_of(node.eqn) or communicates(node.eqn))
