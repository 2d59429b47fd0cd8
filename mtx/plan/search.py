"""The fastest layouts that fit, by predicted time and memory.

Nothing of SC'21's advice is built in: every way to write the devices as data x pipe x tensor, for
long sequences and experts as data x pipe x expert x context x tensor (with experts, tensor groups
only within a node, and sequences sharded in them), every microbatch, number of chunks, sharding of
sequences and optimizer, and way to keep or recompute activations is a candidate, and only
`mtx.plan.time` and `mtx.plan.memory` decide.

Candidates are taken in the order of their time, and the first that fits wins its mesh. Until a
candidate is due, a bound stands for its time (`mtx.plan.makespan`), so that few are simulated; and
until any number of chunks is due, one bound stands for all of them: the step without its bubble.
Candidates that cannot win are not priced (tests/test_plan_search.py enumerates them all, and finds
nothing better):
  - if a mesh does not fit with everything recomputed that may be, and with the fewest sequences at
    once, nothing on that mesh does
  - recomputing more is tried if recomputing less does not fit; a way to recompute that is slower
    than one that keeps less is not tried at all
  - GPipe is never faster nor leaner than 1F1B, nor zero=0 than zero=1: they are tried if asked for
  - chunks change nothing on one stage, nor sequence parallelism on one tensor shard
Schedules that have to be simulated, such as zero bubble's, are not enumerated: they are priced on
the settings that are best with 1F1B, and only for the leaders. Neither are the ways of attention
over `context`, which are compared for the best of each mesh, nor whether experts are split over
`tensor`, which is compared for the leaders.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, get_args

from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.errors import UserError
from mtx.fields import checked
from mtx.plan.candidates import MEMORY_AT_MOST, RECOMPUTE, Fixed, Question
from mtx.plan.choose import with_zero
from mtx.plan.experts import check_imbalance
from mtx.plan.hardware import Hardware
from mtx.plan.makespan import LOOPED
from mtx.plan.memory import Memory, Zero
from mtx.plan.time import StepTime
from mtx.schedules.formats import SUFFIXES
from mtx.schedules.makers import check_virtual, maker
from mtx.sharding.axes import AXES
from mtx.sizes import Devices, Sequences

_SIMULATED = ("zb_h1", "zb_h2", "aligned_zb", "deferred_zb", "zb_v", "v_half", "dualpipe_v")
_NEARBY = 256  # numbers of GPUs among which one with a layout is looked for
_LEADERS, _MOST_OPS = 3, 4096  # if the schedule is open: meshes, and F of a simulated table


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, with its price."""

    layout: Layout
    zero: Zero
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
    meshes: int  # products of the axes' sizes that the model and the batch allow
    priced: int  # candidates whose time was predicted
    measured: int  # candidates whose memory was predicted as well

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


class _Waiting(NamedTuple):
    """A candidate that may be the next best, ordered by when it is looked at."""

    least_s: float  # its time, or a lower bound
    order: tuple[int, ...]  # of arrival; one number alone stands for all numbers of chunks
    layout: Layout
    zero: Zero
    priced: tuple[StepTime, Memory] | None = None  # None: `least_s` is a bound


def search(
    model: ModelConfig, *, gpus: int, global_batch: int, hardware: Hardware,
    fixed: Fixed | None = None, scatter_gather: bool = True, expert_imbalance: float = 1.0,
    optimizer: OptimizerConfig | None = None, top: int = 8,
) -> Found:  # fmt: skip
    """The `top` fastest meshes that fit in 90 % of a device, each with its best settings.

    A mesh is data x pipe x expert x context x tensor = gpus; stages have equal numbers of layers
    or, with experts and no equal numbers, numbers that differ by one. schedule="auto" leaves it
    open; optimizer: by default AdamW. UserError if the sizes allow no layout at all, or if none
    fits.
    """
    question = Question(
        model=model, gpus=checked("gpus", gpus, Devices),
        global_batch=checked("global_batch", global_batch, Sequences), hardware=hardware,
        fixed=fixed or Fixed(), scatter_gather=scatter_gather, expert_imbalance=expert_imbalance,
        optimizer=optimizer,
    )  # fmt: skip
    check_imbalance(model, expert_imbalance)
    wanted = question.fixed.schedule
    if wanted in LOOPED:
        return _looped(question, top)
    question = replace(question, fixed=replace(question.fixed, schedule=None))
    if wanted not in (None, "auto"):
        return _simulated(question, wanted, top)
    found = _looped(question, top)
    leaders = [
        _improve(question, one, _SIMULATED, below_s=one.time.step_s) or one
        for one in found.ranked[:_LEADERS]
    ]
    return replace(found, ranked=_by_time([*leaders, *found.ranked[_LEADERS:]]))


