"""Place the weight gradients of the layer whose B is the last of a tick beside what the tick sends.

Some stay with B, to lie beside what it scatters last; the others wait, in three parts, for what the
tick sends. Each is placed where the least is left exposed, by the costs of the target; the largest
may be split into two shares, some rows in one part and the rest in another. A share's rows are
columns of an operand of the matmul, which XLA copies; that is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mtx.pipeline.costs import collective_s, communicates, is_nested, matmuls_s, moved_s, size_of
from mtx.pipeline.nodes import is_view
from mtx.strand import COLLECTIVES, Strand, bind, divide, is_matmul, needed_of
from mtx.vjp import Cut, LayerVJP

Tree = Any

_PARTS = 0.36, 0.28, 0.36  # the parts' sizes by default
_OWN = len(_PARTS)  # the number of the part that stays with B
_UNITS = 8  # of rows; the first share of a gradient has two, four or six
_MOST = 6  # the largest gradients, which are placed one by one
_ENOUGH = 2e-6  # seconds that another choice has to gain


class Sends(NamedTuple):
    """What a tick sends beside each of the three parts, in seconds."""

    with_head: tuple[float, float, float]  # without x
    without: tuple[float, float, float]
    heads: float  # the share of ticks that have a head
    x: float  # to the next stage, beside the second part
    head: float  # the head's matmuls, which may lie beside x instead


class Share(NamedTuple):
    """A gradient, or some rows of it."""

    leaf: int  # its place among the gradients
    row: int = 0  # the first
    part: int = 0


class _Item(NamedTuple):
    """A gradient that may wait."""

    leaf: int
    seconds: float
    size: int  # bytes
    matmuls: tuple  # the variables that its matmuls give; () if one is in a loop


class _Choice(NamedTuple):
    """The part in which each item lies; the largest may lie in two, a share in each."""

    parts: tuple[int, ...]
    units: int = 0  # units of the first item's rows that lie in `other`
    other: int = 0
    x_beside_head: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Division:
    """B and W, and where each of W's gradients lies."""

    cut: Cut  # its gradients are shares, in a list
    shares: tuple[Share, ...]
    gradients: Any  # the structure of the gradients
    x_beside_head: bool  # whether the head's matmuls lie beside the send of x

    @classmethod
    def of(cls, vjp: LayerVJP, sends: Sends) -> Division:
        flat, (gradients, others) = vjp.strands[1], vjp.structures
        items = _items(flat, gradients.num_leaves)
        found = _by_sizes(items)
        if items:
            scatter_s = _last_scatter_s(flat, gradients.num_leaves)
            found = _best(items, found, sends, scatter_s, _copied_s(flat, items[0]))
        shares = [Share(leaf) for leaf in range(gradients.num_leaves)]
        keep = set()
        for item, part in zip(items, found.parts, strict=True):
            shares[item.leaf] = Share(item.leaf, part=part)
            keep.update(item.matmuls if part == _OWN else ())
        if found.units:
            leaf, (product,) = items[0].leaf, items[0].matmuls
            flat, made, row = _in_rows(flat, product, found.units)
            shares[leaf : leaf + 1] = Share(leaf, 0, found.other), shares[leaf]._replace(row=row)
            keep.update(made[:1] if found.other == _OWN else ())
        places = [n for n, eqn in enumerate(flat.eqns) if not keep.isdisjoint(eqn.outvars)]
        structure = jax.tree.structure([0] * len(shares))
        cut = Cut.of(flat, structure, others, stay=COLLECTIVES, keep=places)
        return cls(
            cut=cut, shares=tuple(shares), gradients=gradients, x_beside_head=found.x_beside_head
        )

    def of_b(self, values: Sequence) -> tuple[Tree, Tree, tuple]:
        """What B gives: (gradients of the parameters, or their first rows, None for those that W
        makes; the other gradients; what waits for W)"""
        made, others, waits = self.cut.of_b(values)
        leaves = [None] * self.gradients.num_leaves
        for share, value in zip(self.shares, made, strict=True):
            if value is not None:
                leaves[share.leaf] = value
        return self.gradients.unflatten(leaves), others, waits

    def part(self, part: int) -> tuple[list[Share], Strand]:
        """(the shares in a part, the function that makes them from what waits)"""
        made = zip(self.shares, self.cut.made_by_w, strict=True)
        waiting = [share for share, is_late in made if is_late]
        mine = [share.part == part for share in waiting]
        return [share for share in waiting if share.part == part], self.cut.w.choose(mine)


