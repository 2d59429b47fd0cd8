"""State-space duality (Dao and Gu 2024, section 6): the recurrence

    h <- exp(a) h + dt x B',   y = h C

in chunks of positions, by matmuls. Within a chunk it is attention with scores C B' that decay; what
each chunk adds to the state is carried from chunk to chunk.

Over `context` a device has two spans of a sequence, an early and a late one
(`mtx.sharding.sequence`), and otherwise one. What a span adds to the state, and how much it decays
it, is sent to all devices, each of which computes the states that its own spans begin with.

Decays and sums are float32. The state is not carried from one document to the next.

Legend: B rows · p spans of S positions · n chunks of Q positions that read, or T that are read ·
g groups of R heads that share B and C · K head size · N state size · i, j boundaries of chunks
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from mtx.layers.attend import product
from mtx.sharding.collectives import broadcast_from, reduce_from
from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import places, whole_sequence


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The parts of its sequences that a device has."""

    axes: Axes
    segments_BS: jax.Array | None  # int32, ascending: the documents of a row; None: there is one

    @property
    def count(self) -> int:
        """p"""
        return 1 if self.axes.context is None else 2

    def cut(self, a_BS):
        """[B, p, S, ...]"""
        return a_BS.reshape(a_BS.shape[0], self.count, -1, *a_BS.shape[2:])

    def before(self, ends_Bp):
        """For each own span, what `ends_Bp` has for the span before it; 0 before the first."""
        if self.axes.context is None:
            return jnp.zeros_like(ends_Bp)
        all_ends = whole_sequence(ends_Bp, self.axes)
        return self.own(jnp.concatenate([jnp.zeros_like(all_ends[:, :1]), all_ends[:, :-1]], 1))

    def own(self, all_Bp):
        """This device's entries of an array of all spans in the order of positions."""
        return jnp.take(all_Bp, places(self.count, self.axes), axis=1)

    def of_last(self, a):
        """On all devices, what the first device has, whose second span is the sequence's last."""
        axis = self.axes.context
        return a if axis is None else broadcast_from(a, lax.axis_index(axis) == 0, axis)

    def at(self, a_BS, places_Bw):
        """On all devices, the values at places of the whole sequence; 0 at places below 0."""
        here_BwS = places_Bw[..., None] == places(a_BS.shape[1], self.axes)
        found_Bw = jnp.einsum(
            "BwS,BS...->Bw...", here_BwS.astype(a_BS.dtype), a_BS, precision=lax.Precision.HIGHEST
        )
        return reduce_from(found_Bw, self.axes.context)

    @cached_property
    def documents_BpS(self):
        """Segments plus 1, so that all are above 0."""
        return None if self.segments_BS is None else self.cut(self.segments_BS) + 1


def convolve(a_BpS, before_Bpw, kernel_W, bias, spans: Spans):
    """silu of the causal depthwise convolution along positions, in a's type. before: the w = W - 1
    inputs before each span."""
    width, size = kernel_W.shape[0], a_BpS.shape[2]
    whole = jnp.concatenate([before_Bpw, a_BpS], axis=2)
    documents = spans.documents_BpS
    if documents is not None:
        earlier = spans.before(documents[:, :, size - (width - 1) :])
        all_documents = jnp.concatenate([earlier, documents], axis=2)
    total = bias.astype(jnp.float32)
    for n in range(width):
        part = whole[:, :, n : n + size].astype(jnp.float32)
        if documents is not None:
            same_BpS = all_documents[:, :, n : n + size] == documents
            part = jnp.where(same_BpS.reshape(*same_BpS.shape, *(1,) * (part.ndim - 3)), part, 0)
        total = total + part * kernel_W[n].astype(jnp.float32)
    return jax.nn.silu(total).astype(a_BpS.dtype)


def ssd(x_BpSgRK, dt_BpSgR, a_gR, b_BpSgN, c_BpSgN, start_BgRKN, *, chunk: int, spans: Spans):
    """(y_BpSgRK, the state after the last span, [B, g, R, K, N]), float32.

    dt: float32, at least 0; 0 leaves the state as it is. a: below 0. start: the state before the
    first span, or None. chunk: the largest Q.
    """
    size = x_BpSgRK.shape[2]
    chunk = min(chunk, size)

    def chunks(a_BpS):
        """[B, p, n, Q, ...], padded with zeros at the end"""
        padding = ((0, 0), (0, 0), (0, -size % chunk)) + ((0, 0),) * (a_BpS.ndim - 3)
        padded = jnp.pad(a_BpS, padding)
        return padded.reshape(*padded.shape[:2], -1, chunk, *padded.shape[3:])

    x, dt, b, c = map(chunks, (x_BpSgRK, dt_BpSgR, b_BpSgN, c_BpSgN))
    documents = Documents.of(spans, chunks)
    sums_BpnQgR = jnp.cumsum(dt * a_gR, axis=3)
    last_BpngR = sums_BpnQgR[:, :, :, -1]
    rest_BpnTgR = dt * jnp.exp(last_BpngR[:, :, :, None] - sums_BpnQgR)
    if documents is not None:
        rest_BpnTgR = jnp.where(documents.to_the_end[..., None, None], rest_BpnTgR, 0)
    left = (x * rest_BpnTgR[..., None]).astype(x.dtype)
    added_BpngRKN = product("BpnTgRK,BpnTgN->BpngRKN", left, b)
    states_BpigRKN = carried(added_BpngRKN, last_BpngR, start_BgRKN, documents, spans)
    y = within(x, dt, sums_BpnQgR, b, c, documents)
    read = product("BpnQgN,BpngRKN->BpnQgRK", c, states_BpigRKN[:, :, :-1].astype(c.dtype))
    decay_BpnQgR = jnp.exp(sums_BpnQgR)
    if documents is not None:
        decay_BpnQgR = jnp.where(documents.from_before[..., None, None], decay_BpnQgR, 0)
    y += read * decay_BpnQgR[..., None]
    y_BpSgRK = y.reshape(*y.shape[:2], -1, *y.shape[4:])[:, :, :size]
    return y_BpSgRK, states_BpigRKN[:, -1, -1]


