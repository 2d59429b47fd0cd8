"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021): x W + scale x A B with
scale = alpha / r.

A begins normal, B zero, so that the first step's model is the frozen one. What is one matrix here
has one adapter: keys and values together, gate and up together.

Under `tensor` an adapter costs no collective of its own. Of a column-parallel weight A is whole and
B is split as the outputs are: x A is a further product of the x that is gathered for W. Of a
row-parallel one A is split as the inputs are and B is whole: x A B is a part of the sum over
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
    """Which sublayers have them, by name, and of what size."""

    rank: int
    alpha: float
    on: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(nnx.Module):
    """a [*inputs, r] and b [r, *outputs], of a weight [*inputs, *outputs]."""

    def __init__(
        self, shape: tuple[int, ...], spec: P, adapters: Adapters, *, inputs: int = 1, axes: Axes,
        rngs: nnx.Rngs, dims: Sequence[str] = (),
    ):  # fmt: skip
        """shape, spec, dims: of the weight, which has so many dims of inputs."""
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
        self.axes = replace(axes, joint=True)  # whose products have no collective
