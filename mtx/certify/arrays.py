"""Rules for operations that move, pick, add up or multiply dims of arrays: where a shard's dims go.

A sum over the dims of which a value is a shard leaves it partial. An index that differs between
devices picks a shard, except along the axes whose devices run other layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mtx.certify.elementwise import own_counts, product_of
from mtx.certify.kinds import (
    DIFFERENT,
    MIXED,
    PARTIAL,
    SAME,
    ZERO,
    Kind,
    Part,
    Value,
    different,
    either,
    together,
)
from mtx.certify.walk import Rule, Walk
from mtx.sharding.fp8 import SCALED_DOT

Values = list[Value]
Places = dict[int, tuple[int, ...]]  # dim of an operand -> its dims in the result


def _moved(value: Value, places: Places) -> Value:
    return value._replace(kinds=tuple(kind.moved(places) for kind in value.kinds))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


# -- dims ------------------------------------------------------------------------------------------


def broadcast_in_dim(walk: Walk, eqn: Any, inputs: Values) -> Values:
    to = eqn.params["broadcast_dimensions"]
    return [_moved(inputs[0], {dim: (new,) for dim, new in enumerate(to)})]


def reshape(walk: Walk, eqn: Any, inputs: Values) -> Values:
    shapes = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    return [inputs[0]._replace(kinds=tuple(_as_shape(kind, *shapes) for kind in inputs[0].kinds))]


def _as_shape(kind: Kind, before: Sequence[int], after: Sequence[int]) -> Kind:
    """The kind after a reshape: its dims are those whose strides overlap what was sharded."""
    if not kind.dims:
        return kind
    places, groups = reshaped(before, after), _groups(before, after)
    dims, within = set(), set()
    for dim in kind.dims:
        dims |= {new for new in places.get(dim, ()) if after[new] == 1}
        old, new = next((group for group in groups if dim in group[0]), ((), ()))
        for low, high in _strides(kind, before, old, dim):
            for to in new:
                first = math.prod(after[d] for d in new if d > to)
                last = first * after[to]
                if first < high and low < last:
                    dims.add(to)
                if first < high and low < last and (first < low or high < last):
                    within.add((to, max(low // first, 1), -(-min(high, last) // first)))
    return different(dims, within)


def _strides(kind: Kind, shape: Sequence[int], group: Sequence[int], dim: int):
    """The strides, (from, up to), that are sharded in `dim`, which is reshaped with `group`."""
    unit = math.prod(shape[d] for d in group if d > dim)
    parts = [(low, high) for of, low, high in kind.within if of == dim] or [(1, shape[dim])]
    return [(unit * low, unit * high) for low, high in parts]


def reshaped(before: Sequence[int], after: Sequence[int]) -> Places:
    """Where a reshape puts dims. Those of size 1 go to dims of size 1 between the same others,
    matched from the last to the first; a new one between others is a part of the first of those, or
    if there are none of the dim after it, as when heads are grouped."""
    groups = _groups(before, after)
    places: Places = {dim: tuple(new) for old, new in groups for dim in old}
    between = zip(_between(before, groups, 0), _between(after, groups, 1))
    for n, (one, two) in enumerate(between):
        places |= {dim: (new,) for dim, new in zip(reversed(one), reversed(two))}
        new = tuple(two[: max(0, len(two) - len(one))])
        if new and 0 < n < len(groups):
            places |= {dim: (*new, *places[dim]) for dim in one[:1] or groups[n - 1][0]}
    return places


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """(old dims, new dims) of more than one element that become each other, the last ones first."""
    left, right = ([d for d, size in enumerate(s) if size > 1] for s in (before, after))
    groups = []
    while left and right:
        old, new = [left.pop()], [right.pop()]
        one, two = before[old[0]], after[new[0]]
        while one != two:
            if one < two:
                old.append(left.pop())
                one *= before[old[-1]]
            else:
                new.append(right.pop())
                two *= after[new[-1]]
        groups.append((sorted(old), sorted(new)))
    return groups


def _between(shape: Sequence[int], groups: list, side: int) -> list[list[int]]:
    """The dims of size 1 after the last group, between it and the one before it, and so on."""
    edges = [(max(group[side]), min(group[side])) for group in groups]
    stops = [len(shape), *(first for _, first in edges)]
    starts = [*(last + 1 for last, _ in edges), 0]
    return [[d for d in range(a, b) if shape[d] == 1] for a, b in zip(starts, stops)]


def transpose(walk: Walk, eqn: Any, inputs: Values) -> Values:
    order = eqn.params["permutation"]
    return [_moved(inputs[0], {dim: (new,) for new, dim in enumerate(order)})]


def squeeze(walk: Walk, eqn: Any, inputs: Values) -> Values:
    gone, dims = eqn.params["dimensions"], range(len(_shape(eqn.invars[0])))
    left = [dim for dim in dims if dim not in gone]
    return [_moved(inputs[0], {dim: (new,) for new, dim in enumerate(left)})]


def same_dims(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return [inputs[0]]


def slice_(walk: Walk, eqn: Any, inputs: Values) -> Values:
    (value,) = inputs
    if value.parts:
        starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
        for start, stop, size in zip(starts, stops, _shape(eqn.invars[0])):
            for part in value.parts:
                if (part.start, part.stop) == (start, stop) and stop - start < size:
                    return [_taken(walk, value, part)]
    return [value]


def _taken(walk: Walk, value: Value, part: Part) -> Value:
    walk.mixed += 1
    kinds = zip(value.kinds, part.kinds, strict=True)
    return Value(tuple(
        (DIFFERENT if own.dims else own) if kind.name == "mixed" else kind for kind, own in kinds
    ))  # fmt: skip


def pad(walk: Walk, eqn: Any, inputs: Values) -> Values:
    value, filled = inputs
    kinds = tuple(
        SAME if kind.name == "zero" and other.name != "zero" else kind
        for kind, other in zip(value.kinds, filled.kinds)
    )
    return [Value(kinds, divisor=value.divisor, parts=value.parts)]


def concatenate(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Arrays of different kinds along an axis make a mixed buffer, from which they are taken by
    their place."""
    dim, kinds, parts, at = eqn.params["dimension"], [], [], 0
    for each in zip(*(value.kinds for value in inputs)):
        names = {kind.name for kind in each if kind.name != "zero"}
        kind = each[0]
        for other in each[1:]:
            kind = either(kind, other)
        kinds.append(MIXED if len(names) > 1 else kind)
    if MIXED in kinds:
        for value, atom in zip(inputs, eqn.invars):
            stop = at + _shape(atom)[dim]
            parts.append(Part(at, stop, value.kinds))
            at = stop
    inner = [part for value in inputs for part in value.parts]
    return [Value(tuple(kinds), parts=tuple(parts or inner))]


