"""The fastest layouts that fit, by predicted time and memory.

Nothing of SC'21's advice is in here: every way to write the devices as data x pipe x tensor, every
microbatch, number of chunks, sharding of sequences and optimizer, and way to keep or recompute
activations is a candidate, and only `mtx.plan.time` and `mtx.plan.memory` decide.

Candidates are taken in the order of their time, and the first that fits wins its mesh. Until one is
due a bound stands for its time (`mtx.plan.makespan`), so that few are simulated; and until
one of them is due, one for all numbers of chunks: the step without its bubble. Not priced is what
cannot win (tests/test_plan_search.py enumerates it all, and finds nothing better):
  - parameters, gradients and optimizer depend on the mesh and on zero alone: where they do not fit,
    nothing on that mesh does
  - recomputing more never makes a step faster: it is tried where recomputing less does not fit
  - GPipe is never faster nor leaner than 1F1B, nor zero=0 than zero=1: they are tried if asked for
  - chunks change nothing on one stage, nor sequence parallelism on one tensor shard
Schedules that have to be simulated, as zero bubble's, are priced on the settings that are best with
1F1B, and of those the leaders' only: they are not enumerated.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.fields import checked
from mtx.plan.hardware import Hardware
from mtx.plan.makespan import LOOPED
from mtx.plan.memory import Memory, predict_memory
from mtx.plan.time import StepTime, predict_step
from mtx.schedules.formats import SUFFIXES
from mtx.schedules.makers import check_virtual, maker
from mtx.sizes import Devices, Sequences

MEMORY_AT_MOST = 0.9  # of a device: what JAX can be told to take
RECOMPUTE = ("none", "selective", "full")  # from the fastest to the leanest
_SIMULATED = ("zb_h1", "zb_h2", "aligned_zb", "deferred_zb", "zb_v", "v_half", "dualpipe_v")
_SCHEDULES = ("1f1b",)
_LEADERS, _MOST_OPS = 3, 4096  # of a search that is open: meshes, and F of a simulated table
_ZERO = (1, 3)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the search may not choose; None is open."""

    data: int | None = None
    pipe: int | None = None
    tensor: int | None = None
    virtual: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    zero: int | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, with its price."""

    layout: Layout
    zero: int
    time: StepTime
    memory: Memory

    @property
    def runs(self) -> bool:
        """Whether this program trains it; zero=0 is only priced."""
        return self.zero == self.layout.zero


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidate of each mesh, fastest first, and how much was looked at."""

    ranked: tuple[Candidate, ...]
    meshes: int  # data x pipe x tensor that the model and the batch allow
    priced: int  # candidates whose time was predicted
    measured: int  # candidates whose memory was predicted as well

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