def seconds_of(eqns: Iterable) -> float:
    """Seconds of the collectives among equations."""
    return sum(collective_s(eqn)[0] for eqn in eqns if communicates(eqn))


def _items(flat: Strand, weights: int) -> list[_Item]:
    """The gradients that may wait, the largest first. The time of a loop that makes several is
    divided among them."""
    _, of_w = divide(flat, weights, COLLECTIVES)
    made = {var for eqn in of_w for var in eqn.outvars}
    gradients = {
        leaf: var for leaf, var in enumerate(flat.outvars[:weights])
        if not isinstance(var, Literal) and var in made
    }  # fmt: skip
    needed = {leaf: needed_of(of_w, [var]) for leaf, var in gradients.items()}
    bytes_of = [
        sum(size_of(gradients[leaf]) for leaf in needed if n in needed[leaf])
        for n in range(len(of_w))
    ]
    items = []
    for leaf, var in gradients.items():
        eqns = [of_w[n] for n in sorted(needed[leaf])]
        seconds = sum(matmuls_s([of_w[n]]) * size_of(var) / bytes_of[n] for n in needed[leaf])
        in_loops = any(is_nested(eqn) and not is_matmul(eqn) for eqn in eqns)
        matmuls = [] if in_loops else [eqn for eqn in eqns if is_matmul(eqn)]
        made_by = tuple(eqn.outvars[0] for eqn in matmuls)
        items.append(_Item(leaf, seconds, size_of(var), made_by))
    return sorted(items, key=lambda item: -item.size)


def _source(variable, makers: Mapping):
    """The variable that a chain of views begins with."""
    while (maker := makers.get(variable)) and is_view(maker):
        variable = maker.invars[0]
    return variable


def _last_scatter_s(flat: Strand, weights: int) -> float:
    """Seconds of a layer's last scatter in its backward pass; 0 if that leaves the node, or there
    is none."""
    needed = sorted(needed_of(flat.eqns, flat.outvars[weights:]))
    sent = [eqn for eqn in (flat.eqns[n] for n in needed) if communicates(eqn)]
    seconds, network = collective_s(sent[-1]) if sent else (0.0, True)
    return 0.0 if network else seconds


def _by_sizes(items: Sequence[_Item]) -> _Choice:
    """The smallest stays with B; the others, largest first, go to the part that lacks most."""
    plain = [item for item in items if item.matmuls]
    own = min(plain, key=lambda item: item.size) if len(plain) > 1 else None
    sizes = [0 if item is own else item.size for item in items]
    wanted, parts = sum(sizes) * np.array(_PARTS), [_OWN] * len(items)
    missing = wanted.copy()
    for place, size in enumerate(sizes):
        if items[place] is not own:
            parts[place] = int(np.lexsort((-wanted, -missing / wanted))[0])
            missing[parts[place]] -= size
    return _Choice(tuple(parts))


def _best(
    items: Sequence[_Item], first: _Choice, sends: Sends, scatter_s: float,
    copied_s: float | None,
) -> _Choice:  # fmt: skip
    """The choice that leaves the least exposed. Items beyond the `_MOST` largest stay as in
    `first`. copied_s: the cost of having the largest in two shares; None if that cannot be."""
    count, seconds = min(len(items), _MOST), np.array([item.seconds for item in items])
    best, best_s = first, np.inf
    for beside in (False, True):
        parts = np.array([first.parts])
        (exposed_s,) = _exposed_s(parts, seconds, sends, scatter_s, x_beside_head=beside)
        if exposed_s < best_s:
            best, best_s = first._replace(x_beside_head=beside), exposed_s - _ENOUGH
    for units in (0, 2, 4, 6) if copied_s is not None else (0,):
        places = count + (units > 0)
        tried = np.indices((_OWN + 1,) * places).reshape(places, -1).T
        for place, item in enumerate(items[:count]):
            if not item.matmuls or (units and not place):  # B's rows come first
                tried = tried[tried[:, place] != _OWN]
        rest = np.broadcast_to(first.parts[count:], (len(tried), len(items) - count))
        parts = np.concatenate([tried[:, :count], rest, tried[:, count:]], axis=1)
        other_s = seconds[0] * units / _UNITS
        each_s = np.array([seconds[0] - other_s, *seconds[1:], *([other_s] if units else ())])
        for beside in (False, True):
            exposed_s = _exposed_s(parts, each_s, sends, scatter_s, x_beside_head=beside)
            exposed_s += copied_s if units else 0.0
            least = int(exposed_s.argmin())
            if exposed_s[least] < best_s:
                chosen, best_s = parts[least].tolist(), exposed_s[least]
                other = chosen.pop() if units else 0
                best = _Choice(tuple(chosen), units, other, beside)
    return best


