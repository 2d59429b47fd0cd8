"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) of one additional token.

The last layer of the pattern sees the model's output and the embedding of each position's next
token, which the stream carries from the embedding on. From both it computes the input from which
the head predicts the token after that. Only training does this: without that leaf of the stream the
layer is the last norm.

The layer sees what the head sees, the output of the last norm, as published weights are used.

Legend: B rows · S sequence (s: shard; t: the next positions) · D hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mtx.layers.context import Context
from mtx.layers.layer import Kind, Layer, Stream
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.linear import WholeLinear
from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import places, whole_sequence

NEXT = "next"  # the leaf of the stream: the next token's embedding, then this layer's output
_SECOND = {"targets": "second_targets", "weights": "second_weights"}  # added to a batch
Tree = Any


@dataclass(frozen=True, kw_only=True)
class MultiToken(Kind):
    """A kind of layer that ends a model; `norm` is also the model's last norm."""

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return MultiTokenLayer(self, build, rngs)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        return {}


class MultiTokenLayer(Layer):
    """last_norm; token_norm, stream_norm, join [2D, D], the sublayers, output_norm."""

    def __init__(self, kind: Kind, build: Build, rngs: nnx.Rngs):
        super().__init__(kind, build, rngs)
        self.last_norm, self.output_norm = (kind.norm.module(build.hidden) for _ in range(2))
        self.token_norm, self.stream_norm = (kind.norm.module(build.hidden) for _ in range(2))
        self.join = WholeLinear(
            2 * build.hidden, build.hidden, std=build.init_std, axes=build.axes, rngs=rngs,
            dims=("token and stream", "hidden"),
        )  # fmt: skip

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        x_BsD = self.last_norm(stream["x"])
        if NEXT not in stream:
            return stream | {"x": x_BsD}
        both = self.token_norm(stream[NEXT]), self.stream_norm(x_BsD)
        joined = stream | {"x": self.join(jnp.concatenate(both, axis=-1))}
        found: Any = super().__call__(joined, context, cache)
        found, own = (found, None) if cache is None else found
        stream = found | {"x": x_BsD, NEXT: self.output_norm(found["x"])}
        return stream if cache is None else (stream, own)

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        return stream | {"x": self.last_norm(stream["x"])}


# -- batches ---------------------------------------------------------------------------------------


def with_second(batch: Tree, axes: Axes) -> Tree:
    """The batch with second_targets and second_weights, [B, s]: its targets and weights one place
    later. Weights are 0 at the last place of a row and if the next one is in another document."""
    targets_BS, weights_BS = (whole_sequence(batch[name], axes) for name in _SECOND)
    weights_BS = _one_on(weights_BS)
    if (segments_Bs := batch.get("segments")) is not None:
        segments_BS = whole_sequence(segments_Bs, axes)
        weights_BS = weights_BS * (segments_BS == _one_on(segments_BS))
    own_s = places(batch["targets"].shape[1], axes)
    found = {"targets": _one_on(targets_BS), "weights": weights_BS}
    return batch | {_SECOND[name]: a_BS[:, own_s] for name, a_BS in found.items()}


def _one_on(a_BS):
    """The value at the next place; 0 at the last place."""
    return jnp.pad(a_BS[:, 1:], ((0, 0), (0, 1)))


def without_second(batch: Tree) -> Tree:
    """The batch without those two, for callers that only want the loss of the next token."""
    return {name: a for name, a in batch.items() if name not in _SECOND.values()}


def predicts_second(batch: Tree) -> bool:
    return _SECOND["targets"] in batch


def of_next(batch: Tree) -> Tree:
    """A batch of each position's next token, for the embedding."""
    return batch | {"tokens": batch["targets"]}


def of_second(batch: Tree) -> Tree:
    """A batch whose targets are the second ones, for the head."""
    return batch | {name: batch[second] for name, second in _SECOND.items()}
