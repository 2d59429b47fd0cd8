"""The ways in which the queries of a device meet the keys of all devices of a ring, in pairs of
chunks (`mtx.layers.over_context`).

Legend: B rows · n queries · m keys · h heads of queries · g of keys and values · K head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mtx.layers.attend import Drops, Scores
from mtx.layers.kernels import AttentionKernel
from mtx.layers.pairs import NOTHING, Pair, Part, merge, only_if
from mtx.sharding.ring import Ring


class Keys(NamedTuple):
    """Keys and values of a device or of a chunk, and the segments of their positions."""

    k: jax.Array  # [B, m, g, K]
    v: jax.Array
    segments: jax.Array | None  # int32 [B, m]
    places: jax.Array | None = None  # int32 [1, m], for dropout


class Queries(NamedTuple):
    """Queries of a device or of a chunk, and the segments of their positions."""

    q: jax.Array  # [B, n, h, K]
    segments: jax.Array | None  # int32 [B, n]
    places: jax.Array | None = None  # int32 [1, n], for dropout


class Output(NamedTuple):
    """The output of queries for all their keys, and its gradient."""

    whole: Part
    gradient: jax.Array  # [B, n, h, K]


Gradients = tuple[jax.Array, jax.Array, jax.Array]  # of q, k, v


def way_of(
    rules: Scores, kernel: AttentionKernel, ring: Ring | None, gathers: bool, positions: int,
    drops: Drops | None,
) -> Way:  # fmt: skip
    """The way in which queries and keys meet; positions: how many a device has."""
    common: Any = {
        "rules": rules, "kernel": kernel, "ring": ring, "gathers": gathers, "drops": drops
    }  # fmt: skip
    if ring is None:
        return Alone(**common)
    if not rules.causal:
        return AllSeen(**common)
    if rules.window is None or rules.window >= positions * ring.size:
        return Causal(**common | {"rules": replace(rules, window=None)})
    return Windowed(**common)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one device's queries meet the keys of all."""

    rules: Scores
    kernel: AttentionKernel
    ring: Any  # a Ring; None: one device
    gathers: bool
    drops: Drops | None

    @property
    def _own(self) -> Pair:
        """A pair of queries and keys of the same positions."""
        return Pair(rules=self.rules, kernel=self.kernel, drops=self.drops)

    @property
    def _all(self) -> Pair:
        """A pair whose queries see all its keys."""
        return replace(self._own, rules=replace(self.rules, causal=False, window=None))

    def _go(self, own: Keys, state, body):
        go = self.ring.through_all if self.gathers else self.ring.go_round
        return go(own, state, body)

    def _go_and_add(self, own: Keys, state, body):
        """(the state, the sums of the gradients of k and v)"""
        ring = self.ring
        return (ring.through_all_and_add if self.gathers else ring.go_round_and_add)(
            own, state, body
        )

    def forward(self, queries: Queries, keys: Keys) -> Part:
        raise NotImplementedError

    def backward(self, queries: Queries, keys: Keys, output: Output) -> Gradients:
        """float32"""
        raise NotImplementedError


class Alone(Way):
    """One device has all queries and keys."""

    def forward(self, queries: Queries, keys: Keys) -> Part:
        return _forward_of(self._own, queries, keys)

    def backward(self, queries: Queries, keys: Keys, output: Output) -> Gradients:
        return _backward_of(self._own, queries, keys, output)


class AllSeen(Way):
    """All queries see all keys."""

    def forward(self, queries: Queries, keys: Keys) -> Part:
        def meet(_, keys, part):
            return merge(part, _forward_of(self._all, queries, keys))

        return self._go(keys, _forward_of(self._all, queries, keys), meet)

    def backward(self, queries: Queries, keys: Keys, output: Output) -> Gradients:
        def meet(_, keys, dq):
            more, *dkv = _backward_of(self._all, queries, keys, output)
            return dq + more, tuple(dkv)

        dq, *own = _backward_of(self._all, queries, keys, output)
        dq, others = self._go_and_add(keys, dq, meet)
        dk, dv = map(jnp.add, own, others)
        return dq, dk, dv


