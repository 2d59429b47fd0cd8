"""`mtx train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mtx.cli.options import OwnFields, parse, split_name, start_devices
from mtx.config import RunConfig
from mtx.launch.cluster import ClusterOptions
from mtx.launch.exits import leave_at_once
from mtx.launch.startup import StartUp, use_compile_cache
from mtx.launch.watch_options import WatchOptions
from mtx.plan.plan import is_plan_file, load_run
from mtx.presets import preset, require_data


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    run: Annotated[RunConfig, OwnFields]
    virtual_devices: int = 0  # CPU devices to make, for a machine without GPUs
    compile_cache: str = "auto"  # directory of compiled programs: in the user's cache; or "none"
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)


def train_command(arguments: list[str]) -> int | None:
    """Train a preset or a plan, or a change of it.

    PRESET is miniature where none is named; PLAN is a file that `mtx plan --save` has written;
    options replace their fields. What is larger than a laptop's model needs --data.path and
    --data.tokenizer. Log, config and checkpoints lie in --out, from which the same command goes on.
    Exit status: 0 finished, 2 a mistake in what was asked for, 75 stopped by SIGTERM and 130 by
    Ctrl-C, both with all steps saved; 74 the last checkpoint could not be saved, 69 another process
    was lost, 70 an exception, 124 no step finished for --watch.hang-s.
    """
    startup = StartUp.of_process()
    name, rest = split_name(arguments)
    run = load_run(name) if name and is_plan_file(name) else preset(name or "miniature")
    prog = "mtx train [PRESET | PLAN]"
    options = parse(rest, TrainOptions(run=run), prog=prog, about=train_command)
    require_data(run, options.run, rest)
    startup.mark("python")
    start_devices(options.virtual_devices, options.cluster)
    use_compile_cache(options.compile_cache)
    startup.mark("devices")
    import jax

    from mtx.train.loop import run_training

    if not jax.distributed.is_initialized():
        leave_at_once()

    return run_training(options.run, watch=options.watch, startup=startup).exit