def _exposed_s(
    parts: np.ndarray, seconds: np.ndarray, sends: Sends, scatter_s: float, *, x_beside_head: bool
) -> np.ndarray:
    """Exposed seconds in a mean tick, for each of the divisions [n, items]."""
    *beside, own_s = (np.where(parts == part, seconds, 0.0).sum(1) for part in range(_OWN + 1))

    def left(wanted: Sequence[float]) -> np.ndarray:
        return np.maximum(0.0, np.array(wanted)[:, None] - np.stack(beside)).sum(0)

    sum_y, gather_y, sum_dy = sends.with_head
    beside_w_s, x_s = (0.0, sends.x - sends.head) if x_beside_head else (sends.x, 0.0)
    with_head = left((sum_y, max(gather_y, beside_w_s), sum_dy)) + max(0.0, x_s)
    exposed_s = sends.heads * with_head + (1 - sends.heads) * left(sends.without)
    return exposed_s + np.maximum(0.0, scatter_s - own_s)


def _copied_s(flat: Strand, item: _Item) -> float | None:
    """Seconds to copy the operand of the matmul that makes a gradient. None if the gradient is not
    a product alone, or others read it; also if a pass makes the operand, because XLA would not copy
    it, but make it in a pass of its own."""
    if len(item.matmuls) != 1 or flat.outvars[item.leaf] is not item.matmuls[0]:
        return None
    makers = {var: eqn for eqn in flat.eqns for var in eqn.outvars}
    eqn = makers[item.matmuls[0]]
    if eqn.primitive.name != "dot_general":  # of float8 with its scale
        return None
    (product,), (left, right) = eqn.outvars, eqn.invars
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    is_read = any(product in other.invars for other in flat.eqns)
    is_twice = sum(var is product for var in flat.outvars) > 1 or left is right
    has_rows = not batch and len(contract) < left.aval.ndim
    if is_read or is_twice or not has_rows or product.aval.shape[0] % _UNITS:
        return None
    maker = makers.get(_source(left, makers))
    is_there = maker is None or communicates(maker) or is_matmul(maker)
    return moved_s(2 * size_of(left)) if is_there else None


def _in_rows(flat: Strand, product, units: int) -> tuple[Strand, list, int]:
    """(a backward pass that gives a gradient in two shares, their variables, the first row of the
    second). units: of rows, for the first share."""
    place = next(n for n, eqn in enumerate(flat.eqns) if product in eqn.outvars)
    eqn = flat.eqns[place]
    (contract, _), _ = eqn.params["dimension_numbers"]
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    rows = product.aval.shape[0]
    dim = next(dim for dim in range(given[0].ndim) if dim not in contract)
    row = rows // _UNITS * units

    def made(left, right) -> list:
        each = [lax.slice_in_dim(left, start, stop, axis=dim) for start, stop in bounds]
        return [bind(flat.jaxpr, eqn, (some, right)) for some in each]

    bounds = (0, row), (row, rows)
    strand, leaf = Strand.of(made, *given), flat.outvars.index(product)
    same = dict(zip(strand.invars, eqn.invars, strict=True))
    added = [one.replace(invars=[same.get(v, v) for v in one.invars]) for one in strand.eqns]
    eqns = [*flat.eqns[:place], *added, *flat.eqns[place + 1 :]]
    outvars = [*flat.outvars[:leaf], *strand.outvars, *flat.outvars[leaf + 1 :]]
    return flat.part(eqns, flat.invars, outvars), strand.outvars, row
