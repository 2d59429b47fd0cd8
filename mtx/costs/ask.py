"""Look up costs: in the user's cache folder, or else from a trace (`mtx.costs.trace`, which imports
JAX), which is then kept there, so that a model that was planned before is planned without JAX."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from mtx.config import ModelConfig, Recompute, to_dict
from mtx.config.layout import ContextAttention
from mtx.costs.cost import PARAMETERS, Cost, ExpertShards, Parameters, Question
from mtx.errors import UserError
from mtx.families import family_module
from mtx.files import replacing

_ANY_KERNEL = "cudnn"  # for parts without attention: that of layers, so that modules are shared
_ANY = 0  # for the shards of experts, in a question that is asked for several numbers of them


def pattern_of(model: ModelConfig) -> tuple[str, ...]:
    """The kind of each layer."""
    return model_parameters(model).pattern


def layer_cost(
    model: ModelConfig,
    *,
    kind: str,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    kernel: str = "blocked",
    slices: int = 1,
    context: int = 1,
    context_attention: ContextAttention = "gather",
    experts: ExpertShards | None = None,
) -> Cost:
    """The cost of one layer of that kind, with attention computed by `kernel`, and over `context`
    by `context_attention`."""
    if experts and not _routes(model, kind):
        experts = None
    elif experts and tensor == 1:
        experts = experts._replace(expert_tensor=True)
    shards = experts.expert if experts and experts.expert_dispatch == "alltoall" else 1
    question = Question(
        model=model, part=kind, tensor=tensor, recompute=recompute, slices=slices, context=context,
        context_attention=context_attention if context > 1 else "gather",
        experts=experts._replace(expert=_ANY) if experts and shards > 1 else experts,
        sequence_parallel=sequence_parallel and tensor > 1,
        kernel="cudnn" if kernel == "cudnn" else "blocked",  # model and slices decide the rest
    )  # fmt: skip
    return _over_shards(question).cost(shards) if shards > 1 else _answer(question, Cost)


@lru_cache(maxsize=8192)
def _over_shards(question: Question) -> _OverShards:
    return _OverShards(question)


class _OverShards:
    """The costs of a question with `_ANY` shards of experts, by their number. The costs for any two
    numbers determine all others, so only the first two that are asked for are traced."""

    def __init__(self, question: Question):
        self._question = question
        self._known: dict[int, Cost] = {}

    def cost(self, shards: int) -> Cost:
        """The cost with that many shards of experts, two or more."""
        if shards not in self._known and len(self._known) < 2:
            self._learn(shards)
        if shards not in self._known:
            (n, of_n), (m, of_m) = islice(self._known.items(), 2)
            self._known[shards] = _spread(of_n, of_m, (n, m, shards))
        return self._known[shards]

    def _learn(self, shards: int) -> None:
        """Read costs from the file, where other processes add theirs, or else trace this one."""
        path, question = _path(self._question), self._question
        self._known |= (_read(path, dict[int, Cost]) if path else None) or {}
        if shards in self._known or len(self._known) > 1:
            return
        experts = cast(ExpertShards, question.experts)._replace(expert=shards)
        self._known[shards] = _traced(replace(question, experts=experts))
        if path:
            _keep(path, self._known)


def _spread(of_n: Any, of_m: Any, shards: tuple[int, int, int]) -> Any:
    """A cost, or a part of one, for the last of three numbers of shards of experts, given those for
    the first two. Each count is the same with any number, is proportional to it (tokens at an
    expert), or has a part that the shards divide among them (experts of a device)."""
    if isinstance(of_n, tuple):
        parts = [_spread(*each, shards) for each in zip(of_n, of_m, strict=True)]
        return type(of_n)(*parts) if hasattr(of_n, "_fields") else tuple(parts)
    if of_n == of_m:
        return of_n
    n, m, asked = shards
    if of_n * m == of_m * n:
        return of_n * asked // n
    shared = (of_n - of_m) * n * m // (m - n)
    return of_n - shared // n + shared // asked


def shared_cost(
    model: ModelConfig, part: str, *, tensor: int = 1, sequence_parallel: bool = False,
    context: int = 1,
) -> Cost:  # fmt: skip
    """The cost of the embedding (EMBED) or of the head (HEAD), with the vocabulary sharded over
    `pipe` and `tensor`."""
    parallel = sequence_parallel and tensor > 1
    question = Question(
        model=model, part=part, tensor=tensor, sequence_parallel=parallel, context=context,
        kernel=_ANY_KERNEL,
    )  # fmt: skip
    return _answer(question, Cost)


@lru_cache(maxsize=4096)
def _routes(model: ModelConfig, kind: str) -> bool:
    """Whether layers of that kind have a router."""
    return any(each.role == "router" for each in model_parameters(model).layers[kind])


def model_parameters(
    model: ModelConfig, *, tensor: int = 1, experts: ExpertShards | None = None
) -> Parameters:
    """Every parameter of the model; for layers, those of one layer of each kind."""
    question = Question(
        model=model, part=PARAMETERS, tensor=tensor, sequence_parallel=tensor > 1,
        kernel=_ANY_KERNEL, experts=experts and ExpertShards(expert_tensor=experts.expert_tensor),
    )  # fmt: skip
    return _answer(question, Parameters)


@lru_cache(maxsize=8192)
def _answer(question: Question, kind: type) -> Any:
    path = _path(question)
    answer = _read(path, kind) if path else None
    if answer is None:
        answer = _traced(question)
        if path:
            _keep(path, answer)
    return answer


def _path(question: Question) -> Path | None:
    """The file for a question's answer; None for a model class other than its family's, since the
    file's name would cover neither that class nor its source."""
    model = question.model
    if type(model) is not family_module(model.family).CONFIG:
        return None
    return _cache_folder() / f"{_fingerprint(question)}.json"


def _read(path: Path, kind: Any) -> Any:
    """The answer in a file; None if none can be read."""
    try:
        return _decode(kind, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _traced(question: Question) -> Any:
    from mtx.costs.trace import trace

    return trace(question)


def _decode(kind, value):
    """Turn JSON's lists back into the records that they were: named tuples, and tuples and dicts of
    them."""
    if hasattr(kind, "_fields"):
        return kind(*(_decode(of, each) for of, each in zip(_fields(kind), value, strict=True)))
    if get_origin(kind) is tuple:
        return tuple(_decode(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        of_key, of_value = get_args(kind)
        return {of_key(key): _decode(of_value, each) for key, each in value.items()}
    return value


@cache
def _fields(kind: type) -> tuple:
    return tuple(get_type_hints(kind).values())


def _keep(path: Path, answer: Any) -> None:
    """Write a file as a whole or not at all; a folder that cannot be written is left as it is."""
    text = json.dumps(answer, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as written:
            written.write_text(text)
    except (OSError, UserError):
        pass


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtx" / "costs" / _sources()


def _fingerprint(question: Question) -> str:
    asked = question.__dict__ | {"model": to_dict(question.model)}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """A checksum of everything that a trace depends on: JAX's version and the sources of layers."""
    digest = hashlib.sha256(importlib.metadata.version("jax").encode())
    root = Path(__file__).parent.parent
    for path in sorted(_layer_sources(root)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _layer_sources(root: Path) -> Iterator[Path]:
    for package in ("layers", "families", "sharding", "costs"):
        yield from (root / package).rglob("*.py")
    yield from (root / "strand.py", root / "vjp.py")
