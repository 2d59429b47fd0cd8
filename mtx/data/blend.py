"""Several corpora as one: which sample of which dataset each sample of a blend is.

Megatron-LM's choice is greedy: the next sample comes from the dataset that is furthest behind its
share. One loop over the samples would take minutes for a long run. But two walks that differ by a
few samples soon make the same choices: so we start walks at many places at once from guessed
counts, and keep the result only if each walk ends with the counts that the next one began with; it
is then equal to that of one long walk, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

import numpy as np

from mtx.data.cache import Arrays, cached_arrays
from mtx.data.indexed import is_dataset
from mtx.data.samples import require_sample
from mtx.errors import UserError
from mtx.files import Name

_WALK = 4096  # steps of a walk, at least
_LEAD = 256  # steps that a walk takes before its first that counts, plus 64 per dataset
_MOST_WALKS = 8192


def read_blend(names: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) from names such as "0.7 corpus 0.3 code", as Megatron-LM's users write
    them. Without weights, all names are prefixes and the weights are None."""
    weights = {}  # by place
    for place, name in enumerate(names):
        with contextlib.suppress(ValueError):
            if not os.path.exists(name) and not is_dataset(name):
                weights[place] = float(name)
    if not weights:
        return list(names), None
    if len(names) % 2 or not {*range(0, len(names), 2)} <= {*weights}:
        raise UserError(
            "weights and datasets must take turns, as in 0.7 corpus 0.3 code, and not "
            f"{_listed(names)}"
        )
    return list(names[1::2]), [weights[place] for place in range(0, len(names), 2)]


def normalize_weights(weights: Sequence[float]) -> np.ndarray:
    """`weights` scaled to add up to 1, float64. UserError if they are negative or all zero."""
    values = np.array(weights, np.float64)
    if not len(values) or not np.isfinite(values).all() or (values < 0).any():
        raise UserError(f"weights={_listed(weights)} must be numbers of at least 0")
    if values.sum() == 0:
        raise UserError(f"weights={_listed(weights)} sum to zero; give a dataset a weight above 0")
    return values / values.sum()


def request_samples(samples: int, weight: float) -> int:
    """How many samples a blend of `samples` asks of a dataset of this weight: its share plus half a
    percent, since the greedy choice may take a few more than the share."""
    return math.ceil(math.ceil(samples * weight) * 1.005)


def shares_of(weights: Sequence[float], datasets: Sequence) -> np.ndarray:
    """The normalized weights of `datasets`; UserError if one of them is 0."""
    if len(weights) != len(datasets):
        raise UserError(f"{len(weights)} weights are not one for each of {len(datasets)} datasets")
    shares = normalize_weights(weights)
    if (shares == 0).any():
        raise UserError(f"{datasets[int(np.argmin(shares))]} has weight 0; leave it out")
    return shares


class BlendedDataset:
    """Samples of several datasets in the proportions of `weights`, or all of their samples.

    weights: `samples` samples in these proportions, each dataset over as many epochs as it takes.
    None: every sample of each dataset's epoch once, in proportion throughout; samples is then None.
    `endless`: every dataset is endless, and the first samples of a blend by weights are the same
    whatever `samples` is. cache: see `cached_arrays`.
    """

    def __init__(
        self,
        datasets: Sequence,
        weights: Sequence[float] | None = None,
        *,
        samples: int | None = None,
        endless: bool = True,
        cache: Name | None = None,
    ):
        """datasets: GPTDataset or BertSamples. Raises UserError for weights that are not above 0,
        and for weights without samples or samples without weights."""
        if (weights is None) != (samples is None):
            raise UserError("a blend takes weights and samples together, or neither of them")
        self.datasets, self.sequence = datasets, datasets[0].sequence
        self.part_tokens = sum(dataset.part_tokens for dataset in datasets)
        sizes, shares = [len(dataset) for dataset in datasets], []
        description: dict = {"kind": "Megatron-LM blend", "samples": samples}
        if weights is None:
            description["sizes"] = sizes
        else:
            shares = shares_of(weights, datasets).tolist()
            description["weights"] = [share.hex() for share in shares]

        def build() -> Arrays:
            # Shares are normalized a second time, as Megatron-LM does; it may change the last bit.
            walked = blend_all(sizes) if samples is None else blend_by_weights(shares, samples)
            return {"dataset": walked[0], "sample": walked[1]}

        arrays = cached_arrays(cache, description, build)
        self._dataset, self._sample = arrays["dataset"], arrays["sample"]
        self._all_endless = endless and not shares
        epochs = (int(size / share) for size, share in zip(sizes, shares))
        self.distinct = min([len(self), *epochs])  # how many samples come before one repeats
        taken = np.bincount(self._dataset, minlength=len(sizes))
        for dataset, count, size in zip(datasets, taken.tolist(), sizes, strict=True):
            if count > size and not endless:
                raise UserError(
                    f"the blend takes {count:,} samples of {dataset}, which was asked for "
                    f"{size:,}; give it a larger weight"
                )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int):
        epoch = 0
        if self._all_endless and index >= 0:
            epoch, index = divmod(index, len(self))
        index = require_sample(index, len(self), "the blend")
        dataset = self.datasets[self._dataset[index]]
        return dataset[int(self._sample[index]) + epoch * len(dataset)]


