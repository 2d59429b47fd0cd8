"""Attention of some queries to some of the keys that they see, and how such parts are merged.

If a sequence is cut over devices or into chunks, a query meets its keys in parts. Each part gives
an output and the log of its sum of exponentials, from which `merge` computes those of all parts
together (Milakov and Gimelshein 2018; Liu et al. 2023). The backward pass takes the merged ones, so
that a part's gradients are those that it has in the whole.

Legend: B rows · n queries · m keys · h heads of queries · g of keys and values · K head size
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtx.layers.attend import Drops, Mask, Scores, attend, attend_backward, output_gradient
from mtx.layers.fused import BACKWARD, FORWARD
from mtx.layers.kernels import AttentionKernel
from mtx.layers.projected import positions_first, queries_first

NOTHING = -1e30  # the log of a sum over no keys: finite, so that a difference of two is a number
_QUERIES = 2048  # of a block, whose scores are n x m numbers per head
_HIDDEN = -1e9  # as `jax.nn.dot_product_attention` hides scores


class Part(NamedTuple):
    """The output for some of the keys, float32 [B, n, h, K], and the log of its sum of exponentials
    [B, h, n]."""

    output: jax.Array
    logsumexp: jax.Array


def merge(a: Part, b: Part) -> Part:
    """The part of the keys of `a` and `b` together."""
    logsumexp = jnp.logaddexp(a.logsumexp, b.logsumexp)

    def share(part: Part):
        weight_Bhn = jnp.exp(part.logsumexp - logsumexp)
        return part.output * jnp.swapaxes(weight_Bhn, 1, 2)[..., None]

    return Part(share(a) + share(b), logsumexp)


def only_if(condition, part: Part) -> Part:
    """The part if `condition` holds, otherwise one of no keys."""
    return part._replace(logsumexp=jnp.where(condition, part.logsumexp, NOTHING))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What n queries see of m keys, with the first query `offset` positions after the first key."""

    rules: Scores
    kernel: AttentionKernel
    offset: int = 0
    drops: Drops | None = None  # with "blocked" only

    def at(self, queries_1n, keys_1m) -> Pair:
        """The pair with dropout for these positions, if it has dropout."""
        if self.drops is None:
            return self
        drops = self.drops._replace(queries_S=queries_1n[0], keys_T=keys_1m[0])
        return replace(self, drops=drops)

    def forward(self, q_BnhK, k_BmgK, v_BmgK, segments) -> Part:
        """The part of these keys. segments: of queries int32 [B, n] and of keys [B, m], which see
        each other if they are equal; None: all do."""
        if self.kernel == "blocked":
            return self._blocked_forward(q_BnhK, k_BmgK, v_BmgK, segments)
        bias, rules = self._bias(q_BnhK, k_BmgK, segments), self._fused
        if self.kernel == "described":
            inputs = q_BnhK, k_BmgK, v_BmgK, *bias
            o_BnhK, logsumexp = FORWARD.bind(*inputs, causal=rules.causal, window=rules.window)
        else:
            o_BnhK, logsumexp = _cudnn().dot_product_attention(
                q_BnhK, k_BmgK, v_BmgK, *bias, return_residual=True,
                **self._cudnn_arguments(q_BnhK)
            )  # fmt: skip
        return Part(o_BnhK.astype(jnp.float32), logsumexp)

    def backward(self, q_BnhK, k_BmgK, v_BmgK, segments, whole: Part, do_BnhK) -> tuple:
        """Float32 gradients (dq_BnhK, dk_BmgK, dv_BmgK). whole: the part of all keys that the
        queries see, in the type of the values; do_BnhK: the gradient of its output."""
        if self.kernel == "blocked":
            return self._blocked_backward(q_BnhK, k_BmgK, v_BmgK, segments, whole, do_BnhK)
        bias, rules = self._bias(q_BnhK, k_BmgK, segments), self._fused
        if self.kernel == "described":
            inputs = q_BnhK, k_BmgK, v_BmgK, *bias, whole.output, whole.logsumexp, do_BnhK
            gradients = BACKWARD.bind(*inputs, causal=rules.causal, window=rules.window)
        else:
            gradients = self._cudnn_backward(q_BnhK, k_BmgK, v_BmgK, bias, whole, do_BnhK)
        return tuple(gradient.astype(jnp.float32) for gradient in gradients)

    # -- in blocks of queries ---------------------------------------------------------------------

    def _blocks(self, queries: int, segments):
        """(queries, keys, mask) of each block; keys end with the last that a query of it sees."""
        for start in range(0, queries, _QUERIES):
            block = slice(start, min(start + _QUERIES, queries))
            keys = slice(0, block.stop + self.offset if self.rules.causal else None)
            of_block = None if segments is None else (segments[0][:, block], segments[1][:, keys])
            drops = self.drops and self.drops.of(block, keys)
            yield block, keys, Mask(self.rules, start + self.offset, 0, of_block, drops)

    def _blocked_forward(self, q_BnhK, k_BmgK, v_BmgK, segments) -> Part:
        q_BgRnK = queries_first(q_BnhK, k_BmgK.shape[2])
        k_BgmK, v_BgmK = (jnp.swapaxes(a, 1, 2) for a in (k_BmgK, v_BmgK))
        parts = []
        for block, keys, mask in self._blocks(q_BnhK.shape[1], segments):
            parts.append(
                attend(q_BgRnK[:, :, :, block], k_BgmK[:, :, keys], v_BgmK[:, :, keys], mask)
            )
        o_BgRnK = jnp.concatenate([o for o, _ in parts], axis=3)
        logsumexp = jnp.concatenate([logsumexp for _, logsumexp in parts], axis=3)
        rows, _, heads, _ = q_BnhK.shape
        return Part(positions_first(o_BgRnK), logsumexp.reshape(rows, heads, -1))

    def _blocked_backward(self, q_BnhK, k_BmgK, v_BmgK, segments, whole: Part, do_BnhK):
        q_BgRnK = queries_first(q_BnhK, k_BmgK.shape[2])
        k_BgmK, v_BgmK = (jnp.swapaxes(a, 1, 2) for a in (k_BmgK, v_BmgK))
        do_BgRnK, along_BgRn = output_gradient(do_BnhK, whole.output, k_BmgK.shape[2])
        logsumexp_BgRn = whole.logsumexp.reshape(along_BgRn.shape)
        dq, dk_BgKm, dv_BgKm = [], 0.0, 0.0
        for block, keys, mask in self._blocks(q_BnhK.shape[1], segments):
            dq_BgRbK, *dkv = attend_backward(
                q_BgRnK[:, :, :, block], k_BgmK[:, :, keys], v_BgmK[:, :, keys], mask,
                logsumexp_BgRn[..., block], along_BgRn[..., block], do_BgRnK[:, :, :, block],
            )  # fmt: skip
            dq.append(dq_BgRbK)
            unseen = ((0, 0),) * 3 + ((0, k_BmgK.shape[1] - dkv[0].shape[-1]),)
            dk_BgKm, dv_BgKm = (a + jnp.pad(d, unseen) for a, d in zip((dk_BgKm, dv_BgKm), dkv))
        dk_BmgK, dv_BmgK = (jnp.transpose(d, (0, 3, 1, 2)) for d in (dk_BgKm, dv_BgKm))
        return positions_first(jnp.concatenate(dq, axis=3)), dk_BmgK, dv_BmgK

    # -- fused ------------------------------------------------------------------------------------

    @property
    def _fused(self) -> Scores:
        """The rules that the fused kernel is given; a bias does the rest."""
        shifted = self.offset != 0
        return replace(self.rules, causal=False, window=None) if shifted else self.rules

    def _bias(self, q_BnhK, k_BmgK, segments) -> tuple[jax.Array, ...]:
        """(), or the bias [B or 1, 1, n, m] that hides what the kernel's own mask does not."""
        seen = None
        if self._fused != self.rules:
            shape = q_BnhK.shape[1], k_BmgK.shape[1]
            seen = Mask(self.rules, self.offset, 0).seen((1, 1, 1, *shape))
            seen = None if seen is None else seen[:, 0]
        if segments is not None:
            same = (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
            seen = same if seen is None else seen & same
        return () if seen is None else (jnp.where(seen, 0, _HIDDEN).astype(q_BnhK.dtype),)

    def _cudnn_arguments(self, q_BnhK) -> dict[str, Any]:
        rules, kinds = self._fused, _cudnn().MaskType
        return {
            "scale": rules.scaled_by(q_BnhK.shape[-1]),
            "mask_type": kinds.CAUSAL if rules.causal else kinds.NO_MASK,
            "sliding_window_length": rules.window,
        }

    def _cudnn_backward(self, q_BnhK, k_BmgK, v_BmgK, bias, whole: Part, do_BnhK):
        arguments, cudnn = self._cudnn_arguments(q_BnhK), _cudnn()
        unused = jnp.zeros(0, q_BnhK.dtype)
        inputs = q_BnhK, k_BmgK, v_BmgK, *(bias or (unused,)), *(unused,) * 6
        takes = inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters
        newer = {"score_mod": None} if "score_mod" in takes else {}  # from jax 0.12 on
        gradients = cudnn._dot_product_attention_bwd_p_wrapper.bind(
            *inputs, whole.logsumexp, whole.output, do_BnhK, seed=42, dropout_rate=0.0,
            variadic_args=(bool(bias), False), layout=cudnn.AttentionLayout.BTNH.value,
            **arguments, **newer,
        )  # fmt: skip
        return gradients[:3]


def _cudnn() -> Any:
    """JAX's functions of cuDNN's attention, whose public interface neither returns the sums in
    float32 nor takes those of other parts."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
