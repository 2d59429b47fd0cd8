"""Indexed datasets as samples of a fixed length, from one dataset or a blend of several.

For a given number of samples, they are Megatron-LM's to the last index. But Megatron-LM's order of
several epochs depends on how many samples are asked for, and a run that is made longer, or
continues with another batch size, must not change what it has yet to read. So there is a second
mode, `endless`: the first epoch is Megatron-LM's, and each later one goes through the same samples
in its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import numpy as np

from mtx.data.blend import BlendedDataset, request_samples, shares_of
from mtx.data.cache import cached_arrays, hash_of_array
from mtx.data.indexed import IndexedDataset, require_tokens
from mtx.data.indices import Indices, build_indices
from mtx.data.samples import place_in_epoch, require_sample
from mtx.data.split import DEFAULT_SPLIT, Division, SplitBy, divide
from mtx.errors import UserError
from mtx.fields import Between, checked
from mtx.files import Name
from mtx.sizes import DataSeed, Tokens

_Samples: TypeAlias = Annotated[int, Between(1, 2**40)]


class GPTDataset:
    """The samples of one part of an indexed dataset, as Megatron-LM's GPTDataset gives them.

    `dataset[i]` is int32 [sequence + 1], of which the first `sequence` are inputs and the last
    `sequence` targets. `samples`: how many there must be at least, over as many epochs as they
    take; None: those of one epoch. `endless`: samples is None, and after one epoch the next begins.
    If Megatron-LM's split leaves train or valid without a sample, each document is cut.
    """

    unit = "tokens"  # what a part has a share of

    def __init__(
        self,
        prefix: Name | IndexedDataset,
        *,
        sequence: int,
        seed: int = 0,
        samples: int | None = None,
        endless: bool = False,
        split: str = DEFAULT_SPLIT,
        split_by: SplitBy = "auto",
        part: str = "train",
        cache: Name | None = None,
        vocab: int | None = None,
        eod: int | None = None,
    ):
        """cache: see `cached_arrays`. vocab: every token that is returned is checked to be below
        it. split_by: see `divide`. eod: replaces the last token of a part's share of a document
        that is cut; None: nothing does. Raises UserError for a dataset that cannot be read, a part
        without a whole sample, and invalid options."""
        checked("sequence", sequence, Tokens)
        if samples is not None:
            checked("samples", samples, _Samples)
        checked("seed", seed, DataSeed)
        if endless and samples is not None:
            raise ValueError(f"an endless dataset has no samples={samples}")
        self.data = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.sequence, self.part = sequence, part
        self._vocab, self._seed, self._endless, self._eod = vocab, seed, endless, eod
        self._division = divide_tokens(
            self.data, part, split=split, by=split_by, sequence=sequence,
            least=None if samples is None else 1,
        )  # fmt: skip
        self.cut = self._division.cut is not None  # whether it has a share of each document
        first, lengths = self._division.first, self._division.sizes(self.data.lengths)
        self.part_tokens = int(lengths.sum(dtype=np.int64))
        description = {
            "kind": "Megatron-LM GPT indices", "sequence": sequence, "samples": samples,
            "seed": seed, "first": first, "lengths": hash_of_array(lengths),
        }  # fmt: skip
        self.indices = Indices(**cached_arrays(cache, description, lambda: vars(build_indices(
            lengths, first=first, sequence=sequence, samples=samples, seed=seed
        ))))  # fmt: skip
        self.distinct = len(self)  # how many samples come before one repeats, if endless

    def __str__(self) -> str:
        return self.data.prefix

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self.data.tokens
        out, filled = np.empty(self.sequence + 1, np.int32), 0
        for sequence, first, end in self.places(index):
            begin = self.data.first_token(sequence)
            out[filled : filled + end - first] = tokens[begin + first : begin + end]
            filled += end - first
            stop = self._division.within(int(self.data.lengths[sequence]))[1]
            if self.cut and self._eod is not None and first < end == stop:
                out[filled - 1] = self._eod
        if self._vocab is not None:
            require_tokens(out, self._vocab, f"{self.data.prefix}: sample {index}")
        return out

    def places(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Where the tokens of sample `index` are: (sequence, first, end) for each part, with first
        and end counted within the sequence."""
        if self._endless and index >= len(self):
            index = place_in_epoch(index, len(self), self._seed)
        sample = self.indices.shuffle[require_sample(index, len(self), self.data.prefix)]
        (place, offset), (last, last_offset) = self.indices.sample[sample : sample + 2].tolist()
        for at in range(place, last + 1):
            sequence = int(self.indices.document[at])
            low, high = self._division.within(int(self.data.lengths[sequence]))
            yield sequence, low + offset, low + last_offset + 1 if at == last else high
            offset = 0


def open_part(
    datasets: Sequence[Name | IndexedDataset],
    weights: Sequence[float] | None = None,
    *,
    samples: int | None = None,
    endless: bool = True,
    cache: Name | None = None,
    **options,
) -> GPTDataset | BlendedDataset:
    """One part of a dataset, or of a blend; `options` are those of GPTDataset.

    samples: of the dataset, or of a blend by weights, which asks each dataset that is not endless
    for its share. Raises UserError as the two classes do, and for datasets of different tokenizers.
    """
    if len(datasets) == 1 and weights is None:
        return GPTDataset(datasets[0], samples=samples, endless=endless, cache=cache, **options)
    wanted = [None] * len(datasets)
    if weights is not None and samples is not None:
        shares = shares_of(weights, datasets)
        wanted = wanted if endless else [request_samples(samples, one) for one in shares.tolist()]
    parts = [
        GPTDataset(dataset, samples=want, endless=endless, cache=cache, **options)
        for dataset, want in zip(datasets, wanted, strict=True)
    ]
    known = [part.data.identity for part in parts if part.data.identity]
    for part in parts if known else ():
        part.data.require_tokenizer(known[0])
    return BlendedDataset(parts, weights, samples=samples, endless=endless, cache=cache)


def divide_tokens(
    data: IndexedDataset,
    part: str,
    *,
    split: str,
    by: SplitBy,
    sequence: int,
    least: int | None = None,
) -> Division:
    """A part's share of a dataset's sequences: see `divide`. UserError if it has fewer than `least`
    tokens, by default those of one sample."""
    least = sequence + 1 if least is None else least
    division = divide(
        data.lengths, split, part, by=by,
        serves=lambda lengths: int(lengths.sum(dtype=np.int64)) >= least,
    )  # fmt: skip
    tokens = int(division.sizes(data.lengths).sum(dtype=np.int64))
    if tokens >= least:
        return division
    shorter = f"sequence={tokens - 1} or less, " if tokens > 1 else ""
    raise UserError(
        f"{data.prefix}: part {part!r} of split={split!r} has {tokens:,} of {len(data.tokens):,} "
        f"tokens in {len(data):,} sequences, but one sample needs sequence+1={sequence + 1}; use "
        f"{shorter}a split that gives it more, {'split_by=tokens, ' if by == 'documents' else ''}"
        "or more text"
    )