def within(x, dt_BpnTgR, sums_BpnQgR, b, c, documents: Documents | None):
    """What positions read of others in the same chunk, [B, p, n, Q, g, R, K] in float32."""
    scores_BpngQT = product("BpnQgN,BpnTgN->BpngQT", c, b)
    sums_BpngRQ, dt_BpngRT = (jnp.moveaxis(a, 3, -1) for a in (sums_BpnQgR, dt_BpnTgR))
    positions = jnp.arange(x.shape[3])
    seen = positions[:, None] >= positions
    if documents is not None:
        seen = (seen & documents.same_QT)[:, :, :, None, None]
    decay = jnp.exp(jnp.where(seen, sums_BpngRQ[..., None] - sums_BpngRQ[..., None, :], -jnp.inf))
    weights = scores_BpngQT[:, :, :, :, None] * decay * dt_BpngRT[..., None, :]
    return product("BpngRQT,BpnTgRK->BpnQgRK", weights.astype(x.dtype), x)


# -- from chunk to chunk ---------------------------------------------------------------------------


def carried(added_BpngRKN, last_BpngR, start_BgRKN, documents: Documents | None, spans: Spans):
    """The states at the boundaries of chunks, [B, p, i, g, R, K, N]. added: what each chunk adds;
    last: the logarithm of its decay."""
    rows, count, _, *head = added_BpngRKN.shape
    ends = None if documents is None else documents.ends_Bpi
    decay_BpijgR = decays(last_BpngR, ends)
    starts = jnp.zeros((rows, count, *head), jnp.float32)
    if start_BgRKN is not None:
        starts = start_BgRKN[:, None]
    elif spans.axes.context is not None:
        added_Bp = _sum(decay_BpijgR[:, :, -1:, 1:], added_BpngRKN)[:, :, 0]
        all_added = whole_sequence(added_Bp, spans.axes)[:, None]
        all_last = whole_sequence(last_BpngR.sum(axis=2), spans.axes)[:, None]
        if ends is not None:
            ends = whole_sequence(ends[:, :, -1], spans.axes)[:, None]
            ends = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends], axis=-1)
        all_starts = _sum(decays(all_last, ends)[:, :, :-1, 1:], all_added)
        starts = spans.own(all_starts[:, 0])
    return _sum(decay_BpijgR, jnp.concatenate([starts[:, :, None], added_BpngRKN], axis=2))


def decays(last_BpngR, ends_Bpi):
    """How much of the state at boundary j is left at boundary i, [B, p, i, j, g, R]: 0 if j is
    later, or in another document. Only the chunks in between are summed, because over long
    sequences the difference of two cumulative sums would be lost in rounding."""
    boundaries = jnp.arange(last_BpngR.shape[2] + 1)
    rising = boundaries[:, None] >= boundaries
    after = rising[:-1, :, None, None]  # [n, j]: whether chunk n is after boundary j
    sums = jnp.cumsum(jnp.where(after, last_BpngR[:, :, :, None], 0), axis=2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
    if ends_Bpi is not None:
        rising = rising & (ends_Bpi[..., :, None] == ends_Bpi[..., None, :])
    return jnp.exp(jnp.where(rising[..., None, None], sums, -jnp.inf))


def _sum(decay_BpijgR, added_BpjgRKN):
    return jnp.einsum(
        "BpijgR,BpjgRKN->BpigRKN", decay_BpijgR, added_BpjgRKN, precision=lax.Precision.HIGHEST
    )


# -- documents -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Which positions of a chunk belong to the same document."""

    numbers_BpnQ: jax.Array
    ends_Bpi: jax.Array  # the number at the last position before each boundary of chunks

    @classmethod
    def of(cls, spans: Spans, chunks) -> Documents | None:
        """None if each row is one document. Padding belongs to the last document."""
        documents = spans.documents_BpS
        if documents is None:
            return None
        numbers = chunks(documents)
        numbers = lax.cummax(numbers.reshape(*documents.shape[:2], -1), axis=2)
        numbers = numbers.reshape(chunks(documents).shape)
        ends_Bpn = numbers[..., -1]
        before_Bp = spans.before(ends_Bpn[..., -1])
        ends = jnp.concatenate([before_Bp[..., None], ends_Bpn], axis=-1)
        return cls(numbers_BpnQ=numbers, ends_Bpi=ends)

    @property
    def same_QT(self):
        """[B, p, n, Q, T]"""
        return self.numbers_BpnQ[..., :, None] == self.numbers_BpnQ[..., None, :]

    @property
    def to_the_end(self):
        """[B, p, n, T]: whether a position is in the document that its chunk ends with."""
        return self.numbers_BpnQ == self.ends_Bpi[..., 1:, None]

    @property
    def from_before(self):
        """[B, p, n, Q]: whether a position is in the document that the chunk before ends with."""
        return self.numbers_BpnQ == self.ends_Bpi[..., :-1, None]
