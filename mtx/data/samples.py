"""A flat array of tokens to batches: which sample stands in which row of which step.

B batch rows · S sequence. Sample i is tokens[i*S : i*S + S + 1]: neighbours share one token, so
that every token but the first is a target exactly once (Megatron-LM's way). What remains after
the last full sample is left out.
"""

from __future__ import annotations

import functools

import numpy as np


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count), int64 [count], that depends on `count` and `key` only.

    It sorts raw draws, whose stream numpy guarantees; `Generator.permutation` may change between
    numpy versions, and a resumed run or a second host must see the same order.
    Keys that differ only in trailing zeros are the same key.
    """
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(draws, kind="stable")


class Samples:
    """Random access to the samples of one text, and the order in which epochs visit them."""

    def __init__(self, tokens: np.ndarray, *, sequence: int, seed: int):
        """`tokens` [at least sequence + 1], of any integer type; kept, not copied."""
        windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence + 1)
        self.tokens = tokens
        self._samples = windows[::sequence]  # [samples, S + 1], a view
        self._seed = seed
        # The running epoch and the next, which a batch may straddle.
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._samples)

    def batch(self, step: int, global_batch: int) -> dict[str, np.ndarray]:
        """Batch `step` of `global_batch` rows: see `take` for what it holds.

        Steps consume one endless sequence of samples, each epoch in its own order: a pure
        function of (seed, step, global_batch), so a run resumes anywhere and every process,
        under every layout, computes the same batch.
        """
        if step < 0 or global_batch < 1:
            raise ValueError(f"{step=} must be at least 0 and {global_batch=} at least 1")
        epochs, places = np.divmod(step * global_batch + np.arange(global_batch), len(self))
        indices = np.empty(global_batch, np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._order(int(epoch))[places[rows]]
        return self.take(indices)

    def first_batches(self, count: int, global_batch: int) -> list[dict[str, np.ndarray]]:
        """At most `count` batches of the first samples, each sample once and unshuffled.

        Where the text has fewer, there are fewer batches, and the last is filled up with rows of
        weight 0.
        """
        batches = []
        last = min(count * global_batch, len(self))
        for first in range(0, last, global_batch):
            batch = self.take(np.arange(first, min(first + global_batch, last)))
            missing = global_batch - len(batch["tokens"])
            batches.append({k: np.pad(v, ((0, missing), (0, 0))) for k, v in batch.items()})
        return batches

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at `indices` [B]: tokens int32 [B, S], targets int32 [B, S] (the tokens
        one place on) and weights float32 [B, S], each target's weight in the loss, here 1."""
        rows = self._samples[indices].astype(np.int32)
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": np.ones(tokens.shape, np.float32),
        }

    def _shuffle(self, epoch: int) -> np.ndarray:
        return shuffled(len(self), self._seed, epoch)
