"""Arrays in files: written as blocks, as the processes hold them, and read back in any other cut.

A process writes one file, `arrays.<process>.bin`: the blocks it holds, raw and in row-major order,
one after the other; the catalog says where. A reader takes whole blocks and checks each before
anything of it is used. Nothing here knows what the arrays are for, and nothing needs JAX.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import numpy as np

from mtx.checkpoint.catalog import Block, Catalog
from mtx.checkpoint.fingerprint import MODULUS, factor_of, fingerprint
from mtx.errors import UserError

MOST_BLOCK_BYTES = 32 << 20  # read to get at one element; also what a thread works on
_AT_A_TIME_BYTES = 4 << 20  # still in a cache when it is used again
_ALIGNMENT = 64  # bytes


class Damaged(UserError):
    """A checkpoint is not what was written; says which one, and what is wrong with it."""

    def __init__(self, directory: Path, what: str):
        super().__init__(f"checkpoint {directory} is damaged: {what}")
        self.directory, self.what = directory, what


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a checkpoint's file that cannot be read; a lack of permission is not damage."""
    if isinstance(error, PermissionError):
        return UserError(f"{path} cannot be read ({error.strerror}); let this user read it")
    return Damaged(path.parent, f"{path.name}: {error.strerror or error}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The part of an array that a process holds: `values`, which begin at `start`."""

    name: str
    start: tuple[int, ...]
    values: np.ndarray


# -- writing ---------------------------------------------------------------------------------------


def write_parts(path: Path, parts: Sequence[Part], *, threads: int = 2) -> list[Block]:
    """Writes a file that holds `parts`, and returns when it is on the disk. Raises OSError."""
    pieces = [
        Part(name=part.name, start=start, values=values)
        for part in parts
        for start, values in _pieces(part, MOST_BLOCK_BYTES)
    ]
    offsets, size = [], 0
    for piece in pieces:
        offsets.append(size)
        size += -(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(piece: Part, offset: int) -> Block:
        digest, end = 0, offset
        for start, values in _pieces(piece, _AT_A_TIME_BYTES):
            values = np.ascontiguousarray(values).reshape(values.shape)
            digest += fingerprint(values, start)
            end = _write_all(file, values, end)
        # Begins to write to the disk now, and lets go of pages that nobody reads again.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, end - offset, os.POSIX_FADV_DONTNEED)
        return Block(
            name=piece.name, start=piece.start, shape=piece.values.shape, file=path.name,
            offset=offset, fingerprint=digest * factor_of(piece.name, values.dtype) % MODULUS,
        )  # fmt: skip

    try:
        with ThreadPoolExecutor(threads) as pool:
            blocks = list(pool.map(write, pieces, offsets))
        os.fsync(file)
    finally:
        os.close(file)
    return blocks


def _write_all(file: int, values: np.ndarray, offset: int) -> int:
    """Writes contiguous values; returns the offset of their end."""
    left = values.reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
    return offset


def _pieces(part: Part, most_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(start, values) of pieces of a part, cut as `_cuts` cuts."""
    values = part.values
    for start, shape in _cuts(part.start, values.shape, most_bytes // values.itemsize):
        yield (
            start,
            values[tuple(slice(a - b, a - b + n) for a, b, n in zip(start, part.start, shape))],
        )


def _cuts(
    start: tuple[int, ...], shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of pieces of at most `most` elements, one after the other: cut along the first
    dims, so that the pieces of a contiguous array are contiguous and follow each other."""
    size = math.prod(shape)
    if size <= max(most, 1):
        yield start, shape
        return
    dim = next(dim for dim, rows in enumerate(shape) if rows > 1)
    step = max(1, most * shape[dim] // size)
    for row in range(0, shape[dim], step):
        first = (*start[:dim], start[dim] + row, *start[dim + 1 :])
        rows = min(step, shape[dim] - row)
        yield from _cuts(first, (*shape[:dim], rows, *shape[dim + 1 :]), most)


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """A part of an array to read: it begins at `start`, and goes into `target`."""

    start: tuple[int, ...]
    target: np.ndarray


@dataclass(kw_only=True, eq=False)
class Store:
    """The arrays of one directory. A context: files that were read stay open until its end."""

    directory: Path
    catalog: Catalog
    _files: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(
        self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """An array, or the part of it that begins at `start` and has `shape`. Raises Damaged."""
        info = self.catalog[name]
        start = tuple(start or (0,) * len(info.shape))
        if shape is None:
            shape = tuple(size - a for size, a in zip(info.shape, start, strict=True))
        values = np.empty(shape, info.dtype)
        self.fill(name, [Region(start=start, target=values)])
        return values

    def fill(self, name: str, regions: Sequence[Region]) -> None:
        """Reads `regions` of an array, each block once. Raises Damaged; what has been read by then
        must not be used."""
        info = self.catalog[name]
        missing = [region.target.size for region in regions]
        for block in _touching(info.blocks, regions):
            for place, region in enumerate(regions):
                missing[place] -= _overlap(block.start, block.shape, region)[1].size
            self._read(block, info.dtype, regions)
        if any(missing):
            raise Damaged(self.directory, f"{sum(missing):,} values of {name} are in no file")

    def check_files(self) -> None:
        """Raises Damaged if a file is missing or too short; reads nothing."""
        ends: dict[str, int] = {}
        for info in self.catalog.values():
            for block in info.blocks:
                end = block.offset + math.prod(block.shape) * info.dtype.itemsize
                ends[block.file] = max(end, ends.get(block.file, 0))
        for file, end in ends.items():
            try:
                size = (self.directory / file).stat().st_size
            except OSError as error:
                raise unreadable(self.directory / file, error) from error
            if size < end:
                raise Damaged(self.directory, f"{file} has {size:,} of {end:,} bytes")

    def verify(self, name: str) -> Iterator[int]:
        """Reads an array block by block; after each, yields its size in bytes. Raises Damaged."""
        info = self.catalog[name]
        for block in info.blocks:
            self._read(block, info.dtype)
            yield math.prod(block.shape) * info.dtype.itemsize

    def _read(self, block: Block, dtype: np.dtype, regions: Sequence[Region] = ()) -> None:
        """Reads a block and checks it. Its values that lie in `regions` are copied there piece by
        piece, while a cache holds them, or read right into their place."""
        digest, offset = 0, block.offset
        memory = np.empty(min(_AT_A_TIME_BYTES, math.prod(block.shape) * dtype.itemsize), np.uint8)
        for start, shape in _cuts(block.start, block.shape, _AT_A_TIME_BYTES // dtype.itemsize):
            found = [_overlap(start, shape, region) for region in regions]
            values = next((target for _, target in found if _fits(target, shape)), None)
            if values is None:
                values = memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            self._read_all(block, values, offset)
            digest += fingerprint(values, start)
            offset += values.nbytes
            for source, target in found:
                if target is not values and target.size:
                    target[...] = values[source]
        if digest * factor_of(block.name, dtype) % MODULUS != block.fingerprint:
            raise self._damaged(block, "these are not the bytes that were written")

    def _read_all(self, block: Block, values: np.ndarray, offset: int) -> None:
        left = values.reshape(-1).view(np.uint8).data
        try:
            file = self._open(block.file)
            while left:
                read = os.preadv(file, [left], offset)
                if not read:
                    raise self._damaged(block, "the file is too short")
                left, offset = left[read:], offset + read
        except OSError as error:
            raise unreadable(self.directory / block.file, error) from error

    def _open(self, name: str) -> int:
        if name not in self._files:
            file = os.open(
                self.directory / name, os.O_RDONLY | os.O_NONBLOCK
            )  # no waiting for a pipe
            if self._files.setdefault(name, file) != file:  # another thread was faster
                os.close(file)
        return self._files[name]

    def _damaged(self, block: Block, what: str) -> Damaged:
        return Damaged(
            self.directory,
            f"array {block.name}, from byte {block.offset:,} of {block.file}: {what}",
        )


def _touching(blocks: Sequence[Block], regions: Sequence[Region]) -> Iterable[Block]:
    """The blocks that lie in any of the regions, wholly or in part."""
    if not blocks or not blocks[0].shape:
        return blocks
    first = np.array([block.start for block in blocks])
    last = first + np.array([block.shape for block in blocks])
    touching = np.zeros(len(blocks), bool)
    for region in regions:
        start, stop = np.array(region.start), np.add(region.start, region.target.shape)
        touching |= ((first < stop) & (last > start)).all(axis=1)
    return compress(blocks, touching)


def _overlap(
    start: tuple[int, ...], shape: tuple[int, ...], region: Region
) -> tuple[tuple[slice, ...], np.ndarray]:
    """Where in a piece its overlap with a region lies, and that part of the region's target."""
    source, target = [], []
    for a, n, b, m in zip(start, shape, region.start, region.target.shape):
        first, last = max(a, b), min(a + n, b + m)
        last = max(first, last)
        source.append(slice(first - a, last - a))
        target.append(slice(first - b, last - b))
    return tuple(source), region.target[(*target, ...)]


def _fits(target: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether a piece can be read right into its place, as it lies in the file."""
    return target.shape == shape and target.flags.c_contiguous