def _looped(question: Question, top: int) -> Found:
    """Search SC'21's schedules: by bounds of their times, until a time is needed."""
    meshes = question.meshes()
    if not meshes:
        raise _no_layout(question)
    waiting = list(_openings(question, meshes))
    heapq.heapify(waiting)
    priced, measured = len(waiting), 0
    found: dict[tuple[int, ...], Candidate] = {}
    while waiting and len(found) < top:
        one = heapq.heappop(waiting)
        layout, zero = one.layout, one.zero
        mesh = tuple(layout.sizes.values())
        if mesh in found:
            continue
        if one.priced is not None:
            time, memory = one.priced
            found[mesh] = Candidate(layout=layout, zero=zero, time=time, memory=memory)
            continue
        if len(one.order) == 1:
            further = list(_chunked(question, one))
        else:
            measured += 1
            further = list(_looked_at(question, one))
        priced += sum(each.priced is None for each in further)
        for each in further:
            heapq.heappush(waiting, each)
    if not found:
        raise _nothing_fits(question, meshes)
    ranked = _by_time(_best_way(question, one) for one in found.values())
    leaders = (_best_split(question, one) for one in ranked[:_LEADERS])
    ranked = _by_time([*leaders, *ranked[_LEADERS:]])
    return Found(ranked=ranked, meshes=len(meshes), priced=priced, measured=measured)


def _best_way(question: Question, one: Candidate) -> Candidate:
    """The candidate with the fastest attention over `context` that fits."""
    best = one
    for way in question.attentions(one.layout):
        layout = replace(one.layout, context_attention=way)
        if not question.allows(layout):
            continue
        time, memory = question.time(layout, one.zero), question.memory(layout, one.zero)
        named = best.layout.context_attention != "auto"
        slower = time.step_s >= best.time.step_s if named else time.step_s > best.time.step_s
        if not slower and question.holds(memory.total_bytes):
            best = Candidate(layout=layout, zero=one.zero, time=time, memory=memory)
    return best


def _best_split(question: Question, one: Candidate) -> Candidate:
    """The candidate with experts split over `tensor`, or whole: the faster one that fits."""
    best = one
    for split in question.ways_of_experts(one.layout):
        layout = replace(one.layout, expert_tensor=split)
        if layout == one.layout or not question.allows(layout):
            continue
        time, memory = question.time(layout, one.zero), question.memory(layout, one.zero)
        if time.step_s < best.time.step_s and question.holds(memory.total_bytes):
            best = Candidate(layout=layout, zero=one.zero, time=time, memory=memory)
    return best


def _openings(question: Question, meshes: list[Layout]) -> Iterator[_Waiting]:
    """One entry for every candidate that recomputes least, which stands for all of its numbers of
    chunks."""
    fastest: list[tuple[Layout, Zero]] = [
        (layout, zero)
        for mesh in meshes
        for zero in question.zeros(mesh)
        if question.mesh_fits(with_zero(mesh, zero), zero)
        for layout in question.settings(
            replace(with_zero(mesh, zero), recompute=question.fixed.ways()[0])
        )
    ]
    for arrival, (layout, zero) in enumerate(fastest):
        time = question.time(layout, zero, bound=True)
        least_s = (time.step_s - time.bubble_s) * (1 - 1e-12)  # rounded down
        yield _Waiting(least_s, (arrival,), layout, zero)