class _Waiting(NamedTuple):
    """What may be the next best, in the order in which it is looked at."""

    least_s: float  # its time, or a bound of it
    order: tuple[int, ...]  # of arrival; one number alone stands for all numbers of chunks
    layout: Layout
    zero: int
    way: int = 0  # its place in the ways to recompute
    priced: tuple[StepTime, Memory] | None = None  # None: `least_s` is a bound


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is searched for, and where."""

    model: ModelConfig
    gpus: int
    global_batch: int
    hardware: Hardware
    fixed: Fixed
    scatter_gather: bool

    def time(self, layout: Layout, zero: int, *, bound: bool = False) -> StepTime:
        """The predicted step. UserError where the model cannot be laid out."""
        return predict_step(
            self.model, layout, self.global_batch, self.hardware, zero=zero,
            scatter_gather=self.scatter_gather, bound=bound,
        )  # fmt: skip

    def memory(self, layout: Layout, zero: int) -> Memory:
        """Predicted bytes of a device. UserError where it cannot be laid out."""
        return predict_memory(
            self.model, layout, self.global_batch, backend=self.hardware.backend, zero=zero
        )

    def holds(self, size_bytes: int) -> bool:
        """Whether a device has room for so much: MEMORY_AT_MOST of it is taken."""
        return size_bytes <= MEMORY_AT_MOST * self.hardware.memory_bytes


def search(
    model: ModelConfig,
    *,
    gpus: int,
    global_batch: int,
    hardware: Hardware,
    fixed: Fixed | None = None,
    scatter_gather: bool = True,
    top: int = 8,
) -> Found:
    """The `top` fastest meshes that fit in 90 % of a device, each with its best settings.

    A mesh is data x pipe x tensor = gpus; layers lie in equal parts on the stages. schedule="auto"
    is an open one. Raises UserError where the sizes allow no layout at all, and where none fits.
    """
    question = Question(
        model=model, gpus=checked("gpus", gpus, Devices),
        global_batch=checked("global_batch", global_batch, Sequences), hardware=hardware,
        fixed=fixed or Fixed(), scatter_gather=scatter_gather,
    )  # fmt: skip
    wanted = question.fixed.schedule
    if wanted in (None, "auto"):
        question = replace(question, fixed=replace(question.fixed, schedule=None))
        found = _looped(question, top)
        leaders = [_improve(question, one, _SIMULATED) for one in found.ranked[:_LEADERS]]
        return replace(found, ranked=_by_time([*leaders, *found.ranked[_LEADERS:]]))
    if wanted in LOOPED:
        return _looped(question, top)
    return _simulated(question, top)


def _looped(question: Question, top: int) -> Found:
    """The search among SC'21's schedules: by the bounds of their times, until a time is needed."""
    meshes = _meshes(question)
    if not meshes:
        raise _no_layout(question)
    ways = _open(question.fixed.recompute, RECOMPUTE)
    waiting = list(_openings(question, meshes, ways[0]))
    heapq.heapify(waiting)
    priced, measured = len(waiting), 0
    found: dict[tuple[int, int, int], Candidate] = {}
    while waiting and len(found) < top:
        one = heapq.heappop(waiting)
        layout, zero = one.layout, one.zero
        mesh = (layout.data, layout.pipe, layout.tensor)
        if mesh in found:
            continue
        if len(one.order) == 1:
            further = list(_chunked(question, one))
        elif one.priced is None:
            measured += 1
            further = _look_at(question, one, ways)
        else:
            time, memory = one.priced
            found[mesh] = Candidate(layout=layout, zero=zero, time=time, memory=memory)
            continue
        priced += sum(each.priced is None for each in further)
        for each in further:
            heapq.heappush(waiting, each)
    if not found:
        raise _nothing_fits(question, meshes)
    return Found(ranked=tuple(found.values()), meshes=len(meshes), priced=priced, measured=measured)


def _openings(question: Question, meshes: list[Layout], recompute: str) -> Iterator[_Waiting]:
    """What stands for every candidate that recomputes least, whatever its chunks; but for those
    whose state alone is too large."""
    arrival = itertools.count()
    for mesh in meshes:
        for zero in zeros(question.fixed, mesh):
            if not question.holds(_state_bytes(question.memory(_leanest(question, mesh), zero))):
                continue
            for layout in _unchunked(question, replace(with_zero(mesh, zero), recompute=recompute)):
                time = question.time(layout, zero, bound=True)
                least_s = (time.step_s - time.bubble_s) * (1 - 1e-12)
                yield _Waiting(least_s, (next(arrival),), layout, zero)


def _chunked(question: Question, one: _Waiting) -> Iterator[_Waiting]:
    for place, virtual in enumerate(_virtuals(question, one.layout)):
        layout = replace(one.layout, virtual=virtual)
        time = question.time(layout, one.zero, bound=True)
        yield _Waiting(time.step_s, (*one.order, place), layout, one.zero)


def _look_at(question: Question, one: _Waiting, ways: tuple[str, ...]) -> list[_Waiting]:
    """The candidate with its time and memory; with less of it to keep where that does not fit."""
    memory = question.memory(one.layout, one.zero)
    if question.holds(memory.total_bytes):
        time = question.time(one.layout, one.zero)
        return [one._replace(least_s=time.step_s, priced=(time, memory))]
    if one.way + 1 == len(ways):
        return []
    layout = replace(one.layout, recompute=ways[one.way + 1])
    least_s = question.time(layout, one.zero, bound=True).step_s
    return [one._replace(least_s=least_s, layout=layout, way=one.way + 1)]


def _simulated(question: Question, top: int) -> Found:
    """The search with one schedule that has to be simulated, on what is best with 1F1B."""
    wanted = question.fixed.schedule
    if wanted.endswith(SUFFIXES):
        raise UserError(
            f"schedule={wanted!r} is a table of one shape, which leaves nothing to search: give "
            "--data, --pipe, --tensor and --microbatch"
        )
    chunks = maker(wanted).virtual
    if chunks and question.fixed.virtual is None:
        question = replace(question, fixed=replace(question.fixed, virtual=chunks))
    check_virtual(wanted, question.fixed.virtual or 1, 1)
    found = _looped(replace(question, fixed=replace(question.fixed, schedule=None)), top)
    tried = [
        _improve(question, one, (wanted,), anyway=True)
        for one in found.ranked
        if one.layout.pipe > 1
    ]
    ranked = _by_time(one for one in tried if one is not None)
    if not ranked:
        raise UserError(
            f"schedule={wanted!r} fits none of the {len(found.ranked)} best meshes of "
            f"{question.gpus} x {question.hardware.name}, or has too long a table to be simulated; "
            f"use more GPUs, or schedule={_SCHEDULES[0]!r}"
        )
    return replace(found, ranked=ranked)


def _improve(
    question: Question, one: Candidate, schedules: tuple[str, ...], *, anyway: bool = False
) -> Candidate | None:
    """The candidate with the fastest of `schedules` that fits, or as it is where none is faster.

    anyway: None where none fits, whatever is faster. Tables of too many ops are passed over.
    """
    best = None if anyway else one
    microbatches = one.layout.microbatches(question.global_batch)
    for name in schedules if one.layout.pipe > 1 else ():
        virtual = maker(name).virtual or one.layout.virtual
        ops = microbatches * one.layout.pipe * virtual
        if ops > _MOST_OPS * (16 if anyway else 1) or question.fixed.virtual not in (None, virtual):
            continue
        for way in _open(question.fixed.recompute, RECOMPUTE):
            layout = replace(one.layout, schedule=name, virtual=virtual, recompute=way)
            if not is_allowed(question, layout):
                break
            time = question.time(layout, one.zero)
            if best and time.step_s >= best.time.step_s:
                break
            memory = question.memory(layout, one.zero)
            if question.holds(memory.total_bytes):
                best = Candidate(layout=layout, zero=one.zero, time=time, memory=memory)
                break
    return best


def _by_time(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda one: one.time.step_s))


def with_zero(layout: Layout, zero: int) -> Layout:
    """The layout that shards so over `data`; zero=0, which this program does not run, as zero=1."""
    return replace(layout, zero=zero or 1)


def _state_bytes(memory: Memory) -> int:
    return memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes


def _meshes(question: Question) -> list[Layout]:
    """Every data x pipe x tensor that the model and the batch allow, in its leanest settings."""
    fixed, meshes = question.fixed, []
    for tensor, pipe in itertools.product(divisors(question.gpus), repeat=2):
        data, left = divmod(question.gpus, tensor * pipe)
        wanted = ((fixed.data, data), (fixed.pipe, pipe), (fixed.tensor, tensor))
        if left or any(given not in (None, size) for given, size in wanted):
            continue
        mesh = Layout(
            data=data, pipe=pipe, tensor=tensor, idle="phases", recompute="full",
            virtual=fixed.virtual or 1, microbatch=fixed.microbatch or 1,
            schedule=fixed.schedule or _SCHEDULES[0],
            sequence_parallel=_sequence_parallel(question, tensor)[0],
        )  # fmt: skip
        if is_allowed(question, mesh):
            meshes.append(mesh)
    return meshes


def _leanest(question: Question, mesh: Layout) -> Layout:
    """The mesh with as many chunks as can be: zero=3 then has least of the parameters at hand."""
    if question.fixed.virtual is not None or mesh.stage_layers != "even":
        return mesh
    return replace(mesh, virtual=question.model.layers // mesh.pipe)


def is_allowed(question: Question, layout: Layout) -> bool:
    """Whether the model can be laid out so, and the batch be divided."""
    try:
        layout.check(question.model)
        layout.microbatches(question.global_batch)
    except UserError:
        return False
    return True


def settings(question: Question, mesh: Layout) -> Iterator[Layout]:
    """Every (microbatch, sequence parallelism, virtual) of one mesh."""
    for layout in _unchunked(question, mesh):
        for virtual in _virtuals(question, layout):
            yield replace(layout, virtual=virtual)


def _unchunked(question: Question, mesh: Layout) -> Iterator[Layout]:
    microbatches = divisors(question.global_batch // mesh.data)
    for microbatch in _open(question.fixed.microbatch, microbatches):
        for parallel in _sequence_parallel(question, mesh.tensor):
            layout = replace(mesh, microbatch=microbatch, sequence_parallel=parallel)
            if is_allowed(question, layout):
                yield layout


def _virtuals(question: Question, layout: Layout) -> tuple[int, ...]:
    """The numbers of chunks to try: on one stage they serve zero=3 alone, which gathers one of them
    at a time."""
    matters = layout.pipe > 1 or layout.data > 1
    layers = question.model.layers // layout.pipe
    return _open(question.fixed.virtual, divisors(layers) if matters else (1,))


def _open(given, choices: tuple) -> tuple:
    return choices if given is None else (given,)


def zeros(fixed: Fixed, mesh: Layout) -> tuple[int, ...]:
    """The values of `zero` to try on a mesh: the one that is fixed, else those that this program
    trains with; 3 is as 1 where there is one replica."""
    return _open(fixed.zero, _ZERO if mesh.data > 1 else _ZERO[:1])


def _sequence_parallel(question: Question, tensor: int) -> tuple[bool, ...]:
    """What may be tried, the leaner first."""
    if question.fixed.sequence_parallel is not None:
        return (question.fixed.sequence_parallel,)
    if tensor == 1:
        return (True,)
    return (True, False) if question.model.sequence % tensor == 0 else (False,)


def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


# --- nothing found --------------------------------------------------------------------------------


def _no_layout(question: Question) -> UserError:
    """Names what stands in the way of a mesh that the caller asked for, or of every mesh."""
    fixed, model = question.fixed, question.model
    given = {each.name: getattr(fixed, each.name) for each in fields(fixed)}
    product = (fixed.data or 1) * (fixed.pipe or 1) * (fixed.tensor or 1)
    sizes = " * ".join(
        f"{name}={given[name]}" for name in ("data", "pipe", "tensor") if given[name]
    )
    if sizes and question.gpus % product:
        return UserError(
            f"gpus={question.gpus} cannot be divided by {sizes}; use gpus="
            f"{max(1, question.gpus // product) * product} or leave one of them open"
        )
    said = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return UserError(
        f"no layout of gpus={question.gpus}{' with ' + said if said else ''} divides "
        f"layers={model.layers}, heads={model.heads} and global_batch={question.global_batch}; "
        f"use gpus={_nearest_gpus(question)}, or a global_batch that is a multiple of "
        f"gpus={question.gpus}"
    )


def _nearest_gpus(question: Question) -> int:
    """The next smaller number of devices that has a mesh."""
    free = replace(question, fixed=Fixed())
    return (
        next(gpus for gpus in range(question.gpus - 1, 0, -1) if _meshes(replace(free, gpus=gpus)))
        if question.gpus > 1
        else 1
    )


def _nothing_fits(question: Question, meshes: list[Layout]) -> UserError:
    """With the leanest candidate: no user should have to guess how much is missing."""
    recompute = _open(question.fixed.recompute, RECOMPUTE)[-1]
    least, layout, zero = min(
        (
            (question.memory(layout, zero).total_bytes, layout, zero)
            for mesh in meshes
            for zero in zeros(question.fixed, mesh)
            for layout in (replace(mesh, recompute=recompute),)
        ),
        key=lambda entry: entry[0],
    )
    room = MEMORY_AT_MOST * question.hardware.memory_gib
    return UserError(
        f"no layout on {question.gpus} x {question.hardware.name} fits: the leanest of "
        f"{len(meshes)} meshes (data={layout.data} pipe={layout.pipe} tensor={layout.tensor} "
        f"zero={zero}) needs {least / 2**30:,.1f} of {room:.1f} GiB; use more GPUs, or devices "
        "with more memory"
    )


def fewest_gpus(
    model: ModelConfig, *, hardware: Hardware, batch_of, fixed: Fixed | None = None
) -> int:
    """The smallest power of two of devices on which some layout fits.

    batch_of: the global batch for a number of devices. UserError above 2^20 of them.
    """
    for gpus in (2**power for power in range(21)):
        question = Question(
            model=model, gpus=gpus, global_batch=batch_of(gpus), hardware=hardware,
            fixed=fixed or Fixed(), scatter_gather=True,
        )  # fmt: skip
        recompute = _open(question.fixed.recompute, RECOMPUTE)[-1]
        zero = _open(question.fixed.zero, _ZERO)[0]
        for mesh in _meshes(question):
            leanest = question.memory(replace(mesh, recompute=recompute), zero)
            if question.holds(leanest.total_bytes):
                return gpus
    raise UserError(
        f"layers={model.layers} of hidden={model.hidden} fit on no number of {hardware.name} up to "
        f"{2**20:,}; use a smaller model"
    )
