"""A separate channel for each collective that JAX lowers.

JAX puts all of them on one channel, and XLA's CPU runtime takes all devices that arrive at a
channel for those of one collective. There, computation that does not need a loop's values goes on
beside the loop, so one device can arrive at a collective after the loop while another is at one
inside it: then the runtime ends the process ("Id can't be larger than the number of participating
threads"), or all devices wait forever. On separate channels the collectives are told apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

from jax._src.interpreters import mlir  # where JAX reads the channel, once for each collective
from jax._src.lax import parallel
from jax.extend.core import Primitive


@contextmanager
def own_channels() -> Iterator[None]:
    """A context in which collectives are lowered to separate channels. A cache of compiled programs
    does not find such programs again."""
    numbers = itertools.count(mlir.COLLECTIVE_CHANNEL_ID)

    class Numbered(ModuleType):
        COLLECTIVE_CHANNEL_ID = property(lambda module: next(numbers))

    module = cast(ModuleType, mlir)
    before, module.__class__ = module.__class__, Numbered
    known: set[Primitive] = mlir._uncacheable_primitives
    alike = {each for each in vars(parallel).values() if isinstance(each, Primitive)} - known
    known |= alike  # else JAX lowers collectives of the same shapes once, with one channel
    try:
        yield
    finally:
        known -= alike
        module.__class__ = before
