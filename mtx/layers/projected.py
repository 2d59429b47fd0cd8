"""Queries, keys and values as a projection gives them, and with heads first, as products take them.

They are (qkv_BSnhK,) with n = 3, (q_BShK, kv_BSngK) with n = 2, or (q_BShK, k_BSgK, v_BSgV), which
may be followed by sinks_h (`mtx.layers.sinks`).

Legend: B rows · S sequence (T: keys) · h heads of queries · g of keys and values · R = h / g ·
K head size (V: of values, if different)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mtx.layers.sinks import sinks_gradient

Projected = tuple[jax.Array, ...]


def separate(projected: Projected):
    """(q_BShK, k_BSgK, v_BSgV)"""
    if len(projected) == 1:
        return tuple(projected[0][:, :, n] for n in range(3))
    if len(projected) == 2:
        q_BShK, kv_BSngK = projected
        return q_BShK, kv_BSngK[:, :, 0], kv_BSngK[:, :, 1]
    return projected[:3]


def keys_and_values(projected: Projected):
    """kv_BSngK, n = 2, both of the same size"""
    if len(projected) == 1:
        return projected[0][:, :, 1:]
    return projected[1] if len(projected) == 2 else jnp.stack(projected[1:3], axis=2)


def sinks_of(projected: Projected):
    """sinks_h, or None"""
    return projected[3] if len(projected) > 3 else None


def heads_first(projected: Projected):
    """(q_BgRSK, k_BgSK, v_BgSV): one copy here, instead of one for every block and product."""
    if len(projected) == 1:
        q_BgSK, k_BgSK, v_BgSK = jnp.transpose(projected[0], (2, 0, 3, 1, 4))
        return q_BgSK[:, :, None], k_BgSK, v_BgSK
    if len(projected) == 2:
        k_BgSK, v_BgSV = jnp.transpose(projected[1], (2, 0, 3, 1, 4))
    else:
        k_BgSK, v_BgSV = (jnp.swapaxes(a, 1, 2) for a in projected[1:3])
    return queries_first(projected[0], k_BgSK.shape[1]), k_BgSK, v_BgSV


def queries_first(q_BShK, groups: int):
    """q_BgRSK"""
    return in_groups(jnp.swapaxes(q_BShK, 1, 2), groups)


def in_groups(a_Bh, groups: int):
    """[B, h, ...] -> [B, g, R, ...]"""
    return a_Bh.reshape(a_Bh.shape[0], groups, -1, *a_Bh.shape[2:])


def in_a_row(a_BgR):
    """[B, g, R, ...] -> [B, h, ...]"""
    return a_BgR.reshape(a_BgR.shape[0], -1, *a_BgR.shape[3:])


def positions_first(a_BgRSK):
    """a_BShK"""
    return jnp.swapaxes(in_a_row(a_BgRSK), 1, 2)


def projected_like(
    projected: Projected, dq_BShK, dk_BSgK, dv_BSgK, logsumexp_Bh, along_Bh
) -> Projected:
    """Gradients in the order and type of `projected`. logsumexp, along: as for `sinks_gradient`,
    with heads as [h] or [g, R]."""
    dq_BShK, dk_BSgK, dv_BSgK = (d.astype(projected[0].dtype) for d in (dq_BShK, dk_BSgK, dv_BSgK))
    if len(projected) == 1:
        return (jnp.stack([dq_BShK, dk_BSgK, dv_BSgK], axis=2),)
    if len(projected) == 2:
        return dq_BShK, jnp.stack([dk_BSgK, dv_BSgK], axis=2)
    dsinks = (sinks_gradient(sinks_h, logsumexp_Bh, along_Bh) for sinks_h in projected[3:])
    return dq_BShK, dk_BSgK, dv_BSgK, *dsinks


def projected_like_blocks(
    projected: Projected, dq_BgRSK, dk_BgKS, dv_BgKS, *sums_BgRS
) -> Projected:
    """`projected_like`, for gradients in the order in which blocks give them."""
    dk_BSgK, dv_BSgK = (jnp.transpose(d, (0, 3, 1, 2)) for d in (dk_BgKS, dv_BgKS))
    return projected_like(projected, positions_first(dq_BgRSK), dk_BSgK, dv_BSgK, *sums_BgRS)
