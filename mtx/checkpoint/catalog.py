"""What a checkpoint's manifest says about its arrays: the shape, dtype and fingerprint of each, and
where its blocks lie. What is read is accepted only if all of it is consistent."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
        """The fingerprint of the whole array, the same however it was cut."""
        return sum(block.fingerprint for block in self.blocks) % MODULUS


Catalog = dict[str, ArrayInfo]


def catalog_of(
    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]], blocks: Iterable[Block]
) -> Catalog:
    """The catalog of arrays, {name: (shape, dtype)}, and of the blocks that hold them."""
    held = defaultdict(list)
    for block in blocks:
        held[block.name].append(block)
    return {
        name: ArrayInfo(shape=shape, dtype=dtype, blocks=tuple(held[name]))
        for name, (shape, dtype) in arrays.items()
    }


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
    """The inverse of `catalog_to_json`. Raises KeyError, TypeError or ValueError if a value is of
    another kind or out of range, if an array's blocks do not tile it, or if their fingerprints do
    not add up to its own."""
    files, arrays = values["files"], values["arrays"]
    if not isinstance(files, list) or not isinstance(arrays, dict):
        raise ValueError("its files must be a list, and its arrays a table")
    for file in files:
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ValueError(f"file {file!r:.60} is not named like arrays.0.bin")
    return {name: _array(name, array, files) for name, array in arrays.items()}


def _array(name: str, values: object, files: Sequence[str]) -> ArrayInfo:
    where = f"array {name:.60}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where!r} must be words with dots between them")
    match values:
        case {"dtype": str(dtype), "shape": list(shape), "blocks": list(listed),
              "fingerprint": str(digits)} if (
            dtype in _DTYPES and _whole(shape, least=1) and len(shape) <= _MOST_DIMS
            and _FINGERPRINT.fullmatch(digits)
        ):  # fmt: skip
            itemsize = _DTYPES[dtype].itemsize
        case _:
            said = values
            if isinstance(values, dict):
                said = {key: value for key, value in values.items() if key != "blocks"}
            raise ValueError(
                f"{where} must have a dtype, shape, fingerprint and blocks: {said!r:.90}"
            )
    blocks = tuple(_block(name, block, files, len(shape), itemsize) for block in listed)
    if not _tile(tuple(shape), blocks):
        raise ValueError(f"the blocks of {where} do not hold each of its values once")
    info = ArrayInfo(shape=tuple(shape), dtype=_DTYPES[dtype], blocks=blocks)
    if info.fingerprint != int(digits, 16):
        raise ValueError(f"the fingerprints of the blocks of {where} do not add up to its own")
    return info


def _block(name: str, values: object, files: Sequence[str], dims: int, itemsize: int) -> Block:
    match values:
        case [int(file), int(offset), list(start), list(shape), str(digits)] if (
            _whole([file, offset, *start]) and _whole(shape, least=1) and file < len(files)
            and len(start) == len(shape) == dims and _FINGERPRINT.fullmatch(digits)
            and offset + math.prod(shape) * itemsize <= _MOST
        ):  # fmt: skip
            return Block(
                name=name, start=tuple(start), shape=tuple(shape), file=files[file], offset=offset,
                fingerprint=int(digits, 16),
            )  # fmt: skip
    raise ValueError(
        f"a block of {name:.60} must have a file below {len(files)}, offset, start and shape in "
        f"{dims} dims, and a fingerprint of 16 digits: {values!r:.160}"
    )


def _whole(values: Sequence[object], *, least: int = 0) -> bool:
    return all(type(value) is int and least <= value < _MOST for value in values)  # no bool either


def _tile(shape: tuple[int, ...], blocks: Sequence[Block]) -> bool:
    """Whether the blocks hold every place of an array exactly once.

    This works as fingerprints do: each stretch between two cuts along a dim gets a random weight,
    and each block the product over dims of its stretches' sums. The products add up to the array's
    own if every place is held once, and otherwise with a chance of some 2^-40 at most.
    """
    if len(blocks) < 2:
        return any(not any(block.start) and block.shape == shape for block in blocks)
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
