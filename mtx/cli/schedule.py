"""`mtx schedule`."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtx.cli.options import parse, split_name
from mtx.errors import UserError

if TYPE_CHECKING:
    from mtx.pipeline.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    stages: int = 4  # p
    microbatches: int = 8  # m, of one replica and step
    virtual: int = 1  # v, model chunks per stage: above 1, 1f1b is interleaved
    draw: str = ""  # FILE.svg, .png or .pdf: a picture as well


def schedule_command(arguments: list[str]) -> None:
    """Show a pipeline schedule: what each stage does in every tick.

    NAME is 1f1b or gpipe; 1f1b where none is named.
    """
    name, rest = split_name(arguments)
    options = parse(rest, ScheduleOptions(), prog="mtx schedule [NAME]", about=schedule_command)
    for field in ("stages", "microbatches", "virtual"):
        if getattr(options, field) < 1:
            raise UserError(f"{field}={getattr(options, field)} must be at least 1")
    from mtx.pipeline.makers import make
    from mtx.view.schedule import draw_timeline, timeline_text

    schedule = make(
        name or "1f1b",
        microbatches=options.microbatches,
        stages=options.stages,
        virtual=options.virtual,
    )
    if options.draw:
        try:
            draw_timeline(schedule, options.draw)
        except OSError as error:
            raise UserError(f"cannot write {options.draw}: {error.strerror}") from None
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(timeline_text(schedule, width))
    print("\n".join(_schedule_facts(schedule)))
    if options.draw:
        print(f"picture    {options.draw}")


def _schedule_facts(schedule: Schedule) -> list[str]:
    from mtx.view.schedule import LockStep

    run = LockStep(schedule=schedule)
    p, v, m = schedule.stages, schedule.virtual, schedule.microbatches
    formula = (p - 1) / (v * m)
    idle = 1 / (1 - run.idle_share) - 1
    bubble = f"bubble     (p-1)/(v m) = {p - 1}/({v}*{m}) = {formula:.2%} of the ideal time"
    if abs(idle - formula) > 1e-9:
        bubble += f"; by the table {idle:.2%}, since p={p} does not divide m={m}"
    waiting = [str(count) for count in schedule.in_flight]
    if len(waiting) > 16:
        waiting = [*waiting[:4], "...", *waiting[-4:]]
    return [
        f"ticks      {schedule.ticks}, each one F and one B half",
        bubble,
        f"in flight  {' '.join(waiting)} on stages 0 to {p - 1}: chunks of microbatches between "
        "their F and their B, at most",
        f"slots      {schedule.slots} of the stash, on every stage",
    ]
