"""What every parameter says about itself: how it is sharded, and what it is for.

Weight decay, the choice of an optimizer and conversion ask for the role, never for a name.
"""

from __future__ import annotations

from typing import Literal, get_args

from flax import nnx
from jax.sharding import PartitionSpec as P

Role = Literal["matrix", "embedding", "head", "norm", "bias", "filter"]  # filter: a convolution's
ROLES: tuple[Role, ...] = get_args(Role)
QUANTISED: frozenset[Role] = frozenset({"matrix"})  # in layers, with fp8
DECAYED: frozenset[Role] = frozenset({"matrix", "embedding", "head", "filter"})  # as in Megatron-LM


def parameter(value, *, spec: P, role: Role, inputs: int = 1) -> nnx.Param:
    """`value`, the global array, as a parameter that `spec` shards over the mesh. inputs: of a
    matrix, how many of its first dims are inputs; the others are outputs."""
    return nnx.Param(value, spec=spec, role=role, inputs=inputs)
