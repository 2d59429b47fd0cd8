"""What every parameter says about itself: how it is sharded, and what it is for.

Weight decay, the choice of an optimizer and conversion look at the role, never at a name.

The config says which parameters are trained (`ModelConfig.trains`), as a tree of bool like the
parameters. The others are frozen: they have no gradients, no moments and no float32 master. Trees
that hold values of trained parameters only are the same nested dicts without the others (`chosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from flax import nnx
from jax.sharding import PartitionSpec as P

from mtx.errors import UserError, unknown_name
from mtx.sharding.axes import AXES, axes_of

# recurrence: how the states of a state-space model evolve. filter: a convolution's. adapter: a
# frozen matrix's (`mtx.sharding.adapter`).
Role = Literal[
    "matrix", "embedding", "head", "norm", "bias", "router", "state", "recurrence", "filter",
    "adapter",
]  # fmt: skip
ROLES: tuple[Role, ...] = get_args(Role)
MATRICES: frozenset[Role] = frozenset({"matrix", "adapter"})  # for an optimizer
QUANTISED: frozenset[Role] = frozenset({"matrix"})  # in layers, with fp8
DECAYED: frozenset[Role] = frozenset(  # as in Megatron-LM
    {"matrix", "embedding", "head", "router", "filter", "adapter"}
)
# computed with in float32, as they are kept
FLOAT32: frozenset[Role] = frozenset({"router", "state", "recurrence"})
Tree = Any
Rule = Callable[[Any, Any], Any]  # (a state, the sum over microbatches) -> the next state


def parameter(
    value, *, spec: P, role: Role, dims: Sequence[str] = (), inputs: int = 1,
    rule: Rule | None = None,
) -> nnx.Param:  # fmt: skip
    """`value`, the global array, as a parameter that `spec` shards over the mesh. dims: a name for
    each dim, for readers of what a device holds. inputs: how many of a matrix's first dims are
    inputs; the others are outputs.

    rule: for a state, which no optimizer updates. Its cotangents are summed like gradients, and
    once per step the rule makes the next state from the sum. It is written for the dims of `value`;
    others may come first. UserError for an unknown role or axis, for a spec of more dims than
    `value` has, and for more or fewer names than dims.
    """
    if role not in ROLES:
        raise unknown_name("role", role, ROLES)
    for axis in axes_of(spec):
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
    if len(spec) > value.ndim:
        raise UserError(
            f"spec={spec} has {len(spec)} dims, and the parameter {value.ndim}, {value.shape}; use "
            "one entry a dim at most"
        )
    if dims and len(dims) != value.ndim:
        raise UserError(
            f"dims={tuple(dims)} names {len(dims)} dims, and the parameter has {value.ndim}, "
            f"{value.shape}; use a name each, or none"
        )
    return nnx.Param(value, spec=spec, role=role, dims=tuple(dims), inputs=inputs, rule=rule)


def chosen(tree: Tree, which: Tree) -> Tree:
    """Nested dicts with only those leaves for which `which`, a tree of bool like it, is true."""
    return {
        key: chosen(value, which[key]) if isinstance(which[key], dict) else value
        for key, value in tree.items()
        if which[key] is not False
    }


def with_chosen(tree: Tree, part: Tree) -> Tree:
    """The nested dicts `tree`, with the leaves that `part` has in place of its own."""
    return {
        key: with_chosen(value, part[key])
        if isinstance(value, dict) and key in part
        else part.get(key, value)
        for key, value in tree.items()
    }
