"""Indexed datasets to indexed datasets: several merged into one, and one split into several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mtx.data.indexed import IndexedDataset, IndexedWriter, require_new, strip_suffix
from mtx.data.split import PARTS, Division, SplitBy, divide, parse_split
from mtx.errors import UserError


def merge_datasets(prefixes: Sequence[str], out: str) -> IndexedDataset:
    """Writes all documents of `prefixes`, in that order, as the dataset `out`. UserError if types,
    modes or tokenizers differ."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise UserError("no datasets to merge; name their prefixes")
    first = datasets[0]
    for other in datasets[1:]:
        kinds = [
            f"{one.dtype}, {'modes' if one.modes is not None else 'no modes'}, "
            f"{'a' if one.identity else 'no'} tokenizer's identity"
            for one in (first, other)
        ]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"{first.prefix} ({kinds[0]}) and {other.prefix} ({kinds[1]}) cannot be merged; "
                "build one of them again"
            )
        if first.identity:
            other.require_tokenizer(first.identity)
    with IndexedWriter(out, first.dtype, identity=first.identity) as writer:
        for dataset in datasets:
            _copy(dataset, writer, 0, dataset.document_count)
    return IndexedDataset(out)


def split_dataset(
    prefix: str, ratios: str, out: str, *, by: SplitBy = "auto"
) -> dict[str, IndexedDataset]:
    """Writes `<out>_train`, `_valid` and `_test`, divided by the ratios ("969,30,1"); a part of
    ratio 0 is not written. by: see `divide`; "auto" cuts documents if some part would get none.

    Whole documents stay in their order. Each part gets a share of a document that is cut, in tokens
    or, if its sequences are sentences, in whole sentences; a share ends with the tokenizer's
    end-of-document token. Raises UserError if a part would have nothing.
    """
    dataset, split = IndexedDataset(prefix), parse_split(ratios)
    counts = np.diff(dataset.documents)
    sentences = bool((counts != 1).any())
    counts = counts if sentences else dataset.lengths
    parts = {
        part: divide(counts, ratios, part, by=by, serves=lambda some: len(some) > 0, parts=PARTS)
        for part, share in zip(PARTS, split, strict=True)
        if share
    }
    for part, division in parts.items():
        require_new(f"{strip_suffix(out)}_{part}")
        if not division.sizes(counts).any():
            raise UserError(
                f"{prefix} has {dataset.document_count:,} documents, of which {ratios!r} gives "
                f"none to {part}; change the ratios"
            )
    with ExitStack() as stack:  # all parts or none
        for part, division in parts.items():
            name = f"{strip_suffix(out)}_{part}"
            writer = IndexedWriter(name, dataset.dtype, identity=dataset.identity)
            stack.enter_context(writer)
            if division.cut is None:
                _copy(dataset, writer, division.first, division.end)
            else:
                _copy_shares(dataset, writer, division, sentences)
    return {part: IndexedDataset(f"{strip_suffix(out)}_{part}") for part in parts}


def _copy_shares(
    dataset: IndexedDataset, writer: IndexedWriter, division: Division, sentences: bool
) -> None:
    """Copies the share of each document that `division` has."""
    eod = dataset.identity and dataset.identity.eod
    for first, end in itertools.pairwise(dataset.documents.tolist()):
        count = end - first if sentences else dataset.lengths[first]
        low, high = division.within(int(count))
        if low == high:
            continue
        rows = slice(first + low, first + high) if sentences else slice(first, end)
        lengths = dataset.lengths[rows] if sentences else np.array([high - low])
        begin = dataset.first_token(first + low) if sentences else dataset.first_token(first) + low
        tokens = dataset.tokens[begin : begin + int(lengths.sum(dtype=np.int64))]
        if eod is not None and len(tokens) and tokens[-1] != eod:
            tokens = np.append(tokens, np.array([eod], tokens.dtype))
            lengths = lengths + (np.arange(len(lengths)) == len(lengths) - 1)
        writer.add(tokens, lengths, modes=None if dataset.modes is None else dataset.modes[rows])


def _copy(dataset: IndexedDataset, writer: IndexedWriter, first: int, end: int) -> None:
    """Copies documents `first` to `end`, exclusive."""
    ends = dataset.documents[first : end + 1]
    low, high = int(ends[0]), int(ends[-1])
    modes = None if dataset.modes is None else dataset.modes[low:high]
    writer.add(dataset.text(low, high), dataset.lengths[low:high], np.diff(ends), modes=modes)
