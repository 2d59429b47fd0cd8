"""`mtx train`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from mtx.cli.options import OwnFields, read_line, split_names
from mtx.cli.output import progress
from mtx.cli.process import start_devices
from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.launch.cluster import ClusterOptions
from mtx.launch.exits import leave_at_once
from mtx.launch.judge import WatchOptions
from mtx.launch.startup import StartUp, use_compile_cache
from mtx.plan.plan import is_plan_file, load_run
from mtx.presets import NAMES, preset, require_data
from mtx.sizes import VirtualDevices

if TYPE_CHECKING:
    from mtx.train.start import Start


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    run: Annotated[RunConfig, OwnFields]
    virtual_devices: VirtualDevices = 0  # CPU devices to create, for a machine without GPUs
    compile_cache: str = "auto"  # folder of compiled programs; auto: in the user's cache; or "none"
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)


def train_command(arguments: list[str]) -> int | None:
    """Train a preset or a plan, or continue from a run or a Hugging Face model.

    PRESET is miniature by default; PLAN is a file that `mtx plan --save` has written; options
    replace their fields. Models larger than a laptop's need --data.path and --data.tokenizer. Log,
    config and checkpoints go to --out, from which the same command continues. RUN_DIR is such an
    --out: the run continues there with its own config and data or, given another --out, in that one
    from the newest checkpoint. MODEL_DIR has a config.json and safetensors, which are converted
    into --out and trained on what --data.path names. Exit status: 0 finished, 2 a user's mistake,
    75 stopped by SIGTERM and 130 by Ctrl-C, both with all steps saved; 74 the last checkpoint could
    not be saved, 69 another process was lost, 70 an exception, 124 no step finished for
    --watch.hang-s.
    """
    startup = StartUp.of_process()
    start, named = _named(*split_names(arguments)[0][:1])
    usage = "mtx train [PRESET | PLAN | RUN_DIR | MODEL_DIR]"
    line = read_line(arguments, TrainOptions(run=named), usage, train_command)
    options, run, given = line.options, line.options.run, line.given
    if start is not None:
        run = start.complete(run, given)
    else:
        require_data(named, run, given)
    from mtx.data.corpus import check_data

    check_data(run)
    startup.mark("python")
    start_devices(options.virtual_devices, options.cluster)
    use_compile_cache(options.compile_cache)
    startup.mark("devices")
    import jax

    from mtx.train.loop import run_training

    if not jax.distributed.is_initialized():
        leave_at_once()
    if start is not None:
        with progress("bytes") as report:
            run = start.prepare(run, given, report=report)
        startup.mark("conversion")
    return run_training(run, watch=options.watch, startup=startup).exit


def _named(name: str | None = None) -> tuple[Start | None, RunConfig]:
    """(the directory to start from, if `name` is one, the run that `name` is without options)"""
    if name is None or name in NAMES:
        return None, preset(name or "miniature")
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        from mtx.train.start import find_start

        start = find_start(name)
        return start, start.run
    if is_plan_file(name):
        return None, load_run(name)
    if os.path.exists(path) or os.path.basename(name) != name:
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise UserError(
            f"{name} {what}; name a preset, a plan (.toml, .json), the directory of a run or of a "
            "Hugging Face model; text to train on is named by --data.path"
        )
    return None, preset(name)
