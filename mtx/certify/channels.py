"""A channel of its own for each collective that JAX lowers.

JAX puts all of them on one, and XLA's CPU runtime takes devices that come to one channel for those
of one collective. What has no need of a loop's values goes on beside it there, so that a device
can come to a collective after the loop while another is at one in it: then the runtime ends the
process ("Id can't be larger than the number of participating threads"), or all wait for ever. On
channels of their own they are told apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

from jax._src.interpreters import mlir  # what JAX asks for the channel, once for each collective


@contextmanager
def own_channels() -> Iterator[None]:
    """Meanwhile. What is compiled so is not found again in a cache of compiled programs."""
    numbers = itertools.count(mlir.COLLECTIVE_CHANNEL_ID)

    class Numbered(ModuleType):
        COLLECTIVE_CHANNEL_ID = property(lambda module: next(numbers))

    module = cast(ModuleType, mlir)
    before, module.__class__ = module.__class__, Numbered
    try:
        yield
    finally:
        module.__class__ = before
