"""A whole run: read the text, build or restore the state, train, evaluate, save.

Everything that can be refused is refused before `run.out` is created and before anything is
allocated on a device.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from rich.console import Console

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.store import Damaged
from mtx.config import RunConfig, to_dict
from mtx.config.run import RUN_FILE
from mtx.data import Corpus, load_data, read_ahead
from mtx.errors import UserError
from mtx.files import replacing
from mtx.launch.shared import require_same, require_shared
from mtx.launch.startup import StartUp
from mtx.launch.watch import Watch, WatchOptions
from mtx.paths import check_path
from mtx.plan.fit import refuse_if_too_large
from mtx.plan.hardware import find_hardware
from mtx.sharding.axes import BATCH
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer
from mtx.train.guard import Faults, Guard, RollBack, refuse_to_roll_back
from mtx.train.history import History
from mtx.train.log import Log
from mtx.train.metrics import Meter, StepRecord
from mtx.train.programs import Programs
from mtx.train.report import Report, changes, header
from mtx.train.session import Session, Summary
from mtx.train.track import make_trackers

_OF_HOSTS = ("out", "data.path", "data.tokenizer", "data.cache")  # may differ between hosts
_FILES, _FOLDERS = (RUN_FILE, "log.jsonl"), ("checkpoints", "profile", "tensorboard", "wandb")


def run_training(
    run: RunConfig,
    *,
    console: Console | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    watch: WatchOptions | None = None,
    startup: StartUp | None = None,
) -> Summary:
    """Trains `run`, from the newest checkpoint in `run.out` if there is one.

    The held-out loss is taken before the first step, every `eval_every` steps and at the end;
    checkpoints are saved every `save_every` steps and at the end. Ctrl-C, or SIGTERM, finishes the
    running step, saves, and returns; a second one leaves at once. `on_step` gets every step's
    record, at most one step late.

    One seed gives the same losses on every run, and on every layout up to rounding. Raises
    UserError if the text, the vocabulary, the devices, their memory or the checkpoint do not suit
    the run.

    Several processes watch each other (`mtx.launch.watch`); with `watch`, one process watches
    itself, too. `startup` holds the time from the launch up to here.
    """
    check_path("out", run.out)
    startup, faults = startup or StartUp("the call"), Faults(guard=Guard(run.guard))
    history = History()
    with Watch(watch) as watching:
        startup.mark("imports")
        programs = Programs(Trainer(run))
        run = programs.trainer.run  # with its schedule chosen, if that was left open
        _check_devices(programs.trainer)
        while True:
            try:
                return _train(programs, console, on_step, watching, startup, faults, history)
            except Damaged as error:  # found while restoring: try the one before it
                checkpoints = Checkpoints(Path(run.out) / "checkpoints")
                aside = checkpoints.set_aside(
                    int(error.directory.name), f"is damaged: {error.what}"
                )
                faults.events.append(("damaged", aside))
            except RollBack as fault:
                if faults.rollbacks >= run.guard.rollbacks:
                    raise refuse_to_roll_back(fault, run.guard) from None
                checkpoints = Checkpoints(Path(run.out) / "checkpoints")
                faults.go_back(fault, partial(checkpoints.set_aside, unless_oldest=True))
                startup = StartUp("the fault")


def check_run(run: RunConfig, checkpoints: Checkpoints, step: int | None) -> None:
    """Raises the UserErrors of `run_training`, except those about `run.out`, for a run that starts
    from the checkpoint of `step`, or from none. For callers that first spend long filling `out`."""
    trainer = Trainer(run)
    _check_devices(trainer)
    _ = trainer.mesh  # refuses a layout of more devices than there are
    consumed, _ = _noted(run, checkpoints, step)
    _load_checked(trainer, checkpoints, step, consumed)


def _check_devices(trainer: Trainer) -> None:
    refuse_if_too_large(trainer.run, jax.devices())
    _ = trainer.model  # refuses an attention kernel that these devices lack


def _load_checked(
    trainer: Trainer, checkpoints: Checkpoints, step: int | None, consumed: int
) -> Corpus:
    """The run's data. UserError if the data, the model and the checkpoint of `step`, if there is
    one, do not match."""
    run = trainer.run
    left = max(0, run.steps - (step or 0)) * run.global_batch
    data = load_data(run, samples=consumed + left)
    if step is not None:
        checkpoints.check(trainer, data.tokenizer, step)
    if left:  # a token beyond the vocabulary is refused
        data.batch(consumed, run.global_batch, _local_rows(trainer))
    return data


def _train(
    programs: Programs,
    console: Console | None,
    on_step: Callable[[StepRecord], None] | None,
    watch: Watch,
    startup: StartUp,
    faults: Faults,
    history: History,
) -> Summary:
    """One attempt at the run, given the faults and the history of the attempts before it."""
    trainer = programs.trainer
    run = trainer.run
    watch.place(trainer.mesh)  # refuses a layout of more devices than there are
    out, report = Path(run.out), Report(console)
    checkpoints, latest = _checkpoints(run, report, faults)
    asked = flatten_dict(to_dict(run), sep=".")
    require_same("run", {name: asked[name] for name in asked if name not in _OF_HOSTS})
    start = latest or 0  # a converted checkpoint is of step 0
    consumed, usual = _noted(run, checkpoints, latest)
    consumed = max(consumed, faults.consumed)
    faults.guard.start_from(start, usual)
    data = _load_checked(trainer, checkpoints, latest, consumed)
    require_same("data", {
        "tokens to train on": int(data.train.part_tokens),
        "tokens held out": int(data.held_out.part_tokens),
        "tokenizer sha256": data.tokenizer.identity.sha256,
    })  # fmt: skip
    local = _local_rows(trainer)
    with _created(out, run):
        startup.mark("data")
        watch.started(start)
        report.lines(header(trainer, data.describe(), out))
        leader = jax.process_index() == 0
        trackers = make_trackers(run) if leader else ()
        reading = read_ahead(data, consumed, run.global_batch, local=local)
        with (
            checkpoints,
            Log(out / "log.jsonl" if leader else None, trackers) as log,
            reading as batches,
        ):
            state = _first_state(trainer, checkpoints, latest, report)
            history.start_from(start)
            session = Session(
                programs=programs, data=data, batches=batches, local=local, consumed=consumed,
                checkpoints=checkpoints, report=report, log=log, meter=_meter(trainer),
                on_step=on_step, state=state, step=start, saved=latest, watch=watch,
                startup=startup, faults=faults, history=history,
            )  # fmt: skip
            startup.mark("init" if latest is None else "restore")
            return session.run()


def _first_state(
    trainer: Trainer, checkpoints: Checkpoints, step: int | None, report: Report
) -> TrainState:
    if step is None:
        return trainer.init()
    report.line(f"resumes    from step {step:,}: {checkpoints.directory / str(step)}")
    report.lines(changes(checkpoints.run(step), trainer.run))
    return trainer.with_checksums(checkpoints.restore(trainer, step))


def _checkpoints(run: RunConfig, report: Report, faults: Faults) -> tuple[Checkpoints, int | None]:
    """A run's checkpoints, and the newest step to continue from. UserError if `out` is unusable."""
    out = Path(run.out)
    require_shared(out)
    file = next((path for path in (out, *out.parents) if path.is_file()), None)
    if file is not None:
        below = "" if file == out else f"lies below {file}, which "
        raise UserError(f"out={out} {below}is a file; use another")
    checkpoints = Checkpoints(
        out / "checkpoints", keep=run.keep, keep_every=run.keep_every, say=report.line
    )
    latest = checkpoints.find(lambda line: faults.events.append(("damaged", line)))
    if latest is not None and not (run.resume or faults.rollbacks):
        raise UserError(
            f"{checkpoints.directory} has a checkpoint of step {latest}, and resume=False starts "
            "anew; use another out, or delete that directory"
        )
    return checkpoints, latest


