"""How many seconds equations take. These costs decide what lies beside what, and nothing else.

They are those of H100s, in nodes of eight, with neighbours along `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax import lax

from mtx.sharding.axes import AXES
from mtx.strand import COLLECTIVES, axes_of

# Per second: FLOPs of bfloat16 matmuls, bytes of memory, bytes over NVLink, and bytes of a whole
# node over the network.
_FLOPS, _MEMORY, _LINK, _NETWORK = 740e12, 2.4e12, 300e9, 300e9
_MESSAGE = 0.7e-6  # seconds over the network, for each device of a ring
_SENDS = 0.74  # the share of that rate that sends between neighbours reach, as in the timeline
_NODE = 8  # devices


def moved_s(size: float) -> float:
    """Seconds to read or write this many bytes."""
    return size / _MEMORY


def matmul_s(eqn) -> float:
    """Seconds of the matmuls in an equation."""
    rate = _FLOPS * (2 if eqn.invars[0].aval.dtype.itemsize == 1 else 1)  # of float8
    return max(flops_of(eqn) / rate, moved_s(sum(map(size_of, (*eqn.invars, *eqn.outvars)))))


def matmuls_s(eqns: Iterable) -> float:
    return sum(matmul_s(eqn) for eqn in eqns if flops_of(eqn))


def send_s(size: int, axis: str) -> float:
    """Seconds for every device to send `size` bytes to its neighbour along an axis."""
    return size / (_SENDS * _rate((axis,)))


def collective_s(eqn) -> tuple[float, bool]:
    """(seconds of a collective, whether it leaves the node)"""
    rate, leaves = _link(eqn)
    moved = max(sum(map(size_of, atoms)) for atoms in (eqn.invars, eqn.outvars))
    seconds = _sent(eqn, moved) / rate
    return seconds + (_MESSAGE * lax.axis_size(axes_of(eqn)) if leaves else 0.0), leaves


def communicates(eqn) -> bool:
    return eqn.primitive.name in COLLECTIVES


def is_nested(eqn) -> bool:
    """Whether an equation contains a function, as a loop or a conditional does."""
    return any("jaxpr" in name or name == "branches" for name in eqn.params)


def _link(eqn) -> tuple[float, bool]:
    """(bytes a second of a collective, whether it leaves the node)"""
    axes = axes_of(eqn)
    if eqn.primitive.name != "all_to_all":
        return _rate(axes), set(axes) != {"tensor"}
    size = lax.axis_size(axes)
    inside = min(size, max(1, _NODE // (1 if "tensor" in axes else lax.axis_size("tensor"))))
    if inside == size:
        return _LINK, False
    # Each device sends what leaves the node over its own network card.
    return _NETWORK / _NODE * (size - 1) / (size - inside), True


def _rate(axes: Sequence[str]) -> float:
    """Bytes a second that a device sends along axes. Over the network, the devices of its node that
    lie between two neighbours send at the same time, each in its own ring."""
    if set(axes) == {"tensor"}:
        return _LINK
    inner = AXES[max(map(AXES.index, axes)) + 1 :]
    return _NETWORK / min(_NODE, math.prod(map(lax.axis_size, inner)))


def _sent(eqn, moved: int) -> float:
    """Bytes that a device sends in a collective of an array of `moved` bytes."""
    if eqn.primitive.name == "ppermute":
        return moved
    times = 2 if eqn.primitive.name in ("psum", "pmax") else 1
    return times * moved * (1 - 1 / lax.axis_size(axes_of(eqn)))


def size_of(atom) -> int:
    """Bytes."""
    return (
        math.prod(atom.aval.shape) * atom.aval.dtype.itemsize if hasattr(atom.aval, "shape") else 0
    )


def flops_of(eqn) -> float:
    """FLOPs of the matmuls in an equation, including its loops and branches. A loop of unknown
    length counts as zero: such loops are the extra rounds of full experts, which hardly ever
    run."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        shared = math.prod(eqn.invars[0].aval.shape[dim] for dim in contract)
        return 2.0 * shared * math.prod(eqn.outvars[0].aval.shape)
    if "attention" in name:  # a fused kernel: q, k, ..., and two products, or five
        products = 5 if "bwd" in name or "backward" in name else 2
        rows, keys, *_ = eqn.invars[1].aval.shape
        return products * 2.0 * math.prod(eqn.invars[0].aval.shape) * keys
    if name == "while":
        return 0.0
    if name == "cond":
        return max(_flops_within(branch) for branch in params["branches"])
    return params.get("length", 1) * sum(map(_flops_within, _inside(eqn)))


def _inside(eqn) -> list:
    """The functions in an equation."""
    return [value for value in eqn.params.values() if hasattr(value, "jaxpr")]


def _flops_within(closed) -> float:
    return sum(map(flops_of, closed.jaxpr.eqns))
