"""How much a schedule keeps at once: the planner's one view of it that concerns memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mtx.config import Layout
from mtx.config.layout import Weave
from mtx.plan.choose import schedule_for


class Slots(NamedTuple):
    """How many values of each kind a schedule keeps at once, on every stage."""

    stash: int  # from F to B, of a chunk
    weight_stash: int  # from B to W, of a chunk
    rings: int  # for x and dx that arrive before their tick
    caches: int  # of a chunk's keys and values, and for their gradients


def slots_of(layout: Layout, microbatches: int) -> Slots:
    """In closed form for SC'21's schedules; from the table for all others."""
    pipe, virtual, name = layout.pipe, layout.virtual, layout.schedule
    plain = layout.slices == 1 and layout.weave != "on"
    if plain and name in ("1f1b", "interleaved_1f1b", "eager_1f1b"):
        warming_up = min(microbatches, pipe) * virtual + max(0, microbatches - pipe)
        # One more than are in flight if a stage sits out ticks: it writes to a free slot.
        most = virtual if pipe == 1 else min(warming_up + 1, (virtual + 1) * pipe - 1)
        return Slots(stash=most, weight_stash=0, rings=0, caches=0)
    if plain and name == "gpipe":
        most = microbatches * virtual + (pipe > 1)
        return Slots(stash=most, weight_stash=0, rings=microbatches + 1, caches=0)
    slots = _slots_of_table(name, pipe, virtual, layout.slices, microbatches, layout.weave)
    if slots.weight_stash and layout.idle != "skip":  # a slot of zeros, which an idle W reads
        return slots._replace(weight_stash=slots.weight_stash + 1)
    return slots


@lru_cache(maxsize=4096)
def _slots_of_table(
    name: str, pipe: int, virtual: int, slices: int, microbatches: int, weave: Weave
) -> Slots:
    """Slots read off the table."""
    layout = Layout(
        pipe=pipe, virtual=virtual, schedule=name, slices=slices, weave=weave, idle="phases"
    )
    table = schedule_for(layout, microbatches)
    boxes = [route.ring for route in (*table.receives, *table.gradient_receives)]
    caches = [cache.slots for cache in (table.cache, table.gradient_cache) if cache]
    return Slots(
        stash=table.slots,
        weight_stash=table.weight_stash.slots if table.weight_stash else 0,
        rings=sum(box.slots for box in (*boxes, table.outputs)),
        caches=sum(caches),
    )