def _noted(run: RunConfig, checkpoints: Checkpoints, step: int | None) -> tuple[int, float]:
    """(samples trained on, usual loss) as of a checkpoint. The samples are not step * global_batch
    if the batch was ever another; the usual loss is the guard's, on the same data, and infinite if
    that is not known."""
    if step is None:
        return 0, math.inf
    extra = checkpoints.extra(step)
    consumed, usual = extra.get("consumed", step * run.global_batch), extra.get("usual_loss")
    if type(consumed) is not int or not 0 <= consumed < 2**62:
        raise Damaged(
            checkpoints.directory / str(step),
            f"extra.json: consumed={consumed!r:.60} must be a whole number",
        )
    if isinstance(usual, float) and usual > 0 and checkpoints.run(step).data == run.data:
        return consumed, usual
    return consumed, math.inf


def _local_rows(trainer: Trainer) -> np.ndarray:
    """The rows of a global batch that this process's devices hold."""
    rows = np.arange(trainer.run.global_batch)
    held = trainer.shardings(P(BATCH)).addressable_devices_indices_map(rows.shape)
    return np.unique(np.concatenate([rows[index] for index in held.values()]))


@contextlib.contextmanager
def _created(out: Path, run: RunConfig) -> Iterator[None]:
    """Creates `out` with the run's config in it, and locks it against other runs until the end of
    this context, or of the process, however it ends."""
    with contextlib.ExitStack() as held:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                folder = os.open(out, os.O_RDONLY)
                held.callback(os.close, folder)
                _lock(folder, out)
                _refuse_others(out)
                with replacing(out / RUN_FILE) as written:
                    text = json.dumps(to_dict(run), indent=2) + "\n"
                    written.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"out={out} cannot be written ({error.strerror}); use another"
            ) from error
        yield


def _refuse_others(out: Path) -> None:
    """UserError if a run's file or folder exists as something else; a pipe would hang the run."""
    for name in (*_FILES, *_FOLDERS):
        path, kind = out / name, "file" if name in _FILES else "folder"
        if path.exists() and not (path.is_file() if kind == "file" else path.is_dir()):
            raise UserError(f"{path} is there, and must be a {kind}; move it, or use another out")


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"out={out} is in use by another run; use another, or stop that") from None
    except OSError:  # a file system without locks
        pass


def _meter(trainer: Trainer) -> Meter:
    hardware = find_hardware(trainer.mesh.devices.flat[0].device_kind)
    peak_tflops = hardware and hardware.peak_tflops.get(trainer.run.model.compute_dtype)
    return Meter(trainer.run, peak_flops=peak_tflops and peak_tflops * 1e12)
