"""Indexed datasets as samples of a fixed length, one corpus or a blend of several.

B batch rows · S sequence. A batch is a pure function of the datasets, the seed and the number of
samples consumed before it; that number is all the state there is.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mtx.data.blend import blend_all, blend_by_weights, normalize_weights, request_samples
from mtx.data.cache import cached_arrays
from mtx.data.indexed import IndexedDataset
from mtx.data.indices import Indices, build_indices, parse_split, split_range
from mtx.errors import UserError

DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's


class SampleSource(Protocol):
    """Samples of `sequence` + 1 tokens by their number."""

    sequence: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [sequence + 1]"""


class GPTDataset:
    """The samples of one part of an indexed dataset, as Megatron-LM's GPTDataset gives them.

    `dataset[i]` is int32 [sequence + 1], of which the first `sequence` are inputs and the last
    `sequence` targets. `samples` asks for at least so many, over as many epochs as they take;
    None for those of one epoch.
    """

    def __init__(
        self,
        prefix: str | os.PathLike | IndexedDataset,
        *,
        sequence: int,
        seed: int = 0,
        samples: int | None = None,
        split: str = DEFAULT_SPLIT,
        part: str = "train",
        cache: str | os.PathLike | None = None,
        vocab: int | None = None,
    ):
        """cache: a folder for the index arrays, to be built once; None: built now, in memory.
        vocab: every token that is given is checked to be below it.

        Raises UserError for a dataset that cannot be read, a part without a whole sample, and
        options that cannot be.
        """
        _check(sequence=sequence, samples=samples, seed=seed)
        self.data = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.sequence, self.part = sequence, part
        self._vocab = vocab
        self._again = functools.partial(
            GPTDataset, self.data.prefix, sequence=sequence, seed=seed, samples=samples,
            split=split, part=part, cache=cache, vocab=vocab,
        )  # fmt: skip
        first, end = split_range(parse_split(split), part, len(self.data))
        lengths = self.data.lengths[first:end]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < (sequence + 1 if samples is None else 1):
            raise UserError(
                f"{self.data.prefix}: part {part!r} of split={split!r} has {end - first:,} of "
                f"{len(self.data):,} sequences and {tokens:,} tokens, but one sample needs "
                f"sequence+1={sequence + 1}; change the split, shorten the sequence, or give more "
                "text"
            )

        def build() -> dict[str, np.ndarray]:
            return vars(build_indices(
                lengths, first=first, sequence=sequence, samples=samples, seed=seed
            ))  # fmt: skip

        description = {
            "kind": "Megatron-LM GPT indices", "sequence": sequence, "samples": samples,
            "seed": seed, "first": first, "lengths": _hash(lengths),
        }  # fmt: skip
        self.indices = Indices(**cached_arrays(cache, description, build))

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __reduce__(self):  # another process maps the files again
        return self._again, ()

    def __getitem__(self, index: int) -> np.ndarray:
        sample = self.indices.shuffle[_within(index, len(self), self.data.prefix)]
        (place, offset), (last, last_offset) = self.indices.sample[sample : sample + 2].tolist()
        tokens, data = self.data.tokens, self.data
        out, filled = np.empty(self.sequence + 1, np.int32), 0
        for at in range(place, last + 1):
            sequence = self.indices.document[at]
            start = data.first_token(sequence)
            end = start + (last_offset + 1 if at == last else int(data.lengths[sequence]))
            start, offset = start + offset, 0
            out[filled : filled + end - start] = tokens[start:end]
            filled += end - start
        if self._vocab is not None and (out.max() >= self._vocab or out.min() < 0):
            wrong = out[(out >= self._vocab) | (out < 0)][0]
            raise UserError(
                f"{self.data.prefix}: sample {index} holds token {wrong}, outside of the "
                f"vocabulary of {self._vocab:,}; use the tokenizer that made the dataset"
            )
        return out