def blend_by_weights(weights: Sequence[float], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset int16 [samples], sample in it int64 [samples]) of a blend by `weights`.

    Step i takes the dataset with the largest weight * max(i, 1) - samples so far, the first of
    equals.
    """
    return _walk(normalize_weights(weights), None, samples)


def blend_all(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Like `blend_by_weights`, but every sample of datasets of these sizes exactly once."""
    total = sum(sizes)
    return _walk(normalize_weights(sizes), np.array(sizes, np.int64), total)


def _walk(
    weights: np.ndarray, sizes: np.ndarray | None, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    if len(weights) > np.iinfo(np.int16).max:
        raise UserError(f"{len(weights):,} datasets are too many for a blend; merge some of them")
    walks = max(1, min(_MOST_WALKS, samples // _WALK))
    steps = samples // walks  # of each walk; the remainder is walked at the end
    first = np.arange(walks, dtype=np.int64) * steps
    lead = min(_LEAD + 64 * len(weights), steps)
    before = np.maximum(first - lead, 0)  # the first walk begins at 0, without a lead
    begin, _, _ = _advance(_guess(weights, before), weights, sizes, before, lead)
    begin[0] = 0
    end = np.empty_like(begin)
    dataset, sample = np.empty((walks, steps), np.int16), np.empty((walks, steps), np.int64)
    open_walks = np.arange(walks)
    while len(open_walks):  # each round finishes a walk or more, nearly always all at once
        end[open_walks], dataset[open_walks], sample[open_walks] = _advance(
            begin[open_walks], weights, sizes, first[open_walks], steps
        )
        open_walks = 1 + np.flatnonzero((end[:-1] != begin[1:]).any(axis=1))
        begin[open_walks] = end[open_walks - 1]
    left = samples - walks * steps
    _, *tail = _advance(end[-1:], weights, sizes, np.array([walks * steps]), left)
    return np.append(dataset, tail[0]), np.append(sample, tail[1])


def _guess(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Counts [walks, datasets] after about `steps` [walks] steps: the shares, rounded down.

    A small dataset that is behind is chosen soon, but one that is ahead stays ahead for 1/weight
    steps; so the remainder goes to the large ones.
    """
    shares = np.floor(steps[:, None] * weights)
    left = np.round((steps - shares.sum(axis=1))[:, None] * np.cumsum(weights))
    return shares + np.diff(left, axis=1, prepend=0)


def _advance(
    counts: np.ndarray, weights: np.ndarray, sizes: np.ndarray | None, first: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walks `steps` steps on from step `first` [walks] and `counts` [walks, datasets]. Returns the
    counts after them (whole numbers in float64), and the dataset and sample of each step
    [walks, steps]."""
    counts, walks = np.array(counts, np.float64), np.arange(len(first))
    dataset = np.empty((len(first), steps), np.int16)
    sample = np.empty((len(first), steps), np.int64)
    behind = np.empty_like(counts)
    for step in range(steps):
        place = np.maximum(first + step, 1).astype(np.float64)
        np.multiply(place[:, None], weights, out=behind)
        behind -= counts
        if sizes is not None:
            behind[counts >= sizes] = -np.inf  # it has no samples left
        best = behind.argmax(axis=1)  # the first of equals
        dataset[:, step] = best
        sample[:, step] = counts[walks, best]
        counts[walks, best] += 1
    return counts, dataset, sample


def _listed(values: Sequence) -> str:
    shown = ", ".join(f"{value}" for value in values[:8])
    return f"({shown}{', ...' if len(values) > 8 else ''})"
