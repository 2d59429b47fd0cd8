"""Training batches, read ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mtx.data.batches import Batch, Corpus

_THREADS = 2
_AHEAD = 4  # batches


@contextmanager
def read_ahead(
    corpus: Corpus,
    consumed: int,
    rows: int,
    *,
    local: Sequence[int] | None = None,
    threads: int = _THREADS,
    ahead: int = _AHEAD,
) -> Iterator[Iterator[Batch]]:
    """The batches of `rows` samples after the first `consumed`, one after the other.

    Those of `corpus.batch`, of which `ahead` are read by `threads` of this process before they are
    asked for, by Grain: other processes would read no faster, as a sample is a copy from a mapped
    file, and would have to send it. Raises what `corpus.batch` raises.
    """
    import grain  # loads JAX, which this package does not need elsewhere

    batches = grain.MapDataset.range(2**62 // rows).map(
        lambda step: corpus.batch(consumed + int(step) * rows, rows, local)
    )
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        yield iterator
    finally:
        iterator.close()
