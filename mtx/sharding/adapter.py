"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021): x W + scale x A B with
scale = alpha / r.

A starts from a normal distribution and B from zero, so that the first step's model is the frozen
one. Each matrix here has one adapter: keys and values share one, and so do gate and up.

Over `tensor` an adapter needs no collective of its own. For a column-parallel weight, A is whole
and B is split like the outputs: x A is one more product of the x that is gathered for W. For a
row-parallel weight, A is split like the inputs and B is whole: x A B is a part of the sum over
`tensor`, as x W is.

Legend: B rows · S sequence · D hidden · r rank · lower-case: local shard
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Which sublayers have adapters, by name, and the adapters' size."""

    rank: int
    alpha: float
    on: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(nnx.Module):
    """a [*inputs, r] and b [r, *outputs], for a weight [*inputs, *outputs]."""

    def __init__(
        self, shape: tuple[int, ...], spec: P, adapters: Adapters, *, inputs: int = 1, axes: Axes,
        rngs: nnx.Rngs, dims: Sequence[str] = (),
    ):  # fmt: skip
        """shape, spec, dims: of the weight, whose first `inputs` dims are its inputs."""
        std = 1 / math.sqrt(math.prod(shape[:inputs]))
        a = std * normal(rngs.adapter, (*shape[:inputs], adapters.rank))
        ends = (*dims[:inputs], "rank"), ("rank", *dims[inputs:])
        dims_a, dims_b = ends if dims else ((), ())
        self.a = parameter(
            a, spec=P(*spec[:inputs], None), role="adapter", dims=dims_a, inputs=inputs
        )
        b = jnp.zeros((adapters.rank, *shape[inputs:]), jnp.float32)
        self.b = parameter(b, spec=P(None, *spec[inputs:]), role="adapter", dims=dims_b)
        self.scale = adapters.scale
        self.axes = replace(axes, joint=True)  # so its products have no collective
