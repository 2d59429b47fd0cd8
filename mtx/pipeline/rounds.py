"""Loops that hardly ever run, such as the extra rounds of full experts. The weights that they read,
and the weight gradients that they add to, stay where they lie: if they were given to a loop as
arrays of their own, XLA would copy them even if the loop never ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from mtx.pipeline.slots import read, write
from mtx.strand import Strand, variables_of

_SUMS = "add", "add_any"


class Entry(NamedTuple):
    """array[index], given as the whole array and the index."""

    array: Any
    index: tuple


def is_loop(eqn) -> bool:
    return eqn.primitive.name == "while"


def first_carried(eqn) -> int:
    """The place, among a loop's inputs, of the initial value of its first output."""
    return eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]


def only_adds(eqn, output: int) -> bool:
    """Whether a loop does nothing with an output's previous value but add to it."""
    body, condition = (Strand.flat(eqn.params[name]) for name in ("body_jaxpr", "cond_jaxpr"))
    before = body.invars[eqn.params["body_nconsts"] + output]
    after = body.outvars[output]
    read_by = [one for one in body.eqns if before in variables_of(one.invars)]
    asked = condition.invars[eqn.params["cond_nconsts"] + output]
    if len(read_by) != 1 or any(asked in variables_of(one.invars) for one in condition.eqns):
        return False
    (one,) = read_by
    named = [atom for atom in body.outvars if atom is before]
    return one.primitive.name in _SUMS and one.outvars[0] is after and not named


def run(eqn, values: Sequence) -> list:
    """The outputs of a loop given these inputs, arrays or entries of arrays. An output that starts
    from an entry is the whole array, with the sum in that entry."""
    of_condition, of_body = eqn.params["cond_nconsts"], first_carried(eqn)
    condition, body = (jaxpr_as_fun(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    start = values[of_body:]

    def arrays(given: Sequence, tied) -> Iterator:
        for value in given:
            if isinstance(value, Entry):
                # XLA would hoist the read of what does not change out of the loop.
                index, _ = lax.optimization_barrier((value.index, tied))
                value = read(value.array, *index)
            yield value

    def there(carry: Sequence) -> list:
        return [
            value._replace(array=one) if isinstance(value, Entry) else one
            for value, one in zip(start, carry, strict=True)
        ]

    def goes_on(carry):
        given = *values[:of_condition], *there(carry)
        (found,) = condition(*arrays(given, _counter(carry)))
        return found

    def turn(carry):
        entries = there(carry)
        given = *values[of_condition:of_body], *entries
        made = body(*arrays(given, _counter(carry)))
        return [
            write(one.array, new, *one.index) if isinstance(one, Entry) else new
            for one, new in zip(entries, made, strict=True)
        ]

    whole = [value.array if isinstance(value, Entry) else value for value in start]
    with jax.named_scope(str(eqn.source_info.name_stack)):
        return lax.while_loop(goes_on, turn, whole)


def _counter(carry: Sequence):
    return min(carry, key=lambda array: array.size)
