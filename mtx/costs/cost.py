"""The cost of one layer, of the embedding or of the head on one device, as plain data.

Sizes are exact for every number of rows of a microbatch and every size of the vocabulary: see
`Size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mtx.config import Layout, ModelConfig, Recompute
from mtx.config.layout import ContextAttention, ExpertDispatch
from mtx.layers.kernels import AttentionKernel

Pass = Literal["F", "B", "W"]  # forward, input gradient including recomputation, weight gradient
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the compute type
EMBED, HEAD, PARAMETERS = "(embed)", "(head)", "(parameters)"  # no kind of layer has these names


class Size(NamedTuple):
    """number * rows^rows * vocab^vocab: a count that grows with the rows of a microbatch, with the
    rows of the vocabulary that a device holds, with both, or with neither."""

    number: int
    rows: int = 0
    vocab: int = 0

    def at(self, rows: int, vocab: int = 0) -> int:
        return self.number * rows**self.rows * vocab**self.vocab


def total(sizes: Iterable[Size], rows: int, vocab: int = 0) -> int:
    return sum(size.at(rows, vocab) for size in sizes)


class Matmul(NamedTuple):
    """`batch` products [m, k] x [k, n]."""

    during: Pass
    weight: str  # the parameter that it reads, or whose gradient it makes; "": of activations only
    batch: Size
    m: Size
    n: Size
    k: Size
    times: float = 1  # how often it runs: branches of a conditional are equally likely
    seen: float = 1  # the fraction of it that attention's mask leaves
    fused: bool = False  # in a kernel that keeps its result to itself
    float8: bool = False  # its operands are in float8

    def shape(self, rows: int, vocab: int = 0) -> tuple[int, ...]:
        """(batch, m, n, k)"""
        return tuple(size.at(rows, vocab) for size in self[2:6])

    def flops(self, rows: int, vocab: int = 0) -> float:
        """2 m n k per product. With k = 1 nothing is summed, so it is not a matmul: compilers
        multiply elementwise."""
        batch, m, n, k = self.shape(rows, vocab)
        return 2.0 * batch * m * n * k * self.times if k > 1 else 0.0


class Collective(NamedTuple):
    """bytes: the size of the whole array on one device, after gathering or before scattering."""

    during: Pass
    kind: str  # JAX's name: psum, all_gather, reduce_scatter, ppermute, all_to_all, pmax
    axes: tuple[str, ...]
    bytes: Size
    times: float = 1
    group: int = 0  # devices that take part in one; 0: all of the axes


class Moved(NamedTuple):
    """Memory that kernels other than matmuls and collectives read and write."""

    during: Pass
    kernels: float
    bytes: tuple[Size, ...]


class Parameter(NamedTuple):
    """elements: of the whole array, with the vocabulary of all devices together."""

    path: str
    role: str
    elements: Size
    axes: tuple[str, ...]  # that shard it
    trained: bool  # else it is frozen

    @property
    def is_matrix(self) -> bool:
        """Whether optimizers treat it as a matrix: see `MATRICES` of `mtx.sharding.parameter`."""
        return self.role in ("matrix", "adapter")


class Parameters(NamedTuple):
    pattern: tuple[str, ...]  # the kind of each layer
    shared: tuple[Parameter, ...]  # of embedding and head
    layers: dict[str, tuple[Parameter, ...]]  # by kind, of one layer


class Cut(NamedTuple):
    """An array that is kept from F to B, and part of which can go to the host."""

    length: int  # of the dim that is cut
    bytes: Size


def dim_of_tokens(shape: Sequence[int]) -> int | None:
    """The dim along which an array is cut: the longest after the first, which is the tokens' if
    sequences are long; None if there is no such dim."""
    return max(range(1, len(shape)), key=lambda dim: shape[dim]) if len(shape) > 1 else None


def on_host(arrays: Sequence[tuple[int, int]], fraction: float) -> tuple[int, ...]:
    """How much of each array's length goes to the host, so that `fraction` of all bytes do. arrays:
    (length, bytes) of each. Whole arrays go, largest first, as far as they fit; then the first part
    of one more, the smallest that is left, since an array in two parts must be put together
    again."""
    left, gone = int(fraction * sum(size for _, size in arrays)), [0] * len(arrays)
    ordered = sorted(range(len(arrays)), key=lambda at: -arrays[at][1])
    for at in ordered:
        length, size = arrays[at]
        if size <= left:
            gone[at], left = length, left - size
    stay = [at for at in ordered if arrays[at][1] and not gone[at]]  # an empty one has no part
    if stay:
        length, size = arrays[stay[-1]]
        gone[stay[-1]] = left * length // size
    return tuple(gone)


class Later(NamedTuple):
    """One round of the tokens that had no room at their experts in the first
    (`mtx.sharding.experts`). It runs in a loop, as often as the fullest expert needs."""

    matmuls: tuple[Matmul, ...] = ()
    collectives: tuple[Collective, ...] = ()
    moved: tuple[Moved, ...] = ()


class Cost(NamedTuple):
    """The cost of one layer, or of the embedding or the head, on one device, for one microbatch."""

    matmuls: tuple[Matmul, ...]
    collectives: tuple[Collective, ...]
    moved: tuple[Moved, ...]
    kept: tuple[Size, ...]  # bytes, from F to B
    deferred: tuple[Size, ...]  # bytes, from B to W if they are split
    stream: tuple[Size, ...]  # bytes of the arrays passed from layer to layer
    cache: tuple[Size, ...]  # bytes of a sequence's keys and values, if it is cut into slices
    cuts: tuple[Cut, ...]  # `kept` again, array by array
    scores: Size  # elements of the largest product of activations that is stored in memory
    later: Later  # not counted above

    def flops(self, during: str, rows: int, vocab: int = 0) -> float:
        """FLOPs of the matmuls in these passes, such as "F" or "BW"."""
        return sum(each.flops(rows, vocab) for each in self.matmuls if each.during in during)

    def on_host(self, fraction: float, rows: int) -> tuple[int, int]:
        """(bytes that go to the host, bytes of the array that goes only in part, or 0 without
        one)"""
        arrays = [(cut.length, cut.bytes.at(rows)) for cut in self.cuts]
        parts = [(*array, gone) for array, gone in zip(arrays, on_host(arrays, fraction))]
        joined = (size for length, size, gone in parts if 0 < gone < length)
        sent = sum(size // length * gone for length, size, gone in parts if gone)
        return sent, max(joined, default=0)

    @property
    def weights(self) -> tuple[Matmul, ...]:
        """The products of F that read a parameter."""
        return tuple(each for each in self.matmuls if each.during == "F" and each.weight)

    @property
    def trained(self) -> frozenset[str]:
        """The parameters that W has a product for."""
        return frozenset(each.weight for each in self.matmuls if each.during == "W")


def module_of(path: str) -> str:
    """The first module on a parameter's path: the sublayer."""
    return path.partition(".")[0]


class ExpertShards(NamedTuple):
    """How experts are split, and how they receive their tokens: fields of a layout."""

    expert: int = 1
    expert_tensor: bool = True
    expert_dispatch: ExpertDispatch = "alltoall"
    expert_room: float = 1.0

    @classmethod
    def of(cls, layout: Layout, model: ModelConfig) -> ExpertShards | None:
        """The fields of a layout; None for a model without experts."""
        if not model.routed_experts:
            return None
        return cls(*(getattr(layout, name) for name in cls._fields))


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is traced; hashable."""

    model: ModelConfig
    part: str  # a kind of layer, EMBED, HEAD or PARAMETERS
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    kernel: AttentionKernel = "blocked"
    slices: int = 1
    context: int = 1
    context_attention: ContextAttention = "gather"
    experts: ExpertShards | None = None  # None: each device has all, with room for an even load
