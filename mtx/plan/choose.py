"""What a layout leaves to "auto": the schedule, what zero=3 gathers, attention over `context`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from mtx.config import Layout, ModelConfig
from mtx.config.layout import ContextAttention, ZeroUnit
from mtx.costs.ask import pattern_of
from mtx.costs.cost import ExpertShards
from mtx.errors import UserError
from mtx.plan.block import layer_work
from mtx.plan.calibration import calibration_for
from mtx.plan.hardware import DEFAULT, Hardware, hardware
from mtx.plan.shard import Shard
from mtx.schedules.formats import read_schedule
from mtx.schedules.makers import make
from mtx.schedules.schedule import Schedule
from mtx.schedules.search import Candidate, choose, search_schedules
from mtx.schedules.shape import Times

_HIDES = 4096  # tokens of a microbatch whose FLOPs take as long as its layers' collectives
CONTEXT_WAYS: tuple[ContextAttention, ...] = ("gather", "ring", "ulysses", "usp")
_SEND = 0.01  # of F + B + W, for each send: enough to prefer fewer chunks if nothing else decides


def schedule_for(layout: Layout, microbatches: int, own: Schedule | None = None) -> Schedule:
    """The table that a layout's schedule names, or that its file holds, or the caller's own; woven
    if the layout's ticks are.

    UserError if there is none. A file's table may have another shape: see `check_shape`.
    """
    if own is not None:
        table = own
    elif layout.schedule == "auto":
        raise UserError("schedule='auto' is still to be chosen: see mtx.plan.choose.resolve")
    elif layout.schedule_is_file:
        table = _read(Path(layout.schedule))
    else:
        table = _make(layout.schedule, microbatches, layout.pipe, layout.virtual, layout.slices)
    return table.woven if layout.weave == "on" and isinstance(table, Schedule) else table


@lru_cache(maxsize=128)
def _make(name: str, microbatches: int, stages: int, virtual: int, slices: int) -> Schedule:
    return make(name, microbatches=microbatches, stages=stages, virtual=virtual, slices=slices)


_read = lru_cache(maxsize=8)(read_schedule)


def check_shape(table: Schedule, layout: Layout, microbatches: int) -> None:
    """UserError if a table is only a name, or is made for another number of stages, chunks, slices
    or microbatches, or for woven ticks that a layout does not have."""
    if not isinstance(table, Schedule):
        raise UserError(
            f"schedule={table!r} is not a table; a schedule's name stands in the layout, "
            'Layout(schedule="1f1b"), a table in a Schedule'
        )
    for name, has, wants in (
        ("stages", table.stages, f"layout.pipe={layout.pipe}"),
        ("chunks a stage", table.virtual, f"layout.virtual={layout.virtual}"),
        ("slices", table.slices, f"layout.slices={layout.slices}"),
        ("microbatches", table.microbatches, f"the batch's microbatches={microbatches}"),
    ):
        if has != int(wants.rpartition("=")[2]):
            raise UserError(
                f"schedule {table.name!r} is a table of {has} {name}, which is not {wants}; change "
                "one of the two"
            )
    if table.head_ahead and layout.weave != "on":
        raise UserError(
            f"schedule {table.name!r} is a table of woven ticks, and layout.weave={layout.weave!r} "
            "has none here; use the table that it was woven from, or weave='on'"
        )


def resolve(layout: Layout, model: ModelConfig, global_batch: int) -> tuple[Layout, str]:
    """(the layout with schedule="auto", zero_unit="auto" and context_attention="auto" resolved, why
    that schedule was chosen); any other schedule stays as it is, with "" for the reason.

    The search knows no measured times: F, B and W count the same, B twice as much if it computes F
    again, and a send a hundredth of the three. A layout with virtual > 1, or with a tuple of
    stage_layers, keeps its number of chunks. Otherwise every number is tried that gives each chunk
    the same number of layers, and 1, where stage_layers="balanced" may give some stages more.
    """
    if layout.zero == 3:
        layout = replace(layout, zero_unit=zero_unit(layout, model, global_batch))
    layout = replace(layout, context_attention=context_attention(layout, model))
    if layout.schedule != "auto":
        return layout, ""
    found = _choose(layout, model.layers, layout.microbatches(global_batch))
    resolved = replace(layout, schedule=found.name, virtual=found.virtual, slices=found.slices)
    return resolved, f"schedule {found.label}: {found.reason}"


def with_zero(layout: Layout, zero: int) -> Layout:
    """The layout with that `zero`; zero=0, which this program does not run, becomes zero=1."""
    if zero == 3:
        return replace(layout, zero=3)
    return replace(layout, zero=1, zero_unit="auto")


def zero_unit(layout: Layout, model: ModelConfig, global_batch: int) -> ZeroUnit:
    """What zero=3 gathers at a time, "layer" or "chunk"; "auto" is resolved.

    By layer, 8 bytes per parameter (16 bits gathered twice, float32 scattered) move with every
    microbatch, beside 6 FLOPs per parameter and token: from a few thousand tokens on the FLOPs take
    longer, on A100s and H100s alike, and all but one layer stays sharded. By chunk, they move with
    every group of microbatches, and nothing hides them; for one microbatch they are the same.
    """
    if layout.zero_unit != "auto":
        return layout.zero_unit
    tokens = layout.microbatch * model.sequence // layout.slices
    alone = layout.microbatches(global_batch) * layout.slices == 1
    return "layer" if alone or tokens >= _HIDES else "chunk"


def context_attention(
    layout: Layout, model: ModelConfig, device: Hardware | None = None
) -> ContextAttention:
    """The way of attention over `context`; for "auto", the fastest."""
    if layout.context == 1 or layout.context_attention != "auto":
        return layout.context_attention
    return context_ways(layout, model, device)[0]


def context_ways(
    layout: Layout, model: ModelConfig, device: Hardware | None = None
) -> tuple[ContextAttention, ...]:
    """The ways of attention over `context` that the layout allows, the fastest first: by the
    seconds of a layer, as nothing else in a step depends on them. device: None stands for a plan's
    default, which training uses too; a plan's file keeps what was chosen for its target."""
    if not model.causal:
        return ("gather",)
    heads = max(1, model.groups // layout.tensor)
    whole = heads % layout.context == 0
    ways: list[ContextAttention] = [way for way in CONTEXT_WAYS if whole or way != "ulysses"]
    if device is None:
        device, model = hardware(DEFAULT), model.without_fp8()  # which has no unit for float8
    return tuple(sorted(ways, key=lambda way: _layers_s(layout, model, way, device)))


def _layers_s(layout: Layout, model: ModelConfig, way: ContextAttention, device: Hardware) -> float:
    """Seconds of one layer of each kind, in total, for a microbatch."""
    shard = Shard(
        model=model, microbatch=layout.microbatch, tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel, hardware=device,
        calibration=calibration_for(layout, model, device), context=layout.context,
        context_attention=way, experts=ExpertShards.of(layout, model),
    )  # fmt: skip
    recompute = "full" if layout.stash == "inputs" else layout.recompute
    return sum(layer_work(shard, kind, recompute).all.total_s for kind in set(pattern_of(model)))


@lru_cache(maxsize=64)
def _choose(layout: Layout, layers: int, microbatches: int) -> Candidate:
    again = layout.recompute in ("around_attention", "full") or layout.stash == "inputs"
    work = 4.0 if again else 3.0
    times = Times(forward=1.0, backward=work - 2.0, weight=1.0, comm=_SEND * work)
    even = layout.stage_layers == "even"
    virtuals = [layout.virtual]
    if layout.virtual == 1 and isinstance(layout.stage_layers, str):
        tried = range(2, layers // layout.pipe + 1)
        virtuals += [v for v in tried if layers % (layout.pipe * v) == 0]
    return choose(search_schedules(
        microbatches, layout.pipe, times=times, layers=layers if even else None,
        slices=[layout.slices], virtuals=virtuals,
    ))  # fmt: skip
