"""Rules for operations in which each element depends on one element of every operand.

Linear ones take partial values as they are. It is an error to multiply a partial value by one that
differs, to add it to one that is whole, or to use it in any other operation. If a value is the same
along some axes and is divided by the number of devices along them, a constant, its sum over them is
the value again: it may be added to partial values, and summed.

A count of what a device has is a term of a sum, and also a number of the device's own: where its
queues begin, how many turns it needs. So whole numbers may be compared, limited and added to
others, and stay terms if these are the same; as a float a count is only a term of its sum.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from mtx.certify.kinds import (
    DIFFERENT,
    MIXED,
    PARTIAL,
    SAME,
    ZERO,
    Kind,
    Value,
    either,
    together,
)
from mtx.certify.walk import Rule, Walk
from mtx.pipeline.nodes import BEHIND

Values = list[Value]
LINEAR = (
    "neg convert_element_type copy copy_p real imag reduce_precision layout_constraint name "
    "stop_gradient sharding_constraint reshard pvary"
).split()
NONLINEAR = (
    "abs and acos acosh asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp cos cosh "
    "digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log "
    "log2 log1p logistic lt max min ne nextafter not one_minus_square or polynomial "
    "population_count pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square tan tanh xor random_fold_in"
).split()
ZERO_STAYS = "abs", "sign", "sqrt", "square"  # NONLINEAR ones, as of states' gradients


def linear(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return [inputs[0]]


def negative(walk: Walk, eqn: Any, inputs: Values) -> Values:
    (value,) = inputs
    return [value._replace(constant=None if value.constant is None else -value.constant)]


def barrier(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return inputs


def behind(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """The same array: it only waits for the other input (`mtx.pipeline.nodes.behind`)."""
    return inputs[:1]


def whole_numbers(eqn: Any) -> bool:
    """Whether all operands of an operation are integers."""
    return all(jnp.issubdtype(atom.aval.dtype, jnp.integer) for atom in eqn.invars)


def own_counts(eqn: Any, inputs: Values) -> Values:
    """The inputs; if all are whole numbers, counts are numbers of each device's own."""
    if not whole_numbers(eqn):
        return inputs

    def own(kind: Kind) -> Kind:
        return DIFFERENT if kind.name == "partial" else kind

    return [value._replace(kinds=tuple(map(own, value.kinds))) for value in inputs]


def nonlinear(walk: Walk, eqn: Any, inputs: Values) -> Values:
    _check_random(walk, eqn, inputs)
    kinds, counts = [], whole_numbers(eqn)
    limits = counts and eqn.primitive.name in ("max", "min")
    for axis, each in _by_axis(walk, inputs):
        if PARTIAL in each:
            if limits and not any(kind.name == "different" for kind in each):
                kinds.append(PARTIAL)
                continue
            if not counts:
                walk.report(eqn, axis, f"{eqn.primitive.name} of an unsummed partial value")
            each = [DIFFERENT if kind == PARTIAL else kind for kind in each]
        kind = together(each)
        stays = eqn.primitive.name in ZERO_STAYS
        kinds.append(SAME if kind.name == "zero" and not stays else kind)
    return [Value(tuple(kinds), random=_stays_random(inputs))]


def add(walk: Walk, eqn: Any, inputs: Values) -> Values:
    if len(inputs) == 1:
        return inputs
    one, two = inputs
    left, right, kinds = one.divisor, two.divisor, []
    mixed = one.parts or two.parts
    for axis, (a, b) in _by_axis(walk, inputs):
        size = walk.sizes[axis]
        if a.name == "partial" and b.name == "same" and right % size == 0:
            right, b = right / size, PARTIAL
        elif b.name == "partial" and a.name == "same" and left % size == 0:
            left, a = left / size, PARTIAL
        kinds.append(_sum_of(walk, eqn, axis, a, b))
    if one.is_zero or two.is_zero:
        divisor = max(left, right)
    else:
        divisor = float(math.gcd(int(left), int(right)))
    _check_random(walk, eqn, inputs)
    constant = None
    if one.constant is not None and two.constant is not None:
        constant = one.constant + two.constant * (-1 if eqn.primitive.name == "sub" else 1)
    return [Value(tuple(kinds), constant, divisor, _stays_random(inputs), mixed)]


def _sum_of(walk: Walk, eqn: Any, axis: str, a: Kind, b: Kind) -> Kind:
    names = {a.name, b.name}
    if "partial" not in names:
        if "mixed" in names:
            return either(a, b)
        return together((a, b))
    if whole_numbers(eqn):
        return DIFFERENT if "different" in names else PARTIAL
    if names == {"partial", "same"}:
        walk.report(eqn, axis, "an unsummed partial value is added to one that is whole")
        return DIFFERENT
    if a.dims or b.dims:
        walk.report(eqn, axis, "an unsummed partial value is added to a shard")
        return DIFFERENT
    return DIFFERENT if "different" in names else PARTIAL


def multiply(walk: Walk, eqn: Any, inputs: Values) -> Values:
    one, two = inputs
    kinds = [
        product_of(walk, eqn, axis, a, b) or together((a, b))
        for axis, (a, b) in _by_axis(walk, inputs)
    ]
    _check_random(walk, eqn, inputs)
    divisor = _whole(one.divisor * two.divisor)
    for value in inputs:
        if value.constant and abs(value.constant) < 1:
            divisor *= _whole(1 / value.constant)
    return [Value(tuple(kinds), divisor=_whole(divisor), random=_stays_random(inputs))]


