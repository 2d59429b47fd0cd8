"""The embedding of what enters the pipeline, in two parts around its sums over `pipe`.

Every stage has some rows of the table, and all need the sum. A woven tick makes its own rows of
what enters in the next one, and has the sum of them beside all of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mtx.schedules.schedule import IDLE
from mtx.vjp import Arrays, Strand, axes_of, needed_of, variables_of


@dataclass(frozen=True, kw_only=True)
class Entering:
    """A microbatch's embedding, of its number, int32 []."""

    own: Strand  # up to the sums over `pipe`
    rest: Strand  # of what `own` gives, and the number

    @classmethod
    def of(cls, embed: Callable) -> Entering:
        """Of `embed(item)`, a tree of arrays."""
        strand = Strand.of(embed, jax.ShapeDtypeStruct((), jnp.int32))
        sums = [place for place, eqn in enumerate(strand.eqns) if "pipe" in axes_of(eqn)]
        ends = [strand.eqns[place] for place in sums]
        read = [var for eqn in ends for var in variables_of(eqn.invars)] if ends else strand.outvars
        own = needed_of(strand.eqns, read)
        assert own.isdisjoint(sums), "a sum over pipe of another one"
        first, rest = strand.divided(own)
        return cls(own=first, rest=rest)

    def of_stage(self, item) -> Arrays:
        """What this stage adds to the sums; zeros where nothing enters."""

        def nothing(_):
            return tuple(jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.own.outvars)

        return lax.cond(item != IDLE, lambda item: tuple(self.own(item)), nothing, item)

    def whole(self, item) -> list:
        """Leaves of the embedding, on every stage."""
        return self.summed(tuple(self.own(item)), item)

    def summed(self, parts: Arrays, item) -> list:
        """The same, of what all stages have added."""
        return self.rest(*parts, item)
