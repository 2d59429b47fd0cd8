"""Indexed datasets as samples of a fixed length, one dataset or a blend of several.

Of a given number, they are Megatron-LM's to the last index. But its order of several epochs
depends on how many samples are asked for, and a run that is made longer, or goes on with another
batch size, must not change what it has yet to read. So there is a second way, `endless`: the first
epoch is Megatron-LM's, and each one after it goes through the same samples in an order of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from mtx.data.blend import blend_all, blend_by_weights, normalize_weights, request_samples
from mtx.data.cache import cached_arrays
from mtx.data.indexed import IndexedDataset
from mtx.data.indices import Indices, build_indices
from mtx.data.samples import place_in_epoch
from mtx.data.split import DEFAULT_SPLIT, Division, SplitBy, divide
from mtx.errors import UserError
from mtx.fields import Between, checked
from mtx.sizes import DataSeed, Tokens


class GPTDataset:
    """The samples of one part of an indexed dataset, as Megatron-LM's GPTDataset gives them.

    `dataset[i]` is int32 [sequence + 1], of which the first `sequence` are inputs and the last
    `sequence` targets. `samples` asks for at least so many, over as many epochs as they take;
    None for those of one epoch. `endless`: samples is None, and beyond one epoch the next begins.
    Where Megatron-LM's split leaves train or valid without a sample, each document is cut.
    """

    def __init__(
        self,
        prefix: str | os.PathLike | IndexedDataset,
        *,
        sequence: int,
        seed: int = 0,
        samples: int | None = None,
        endless: bool = False,
        split: str = DEFAULT_SPLIT,
        split_by: SplitBy = "auto",
        part: str = "train",
        cache: str | os.PathLike | None = None,
        vocab: int | None = None,
        eod: int | None = None,
    ):
        """cache: a folder for the index arrays, to be built once; None: built now, in memory.
        vocab: every token that is given is checked to be below it. split_by: see `divide`. eod: the
        token that takes the place of the last one where a document is cut; None: nothing does.

        Raises UserError for a dataset that cannot be read, a part without a whole sample, and
        options that cannot be.
        """
        _check(sequence=sequence, samples=samples, seed=seed)
        if endless and samples is not None:
            raise ValueError(f"an endless dataset has no samples={samples}")
        self.data = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.sequence, self.part = sequence, part
        self._vocab, self._seed, self._endless = vocab, seed, endless
        self._again = functools.partial(
            GPTDataset, self.data.prefix, sequence=sequence, seed=seed, samples=samples,
            endless=endless, split=split, split_by=split_by, part=part, cache=cache, vocab=vocab,
            eod=eod,
        )  # fmt: skip
        least = None if samples is None else 1
        self._part = divide_tokens(
            self.data, part, split=split, by=split_by, sequence=sequence, least=least
        )
        self.cut, self._eod = self._part.cut is not None, eod
        first, end = self._part.first, self._part.end
        lengths = self._part.sizes(self.data.lengths[first:end])
        self.part_tokens = int(lengths.sum(dtype=np.int64))

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
        """Samples; of one epoch, where it is endless."""
        return len(self.indices.shuffle)

    @property
    def distinct(self) -> int:
        """The samples before one is given twice, where it is endless."""
        return len(self)

    def __reduce__(self):  # another process maps the files again
        return self._again, ()

    def __getitem__(self, index: int) -> np.ndarray:
        if self._endless and index >= len(self):
            index = place_in_epoch(index, len(self), self._seed)
        sample = self.indices.shuffle[_within(index, len(self), self.data.prefix)]
        (place, offset), (last, last_offset) = self.indices.sample[sample : sample + 2].tolist()
        tokens = self.data.tokens
        out, filled = np.empty(self.sequence + 1, np.int32), 0
        for at in range(place, last + 1):
            sequence = self.indices.document[at]
            begin, stop = self._tokens_of(sequence)
            end = begin + last_offset + 1 if at == last else stop
            start, offset = begin + offset, 0
            out[filled : filled + end - start] = tokens[start:end]
            filled += end - start
            if self.cut and self._eod is not None and start < end == stop:
                out[filled - 1] = self._eod
        if self._vocab is not None and (out.max() >= self._vocab or out.min() < 0):
            wrong = out[(out >= self._vocab) | (out < 0)][0]
            raise UserError(
                f"{self.data.prefix}: sample {index} holds token {wrong}, outside of the "
                f"vocabulary of {self._vocab:,}; use the tokenizer that made the dataset"
            )
        return out

    def _tokens_of(self, sequence: int) -> tuple[int, int]:
        """(first, end) of the tokens of a sequence that are the part's."""
        first, length = self.data.first_token(sequence), int(self.data.lengths[sequence])
        if not self.cut:
            return first, first + length
        low, high = self._part.within(length)
        return first + int(low), first + int(high)