def _chunked(question: Question, one: _Waiting) -> Iterator[_Waiting]:
    for place, virtual in enumerate(question.virtuals(one.layout)):
        layout = replace(one.layout, virtual=virtual)
        if not question.allows(layout) or not question.can_hold(layout, one.zero):
            continue
        least_s = question.time(layout, one.zero, bound=True).step_s
        yield _Waiting(least_s, (*one.order, place), layout, one.zero)


def _looked_at(question: Question, one: _Waiting) -> Iterator[_Waiting]:
    """The candidate with its time and memory; if it does not fit, the one that recomputes more."""
    memory = question.memory(one.layout, one.zero)
    if question.holds(memory.total_bytes):
        time = question.time(one.layout, one.zero)
        yield one._replace(least_s=time.step_s, priced=(time, memory))
        return
    ways = question.ways(one.layout, one.zero)
    leaner = [way for way in ways if RECOMPUTE.index(way) > RECOMPUTE.index(one.layout.recompute)]
    if leaner:
        layout = replace(one.layout, recompute=leaner[0])
        least_s = question.time(layout, one.zero, bound=True).step_s
        yield one._replace(least_s=least_s, layout=layout)


def _simulated(question: Question, wanted: str, top: int) -> Found:
    """Search with one schedule that has to be simulated, on the settings that are best with
    1F1B."""
    if wanted.endswith(SUFFIXES):
        raise UserError(
            f"schedule={wanted!r} is a table of one shape, which leaves nothing to search; use "
            "--data, --pipe, --tensor and --microbatch"
        )
    virtual = question.fixed.virtual or maker(wanted).virtual
    check_virtual(wanted, virtual or 1, 1)
    question = replace(question, fixed=replace(question.fixed, virtual=virtual))
    found = _looped(question, top)
    tried = [
        _improve(question, one, (wanted,), most_ops=16 * _MOST_OPS)
        for one in found.ranked
        if one.layout.pipe > 1
    ]
    ranked = _by_time(one for one in tried if one is not None)
    if not ranked:
        raise UserError(
            f"schedule={wanted!r} fits none of the {len(found.ranked)} best meshes of "
            f"{question.gpus} x {question.hardware.name}, or has too long a table to be simulated; "
            "use more GPUs, or schedule='1f1b'"
        )
    return replace(found, ranked=ranked)


def _improve(
    question: Question, one: Candidate, schedules: tuple[str, ...], *, below_s: float = math.inf,
    most_ops: int = _MOST_OPS,
) -> Candidate | None:  # fmt: skip
    """The candidate with the fastest of `schedules` that fits and takes less than `below_s`; None
    if none does. Tables of more than `most_ops` are skipped."""
    best = None
    microbatches = one.layout.microbatches(question.global_batch)
    for name in schedules if one.layout.pipe > 1 else ():
        virtual = maker(name).virtual or one.layout.virtual
        ops = microbatches * one.layout.pipe * virtual
        if ops > most_ops or question.fixed.virtual not in (None, virtual):
            continue
        for way in question.ways(one.layout, one.zero):
            layout = replace(one.layout, schedule=name, virtual=virtual, recompute=way)
            if not question.allows(layout):
                break
            time = question.time(layout, one.zero)
            if time.step_s >= below_s:
                break
            memory = question.memory(layout, one.zero)
            if question.holds(memory.total_bytes):
                best = Candidate(layout=layout, zero=one.zero, time=time, memory=memory)
                below_s = time.step_s
                break
    return best


def _by_time(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda one: one.time.step_s))


# --- nothing found --------------------------------------------------------------------------------


