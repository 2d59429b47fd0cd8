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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import lax
from jax.extend.core import Literal

from mtx.pipeline.order import Block, Order, Step, order, places_in
from mtx.pipeline.slots import write
from mtx.vjp import COLLECTIVES, Strand, axes_of, bind, divide, needed_of, variables_of

# A second: FLOPs of bfloat16 matmuls, bytes of memory, bytes over NVLink, and over the network
# where all devices of a node send at once, those of `tensor` each for a ring of its own.
_FLOPS, _MEMORY, _LINK, _NETWORK = 740e12, 2.8e12, 300e9, 300e9
_NODE = 8  # devices
_SHORT = 10e-6  # collectives that take less are not worth a matmul


class Braid:
    """Equations of F and of B, to be computed in an order of our own."""

    def __init__(self):
        self._values: list[Any] = []  # by number; None: still to be computed
        self._nodes: list[_Node | _Write] = []
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

    def add(
        self, strand: Strand, inputs: list[int], *, side: str, later: frozenset = frozenset()
    ) -> list[int]:
        """The numbers of a function's outputs, of inputs by their numbers; nothing runs yet. side:
        F or B. later: of its equations, by their place, those that only weight gradients need."""
        known = dict(zip(strand.jaxpr.invars, self.given(strand.constants) + inputs, strict=True))
        for place, eqn in enumerate(strand.eqns):
            outputs = self.given([None] * len(eqn.outvars))
            reads = [known[v] for v in eqn.invars if not isinstance(v, Literal)]
            self._nodes.append(_Node(strand.jaxpr, eqn, reads, outputs, side, place in later))
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
        for array, value, read_of in zip(arrays, values, taken or (None,) * len(values)):
            behind = () if last or read_of is None else self._made_of(read_of)
            size = math.prod(array.shape[len(index) :]) * array.dtype.itemsize
            number, made = self.given([array, None])
            self._nodes.append(_Write(index, [number, value], [made], behind, size, last))
            written.append(made)
        return written

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
        return self._values[number]

    def read(self, numbers: Sequence[int]) -> list:
        return [self._values[number] for number in numbers]

    def run(self, last: Sequence[int] = ()) -> Order:
        """Computes all; the order in which that was done. last: behind these lie the writes that
        lie beside no collective."""
        large, pending = [], []
        for node in self._nodes:
            (pending if node.op is None else large).append(node)
        found = order(tuple(self._steps()))
        for block in found.blocks:
            self._compute_ready(pending)
            self._together(block, large, pending)
        self._compute_ready(pending)
        writes = [large[place] for place in found.writes]
        for node in writes:
            self._hold_back(node)
        if writes and last:
            self._barrier({*last, *(node.inputs[0] for node in writes)})
        for node in writes:
            self._set(node.outputs, node.compute(self.read(node.inputs)))
        self._nodes = []
        return found

    def _steps(self) -> Iterator[Step]:
        """Matmuls and collectives, and which of them each waits for."""
        waits_for: dict[int, frozenset[int]] = {}  # by the number of a value
        place = 0
        for node in self._nodes:
            read = (*node.inputs, *node.behind)
            before = frozenset().union(*(waits_for.get(n, frozenset()) for n in read))
            if node.op is not None:
                yield node.op._replace(before=before)
                before, place = frozenset({place}), place + 1
            waits_for |= dict.fromkeys(node.outputs, before)

    def _together(self, block: Block, large: Sequence, pending: list) -> None:
        """A collective and what lies beside it: neither runs before what the other waits for, nor
        after what needs the other; writes come first, then matmuls. What only weight gradients
        need is free."""
        first, beside = large[block[0]], block[1:]
        nodes = [large[place] for place in places_in(beside)]
        direct = [large[place] for place in beside if isinstance(place, int)]
        writes = [node for node in direct if isinstance(node, _Write)]
        tied = [node for node in nodes if not (node.later or isinstance(node, _Write))]
        begins = tied and self._is_ready(tied[0])
        if begins:
            arrays = [node.inputs[0] for node in writes]
            self._barrier({*first.inputs, *tied[0].inputs, *arrays} - self._weights)
        made = self._computed(first)
        self._compute_all(writes)
        if writes and begins:
            written = [number for node in writes for number in node.outputs]
            self._barrier({*tied[0].inputs, *written} - self._weights)
        for each in beside:
            self._compute_ready(pending)
            if isinstance(each, tuple):
                self._together(each, large, pending)
            elif large[each] not in writes:
                self._compute_all([large[each]])
        self._set(first.outputs, made)
        if tied:
            self._barrier({*first.outputs, *(n for node in tied for n in node.outputs)})

    def _compute_ready(self, pending: list) -> None:
        """Of what is neither a matmul nor a collective, all that can be computed."""
        while ready := [node for node in pending if self._is_ready(node)]:
            for node in ready:
                pending.remove(node)
                self._compute_all([node])

    def _compute_all(self, nodes: Sequence[_Node | _Write]) -> None:
        for node in nodes:
            self._set(node.outputs, self._computed(node))

    def _computed(self, node: _Node | _Write) -> list:
        self._hold_back(node)
        return node.compute(self.read(node.inputs))

    def _hold_back(self, node: _Node | _Write) -> None:
        if node.behind:
            self._barrier({node.inputs[0], *node.behind})

    def _barrier(self, numbers: set[int]) -> None:
        self._set(sorted(numbers), lax.optimization_barrier(self.read(sorted(numbers))))

    def _set(self, numbers: Sequence[int], values: Sequence) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._values[number] = value

    def _is_ready(self, node: _Node | _Write) -> bool:
        return all(self._values[number] is not None for number in (*node.inputs, *node.behind))