class BlendedDataset:
    """Samples of several datasets in the proportion of `weights`, or all of them.

    weights: about `samples` in that proportion, each dataset over as many epochs as it takes.
    None: every sample of each dataset's epoch once, in proportion throughout; samples is then
    None. `endless`: each dataset is, and of a blend by weights the first samples are the same
    whatever `samples` is. The other options are those of GPTDataset.
    """

    def __init__(
        self,
        prefixes: Sequence[str | os.PathLike | IndexedDataset],
        *,
        sequence: int,
        weights: Sequence[float] | None = None,
        samples: int | None = None,
        endless: bool = False,
        seed: int = 0,
        split: str = DEFAULT_SPLIT,
        split_by: SplitBy = "auto",
        part: str = "train",
        cache: str | os.PathLike | None = None,
        vocab: int | None = None,
        eod: int | None = None,
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
        if shares is not None and not endless:
            wanted = [request_samples(samples, share) for share in shares.tolist()]
        self.datasets = [
            GPTDataset(
                prefix, sequence=sequence, seed=seed, samples=want, endless=endless,
                split=split, split_by=split_by, part=part, cache=cache, vocab=vocab, eod=eod,
            )
            for prefix, want in zip(prefixes, wanted, strict=True)
        ]  # fmt: skip
        _require_same_tokenizer([dataset.data for dataset in self.datasets])
        self.sequence, self.part = sequence, part
        self._again = functools.partial(
            BlendedDataset, list(prefixes), sequence=sequence, weights=weights, samples=samples,
            endless=endless, seed=seed, split=split, split_by=split_by, part=part, cache=cache,
            vocab=vocab, eod=eod,
        )  # fmt: skip
        self._shares, self._all_endless = shares, endless and shares is None
        self.part_tokens = sum(dataset.part_tokens for dataset in self.datasets)
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
        for index, size in enumerate([] if endless else sizes):
            taken = int(np.count_nonzero(self.dataset_index == index))
            if taken > size:
                raise UserError(
                    f"the blend takes {taken:,} samples of {prefixes[index]}, which was asked for "
                    f"{size:,}; give it a larger weight"
                )

    def __len__(self) -> int:
        """Samples; of one epoch, where it is endless and without weights."""
        return len(self.dataset_index)

    @property
    def distinct(self) -> int:
        """The samples before one is given twice, where it is endless."""
        if self._shares is None:
            return len(self)
        sizes = zip(self.datasets, self._shares.tolist(), strict=True)
        return min(len(self), *(int(len(dataset) / share) for dataset, share in sizes))

    def __reduce__(self):
        return self._again, ()

    def __getitem__(self, index: int) -> np.ndarray:
        epoch = 0
        if self._all_endless and index >= 0:
            epoch, index = divmod(index, len(self))
        index = _within(index, len(self), "the blend")
        dataset = self.datasets[self.dataset_index[index]]
        return dataset[int(self.sample_index[index]) + epoch * len(dataset)]


def divide_tokens(
    data: IndexedDataset,
    part: str,
    *,
    split: str,
    by: SplitBy,
    sequence: int,
    least: int | None = None,
) -> Division:
    """What a part has of a dataset's sequences: see `divide`. UserError where it has fewer than
    `least` tokens, by default those of one sample."""
    least = sequence + 1 if least is None else least
    division = divide(
        data.lengths, split, part, by=by,
        serves=lambda lengths: lengths.sum(dtype=np.int64) >= least,
    )  # fmt: skip
    sizes = division.sizes(data.lengths[division.first : division.end])
    tokens = int(sizes.sum(dtype=np.int64))
    if tokens >= least:
        return division
    shorter = f"sequence={tokens - 1} or less, " if tokens > 1 else ""
    raise UserError(
        f"{data.prefix}: part {part!r} of split={split!r} has {tokens:,} of {len(data.tokens):,} "
        f"tokens in {len(data):,} sequences, but one sample needs sequence+1={sequence + 1}; use "
        f"{shorter}a split that gives it more, {'split_by=tokens, ' if by == 'documents' else ''}"
        "or more text"
    )


def _within(index: int, length: int, what: str) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {what}, which has {length:,}; ask for more samples")
    return index


def _check(*, sequence: int, samples: int | None, seed: int) -> None:
    checked("sequence", sequence, Tokens)
    checked("samples", samples, Annotated[int, Between(1, 2**40)] | None)
    checked("seed", seed, DataSeed)


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