class Causal(Way):
    """No query sees a key of a later position. Of two devices, the one with the later first chunk
    has the earlier second chunk. A device's second queries always see the other's first chunk;
    besides, either its first queries see that chunk too, or its second queries see the other's
    second chunk. So every meeting is two pairs of chunks, for every device."""

    def forward(self, queries: Queries, keys: Keys) -> Part:
        first, second = _halves(queries)

        def meet(i, keys, parts):
            theirs, later = _halves(keys)
            before = i <= self.ring.index  # whether their first chunk is before ours
            of_second = merge(parts[1], _forward_of(self._all, second, theirs))
            part = _forward_of(
                self._all, _either(before, first, second), _either(before, theirs, later)
            )
            return (
                merge(parts[0], only_if(before, part)),
                merge(of_second, only_if(~before, part)),
            )

        ours, later = _halves(keys)
        own = (
            _forward_of(self._own, first, ours),
            merge(_forward_of(self._own, second, later), _forward_of(self._all, second, ours)),
        )
        parts = self._go(keys, own, meet)
        return Part(*(jnp.concatenate(pair, axis) for pair, axis in zip(zip(*parts), (1, 2))))

    def backward(self, queries: Queries, keys: Keys, output: Output) -> Gradients:
        first, second = _halves(queries)
        of_first, of_second = _output_halves(output)

        def meet(i, keys, dq):
            theirs, later = _halves(keys)
            before = i <= self.ring.index
            a, *dkv = _backward_of(self._all, second, theirs, of_second)
            b, *either = _backward_of(
                self._all, _either(before, first, second), _either(before, theirs, later),
                _either(before, of_first, of_second),
            )  # fmt: skip
            dq = dq[0] + jnp.where(before, b, 0), dq[1] + a + jnp.where(before, 0, b)
            return dq, tuple(
                jnp.concatenate([d + jnp.where(before, e, 0), jnp.where(before, 0, e)], axis=1)
                for d, e in zip(dkv, either)
            )

        ours, later = _halves(keys)
        dq_first, *dkv_ours = _backward_of(self._own, first, ours, of_first)
        dq_second, *dkv_later = _backward_of(self._own, second, later, of_second)
        more, *dkv_more = _backward_of(self._all, second, ours, of_second)
        dq, others = self._go_and_add(keys, (dq_first, dq_second + more), meet)
        own = (
            jnp.concatenate([a + b, c], axis=1) for a, b, c in zip(dkv_ours, dkv_more, dkv_later)
        )
        dk, dv = map(jnp.add, own, others)
        return jnp.concatenate(dq, axis=1), dk, dv


