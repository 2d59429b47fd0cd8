"""Several corpora as one: which sample of which dataset each sample of a blend is.

Megatron-LM's choice is greedy: the next sample is of the dataset that is furthest behind its share.
Each choice depends on the one before, so a loop would take minutes for a long run. But the greedy
walk forgets where it began: two walks that differ by a few samples soon make the same choices. So
we start walks at many places at once from guessed counts, and keep the result only if each walk
ends in the counts that the next one began with; then it is that of one long walk, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mtx.errors import UserError

_WALK = 4096  # steps of a walk, at least
_LEAD = 256  # steps that a walk takes before its first one that counts, and 64 a dataset
_MOST_WALKS = 8192


def normalize_weights(weights: Sequence[float]) -> np.ndarray:
    """`weights` that add up to 1, float64. UserError where they are negative or all zero."""
    values = np.array(weights, np.float64)
    if not len(values) or not np.isfinite(values).all() or (values < 0).any():
        raise UserError(f"weights={_listed(weights)} must be numbers of at least 0")
    if values.sum() == 0:
        raise UserError(f"weights={_listed(weights)} sum to zero; give a dataset a weight above 0")
    return values / values.sum()


def request_samples(samples: int, weight: float) -> int:
    """What a blend of `samples` asks of a dataset of this weight: its share and half a percent,
    since the greedy choice may take a few more than the share."""
    return math.ceil(math.ceil(samples * weight) * 1.005)


def blend_by_weights(weights: Sequence[float], samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset int16 [samples], sample in it int64 [samples]) of a blend by `weights`.

    At step i it is the dataset with the largest weight * max(i, 1) - samples so far, the first of
    equals.
    """
    return _walk(normalize_weights(weights), None, samples)


def blend_all(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `blend_by_weights`, with every sample of datasets of these sizes exactly once."""
    total = sum(sizes)
    return _walk(normalize_weights(sizes), np.array(sizes, np.int64), total)


def _walk(weights: np.ndarray, sizes: np.ndarray | None, samples: int):
    if len(weights) > np.iinfo(np.int16).max:
        raise UserError(f"{len(weights):,} datasets are too many for a blend; merge some of them")
    walks = max(1, min(_MOST_WALKS, samples // _WALK))
    steps = samples // walks  # of each; what is left over is walked at the end
    first = np.arange(walks, dtype=np.int64) * steps
    lead = min(_LEAD + 64 * len(weights), steps)
    before = np.maximum(first - lead, 0)  # the first walk begins where it must, without a lead
    begin = _advance(_guess(weights, before), weights, sizes, before, lead)
    begin[:, 0] = 0
    dataset, sample = np.empty((walks, steps), np.int16), np.empty((walks, steps), np.int64)
    while True:  # each round settles at least one walk more; nearly always the first settles all
        end = _advance(begin, weights, sizes, first, steps, dataset, sample)
        if (end[:, :-1] == begin[:, 1:]).all():
            break
        begin[:, 1:] = end[:, :-1]
    left = samples - walks * steps
    tail = np.empty((1, left), np.int16), np.empty((1, left), np.int64)
    _advance(end[:, -1:], weights, sizes, np.array([walks * steps]), left, *tail)
    return (
        np.concatenate([dataset.reshape(-1), tail[0].reshape(-1)]),
        np.concatenate([sample.reshape(-1), tail[1].reshape(-1)]),
    )


def _guess(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Counts int64 [datasets, walks] after about so many steps: each dataset's share, rounded down.

    A small dataset that is behind is soon chosen, but one that is ahead stays so for 1/weight
    steps; so what is left is given to the large ones.
    """
    shares = np.floor(weights[:, None] * steps)
    left = np.round(np.cumsum(weights)[:, None] * (steps - shares.sum(axis=0)))
    return (shares + np.diff(left, axis=0, prepend=0)).astype(np.int64)


def _advance(
    counts: np.ndarray,
    weights: np.ndarray,
    sizes: np.ndarray | None,
    first: np.ndarray,
    steps: int,
    dataset: np.ndarray | None = None,
    sample: np.ndarray | None = None,
) -> np.ndarray:
    """The counts [datasets, walks] after `steps` steps from step `first` [walks] on, whose choices
    are written to `dataset` and `sample` [walks, steps] where they are given."""
    counts, walks = counts.astype(np.int64), np.arange(counts.shape[1])
    for step in range(steps):
        place = np.maximum(first + step, 1).astype(np.float64)
        best = np.zeros(len(walks), np.int64)
        most = np.full(len(walks), -np.inf)
        for index, weight in enumerate(weights):
            behind = weight * place - counts[index]
            if sizes is not None:
                behind[counts[index] >= sizes[index]] = -np.inf  # it has no more
            better = behind > most
            most = np.where(better, behind, most)
            best[better] = index
        if dataset is not None:
            dataset[:, step] = best
            sample[:, step] = counts[best, walks]
        counts[best, walks] += 1
    return counts


def _listed(values: Sequence) -> str:
    shown = ", ".join(f"{value}" for value in values[:8])
    return f"({shown}{', ...' if len(values) > 8 else ''})"
