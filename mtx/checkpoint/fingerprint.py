"""Fingerprints of arrays, 64 bits each: those of an array's parts add up to its own.

    sum over all elements of  word * m_0[i_0] * m_1[i_1] * ...  mod 2^64

word: the element's bits as an unsigned number; i_d: its place along dim d of the whole array;
m_d: odd pseudorandom 64-bit numbers. An odd factor loses no bit, so a change of one element always
shows; a swap of two elements, or any larger change, shows with a chance of 1 - 2^-32 or better. The
sum does not depend on how an array is cut, or over how many processes (multilinear hashing, Carter
& Wegman 1979; Lemire & Kaser 2014). One pass over memory, no copies: about 3 GiB/s per core.

In a checkpoint each is multiplied by an odd number that follows from its array's name and dtype, so
another array's bits, or the same bits read as another dtype, show as well.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

MODULUS = 1 << 64
_MOST_COLUMNS = 1 << 15  # their factors stay in a core's cache
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def fingerprint(values: np.ndarray, start: Sequence[int] | None = None) -> int:
    """The fingerprint of the part of an array that begins at `start` (by default, of the whole
    array) and holds `values`, which must be contiguous. The fingerprints of parts that make up an
    array add up to its own, modulo MODULUS."""
    start = (0,) * values.ndim if start is None else tuple(start)
    words = _words(values)
    start += (0,) * (words.ndim - len(start))
    spans = tuple(enumerate(zip(start, words.shape, strict=True)))
    split = len(spans) - 1
    while split and math.prod(words.shape[split - 1 :]) <= _MOST_COLUMNS:
        split -= 1
    rows, columns = _products(spans[:split]), _products(spans[split:])
    sums = np.einsum("rc,c->r", words.reshape(len(rows), len(columns)), columns, dtype=np.uint64)
    return int((sums * rows).sum(dtype=np.uint64))


@functools.lru_cache(maxsize=1024)
def factor_of(name: str, dtype: np.dtype) -> int:
    """The odd number for an array's name and dtype: the first eight bytes of a SHA-256."""
    digest = hashlib.sha256(f"{name} {dtype.name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") | 1


@functools.lru_cache(maxsize=64)
def _products(spans: tuple[tuple[int, tuple[int, int]], ...]) -> np.ndarray:
    """The products of factors along dims, each given as (dim, (first, size)), row-major."""
    products = np.ones(1, np.uint64)
    for dim, (first, size) in spans:
        products = np.multiply.outer(products, _factors(dim, first, size)).ravel()
    return products


def _words(values: np.ndarray) -> np.ndarray:
    """The bits of `values` as unsigned numbers of up to 32 bits, in at least one dim."""
    size = values.dtype.itemsize
    flat = values.reshape(-1)
    if size in _WORDS:
        return flat.view(_WORDS[size]).reshape(values.shape or (1,))
    return flat.view(np.uint32).reshape(*values.shape, size // 4)


def _factors(dim: int, first: int, size: int) -> np.ndarray:
    """The odd numbers for the places first, first + 1, ... along a dim (SplitMix64, Steele et al.
    2014)."""
    z = np.arange(first, first + size, dtype=np.uint64) + np.uint64((dim + 1) << 48)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