def _whole(divisor: float) -> float:
    """The divisor, if it may be a number of devices; otherwise 1."""
    if not 1 <= divisor < 2**53 or abs(divisor - round(divisor)) > 1e-3:
        return 1.0
    return float(round(divisor))


def product_of(walk: Walk, eqn: Any, axis: str, a: Kind, b: Kind) -> Kind | None:
    """The kind of a product if one of the two kinds is partial or zero; otherwise None."""
    if "zero" in (a.name, b.name):
        return ZERO
    if "partial" not in (a.name, b.name):
        return None
    other = b if a.name == "partial" else a
    if other.is_same:
        return PARTIAL
    what = "another" if other.name == "partial" else "one that differs"
    walk.report(eqn, axis, f"an unsummed partial value is multiplied by {what}")
    return DIFFERENT


def divide(walk: Walk, eqn: Any, inputs: Values) -> Values:
    one, by = inputs
    kinds = []
    for axis, (a, b) in _by_axis(walk, inputs):
        if b.name == "partial":
            walk.report(eqn, axis, "a value is divided by an unsummed partial value")
            b = DIFFERENT
        kinds.append(
            ZERO if a.name == "zero" else product_of(walk, eqn, axis, a, b) or together((a, b))
        )
    divisor = _whole(one.divisor * (by.constant or 1.0))
    _check_random(walk, eqn, inputs)
    return [Value(tuple(kinds), divisor=divisor, random=_stays_random(inputs))]


def select(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """A choice for each element. Each device may leave out terms of unsummed partial values. Random
    numbers that choose are applied; random numbers that are chosen are applied to nothing yet."""
    chooser, *cases = inputs
    if chooser.random:
        _check_random(walk, eqn, inputs)
    kinds = []
    for axis, (by, *each) in _by_axis(walk, inputs):
        if by.name == "partial":
            walk.report(eqn, axis, "a choice by an unsummed partial value")
            by = DIFFERENT
        present = [kind for kind in each if kind.name != "zero"] or [ZERO]
        names = {kind.name for kind in present}
        if "partial" in names:
            if names != {"partial"}:
                walk.report(eqn, axis, "a choice between a whole and an unsummed partial value")
            kinds.append(PARTIAL if names == {"partial"} else DIFFERENT)
        elif "mixed" in names:
            kinds.append(MIXED)
        elif names == {"zero"}:
            kinds.append(ZERO)
        else:
            kinds.append(together((by, *present)))
    divisors = {case.divisor for case in cases if case.constant != 0}
    divisor = divisors.pop() if len(divisors) == 1 else 1.0
    random = not chooser.random and _stays_random(cases)
    return [Value(tuple(kinds), divisor=divisor, random=random)]


# -- random numbers --------------------------------------------------------------------------------


def _stays_random(inputs: Values) -> bool:
    """Whether the result is random bits too: of random bits, and otherwise only constants."""
    random = [value for value in inputs if value.random]
    return bool(random) and all(v.random or v.constant is not None for v in inputs)


def _check_random(walk: Walk, eqn: Any, inputs: Values) -> None:
    """Check that random numbers differ along the axes along which the data do, and no others."""
    masks = [value for value in inputs if value.random]
    data = [v for v in inputs if not v.random and v.constant is None]
    for mask in masks:
        for value in data:
            for axis, drawn, applied in zip(walk.axes, mask.kinds, value.kinds):
                if applied.name == "zero" or "mixed" in (drawn.name, applied.name):
                    continue
                if drawn.is_same and not applied.is_same:
                    walk.report(eqn, axis, "the same random numbers are applied to different data")
                elif applied.is_same and not drawn.is_same:
                    walk.report(eqn, axis, "different random numbers are applied to the same data")


def random_bits(walk: Walk, eqn: Any, inputs: Values) -> Values:
    return [inputs[0].plain()._replace(random=True)]


def by_row(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """Between keys and their data only the number of dims at the end changes."""
    return [inputs[0].plain()]


def unknown(walk: Walk, eqn: Any, inputs: Values) -> Values:
    """For primitives without a rule: the result differs if an operand does."""
    found = nonlinear(walk, eqn, inputs)[0]
    kinds = tuple(kind if kind.is_same else DIFFERENT for kind in found.kinds)
    return [Value(kinds)] * len(eqn.outvars)


def _by_axis(walk: Walk, inputs: Values):
    return zip(walk.axes, zip(*(value.kinds for value in inputs)), strict=True)


RULES: dict[str, Rule] = {
    **dict.fromkeys(LINEAR, linear), **dict.fromkeys(NONLINEAR, nonlinear),
    **dict.fromkeys(("optimization_barrier", "device_put"), barrier), BEHIND: behind,
    "neg": negative, "add": add, "sub": add, "add_any": add,
    "mul": multiply, "div": divide, "select_n": select, "random_bits": random_bits,
    "random_wrap": by_row, "random_unwrap": by_row, "random_seed": by_row,
    "random_clone": by_row, "unknown": unknown,
}  # fmt: skip
