"""Rules for collectives: what may be summed, gathered and scattered, and what the result is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mtx.certify.kinds import DIFFERENT, SAME, Kind, Value, different
from mtx.certify.walk import Rule, Walk

Values = list[Value]


def _axes_of(eqn: Any) -> tuple[str, ...]:
    over = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(over) if isinstance(over, tuple | list) else (over,)


def _along(walk: Walk, eqn: Any, value: Value) -> Iterator[tuple[int, str, Kind]]:
    """(place, axis, the value's kind) for each axis of a collective with more than one device."""
    for axis in _axes_of(eqn):
        if axis in walk.sizes:
            walk.check_together(eqn, axis)
            place = walk.axes.index(axis)
            yield place, axis, value.kinds[place]


def _with(value: Value, kinds: dict[int, Kind], *, divisor: float = 1.0) -> Value:
    every = tuple(kinds.get(place, kind) for place, kind in enumerate(value.kinds))
    return Value(every, parts=value.parts, divisor=divisor)


def _check_summed(walk: Walk, eqn: Any, value: Value) -> float:
    """Check a sum. Returns what is left of the divisor if the value is the same along some axes."""
    along, divisor = list(_along(walk, eqn, value)), value.divisor
    same = [axis for _, axis, kind in along if kind.name == "same"]
    count = 1
    for axis in same:
        count *= walk.sizes[axis]
    if count > 1:
        if divisor % count == 0:
            divisor /= count
        else:
            for axis in same:
                walk.report(
                    eqn, axis, f"a sum of what is the same, which makes it {count} times as large"
                )
    for _, axis, kind in along:
        if kind.dims:
            walk.report(eqn, axis, f"a sum, element by element, of what is {kind}")
    return divisor


def _in_groups(walk: Walk, eqn: Any, value: Value, dims: Iterable[int]) -> Value | None:
    """What a collective among groups of an axis's devices makes of a value: a partial one stays
    partial, and one that was the same no longer is. None if all devices take part."""
    if eqn.params.get("axis_index_groups") is None:
        return None
    kinds = {}
    for place, _, kind in _along(walk, eqn, value):
        kept = kind.name in ("partial", "zero", "mixed")
        kinds[place] = kind if kept else different({*kind.dims, *dims})
    return _with(value, kinds)


def psum(walk: Walk, eqn: Any, inputs: Values) -> Values:
    outputs = []
    for value in inputs:
        if (of_group := _in_groups(walk, eqn, value, ())) is not None:
            outputs.append(of_group)
            continue
        divisor = _check_summed(walk, eqn, value)
        kinds = {
            place: kind if kind.name in ("zero", "mixed") else SAME
            for place, _, kind in _along(walk, eqn, value)
        }
        outputs.append(_with(value, kinds, divisor=divisor))
    return outputs


def largest(walk: Walk, eqn: Any, inputs: Values) -> Values:
    outputs = []
    for value in inputs:
        along = list(_along(walk, eqn, value))
        if (of_group := _in_groups(walk, eqn, value, ())) is not None:
            outputs.append(of_group)
            continue
        for _, axis, kind in along:
            if kind.name == "partial":
                walk.report(eqn, axis, f"{eqn.primitive.name} of an unsummed partial value")
        outputs.append(_with(value, {place: SAME for place, _, _ in along}))
    return outputs


def reduce_scatter(walk: Walk, eqn: Any, inputs: Values) -> Values:
    (value,), dim, tiled = inputs, eqn.params["scatter_dimension"], eqn.params["tiled"]
    if (of_group := _in_groups(walk, eqn, value, (dim,) if tiled else ())) is not None:
        return [of_group if tiled else _without(of_group, dim)]
    _check_summed(walk, eqn, value)
    after = different((dim,) if tiled else ())
    value = value if tiled else _without(value, dim)
    return [_with(value, {place: after for place, _, _ in _along(walk, eqn, value)})]


def all_gather(walk: Walk, eqn: Any, inputs: Values) -> Values:
    (value,), dim, tiled = inputs, eqn.params["all_gather_dimension"], eqn.params["tiled"]
    if (of_group := _in_groups(walk, eqn, value, ())) is not None:
        return [of_group if tiled else _with_dim(of_group, dim, frozenset())]
    along = list(_along(walk, eqn, value))
    for _, axis, kind in along:
        if kind.name == "same":
            walk.report(eqn, axis, "a gather of what is the same on all devices")
        elif kind.name == "partial":
            walk.report(eqn, axis, "a gather of unsummed partial values")
        elif tiled and kind.dims and dim not in kind.dims:
            walk.report(eqn, axis, f"a gather into dim {dim} of what is {kind}")
    gathered = {place: kind if kind.name in ("zero", "mixed") else SAME for place, _, kind in along}
    if not tiled:
        value = _with_dim(value, dim, frozenset().union(*(kind.dims for _, _, kind in along)))
    return [_with(value, gathered)]


def all_to_all(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Scatters one dim and gathers another. If both are one dim, its places are devices: what each
    has for each one becomes what all have for this one, and no dim is gathered into another."""
    (value,), kinds = inputs, {}
    scattered, gathered = eqn.params["split_axis"], eqn.params["concat_axis"]
    for place, axis, kind in _along(walk, eqn, value):
        if kind.name in ("same", "partial"):
            walk.report(eqn, axis, f"an all-to-all of what is {kind}")
        elif scattered == gathered:
            kinds[place] = DIFFERENT
            continue
        elif kind.dims and gathered not in kind.dims:
            walk.report(eqn, axis, f"an all-to-all gathers dim {gathered} of what is {kind}")
        kinds[place] = different({*kind.dims, scattered} - {gathered})
    return [_with(value, kinds)]


def ppermute(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Each device has another's value, or zeros if it receives from none."""
    outputs = []
    for value in inputs:
        kinds = {}
        for place, axis, kind in _along(walk, eqn, value):
            whole = len({to for _, to in eqn.params["perm"]}) == walk.sizes[axis]
            kinds[place] = kind if whole or kind.name != "same" else DIFFERENT
        outputs.append(_with(value, kinds))
    return outputs


def axis_index(walk: Walk, eqn: Any, inputs: Values) -> Values:
    value = walk.value()
    return [_with(value, {place: DIFFERENT for place, _, _ in _along(walk, eqn, value)})]


def _without(value: Value, dim: int) -> Value:
    def kind(of: Kind) -> Kind:
        return different(d - (d > dim) for d in of.dims if d != dim) if of.dims else of

    return value._replace(kinds=tuple(map(kind, value.kinds)))


def _with_dim(value: Value, dim: int, split: frozenset[int]) -> Value:
    """The value with a new dim, of the devices that shards were gathered from: with the dims
    `split`, those of the shards. Other axes that have shards of these have shards of both."""

    def kind(of: Kind) -> Kind:
        dims = {d + (d >= dim) for d in of.dims}
        return different(dims | ({dim} if of.dims & split else set())) if dims else of

    return value._replace(kinds=tuple(map(kind, value.kinds)))


RULES: dict[str, Rule] = {
    "psum": psum, "psum_invariant": psum, "pmax": largest, "pmin": largest,
    "reduce_scatter": reduce_scatter, "all_gather": all_gather, "all_to_all": all_to_all,
    "ppermute": ppermute, "axis_index": axis_index,
}  # fmt: skip
