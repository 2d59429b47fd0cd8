"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of a momentum. Its learning rate is 3 to 10
times smaller than AdamW's, and its weight decay larger by the same factor (their section 5)."""

from __future__ import annotations

STATES = 1
DEFAULTS = {"b1": 0.9, "b2": 0.99}


def make(rate, *, b1, b2, weight_decay, mask):
    import optax

    return optax.lion(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=mask)
