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
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Literal

from mtx.vjp import COLLECTIVES, Strand, axes_of, bind, divide, needed_of, variables_of

# A second: FLOPs of bfloat16 matmuls, bytes of memory, bytes over NVLink, and over the network
# where all devices of a node send at once, those of `tensor` each for a ring of its own.
_FLOPS, _MEMORY, _LINK, _NETWORK = 740e12, 2.8e12, 340e9, 300e9
_NODE = 8  # devices
_SHORT = 10e-6  # collectives that take less are not worth a matmul
_TRIALS = 240


class Braid:
    """Equations of F and of B, to be computed in an order of our own."""

    def __init__(self):
        self._values: list[Any] = []  # by number; None: still to be computed
        self._nodes: list[_Node] = []
        self._weights: set[int] = set()

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
        return [
            self.given([atom.val])[0] if isinstance(atom, Literal) else known[atom]
            for atom in strand.outvars
        ]

    def read(self, numbers: Sequence[int]) -> list:
        """Values, computed or given."""
        return [self._values[number] for number in numbers]

    def run(self) -> Order:
        """Computes all; the order in which that was done."""
        large, pending = [], []
        for node in self._nodes:
            (pending if node.op is None else large).append(node)
        found = order(tuple(self._steps()))
        for block in found.blocks:
            self._compute_ready(pending)
            self._together(block, large, pending)
        self._compute_ready(pending)
        self._nodes = []
        return found

    def _steps(self) -> Iterator[Step]:
        """Matmuls and collectives, and which of them each waits for."""
        waits_for: dict[int, frozenset[int]] = {}  # by the number of a value
        place = 0
        for node in self._nodes:
            before = frozenset().union(*(waits_for.get(n, frozenset()) for n in node.inputs))
            if node.op is not None:
                yield node.op._replace(before=before)
                before, place = frozenset({place}), place + 1
            waits_for |= dict.fromkeys(node.outputs, before)

    def _together(self, block: Block, large: Sequence[_Node], pending: list[_Node]) -> None:
        """A collective and what lies beside it: neither runs before what the other waits for, nor
        after what needs the other. What only weight gradients need is free."""
        first, beside = large[block[0]], block[1:]
        tied = [large[place] for place in places_in(beside) if not large[place].later]
        if tied and self._is_ready(tied[0]):
            self._barrier({*first.inputs, *tied[0].inputs} - self._weights)
        made = first.compute(self.read(first.inputs))
        for each in beside:
            self._compute_ready(pending)
            if isinstance(each, tuple):
                self._together(each, large, pending)
            else:
                node = large[each]
                self._set(node.outputs, node.compute(self.read(node.inputs)))
        self._set(first.outputs, made)
        if tied:
            self._barrier({*first.outputs, *(n for node in tied for n in node.outputs)})

    def _compute_ready(self, pending: list[_Node]) -> None:
        """Of what is neither a matmul nor a collective, all that can be computed."""
        while ready := [node for node in pending if self._is_ready(node)]:
            for node in ready:
                pending.remove(node)
                self._set(node.outputs, node.compute(self.read(node.inputs)))

    def _barrier(self, numbers: set[int]) -> None:
        self._set(sorted(numbers), lax.optimization_barrier(self.read(sorted(numbers))))

    def _set(self, numbers: Sequence[int], values: Sequence) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._values[number] = value

    def _is_ready(self, node: _Node) -> bool:
        return all(self._values[number] is not None for number in node.inputs)


@dataclass(frozen=True, eq=False)
class _Node:
    """An equation, with its inputs and outputs by their numbers."""

    jaxpr: Any
    eqn: Any
    inputs: list[int]
    outputs: list[int]
    side: str
    later: bool

    @cached_property
    def op(self) -> Step | None:
        """What there is to be ordered; None: it is computed in passing."""
        communicates, flops = _communicates(self.eqn), _flops(self.eqn)
        if not communicates and not flops:
            return None
        moved = _bytes(self.eqn.invars), _bytes(self.eqn.outvars)
        if communicates:
            twice = 2 if self.eqn.primitive.name in ("psum", "pmax") else 1
            rate = _link(self.eqn)
            seconds = twice * max(moved) / rate
            step = Step(seconds, True, self.later, self.side, network=rate < _LINK)
            return step if seconds > _SHORT else None
        rate = _FLOPS * (2 if self.eqn.invars[0].aval.dtype.itemsize == 1 else 1)  # of float8
        seconds = max(flops / rate, sum(moved) / _MEMORY)
        return Step(seconds, False, self.later, self.side)

    def compute(self, values: Sequence) -> list:
        given = iter(values)
        atoms = [v.val if isinstance(v, Literal) else next(given) for v in self.eqn.invars]
        return bind(self.jaxpr, self.eqn, atoms)


