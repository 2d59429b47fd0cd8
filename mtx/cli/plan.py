"""`mtx plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mtx.cli.options import OwnFields, parse, split_name
from mtx.config import RunConfig
from mtx.presets import preset


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    run: Annotated[RunConfig, OwnFields]
    target: str = "a100-80gb"  # the accelerator: h100, tpu-v5p, ...


def plan_command(arguments: list[str]) -> None:
    """Say what a preset needs on its cluster: parameters, memory, bubble, FLOPs.

    PRESET is gpt-1t where none is named; options replace its fields. Nothing is run: all of it is
    computed from closed forms and the schedule's table.
    """
    name, rest = split_name(arguments)
    start = PlanOptions(run=preset(name or "gpt-1t"))
    options = parse(rest, start, prog="mtx plan [PRESET]", about=plan_command)
    from mtx.plan.summary import plan_lines

    print("\n".join(plan_lines(options.run, target=options.target)))