class BlendedDataset:
    """Samples of several datasets in the proportion of `weights`, or all of them.

    weights: about `samples` in that proportion, each dataset over as many epochs as it takes.
    None: every sample of each dataset's epoch once, in proportion throughout; samples is then
    None. The other options are those of GPTDataset.
    """

    def __init__(
        self,
        prefixes: Sequence[str | os.PathLike],
        *,
        sequence: int,
        weights: Sequence[float] | None = None,
        samples: int | None = None,
        seed: int = 0,
        split: str = DEFAULT_SPLIT,
        part: str = "train",
        cache: str | os.PathLike | None = None,
        vocab: int | None = None,
    ):
        """Raises UserError as GPTDataset does, and for weights that are not above 0."""
        _check(sequence=sequence, samples=samples, seed=seed)
        if (weights is None) != (samples is None):
            raise UserError(
                "a blend takes weights and samples together, or neither of them for every sample "
                "of each dataset"
            )
        shares = None if weights is None else _shares(weights, prefixes)
        wanted = [None] * len(prefixes)
        if shares is not None:
            wanted = [request_samples(samples, share) for share in shares.tolist()]
        self.datasets = [
            GPTDataset(
                prefix, sequence=sequence, seed=seed, samples=want, split=split, part=part,
                cache=cache, vocab=vocab,
            )
            for prefix, want in zip(prefixes, wanted, strict=True)
        ]  # fmt: skip
        _require_same_tokenizer([dataset.data for dataset in self.datasets])
        self.sequence, self.part = sequence, part
        self._again = functools.partial(
            BlendedDataset, list(prefixes), sequence=sequence, weights=weights, samples=samples,
            seed=seed, split=split, part=part, cache=cache, vocab=vocab,
        )  # fmt: skip
        sizes = [len(dataset) for dataset in self.datasets]
        description = {"kind": "Megatron-LM blend", "samples": samples}
        if shares is None:
            description["sizes"] = sizes
        else:
            description["weights"] = [share.hex() for share in shares.tolist()]

        def build() -> dict[str, np.ndarray]:
            # Shares are normalized a second time, as Megatron-LM does: it may change a last bit.
            walked = blend_all(sizes) if shares is None else blend_by_weights(shares, samples)
            return dict(zip(("dataset", "sample"), walked, strict=True))

        arrays = cached_arrays(cache, description, build)
        self.dataset_index, self.sample_index = arrays["dataset"], arrays["sample"]
        for index, size in enumerate(sizes):
            taken = int(np.count_nonzero(self.dataset_index == index))
            if taken > size:
                raise UserError(
                    f"the blend takes {taken:,} samples of {prefixes[index]}, which was asked for "
                    f"{size:,}; give it a larger weight"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __reduce__(self):
        return self._again, ()

    def __getitem__(self, index: int) -> np.ndarray:
        index = _within(index, len(self), "the blend")
        return self.datasets[self.dataset_index[index]][int(self.sample_index[index])]


def make_batch(
    source: SampleSource, consumed: int, rows: int, *, packed_at: int | None = None
) -> dict[str, np.ndarray]:
    """The `rows` (B) samples after the first `consumed`.

    tokens int32 [B, S], targets int32 [B, S] (the tokens one place on) and weights float32 [B, S],
    each target's weight in the loss, here 1. With `packed_at`, the end-of-document token, also
    segments and positions of `pack_documents`.
    """
    rows_BT = np.stack([source[index] for index in range(consumed, consumed + rows)])
    tokens, targets = rows_BT[:, :-1].copy(), rows_BT[:, 1:].copy()
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    if packed_at is not None:
        batch["segments"], batch["positions"] = pack_documents(tokens, packed_at)
    return batch


def pack_documents(tokens: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), int32 [B, S]: which of the row's documents a token of `tokens` [B, S]
    belongs to, from 0, and its place therein. A document ends with the token `eod`.

    As Megatron-LM's reset of attention mask and positions: attention is to stay in a segment.
    """
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int32), (places - starts).astype(np.int32)


def _within(index: int, length: int, what: str) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {what}, which has {length:,}; ask for more samples")
    return index


def _check(*, sequence: int, samples: int | None, seed: int) -> None:
    if sequence < 1:
        raise UserError(f"sequence={sequence} must be at least 1")
    if samples is not None and samples < 1:
        raise UserError(f"samples={samples} must be at least 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must lie between 0 and 2^32 - 1")


def _shares(weights: Sequence[float], prefixes: Sequence) -> np.ndarray:
    if len(weights) != len(prefixes):
        raise UserError(f"{len(weights)} weights are not one for each of {len(prefixes)} datasets")
    shares = normalize_weights(weights)
    if (shares == 0).any():
        name = prefixes[int(np.argmin(shares))]
        raise UserError(f"{name} has weight 0; leave it out of the blend")
    return shares


def _require_same_tokenizer(datasets: list[IndexedDataset]) -> None:
    known = [dataset.identity for dataset in datasets if dataset.identity]
    for dataset in datasets:
        if known:
            dataset.require_tokenizer(known[0])


def _hash(lengths: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(lengths).data).hexdigest()
