"""Random numbers and orders that no numpy version changes, and the samples of a text in memory.

S sequence. Sample i of a text is tokens[i*S : i*S + S + 1]: neighbours share one token, so that
every token except the first is a target exactly once (Megatron-LM's way). Tokens after the last
full sample are left out.
"""

from __future__ import annotations

import functools
import math

import numpy as np


class Rng:
    """A separate stream of random numbers for each key.

    They come from PCG64's raw output, which numpy guarantees; what `Generator` makes of it may
    change between versions, and a resumed run or a second host must get the same.
    """

    def __init__(self, *key: int):
        self._bits = _bits(*key, 1)  # 1: not a key of `shuffled`, which ends differently

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count] in [0, 1)."""
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        return self._bits.random_raw() % bound

    def permutation(self, count: int) -> np.ndarray:
        """A permutation of range(count), int64 [count]."""
        return np.argsort(self._bits.random_raw(count), kind="stable")


def _bits(*key: int) -> np.random.PCG64:
    """The bit generator of a key. Keys that differ only in trailing zeros are the same key."""
    return np.random.PCG64(np.random.SeedSequence(key))


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count), int64 [count], that depends only on `count` and `key`."""
    return np.argsort(_bits(*key).random_raw(count), kind="stable")


def place_in_epoch(index: int, count: int, seed: int) -> int:
    """The place of request `index` of an endless stream in an order of `count` things.

    In the first epoch, each request takes its own place. Each later epoch goes through the order,
    which is random already, with its own start and stride: that takes neither memory nor time.
    """
    epoch, place = divmod(index, count)
    start, stride = _strides(count, seed, epoch) if epoch else (0, 1)
    return (start + place * stride) % count


def require_sample(index: int, count: int, what: str) -> int:
    """Returns `index`; IndexError if `what` has no such sample."""
    if not 0 <= index < count:
        raise IndexError(f"sample {index} of {what}, which has {count:,}; ask for more samples")
    return index


@functools.lru_cache(maxsize=4096)
def _strides(count: int, seed: int, epoch: int) -> tuple[int, int]:
    """A start and a stride that visits all of range(count)."""
    start, stride = (one % count for one in _bits(seed, epoch).random_raw(2).tolist())
    while math.gcd(stride, count) != 1:
        stride += 1
    return start, stride


class Samples:
    """Random access to the samples of a text, epoch after epoch without end."""

    def __init__(self, tokens: np.ndarray, *, sequence: int, seed: int | None):
        """`tokens` [at least sequence + 1], of any integer type; kept, not copied.
        seed: for the order of each epoch; None: the order of the text."""
        windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence + 1)
        self.tokens, self.sequence = tokens, sequence
        self._samples = windows[::sequence]  # [samples, S + 1], a view
        self._seed = seed
        self.part_tokens, self.distinct = len(tokens), len(self)
        # The current epoch and the next: a batch may straddle them.
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` of an endless stream, int32 [S + 1]: each epoch in its own order."""
        epoch, place = divmod(index, len(self))
        return self._samples[self._order(epoch)[place]].astype(np.int32)

    def _shuffle(self, epoch: int) -> np.ndarray:
        count = len(self)
        return np.arange(count) if self._seed is None else shuffled(count, self._seed, epoch)
