"""The loss over a sharded vocabulary; tests of the step compare it with the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.config import Layout
from mtx.sharding.mesh import Axes
from mtx.sharding.vocab import vocab_losses

B, S, D = 4, 64, 48


def gradients(dtype, tokens, vocab):
    """Gradients of the mean loss over `tokens` with respect to x and to the table, in float64."""
    random = np.random.default_rng(0)
    x_BSD, table_VD = random.normal(size=(B, S, D)), random.normal(size=(vocab, D)) / 4
    targets_BS = random.integers(vocab, size=(B, S))

    def loss(x_BSD, table_VD):
        return vocab_losses(x_BSD, table_VD, targets_BS, vocab, Axes.of(Layout())).sum() / tokens

    # The values themselves are bfloat16 numbers, so that only gradients are rounded.
    inputs = (jnp.asarray(a, jnp.bfloat16).astype(dtype) for a in (x_BSD, table_VD))
    return [np.asarray(g, np.float64) for g in jax.grad(loss, argnums=(0, 1))(*inputs)]


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(1, 160), (3, 160), (48, 160), (6 << 20, 160), (3, 40), (6 << 20, 40)]
)
def test_the_mean_over_the_tokens_is_not_rounded_to_the_compute_type(tokens, vocab):
    """1/3 in bfloat16 is 0.2 % too large: a whole gradient would be, and no sum averages it out."""
    both = (gradients(dtype, tokens, vocab) for dtype in ("bfloat16", "float32"))
    for got, want in zip(*both, strict=True):
        assert (got * want).sum() / (want * want).sum() == pytest.approx(1, abs=5e-4)