def _no_layout(question: Question) -> UserError:
    """The error that names what rules out a mesh that the caller asked for, or every mesh."""
    model, gpus = question.model, question.gpus
    given = {name: value for name, value in asdict(question.fixed).items() if value is not None}
    sizes = {axis: given[axis] for axis in ("data", *AXES) if given.get(axis)}
    product, said = math.prod(sizes.values()), _listed(given, ", ")
    use, free = _remedy(question, product), replace(question, fixed=Fixed())
    if not use and given:
        use = f"leave {said} open" if len(given) == 1 else f"leave some of {said} open"
        use += "" if _fits(free) else f", and {_remedy(free, 1) or 'use a smaller model'}"
    use = use or "use a smaller model, or devices with more memory"
    if gpus % product:
        return UserError(f"gpus={gpus} cannot be divided by {_listed(sizes, ' * ')}; {use}")
    return UserError(
        f"no layout of gpus={gpus}{' with ' + said if said else ''} divides layers={model.layers}, "
        f"heads={model.heads} and global_batch={question.global_batch}; {use}"
    )


def _listed(values: dict, between: str) -> str:
    return between.join(f"{name}={value}" for name, value in values.items())


def _remedy(question: Question, product: int) -> str:
    """A number of GPUs, a multiple of `product`, or a batch, with which some layout fits; empty if
    there is neither. The number is the next lower one with a layout, else the next higher one, else
    the nearest power of two."""
    gpus, batch = question.gpus, question.global_batch
    below = range((gpus - 1) // product * product, 0, -product)[:_NEARBY]
    above = range(gpus // product * product + product, 2**20, product)[:_NEARBY]
    near = [
        next((n for n in numbers if replace(question, gpus=n).meshes()), 0)
        for numbers in (below, above)
    ]
    powers = [product * 2**power for power in range(21) if product * 2**power <= 2**20]
    numbers = [*filter(None, near), *sorted(powers, key=lambda n: abs(math.log2(n / gpus)))]
    found = (f"gpus={n}" for n in numbers if _fits(replace(question, gpus=n)))
    multiple = -(-batch // gpus) * gpus
    larger = replace(question, global_batch=multiple)
    fits = multiple != batch and multiple in get_args(Sequences)[1] and _fits(larger)
    remedies = [*itertools.islice(found, 1), *[f"global_batch={multiple}"] * fits]
    return f"use {' or '.join(remedies)}" if remedies else ""


def _fits(question: Question) -> bool:
    """Whether some layout fits."""
    return any(
        question.mesh_fits(mesh, zero)
        for mesh in question.meshes()
        for zero in question.zeros(mesh)
    )


def _nothing_fits(question: Question, meshes: list[Layout]) -> UserError:
    """The error with the leanest candidate: no user should have to guess how much is missing."""
    leanest = (
        (question.memory(layout, zero).total_bytes, layout, zero)
        for layout in (replace(mesh, recompute=question.fixed.ways()[-1]) for mesh in meshes)
        for zero in question.zeros(layout)
    )
    least, layout, zero = min(leanest, key=lambda entry: entry[0])
    sizes = {"data": layout.data} | layout.shown
    room = MEMORY_AT_MOST * question.hardware.memory_gib
    return UserError(
        f"no layout on {question.gpus} x {question.hardware.name} fits: the leanest of "
        f"{len(meshes)} meshes ({' '.join(f'{axis}={n}' for axis, n in sizes.items())} "
        f"zero={zero}) needs {least / 2**30:,.1f} of {room:.1f} GiB; use more GPUs, or devices "
        "with more memory"
    )


def fewest_gpus(
    model: ModelConfig, *, hardware: Hardware, batch_of, fixed: Fixed | None = None,
    optimizer: OptimizerConfig | None = None,
) -> int:  # fmt: skip
    """The smallest power of two of devices on which some layout fits.

    batch_of: the global batch for a number of devices. UserError if none fits up to 2^20.
    """
    fixed = fixed or Fixed()
    for gpus in (2**power for power in range(21)):
        question = Question(
            model=model, gpus=gpus, global_batch=batch_of(gpus), hardware=hardware, fixed=fixed,
            optimizer=optimizer,
        )  # fmt: skip
        for mesh in question.meshes():
            leanest = replace(mesh, recompute=fixed.ways()[-1])
            if question.holds(question.memory(leanest, fixed.zero or 1).total_bytes):
                return gpus
    raise UserError(
        f"layers={model.layers} of hidden={model.hidden} fit on no number of {hardware.name} up to "
        f"{2**20:,}; use a smaller model"
    )