def stack(walk: Walk, eqn: Any, inputs: Values) -> Values:
    dim, rank = eqn.params["axis"], len(_shape(eqn.invars[0]))
    places = {d: (d + (d >= dim),) for d in range(rank)}
    kinds = [_moved(value, places).kinds for value in inputs]
    found = kinds[0]
    for other in kinds[1:]:
        found = tuple(map(either, found, other))
    return [Value(found)]


def unstack(walk: Walk, eqn: Any, inputs: Values) -> Values:
    dim, rank = eqn.params["axis"], len(_shape(eqn.invars[0]))
    places = {d: (d - (d > dim),) for d in range(rank) if d != dim}
    return [_moved(inputs[0], places)] * len(eqn.outvars)


def split(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return [inputs[0]] * len(eqn.outvars)


def iota(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return [walk.value()]


# -- sums ------------------------------------------------------------------------------------------


def _reduced(kind: Kind, dims: Sequence[int], *, adds: bool) -> Kind:
    """The kind of a value after its dims `dims` are reduced."""
    if not kind.dims:
        return kind
    left = kind.dims - set(dims)
    if not left:
        return PARTIAL if adds else DIFFERENT
    return kind.moved({d: (d - sum(gone < d for gone in dims),) for d in left})


def reduce_sum(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """A sum of unsigned integers, which are bits, is a checksum, not a part of another sum. Dims of
    one element do not add up to anything either: autodiff removes broadcast dims that way."""
    (value,), dims = inputs, eqn.params["axes"]
    adds = not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.unsignedinteger)
    adds = adds and any(_shape(eqn.invars[0])[dim] > 1 for dim in dims)
    kinds = tuple(_reduced(kind, dims, adds=adds) for kind in value.kinds)
    return [Value(kinds, divisor=value.divisor)]


def reduce_other(walk: Walk, eqn: Any, inputs: Values) -> Values:
    (value,), dims = own_counts(eqn, inputs), eqn.params["axes"]
    _refuse_partial(walk, eqn, value)
    kinds = tuple(_reduced(kind, dims, adds=False) for kind in value.kinds)
    return [Value(kinds)] * len(eqn.outvars)


def _refuse_partial(walk: Walk, eqn: Any, *values: Value) -> None:
    for value in values:
        for axis, kind in zip(walk.axes, value.kinds):
            if kind.name == "partial":
                walk.report(eqn, axis, f"{eqn.primitive.name} of an unsummed partial value")


def sort(walk: Walk, eqn: Any, inputs: Values) -> Values:
    _refuse_partial(walk, eqn, *inputs)
    kinds = tuple(map(together, zip(*(value.kinds for value in inputs))))
    return [Value(kinds)] * len(eqn.outvars)


def dot_general(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Partial if it sums over sharded dims; as with `reduce_sum`, not over dims of one element."""
    (contract, batch), places = eqn.params["dimension_numbers"], []
    left_free, at = 0, len(batch[0])
    for n, atom in enumerate(eqn.invars):
        free = [d for d in range(len(_shape(atom))) if d not in (*contract[n], *batch[n])]
        here = {dim: (new,) for new, dim in enumerate(batch[n])}
        here |= {dim: (at + left_free + new,) for new, dim in enumerate(free)}
        left_free += len(free)
        places.append(here)
    kinds = []
    for axis, (a, b) in zip(walk.axes, zip(inputs[0].kinds, inputs[1].kinds), strict=True):
        kind = product_of(walk, eqn, axis, a, b)
        if kind is None:
            kind = together((a.moved(places[0]), b.moved(places[1])))
            gone = [_shape(atom)[d] for atom, k in zip(eqn.invars, (a, b)) for d in k.dims]
            if not kind.dims and any(size > 1 for size in gone):
                kind = PARTIAL
        kinds.append(kind)
    return [Value(tuple(kinds))]


def scaled_dot(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """A product of float8 tensors and of their units (`mtx.sharding.fp8`). Units are each device's
    own if the tensors are; they are then in every term of a sum over devices."""
    (dot,) = (e for e in eqn.params["jaxpr"].jaxpr.eqns if e.primitive.name == "dot_general")
    (product,) = dot_general(walk, dot, inputs[:2])
    kinds = zip(product.kinds, inputs[2].kinds)
    return [Value(tuple(k if k.name == "partial" else together((k, unit)) for k, unit in kinds))]


# -- parts by index --------------------------------------------------------------------------------


def dynamic_slice(walk: Walk, eqn: Any, inputs: Values) -> Values:
    value, *indices = inputs
    kinds = []
    for n, (axis, kind) in enumerate(zip(walk.axes, value.kinds)):
        chosen = [d for d, index in enumerate(indices) if not index.kinds[n].is_same]
        if chosen and kind.name == "partial":
            walk.report(eqn, axis, "each device takes another part of an unsummed partial value")
            kind = DIFFERENT
        elif chosen and kind.name not in ("zero", "mixed"):
            kind = different({*kind.dims, *(chosen if axis not in walk.stages else ())})
        kinds.append(kind)
    return [value._replace(kinds=tuple(kinds), divisor=1.0)]


def dynamic_update_slice(walk: Walk, eqn: Any, inputs: Values) -> Values:
    value, update, *indices = inputs
    kinds = []
    for n, axis in enumerate(walk.axes):
        whole, part = value.kinds[n], update.kinds[n]
        chosen = {d for d, index in enumerate(indices) if not index.kinds[n].is_same}
        if not chosen:
            kind = either(whole, part)
            kinds.append(kind)
            _check_parts(walk, eqn, axis, whole, part)
        elif whole.name == "zero" and axis not in walk.stages and part.dims and part.dims <= chosen:
            kinds.append(PARTIAL)  # each device its shard at the shard's place, zeros elsewhere
        elif {whole.name, part.name} <= {"partial", "zero"}:
            kinds.append(either(whole, part))  # terms at places that differ
        elif "partial" in (whole.name, part.name):
            kinds.append(DIFFERENT)
        else:
            kind = either(whole, part)
            kinds.append(DIFFERENT if kind.is_same and kind != ZERO else kind)
    return [Value(tuple(kinds), parts=value.parts or update.parts)]


def _check_parts(walk: Walk, eqn: Any, axis: str, whole: Kind, part: Kind) -> None:
    if {whole.name, part.name} == {"partial", "same"}:
        walk.report(eqn, axis, "an unsummed partial value is put beside one that is whole")


def gather(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Each device may put an unsummed partial value in another order, if it takes all of it."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (len(_shape(atom)) for atom in eqn.invars)
    batching = tuple(numbers.operand_batching_dims)
    offsets = numbers.offset_dims
    kept = [d for d in range(operand) if d not in (*numbers.collapsed_slice_dims, *batching)]
    of_rows = [d for d in range(len(_shape(eqn.outvars[0]))) if d not in offsets]
    whole = _shape(eqn.invars[0])
    from_operand: Places = {
        d: (new,) for d, new in zip(kept, offsets, strict=True) if sizes[d] == whole[d]
    }
    from_indices: Places = {d: (new,) for d, new in zip(range(indices - 1), of_rows, strict=True)}
    for d, row in zip(batching, numbers.start_indices_batching_dims):
        from_operand[d] = from_indices[row]
    kinds, all_of_it = [], eqn.invars[0].aval.size <= eqn.outvars[0].aval.size
    for axis, (a, b) in zip(walk.axes, zip(inputs[0].kinds, inputs[1].kinds), strict=True):
        if a.name == "partial" and not b.is_same and not all_of_it:
            walk.report(eqn, axis, "each device takes another part of an unsummed partial value")
            kinds.append(DIFFERENT)
        elif a.name in ("partial", "zero"):
            kinds.append(a)
        else:
            kinds.append(together((a.moved(from_operand), b.moved(from_indices))))
    return [Value(tuple(kinds))]


def scatter(walk: Walk, eqn: Any, inputs: Values) -> Values:
    value, indices, updates = inputs
    numbers, adds = eqn.params["dimension_numbers"], eqn.primitive.name == "scatter-add"
    rank = len(_shape(eqn.invars[0]))
    apart = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(rank) if d not in apart]
    window = tuple(numbers.update_window_dims)
    places: Places = {d: (new,) for d, new in zip(window, kept, strict=True)}
    rows = [d for d in range(len(_shape(eqn.invars[2]))) if d not in window]
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    places |= {rows[row]: (d,) for d, row in batching}
    kinds = []
    for n, axis in enumerate(walk.axes):
        whole, by, part = value.kinds[n], indices.kinds[n], updates.kinds[n]
        moved = part.moved(places)
        indexed = part.dims & (set(rows) - places.keys())
        own_rows = whole.name == "zero" and not by.is_same and indexed
        if part.dims and adds and (own_rows or not moved.dims):
            # Rows of a shard are added up, or put at their own places, with zeros elsewhere.
            moved = PARTIAL
        if not by.is_same and moved.is_same and moved.name != "zero":
            moved = DIFFERENT
        if adds and "partial" in (whole.name, moved.name) and whole.name == "same":
            walk.report(eqn, axis, "an unsummed partial value is added to one that is whole")
        kinds.append(either(whole, moved))
    return [Value(tuple(kinds))]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim, "reshape": reshape, "transpose": transpose,
    "squeeze": squeeze, "slice": slice_, "pad": pad,
    **dict.fromkeys(("rev", "tile", "cumsum"), same_dims),
    "concatenate": concatenate, "stack": stack, "unstack": unstack, "split": split, "iota": iota,
    "empty": iota,
    "reduce_sum": reduce_sum, "dot_general": dot_general, "sort": sort, "top_k": sort,
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"),
        reduce_other,
    ),
    "dynamic_slice": dynamic_slice, "dynamic_update_slice": dynamic_update_slice,
    SCALED_DOT: scaled_dot, "gather": gather, "scatter": scatter, "scatter-add": scatter,
}  # fmt: skip
