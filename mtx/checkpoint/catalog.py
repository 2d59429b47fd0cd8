"""What a checkpoint's manifest says of its arrays: of each its shape, dtype and fingerprint, and
where its blocks lie. What is read is believed only where all of it fits together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mtx.checkpoint.fingerprint import MODULUS

_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint32", "bool")
}
_FILE = re.compile(r"arrays\.\d{1,9}\.bin")
_NAME = re.compile(r"\w+(\.\w+)*")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_MOST_DIMS = 32
_MOST = 1 << 62  # bytes, and places along a dim


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of an array, in a file."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int  # bytes
    fingerprint: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayInfo:
    """One array and its blocks."""

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def fingerprint(self) -> int:
        """Of the whole array: the same however it was cut."""
        return sum(block.fingerprint for block in self.blocks) % MODULUS


Catalog = dict[str, ArrayInfo]


def catalog_to_json(catalog: Catalog) -> dict:
    files = sorted({block.file for info in catalog.values() for block in info.blocks})
    number = {file: place for place, file in enumerate(files)}
    arrays = {
        name: {
            "dtype": info.dtype.name,
            "shape": list(info.shape),
            "fingerprint": f"{info.fingerprint:016x}",
            "blocks": [
                [number[b.file], b.offset, list(b.start), list(b.shape), f"{b.fingerprint:016x}"]
                for b in info.blocks
            ],
        }
        for name, info in catalog.items()
    }
    return {"files": files, "arrays": arrays}


def catalog_from_json(values: Mapping) -> Catalog:
    """The inverse of `catalog_to_json`.

    Raises KeyError, TypeError or ValueError where a value is of another kind or out of range, and
    where an array's blocks do not tile it or their fingerprints do not add up to its own.
    """
    files, arrays = values["files"], values["arrays"]
    if not isinstance(files, list) or not isinstance(arrays, dict):
        raise ValueError("its files must be a list, and its arrays a table")
    for file in files:
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ValueError(f"file {file!r:.60} is not named like arrays.0.bin")
    return {name: _array(name, array, files) for name, array in arrays.items()}


def _array(name: str, values: Mapping, files: Sequence[str]) -> ArrayInfo:
    where = f"array {name:.60}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where!r} is no name of an array")
    if not isinstance(values, dict) or not isinstance(values["blocks"], list):
        raise ValueError(f"{where} is not described")
    if not isinstance(values["dtype"], str) or values["dtype"] not in _DTYPES:
        raise ValueError(f"{where} is of dtype {values['dtype']!r:.60}")
    dtype, shape = _DTYPES[values["dtype"]], _whole_numbers(where, values["shape"], least=1)
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"{where} has {len(shape)} dims")
    blocks = tuple(
        _block(name, block, files, len(shape), dtype.itemsize) for block in values["blocks"]
    )
    if not _tile(shape, blocks):
        raise ValueError(f"the blocks of {where} do not hold each of its values once")
    info = ArrayInfo(shape=shape, dtype=dtype, blocks=blocks)
    if info.fingerprint != _fingerprint(where, values["fingerprint"]):
        raise ValueError(f"the fingerprints of the blocks of {where} do not add up to its own")
    return info


def _block(name: str, values: Sequence, files: Sequence[str], dims: int, itemsize: int) -> Block:
    where = f"a block of {name:.60}"
    if not isinstance(values, list) or len(values) != 5:
        raise ValueError(f"{where} is not described by five values")
    file, offset = _whole_numbers(where, values[:2])
    if file >= len(files):
        raise ValueError(f"{where} lies in file {file:,} of {len(files)}")
    start = _whole_numbers(where, values[2])
    shape = _whole_numbers(where, values[3], least=1)
    if len(start) != dims or len(shape) != dims:
        raise ValueError(f"{where} has {len(start)} and {len(shape)} dims, and the array {dims}")
    if offset + math.prod(shape) * itemsize > _MOST:
        raise ValueError(f"{where} is larger than a file can be")
    return Block(
        name=name, start=start, shape=shape, file=files[file], offset=offset,
        fingerprint=_fingerprint(where, values[4]),
    )  # fmt: skip


def _whole_numbers(where: str, values: object, *, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{where} has {values!r:.60} in place of a list")
    for value in values:
        if type(value) is not int or not least <= value < _MOST:  # no bool either
            raise ValueError(f"{where} has {value!r:.60} in place of a whole number from {least}")
    return tuple(values)


def _fingerprint(where: str, text: object) -> int:
    if not isinstance(text, str) or not _FINGERPRINT.fullmatch(text):
        raise ValueError(f"{where} has {text!r:.60} in place of a fingerprint of 16 digits")
    return int(text, 16)


def _tile(shape: tuple[int, ...], blocks: Sequence[Block]) -> bool:
    """Whether the blocks hold every place of an array, and none of them twice.

    As with fingerprints: each stretch between two cuts along a dim gets a random weight, and a
    block the product of its stretches' sums; they add up to the array's own where every place is
    held once, and otherwise with a chance of some 2^-40 at most.
    """
    if not blocks:
        return False
    first = np.array([block.start for block in blocks], np.int64).reshape(len(blocks), len(shape))
    last = first + np.array([block.shape for block in blocks], np.int64).reshape(first.shape)
    if (last > np.array(shape, np.int64)).any():
        return False
    random, held, whole = np.random.default_rng(), np.ones(len(blocks), np.uint64), 1
    for dim, size in enumerate(shape):
        cuts = np.unique(np.concatenate([first[:, dim], last[:, dim], [0, size]]))
        weights = random.integers(MODULUS, size=len(cuts), dtype=np.uint64)
        held *= (
            weights[np.searchsorted(cuts, last[:, dim])]
            - weights[np.searchsorted(cuts, first[:, dim])]
        )
        whole = whole * (int(weights[-1]) - int(weights[0])) % MODULUS
    return int(held.sum(dtype=np.uint64)) == whole
