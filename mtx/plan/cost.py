"""What one layer, the embedding or the head costs one device, read off the traced function.

A cost is traced once (`mtx.plan.trace`, which imports JAX) and kept in the user's cache folder, so
that a model that was planned before is planned without JAX. Sizes are exact for every number of
rows of a microbatch and every size of the vocabulary: see `Size`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from mtx.config import ModelConfig, Recompute, to_dict
from mtx.plan.attention import Kernel

Pass = Literal[
    "F", "B", "W"
]  # forward, input gradient with what is computed again, weight gradient
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the compute type
EMBED, HEAD, PARAMETERS = "(embed)", "(head)", "(parameters)"  # no kind of layer's name


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
    weight: str  # the parameter that it reads, or whose gradient it makes; "": of activations alone
    batch: Size
    m: Size
    n: Size
    k: Size
    times: float = 1  # how often it runs: branches of a conditional are equally likely
    seen: float = 1  # the share of it that attention's mask leaves
    fused: bool = False  # in a kernel that keeps its result to itself

    def shape(self, rows: int, vocab: int = 0) -> tuple[int, int, int, int]:
        """(batch, m, n, k)"""
        return tuple(size.at(rows, vocab) for size in self[2:6])

    def flops(self, rows: int, vocab: int = 0) -> float:
        """2 m n k each. One that adds up nothing is no matmul: compilers multiply elementwise."""
        batch, m, n, k = self.shape(rows, vocab)
        return 2.0 * batch * m * n * k * self.times if k > 1 else 0.0


class Collective(NamedTuple):
    """bytes: of the whole array, gathered or not yet scattered, on one device."""

    during: Pass
    kind: str  # JAX's name: psum, all_gather, reduce_scatter, ppermute, all_to_all, pmax
    axes: tuple[str, ...]
    bytes: Size
    times: float = 1


class Moved(NamedTuple):
    """Memory that kernels beside matmuls and collectives read and write."""

    during: Pass
    kernels: float
    bytes: tuple[Size, ...]


class Parameter(NamedTuple):
    """elements: of the whole array; the vocabulary is that of all devices together."""

    path: str
    role: str
    elements: Size
    axes: tuple[str, ...]  # that shard it


class Parameters(NamedTuple):
    pattern: tuple[str, ...]  # the kind of each layer
    shared: tuple[Parameter, ...]  # of embedding and head
    layers: dict[str, tuple[Parameter, ...]]  # by kind, of one layer


class Cost(NamedTuple):
    """Of one layer, or of the embedding or the head, on one device, for one microbatch."""

    matmuls: tuple[Matmul, ...]
    collectives: tuple[Collective, ...]
    moved: tuple[Moved, ...]
    kept: tuple[Size, ...]  # bytes, from F to B
    deferred: tuple[Size, ...]  # bytes, from B to W where they are split
    stream: tuple[Size, ...]  # bytes of what goes from layer to layer
    cache: tuple[Size, ...]  # bytes of a sequence's keys and values, where it is cut into slices
    scores: Size  # elements of the largest product of activations that stands in memory

    def flops(self, during: str, rows: int, vocab: int = 0) -> float:
        """Of the matmuls of these passes, such as "F" or "BW"."""
        return sum(each.flops(rows, vocab) for each in self.matmuls if each.during in during)

    @property
    def weights(self) -> tuple[Matmul, ...]:
        """The products of F that read a parameter."""
        return tuple(each for each in self.matmuls if each.during == "F" and each.weight)


def module_of(path: str) -> str:
    """The first module on a parameter's path: the sublayer."""
    return path.partition(".")[0]


def pattern_of(model: ModelConfig) -> tuple[str, ...]:
    """The kind of each layer."""
    return model_parameters(model).pattern


# -- asking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is traced; hashable."""

    model: ModelConfig
    part: str  # a kind of layer, EMBED, HEAD or PARAMETERS
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    kernel: Kernel = "blocked"
    slices: int = 1


def layer_cost(
    model: ModelConfig,
    *,
    kind: str,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    kernel: Kernel = "blocked",
    slices: int = 1,
) -> Cost:
    """The cost of one layer of that kind, with attention by that kernel."""
    question = Question(
        model=model, part=kind, tensor=tensor, recompute=recompute, slices=slices,
        sequence_parallel=sequence_parallel and tensor > 1,
        kernel="cudnn" if kernel == "cudnn" else "blocked",  # others follow from model and slices
    )  # fmt: skip
    return _answer(question, Cost)


def shared_cost(
    model: ModelConfig, part: str, *, tensor: int = 1, sequence_parallel: bool = False
) -> Cost:
    """The cost of the embedding (EMBED) or of the head (HEAD), the vocabulary over `pipe` and
    `tensor`."""
    parallel = sequence_parallel and tensor > 1
    return _answer(
        Question(model=model, part=part, tensor=tensor, sequence_parallel=parallel), Cost
    )


def model_parameters(model: ModelConfig, *, tensor: int = 1) -> Parameters:
    """Every parameter of the model; of layers, those of one."""
    return _answer(Question(model=model, part=PARAMETERS, tensor=tensor), Parameters)


@lru_cache(maxsize=8192)
def _answer(question: Question, kind: type):
    path = _cache_folder() / f"{_fingerprint(question)}.json"
    try:
        return _decode(kind, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # not there, or not readable: trace
    from mtx.plan.trace import trace

    answer = trace(question)
    _keep(path, json.dumps(answer, separators=(",", ":")))
    return answer


def _decode(kind, value):
    """JSON's lists as the records that they were: named tuples, and tuples and dicts of them."""
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind).values()
        return kind(*(_decode(hint, each) for hint, each in zip(hints, value, strict=True)))
    if get_origin(kind) is tuple:
        return tuple(_decode(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return {key: _decode(get_args(kind)[1], each) for key, each in value.items()}
    return value


def _keep(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all; a folder that cannot be written stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with open(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        pass


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtx" / "costs" / _sources()


def _fingerprint(question: Question) -> str:
    asked = question.__dict__ | {"model": to_dict(question.model)}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """A checksum of all that a trace depends on: JAX's version, and the sources of layers."""
    digest = hashlib.sha256(importlib.metadata.version("jax").encode())
    root = Path(__file__).parent.parent
    for path in sorted(_layer_sources(root)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _layer_sources(root: Path) -> Iterator[Path]:
    for package in ("models", "layers", "families", "sharding"):
        yield from (root / package).rglob("*.py")
    yield from (root / "plan" / name for name in ("cost.py", "trace.py", "equations.py"))
    yield root / "pipeline" / "vjp.py"
