"""Choices of experts that rounding decides: two scores so close to each other that the order in
which numbers are added decides which one is larger.

With these no layout can be compared with another: a token that goes to another expert gives another
gradient, and both are right. So inputs are drawn that have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from mtx.layers import router

# By how much scores are moved, relative: layouts were seen to differ by 9e-7 in five steps.
NEAR = 3e-6
_WAYS = 8  # how often they are moved, each up or down: a closer pair is missed once in 256 times


@contextlib.contextmanager
def watched_choices() -> Iterator[list[int]]:
    """A context in which routers that are traced add a number to the list each time that they run:
    whether other scores, as close as NEAR, would have led to other choices."""
    found: list[int] = []
    real = router.choose

    def choose(scores_nE, balance_E, config):
        ids_nk = real(scores_nE, balance_E, config)
        signs = jax.random.rademacher(jax.random.key(0), (_WAYS, *scores_nE.shape), jnp.float32)
        near = scores_nE * (1 + NEAR * signs)
        others = jax.vmap(lambda scores: real(scores, balance_E, config))(near)
        jax.debug.callback(
            lambda changed: found.append(int(changed)), _changed(ids_nk, others, config)
        )
        return ids_nk

    with mock.patch.object(router, "choose", choose):
        yield found


def _changed(ids_nk: Any, others: Any, config: router.Router) -> Any:
    """Whether the experts differ. Their order counts only if some are dropped."""
    if config.capacity is None:
        ids_nk, others = jnp.sort(ids_nk, axis=-1), jnp.sort(others, axis=-1)
    return (ids_nk != others).any()