class Windowed(Way):
    """A chunk of queries sees its own keys, and those of as many chunks before it as the window
    spans."""

    def _reach(self, chunk: int) -> int:
        chunks, window = 2 * self.ring.size, self.rules.window or 1
        return min(chunks - 1, math.ceil((window - 1) / chunk))

    def _before(self, keys: Keys) -> list[list[Keys]]:
        """The keys of 1, 2, ... chunks before each of this device's two."""
        halves, last = _halves(keys), 2 * self.ring.size - 1

        def owner(chunk: int) -> tuple[int, int] | None:
            """(device, which of its two chunks)"""
            if chunk < 0:
                return None
            return (chunk, 0) if 2 * chunk < last else (last - chunk, 1)

        def back(mine: int, by: int) -> Keys:
            wanted = [owner((r, last - r)[mine] - by) for r in range(self.ring.size)]
            found = None
            for half in (0, 1):
                sources = [w[0] if w and w[1] == half else None for w in wanted]
                if all(source is None for source in sources):
                    continue
                some = self.ring.from_device(halves[half], sources.__getitem__)
                there = jnp.asarray([source is not None for source in sources])[self.ring.index]
                found = some if found is None else _either(there, some, found)
            return halves[0] if found is None else found

        reach = self._reach(halves[0].k.shape[1])
        return [[back(mine, by) for by in range(1, reach + 1)] for mine in (0, 1)]

    def _there(self, mine: int, by: int):
        """Whether there is a chunk `by` chunks before this device's."""
        number = (self.ring.index, 2 * self.ring.size - 1 - self.ring.index)[mine]
        return number >= by

    def _pair(self, by: int, chunk: int) -> Pair:
        return replace(self._own, offset=by * chunk)

    def forward(self, queries: Queries, keys: Keys) -> Part:
        chunk, parts = queries.q.shape[1] // 2, []
        halves = zip(_halves(queries), _halves(keys), self._before(keys))
        for mine, (some, own, before) in enumerate(halves):
            part = _forward_of(self._pair(0, chunk), some, own)
            for by, theirs in enumerate(before, start=1):
                further = _forward_of(self._pair(by, chunk), some, theirs)
                part = merge(part, only_if(self._there(mine, by), further))
            parts.append(part)
        return Part(*(jnp.concatenate(pair, axis) for pair, axis in zip(zip(*parts), (1, 2))))

    def backward(self, queries: Queries, keys: Keys, output: Output) -> Gradients:
        def sent(k, v):
            before = self._before(keys._replace(k=k, v=v))
            return [[each[:2] for each in some] for some in before]

        chunk = queries.q.shape[1] // 2
        dq, own_dkv, sent_dkv = [], [], []
        halves = zip(_halves(queries), _halves(keys), self._before(keys), _output_halves(output))
        for mine, (some, own, before, of_some) in enumerate(halves):
            dq_some, *dkv = _backward_of(self._pair(0, chunk), some, own, of_some)
            back = []
            for by, theirs in enumerate(before, start=1):
                there = self._there(mine, by)
                found = _backward_of(self._pair(by, chunk), some, theirs, of_some)
                more, *further = (jnp.where(there, d, 0) for d in found)
                dq_some = dq_some + more
                back.append(tuple(further))
            dq.append(dq_some)
            own_dkv.append(dkv)
            sent_dkv.append(back)
        kv = keys.k.astype(jnp.float32), keys.v.astype(jnp.float32)
        others = jax.linear_transpose(sent, *kv)(sent_dkv)
        own = (jnp.concatenate(d, axis=1) for d in zip(*own_dkv))
        dk, dv = map(jnp.add, own, others)
        return jnp.concatenate(dq, axis=1), dk, dv


# -- chunks and pairs ------------------------------------------------------------------------------


def _halves(tree):
    """Both chunks of a tree whose arrays have positions in dim 1."""
    halves = [jax.tree.map(lambda a, n=n: jnp.split(a, 2, axis=1)[n], tree) for n in (0, 1)]
    return tuple(halves)


def _output_halves(output: Output) -> tuple[Output, Output]:
    whole, gradients = output.whole, jnp.split(output.gradient, 2, axis=1)
    parts = zip(jnp.split(whole.output, 2, axis=1), jnp.split(whole.logsumexp, 2, axis=2))
    first, second = (Output(Part(*part), d) for part, d in zip(parts, gradients))
    return first, second


def _either(condition, a, b):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def _forward_of(pair: Pair, queries: Queries, keys: Keys) -> Part:
    def attend():
        return pair.forward(queries.q, keys.k, keys.v, segments)

    pair, segments = pair.at(queries.places, keys.places), _segments(queries, keys)
    if segments is None or pair.rules.causal:
        return attend()
    shape = jax.eval_shape(attend)
    nothing = Part(jnp.zeros_like(shape.output), jnp.full_like(shape.logsumexp, NOTHING))
    return lax.cond(_meet(*segments), attend, lambda: nothing)


def _backward_of(pair: Pair, queries: Queries, keys: Keys, output: Output) -> Gradients:
    def attend():
        return pair.backward(queries.q, keys.k, keys.v, segments, output.whole, output.gradient)

    pair, segments = pair.at(queries.places, keys.places), _segments(queries, keys)
    if segments is None or pair.rules.causal:
        return attend()
    return lax.cond(
        _meet(*segments), attend, lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(attend))
    )


def _segments(queries: Queries, keys: Keys):
    if queries.segments is None or keys.segments is None:
        return None
    return queries.segments, keys.segments


def _meet(of_queries_Bn, of_keys_Bm):
    """Whether any query and key can be of the same segment; if not, there is no work. Segments of a
    row are numbered in order."""
    lowest = of_queries_Bn.min(axis=1) <= of_keys_Bm.max(axis=1)
    highest = of_keys_Bm.min(axis=1) <= of_queries_Bn.max(axis=1)
    return (lowest & highest).any()