@dataclass(frozen=True, eq=False)
class _Write:
    """A value to be written to a part of an array, behind what is made of the array as it was."""

    index: tuple
    inputs: list[int]  # array, value
    outputs: list[int]
    behind: tuple[int, ...]
    size: int  # of the value, bytes
    later: bool

    @property
    def op(self) -> Step:
        return Step(2 * self.size / _MEMORY, False, self.later, "F", writes=True)

    def compute(self, values: Sequence) -> list:
        array, value = values
        return [write(array, value, *self.index)]


@dataclass(frozen=True, eq=False)
class _Node:
    """An equation, with its inputs and outputs by their numbers."""

    jaxpr: Any
    eqn: Any
    inputs: list[int]
    outputs: list[int]
    side: str
    later: bool
    behind = ()

    @cached_property
    def op(self) -> Step | None:
        """What there is to be ordered; None: it is computed in passing."""
        communicates, flops = _communicates(self.eqn), _flops(self.eqn)
        if not communicates and not flops:
            return None
        moved = _bytes(self.eqn.invars), _bytes(self.eqn.outvars)
        if communicates:
            rate, network = _link(self.eqn)
            seconds = _sent(self.eqn, max(moved)) / rate
            step = Step(seconds, True, self.later, self.side, network=network)
            return step if seconds > _SHORT else None
        rate = _FLOPS * (2 if self.eqn.invars[0].aval.dtype.itemsize == 1 else 1)  # of float8
        seconds = max(flops / rate, sum(moved) / _MEMORY)
        return Step(seconds, False, self.later, self.side)

    def compute(self, values: Sequence) -> list:
        given = iter(values)
        atoms = [v.val if isinstance(v, Literal) else next(given) for v in self.eqn.invars]
        return bind(self.jaxpr, self.eqn, atoms)


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
    first = next((eqn for eqn in eqns if _flops(eqn)), None)
    if first is None:
        return None
    late = set(after)
    for eqn in eqns:
        if late.intersection(variables_of(eqn.invars)):
            late.update(eqn.outvars)
    needed = (eqns[place] for place in needed_of(eqns, variables_of(first.invars)))
    gathers = [eqn for eqn in needed if _communicates(eqn) and late.isdisjoint(eqn.outvars)]
    if not gathers:
        return None
    ahead = needed_of(eqns, [var for eqn in gathers for var in eqn.outvars])
    return strand.divided(ahead)


def _communicates(eqn) -> bool:
    return eqn.primitive.name in COLLECTIVES


def _link(eqn) -> tuple[float, bool]:
    """Bytes a second of a collective, and whether it leaves the node. Devices along `tensor` are
    neighbours in a node."""
    axes = axes_of(eqn)
    if eqn.primitive.name != "all_to_all":
        leaves = set(axes) != {"tensor"}
        return (_NETWORK / lax.axis_size("tensor") if leaves else _LINK), leaves
    size = lax.axis_size(axes)
    inside = min(size, max(1, _NODE // (1 if "tensor" in axes else lax.axis_size("tensor"))))
    if inside == size:
        return _LINK, False
    # What leaves the node each device sends over a card of its own.
    return _NETWORK / _NODE * (size - 1) / (size - inside), True


def _sent(eqn, moved: int) -> float:
    """Bytes that a device sends in a collective of an array of so many."""
    if eqn.primitive.name == "ppermute":
        return moved
    times = 2 if eqn.primitive.name in ("psum", "pmax") else 1
    return times * moved * (1 - 1 / lax.axis_size(axes_of(eqn)))


def _bytes(atoms) -> int:
    return sum(
        math.prod(a.aval.shape) * a.aval.dtype.itemsize for a in atoms if hasattr(a.aval, "shape")
    )


def _flops(eqn) -> float:
    """Of the matmuls in an equation, those of its loops and branches included; none of a loop that
    communicates, beside which another collective cannot run: of full experts' further rounds, which
    hardly ever come."""
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
        body = params["body_jaxpr"]
        return 0.0 if _has_collective(body) else _flops_of(body)
    return params.get("length", 1) * sum(map(_flops_of, _inside(eqn)))


def _inside(eqn) -> list:
    """The functions in an equation."""
    return [value for value in eqn.params.values() if hasattr(value, "jaxpr")]


def _has_collective(closed) -> bool:
    eqns = closed.jaxpr.eqns
    return any(_communicates(eqn) or any(map(_has_collective, _inside(eqn))) for eqn in eqns)


def _flops_of(closed) -> float:
    return sum(map(_flops, closed.jaxpr.eqns))


def is_nested(eqn) -> bool:
    """Whether an equation has a function of its own: a loop, a conditional."""
    return any("jaxpr" in name or name == "branches" for name in eqn.params)
