"""`mtx train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mtx.cli.options import OwnFields, parse, split_name, start_devices
from mtx.config import RunConfig
from mtx.plan.plan import is_plan_file, load_run
from mtx.presets import preset


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    run: Annotated[RunConfig, OwnFields]
    virtual_devices: int = 0  # CPU devices to make, for a machine without GPUs


def train_command(arguments: list[str]) -> int | None:
    """Train a preset or a plan, or a change of it.

    PRESET is miniature where none is named; PLAN is a file that `mtx plan --save` has written;
    options replace their fields. Log, config and checkpoints lie in --out, from which the same
    command goes on.
    """
    name, rest = split_name(arguments)
    run = load_run(name) if name and is_plan_file(name) else preset(name or "miniature")
    prog = "mtx train [PRESET | PLAN]"
    options = parse(rest, TrainOptions(run=run), prog=prog, about=train_command)
    start_devices(options.virtual_devices)
    from mtx.train.loop import train

    return 130 if train(options.run).interrupted else 0
