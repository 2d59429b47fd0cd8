"""The next token of a text, drawn from a model's logits.

On the host and in float64. Every text has its own stream of random numbers, so that it is the same
on every layout and with any other texts.

V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtx.errors import UserError

_LIKELY = 2**10, 2**14  # how many tokens to look for the nucleus in first


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    The temperature is applied first, then the `top_k` most likely tokens are kept, then, with their
    probabilities normalised, the fewest most likely ones that have `top_p` together (Holtzman et
    al. 2020). Of equally likely tokens the lower id comes first.

    Raises UserError for a value outside its range.
    """

    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0  # 1: all tokens

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature={self.temperature} must be a number from 0 (the most likely token) up"
            )
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie above 0 and be at most 1 (1: all tokens)")

    @property
    def greedy(self) -> bool:
        """Whether it always takes the most likely token, and needs no random number."""
        return self.temperature == 0 or self.top_k == 1

    def distribution(self, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids that may be drawn, ascending; their probabilities, float64). Raises UserError if a
        logit is NaN or +inf, or if none is finite; -inf means probability 0."""
        largest = logits_V.max()
        if not np.isfinite(largest):
            raise UserError(
                f"the model's largest logit is {largest}: its parameters are not finite, or their "
                "values overflow its compute type; use another checkpoint, or bfloat16"
            )
        if self.greedy:
            return np.array([logits_V.argmax()]), np.ones(1)
        with np.errstate(over="ignore"):  # far below the largest: exp(-inf) = 0
            scaled_V = (logits_V.astype(np.float64) - largest) / self.temperature
        ids = _most_likely(scaled_V, self.top_k) if self.top_k else np.arange(len(scaled_V))
        weights = np.exp(scaled_V[ids])
        if self.top_p < 1:
            kept = _nucleus(weights, self.top_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights / weights.sum()

    def draw(self, logits_V: np.ndarray, stream: np.random.Generator) -> int:
        """A token's id, drawn from `distribution`; takes one random number, or none if greedy."""
        ids, probabilities = self.distribution(logits_V)
        if self.greedy:
            return int(ids[0])
        cumulative = probabilities.cumsum()
        place = np.searchsorted(cumulative, stream.random() * cumulative[-1], side="right")
        return int(ids[min(place, len(ids) - 1)])


def _most_likely(values_V: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest values, ascending; of equal values the first."""
    if count >= len(values_V):
        return np.arange(len(values_V))
    least = np.partition(values_V, -count)[-count]
    above, equal = np.flatnonzero(values_V > least), np.flatnonzero(values_V == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """The places, ascending, of the fewest largest weights that sum to at least `share` of all."""
    wanted = share * weights.sum()
    for count in (*_LIKELY, len(weights)):  # a few are sorted quickly, and mostly enough
        places = _most_likely(weights, count)
        places = places[np.argsort(-weights[places], kind="stable")]
        total = weights[places].cumsum()
        if total[-1] >= wanted:
            break
    return np.sort(places[: 1 + np.searchsorted(total, wanted)])