# -- in which order --------------------------------------------------------------------------------


class Step(NamedTuple):
    """A collective, or an equation with matmuls in it."""

    seconds: float
    communicates: bool
    later: bool  # only weight gradients need it
    side: str  # F or B
    before: frozenset[int] = frozenset()  # the places of those that it waits for
    network: bool = False  # a collective that leaves the node


# A collective's place, and of what lies beside it: of matmuls and, where it leaves the node, blocks
# of collectives that do not; or the place of a matmul by itself.
Block = tuple[Any, ...]


class Order(NamedTuple):
    """Blocks in turn."""

    blocks: tuple[Block, ...]
    exposed_s: float  # of collectives, what no matmul lies beside
    collective_s: float


@lru_cache(maxsize=512)
def order(steps: tuple[Step, ...]) -> Order:
    """The order that leaves least exposed, of many tried: each prefers what most waits for, times a
    random factor. The same steps always get the same one."""
    rng, ranks, both = random.Random(0), _ranks(steps), len({step.side for step in steps}) > 1
    best = _tried(steps, ranks)
    for _ in range(_TRIALS if both else _TRIALS // 8):
        if best.exposed_s <= 0.0:
            break
        keys = [rank * rng.uniform(0.3, 1.7) for rank in ranks]
        best = min(best, _tried(steps, keys), key=lambda found: found.exposed_s)
    return best


def _ranks(steps: Sequence[Step]) -> list[float]:
    """The longest way from each step to the end, in seconds."""
    ranks = [step.seconds for step in steps]
    for place in reversed(range(len(steps))):
        for before in steps[place].before:
            ranks[before] = max(ranks[before], steps[before].seconds + ranks[place])
    return ranks


def places_in(block: Block) -> Iterator[int]:
    for each in block:
        yield from places_in(each) if isinstance(each, tuple) else (each,)


def _tried(steps: Sequence[Step], keys: Sequence[float]) -> Order:
    """One order: of what can be done, the larger key comes first, weight gradients last."""
    return _Trial(steps, keys).order()


class _Trial:
    def __init__(self, steps: Sequence[Step], keys: Sequence[float]):
        places = sorted(range(len(steps)), key=lambda n: (steps[n].later, -keys[n]))
        self.steps, self.left, self.done = steps, dict.fromkeys(places), set()
        self.exposed_s = 0.0

    def order(self) -> Order:
        blocks: list[Block] = []
        while self.left:
            link, work = self.next_of(True), self.next_of(False)
            if work is not None and (
                link is None or (self.steps[link].later and self.steps[work].later)
            ):
                self.take(work)
                blocks.append((work,))
                continue
            assert link is not None  # no step waits for itself
            blocks.append(self.block(link)[0])
        collective_s = sum(step.seconds for step in self.steps if step.communicates)
        return Order(tuple(blocks), self.exposed_s, collective_s)

    def next_of(self, communicates: bool, *, later=True, network=True) -> int | None:
        """The first that can be done."""
        for place in self.left:
            step = self.steps[place]
            if (
                step.communicates == communicates and step.before <= self.done
                and later >= step.later and network >= step.network
            ):  # fmt: skip
                return place
        return None

    def take(self, place: int) -> float:
        del self.left[place]
        self.done.add(place)
        return self.steps[place].seconds

    def block(self, link: int) -> tuple[Block, float]:
        """A collective with what lies beside it, and the seconds of it all."""
        step, beside_s = self.steps[link], 0.0
        block: list[Any] = [link]
        del self.left[link]
        while beside_s < step.seconds:
            work = self.next_of(False, later=False)
            inner = self.next_of(True, later=False, network=False) if step.network else None
            if inner is not None and (work is None or self._is_before(inner, work)):
                nested, seconds = self.block(inner)
                block.append(nested)
                beside_s += seconds
            elif work is not None:
                beside_s += self.take(work)
                block.append(work)
            else:
                break
        self.done.add(link)
        self.exposed_s += max(0.0, step.seconds - beside_s)
        return tuple(block), max(step.seconds, beside_s)

    def _is_before(self, one: int, other: int) -> bool:
        return next(place for place in self.left if place in (one, other)) == one


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


def _link(eqn) -> float:
    """Bytes a second of a collective. Devices along `tensor` are neighbours in a node."""
    axes = axes_of(eqn)
    if eqn.primitive.name != "all_to_all":
        return _LINK if set(axes) == {"tensor"} else _NETWORK / lax.axis_size("tensor")
    size = lax.axis_size(axes)
    inside = min(size, max(1, _NODE // (1 if "tensor" in axes else lax.axis_size("tensor"))))
    # What leaves the node each device sends over a card of its own.
    return _LINK if inside == size else _NETWORK / _NODE * size / (size - inside)


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
