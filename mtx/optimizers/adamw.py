"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with GPT-3's b2."""

from __future__ import annotations

STATES = 2
DEFAULTS = {"b1": 0.9, "b2": 0.95, "epsilon": 1e-8}


def make(rate, *, b1, b2, epsilon, weight_decay, mask):
    import optax

    return optax.adamw(rate, b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=mask)
