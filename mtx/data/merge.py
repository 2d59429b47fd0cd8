"""Indexed datasets to indexed datasets: several made one, and one made several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mtx.data.indexed import IndexedDataset, IndexedWriter, require_new, strip_suffix
from mtx.data.indices import PARTS, parse_split, split_range
from mtx.errors import UserError


def merge_datasets(prefixes: Sequence[str], out: str) -> IndexedDataset:
    """Writes all documents of `prefixes`, in that order, as the dataset `out`.

    Raises UserError where types, modes or tokenizers differ.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise UserError("no datasets to merge; name their prefixes")
    first = datasets[0]
    for other in datasets[1:]:
        for what, one, two in (
            ("tokens of type", first.dtype, other.dtype),
            ("modes", _have(first.modes), _have(other.modes)),
            ("a tokenizer's identity", _have(first.identity), _have(other.identity)),
        ):
            if one != two:
                raise UserError(
                    f"{first.prefix} and {other.prefix} cannot be merged: the first has {what} "
                    f"{one}, the second {two}; build one of them again"
                )
        if first.identity:
            other.require_tokenizer(first.identity)
    with IndexedWriter(out, first.dtype, identity=first.identity) as writer:
        for dataset in datasets:
            _copy(dataset, writer, 0, dataset.document_count)
    return IndexedDataset(out)


def split_dataset(prefix: str, ratios: str, out: str) -> dict[str, IndexedDataset]:
    """Writes `<out>_train`, `_valid` and `_test` with whole documents in their order, cut where
    the ratios ("969,30,1") say; a part of ratio 0 is not written.

    Raises UserError where a part would have no document.
    """
    dataset, split = IndexedDataset(prefix), parse_split(ratios)
    parts = {
        part: split_range(split, part, dataset.document_count)
        for part, share in zip(PARTS, split, strict=True)
        if share
    }
    for part, (first, end) in parts.items():
        require_new(f"{strip_suffix(out)}_{part}")
        if first == end:
            raise UserError(
                f"{prefix} has {dataset.document_count:,} documents, of which {ratios!r} gives "
                f"none to {part}; change the ratios"
            )
    with ExitStack() as stack:  # all parts or none
        for part, (first, end) in parts.items():
            name = f"{strip_suffix(out)}_{part}"
            writer = IndexedWriter(name, dataset.dtype, identity=dataset.identity)
            _copy(dataset, stack.enter_context(writer), first, end)
    return {part: IndexedDataset(f"{strip_suffix(out)}_{part}") for part in parts}


def _copy(dataset: IndexedDataset, writer: IndexedWriter, first: int, end: int) -> None:
    """Documents `first` to before `end`."""
    ends = dataset.documents[first : end + 1]
    low, high = int(ends[0]), int(ends[-1])
    writer.add(
        dataset.tokens[dataset.first_token(low) : dataset.first_token(high)],
        dataset.lengths[low:high],
        np.diff(ends),
        modes=None if dataset.modes is None else dataset.modes[low:high],
    )


def _have(value: object) -> str:
    return "no" if value is None else "yes"
