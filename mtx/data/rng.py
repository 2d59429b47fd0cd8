"""Random numbers that no numpy version changes: those of a sample follow from its key alone."""

from __future__ import annotations

import numpy as np


class Rng:
    """A stream of random numbers of its own for each key.

    From PCG64's raw output, which numpy guarantees; what `Generator` makes of it may change between
    versions, and a resumed run or a second host must get the same.
    """

    def __init__(self, *key: int):
        self._bits = np.random.PCG64(np.random.SeedSequence((*key, 1)))  # 1: see `shuffled`

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count] in [0, 1)."""
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        return self._bits.random_raw() % bound

    def permutation(self, count: int) -> np.ndarray:
        """Of range(count), int64 [count]."""
        return np.argsort(self._bits.random_raw(count), kind="stable")
