"""Which tokens of a corpus are in which sample: Megatron-LM's GPT dataset, in numpy alone.

The corpus' sequences ("documents" in GPT's datasets) are visited epoch after epoch in random order
and joined; sample i is tokens [i*S, i*S + S] of that stream: S + 1 tokens, overlapping by one. The
samples are then visited in random order. Three arrays describe this:

    document [epochs * sequences]   the order of the sequences
    sample   [samples + 1, 2]       where sample i begins: place in `document`, token within it
    shuffle  [samples]              the sample that the i-th request gets

All three are those of Megatron-LM (core, GPTDataset) for the same seed, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_LAST_EPOCH_SHARE = 0.80  # the last epoch is shuffled by itself if less of it is used
_BLOCK = 2**22  # samples whose places are found at once


@dataclass(frozen=True, kw_only=True, eq=False)
class Indices:
    """The arrays described above; int32 or int64, int32 or int64, and uint32 or int64."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


def count_epochs(tokens: int, *, sequence: int, samples: int | None) -> int:
    """The fewest epochs of `tokens` that hold `samples` of `sequence` + 1, overlapping by one."""
    return 1 if samples is None else max(1, -(-(samples * sequence + 1) // tokens))


def build_indices(
    lengths: np.ndarray, *, first: int = 0, sequence: int, samples: int | None = None, seed: int
) -> Indices:
    """The indices of sequences `first`, `first + 1`, ... with these `lengths` [sequences], for at
    least `samples`, to the end of an epoch; None: for one. ValueError if there are no tokens."""
    lengths = np.array(lengths, np.int64)
    tokens = int(lengths.sum())
    if tokens == 0:
        raise ValueError("no tokens")
    epochs = count_epochs(tokens, sequence=sequence, samples=samples)
    total = (epochs * tokens - 1) // sequence
    alone = first_of_last_epoch(tokens, epochs=epochs, sequence=sequence, samples=samples)
    random = np.random.RandomState(seed)  # its stream is frozen, and it is what Megatron uses
    document = _document_index(len(lengths), epochs, random, split=alone is not None)
    sample = _sample_index(lengths, document, sequence=sequence, total=total)
    if first + len(lengths) > np.iinfo(document.dtype).max:
        document = document.astype(np.int64)
    document += first
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(total, dtype=dtype)
    shuffle = _shuffle_parts(shuffle, total if alone is None else alone, random)
    return Indices(document=document, sample=sample, shuffle=shuffle)


def first_of_last_epoch(
    tokens: int, *, epochs: int, sequence: int, samples: int | None
) -> int | None:
    """The number of samples before the last epoch, if that epoch is shuffled by itself because less
    than 80 % of it is wanted; otherwise None."""
    if epochs == 1 or samples is None:
        return None
    before = ((epochs - 1) * tokens - 1) // sequence
    an_epoch = (tokens - 1) // sequence
    return before if samples - before < int(_LAST_EPOCH_SHARE * an_epoch) else None


def _document_index(
    count: int, epochs: int, random: np.random.RandomState, *, split: bool
) -> np.ndarray:
    """[epochs * count]: all epochs shuffled together, or with `split` the last one by itself."""
    index = np.tile(np.arange(count, dtype=np.int32), epochs)
    return _shuffle_parts(index, (epochs - 1) * count if split else len(index), random)


def _sample_index(
    lengths: np.ndarray, document: np.ndarray, *, sequence: int, total: int
) -> np.ndarray:
    """[total + 1, 2]: for token i * sequence of the stream, the place in `document` of the sequence
    that holds it, and its place in that. Row 0 is (0, 0), even if that sequence is empty."""
    small = len(document) <= np.iinfo(np.int32).max
    index = np.zeros((total + 1, 2), np.int32 if small else np.int64)
    in_order = lengths[document]
    ends = np.cumsum(in_order)
    for start in range(1, total + 1, _BLOCK):
        tokens = np.arange(start, min(start + _BLOCK, total + 1), dtype=np.int64) * sequence
        # The stream has more than total * sequence tokens, so every place is found.
        places = np.searchsorted(ends, tokens, side="right")
        index[start : start + _BLOCK, 0] = places
        index[start : start + _BLOCK, 1] = tokens - (ends[places] - in_order[places])
    return index


def _shuffle_parts(index: np.ndarray, cut: int, random: np.random.RandomState) -> np.ndarray:
    """Shuffles the parts of `index` before and after `cut` separately, in place."""
    for part in (index[:cut], index[cut:]) if cut < len(index) else (index,):
        random.shuffle(part)
    return index
