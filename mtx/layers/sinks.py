"""Sinks: one number per head that enters the sum of its softmax as the score of one more key, whose
value is 0 (gpt-oss; Xiao et al. 2023). The computation for the other keys does not change.

Legend: B rows · S sequence · h heads, or g of keys and values times R · V head size of values
"""

from __future__ import annotations

import jax.numpy as jnp


def with_sinks(o_BhSV, logsumexp_BhS, sinks_h):
    """(output, log of the sum of exponentials), float32, with the sinks; unchanged if there are no
    sinks. Heads may be [g, R]."""
    if sinks_h is None:
        return o_BhSV, logsumexp_BhS
    whole_BhS = jnp.logaddexp(logsumexp_BhS, by_heads(sinks_h, logsumexp_BhS))
    return o_BhSV * jnp.exp(logsumexp_BhS - whole_BhS)[..., None], whole_BhS


def sinks_gradient(sinks_h, logsumexp_BhS, along_BhS):
    """dsinks_h. logsumexp: with the sinks. along: the sum over V of output times its gradient."""
    p_BhS = jnp.exp(jnp.minimum(by_heads(sinks_h, logsumexp_BhS) - logsumexp_BhS, 0))
    d_h = -(p_BhS * along_BhS).sum(axis=(0, -1)).reshape(sinks_h.shape)
    return d_h.astype(sinks_h.dtype)


def by_heads(sinks_h, like_BhS):
    """[h, 1] or [g, R, 1], float32"""
    return sinks_h.astype(jnp.float32).reshape(like_BhS.shape[1:-1])[..., None]
