"""A whole run: read the text, build or restore the state, train, evaluate, save.

Everything that can be refused is refused before `run.out` is created and before anything is
allocated on a device.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from rich.console import Console

from mtx.config import RunConfig, to_dict
from mtx.data import TextData, load_text
from mtx.errors import UserError
from mtx.plan.flops import parameters
from mtx.plan.hardware import find_hardware
from mtx.train.checkpoint import Checkpoints
from mtx.train.fit import refuse_if_too_large
from mtx.train.interrupt import stop_requests
from mtx.train.metrics import Log, Meter, StepRecord
from mtx.train.report import Report, header
from mtx.train.step import Metrics, Trainer, TrainState

_COMPILE_TIMEOUT_S = 3600  # of one process, after the others have finished


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time of a run went."""

    compile: float  # of the step and of the evaluation, with its first batch
    train: float
    eval: float
    save: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """What is left of a run."""

    trainer: Trainer
    state: TrainState
    data: TextData
    first_eval_loss: float  # on held-out text, before the first step of this session
    last_eval_loss: float
    losses: list[float]  # of this session's steps
    interrupted: bool
    checkpoint: Path | None  # the newest; None where none could be saved yet
    log: Path
    seconds: Seconds


def train(
    run: RunConfig,
    *,
    console: Console | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Summary:
    """Trains `run`, from the newest checkpoint in `run.out` where there is one.

    The held-out loss is taken before the first step, every `eval_every` steps and at the end;
    checkpoints are saved every `save_every` steps and at the end. Ctrl-C, or SIGTERM, finishes the
    running step, saves, and returns; a second one leaves at once. `on_step` gets every step's
    record, at most one step late.

    One seed gives the same losses on every run, and on every layout to rounding. Raises UserError
    where the text, the vocabulary, the devices, their memory or the checkpoint do not suit the run.
    """
    trainer = Trainer(run)
    run = trainer.run  # its schedule chosen, where that was left open
    refuse_if_too_large(run, jax.devices())
    _ = trainer.mesh  # refuses a layout of more devices than there are
    data = load_text(run.data, sequence=run.model.sequence)
    if data.vocab > run.model.vocab:
        raise UserError(
            f"the {data.tokenizer.kind} tokenizer has {data.vocab:,} tokens, more than model.vocab="
            f"{run.model.vocab:,}; set model.vocab to {data.vocab} or more"
        )
    out = Path(run.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out} is a file; use another")
    checkpoints = Checkpoints(out / "checkpoints")
    start = _first_step(run, checkpoints, data)
    _create(out, run)
    report = Report(console)
    report.lines(header(trainer, data.describe(), out))
    leader = jax.process_index() == 0
    with checkpoints, Log(out / "log.jsonl" if leader else None) as log:
        if start:
            report.line(f"resumes    from step {start:,}: {checkpoints.directory / str(start)}")
        session = _Session(
            trainer=trainer,
            data=data,
            checkpoints=checkpoints,
            report=report,
            log=log,
            meter=_meter(trainer),
            on_step=on_step,
            state=checkpoints.restore(trainer, start) if start else trainer.init(),
            step=start,
            saved=start or None,
        )
        return session.run()


def _first_step(run: RunConfig, checkpoints: Checkpoints, data: TextData) -> int:
    """The step of the checkpoint to go on from, or 0."""
    latest = checkpoints.latest()
    if latest is None:
        return 0
    if not run.resume:
        raise UserError(
            f"{checkpoints.directory} has a checkpoint of step {latest}, and resume=False starts "
            "anew; use another out, or delete that directory"
        )
    checkpoints.check(run.model, data.tokenizer, latest)
    return latest


def _create(out: Path, run: RunConfig) -> None:
    """`out`, with the run's config in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            written = out / "run.json.tmp"
            written.write_text(json.dumps(to_dict(run), indent=2) + "\n", encoding="utf-8")
            os.replace(written, out / "run.json")
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}); use another") from error


def _meter(trainer: Trainer) -> Meter:
    hardware = find_hardware(trainer.mesh.devices.flat[0].device_kind)
    peak_tflops = hardware and hardware.peak_tflops.get(trainer.run.model.compute_dtype)
    return Meter(trainer.run, peak_flops=peak_tflops and peak_tflops * 1e12)


@dataclass(kw_only=True, eq=False)
class _Session:
    """One call of `train`, after all checks."""

    trainer: Trainer
    data: TextData
    checkpoints: Checkpoints
    report: Report
    log: Log
    meter: Meter
    on_step: Callable[[StepRecord], None] | None
    state: TrainState
    step: int  # finished or running
    saved: int | None  # the step of the newest checkpoint
    eval_losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    losses: list[float] = field(default_factory=list)
    in_flight: tuple[int, Metrics, float] | None = None  # a step, its metrics, its start
    clock: _Clock = field(default_factory=lambda: _Clock())

    def run(self) -> Summary:
        self._log_start()
        if self.step >= self.trainer.run.steps:
            self.report.line(f"finished   already at step {self.step:,}: {self._checkpoint}")
            self._evaluate()
            return self._summary(interrupted=False)
        train_step = self._compile()
        self._evaluate()
        with stop_requests() as stop:
            self._train(train_step, stop)
            interrupted = self.step < self.trainer.run.steps
            if not interrupted:
                self._evaluate()
            if self.saved != self.step:
                self._save()
            with self.clock("save"):
                self.checkpoints.wait()
        return self._end(interrupted)

    # -- parts of a run ---------------------------------------------------------------------------

    def _compile(self) -> Callable:
        """The compiled step. The evaluation is compiled by its first batch."""
        with self.clock("compile"):
            step = self.trainer.train_step.lower(self.state, self._batch(self.step)).compile()
            # The first use of a collective has a deadline that some compilations would miss; this
            # barrier is one of the coordination service.
            meet = ocp.multihost.get_barrier_sync_fn()
            meet(key=f"mtx_compiled_{self.step}", timeout_ms=_COMPILE_TIMEOUT_S * 1000)
            next(self._held_out_sums())
        self.report.line(f"compiled   in {self.clock.seconds['compile']:.1f} s")
        return step

    def _train(self, train_step: Callable, stop: Callable[[int], bool]) -> None:
        """Steps until the end, or until `stop`. What is due at the end is left to the caller."""
        run = self.trainer.run
        ahead = _runs_ahead(self.trainer.mesh.devices.flat[0])
        with self.report.progress(self.step, run.steps):
            while self.step < run.steps and not stop(self.step):
                start_s = time.perf_counter()
                self.state, metrics = train_step(self.state, self._batch(self.step))
                self.step += 1
                self._settle()  # the step before this one, while this one runs
                self.in_flight = self.step, metrics, start_s
                if not ahead:
                    self._settle()
                if self._due(run.eval_every):
                    self._settle()
                    self._evaluate()
                if self._due(run.save_every):
                    self._settle()
                    self._save()
            self._settle()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0 and self.step < self.trainer.run.steps

    def _settle(self) -> None:
        """Waits for the step in flight, if there is one, and records it."""
        if self.in_flight is None:
            return
        step, metrics, start_s = self.in_flight
        self.in_flight = None
        metrics = jax.device_get(metrics)
        step_s = self.clock.step(start_s)
        record = self.meter.measure(step, metrics, step_s)
        self.losses.append(record.loss)
        self.log.write("step", asdict(record))
        self.report.step(record)
        if self.on_step is not None:
            self.on_step(record)

    def _evaluate(self) -> None:
        with self.clock("eval"):
            losses, tokens = zip(*self._held_out_sums())
        loss = sum(losses) / sum(tokens)
        self.eval_losses.append((self.step, loss))
        self.log.write("eval", {"step": self.step, "loss": loss})
        self.report.line(f"step {self.step:>6,}  held-out loss {loss:.4f}")

    def _save(self) -> None:
        with self.clock("save"):
            path = self.checkpoints.save(
                self.trainer,
                self.state,
                tokenizer=self.data.tokenizer,
                extra={"held_out": dict(zip(("step", "loss"), self.eval_losses[-1]))},
            )
        self.saved = self.step
        self.log.write("save", {"step": self.step, "path": str(path)})

    def _batch(self, step: int):
        return self.trainer.place(self.data.batch(step, self.trainer.run.global_batch))

    def _held_out_sums(self) -> Iterator[tuple[float, float]]:
        """(sum of losses, tokens) of each held-out batch, one after the other."""
        run = self.trainer.run
        for batch in self.data.eval_batches(run.eval_batches, run.global_batch):
            loss, tokens = self.trainer.evaluate(self.state, self.trainer.place(batch))
            yield float(loss), float(tokens)

    @property
    def _checkpoint(self) -> Path | None:
        return None if self.saved is None else self.checkpoints.directory / str(self.saved)

    # -- what is said about it --------------------------------------------------------------------

    def _log_start(self) -> None:
        run, devices = self.trainer.run, self.trainer.mesh.devices
        self.log.write(
            "start",
            {
                "step": self.step,
                "unix_time": time.time(),
                "jax": jax.__version__,
                "device_kind": devices.flat[0].device_kind,
                "devices": devices.size,
                "parameters": parameters(run.model),
                "run": to_dict(run),
            },
        )

    def _end(self, interrupted: bool) -> Summary:
        summary = self._summary(interrupted=interrupted)
        steps = self.trainer.run.steps
        parts = ", ".join(f"{part} {s:.1f} s" for part, s in asdict(summary.seconds).items())
        if interrupted:
            self.report.line(
                f"stopped    at step {self.step:,} of {steps:,}: {summary.checkpoint}; the same "
                "run goes on from there (resume=True)"
            )
        else:
            self.report.line(
                f"finished   step {self.step:,}: {summary.checkpoint}; held-out loss "
                f"{summary.first_eval_loss:.4f} -> {summary.last_eval_loss:.4f}"
            )
        self.report.line(f"time       {parts}")
        end = {"step": self.step, "interrupted": interrupted, "seconds": summary.seconds}
        self.log.write("end", end)
        return summary

    def _summary(self, *, interrupted: bool) -> Summary:
        return Summary(
            trainer=self.trainer,
            state=self.state,
            data=self.data,
            first_eval_loss=self.eval_losses[0][1],
            last_eval_loss=self.eval_losses[-1][1],
            losses=self.losses,
            interrupted=interrupted,
            checkpoint=self._checkpoint,
            log=Path(self.trainer.run.out) / "log.jsonl",
            seconds=Seconds(**self.clock.seconds),
        )


class _Clock:
    """Seconds by part."""

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "train", "eval", "save"), 0.0)
        self._last_end_s = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start_s

    def step(self, start_s: float) -> float:
        """The time of a step that has just ended: since its start, or since the end of the step
        before where that was later, as it is with a step in flight."""
        now_s = time.perf_counter()
        step_s = now_s - max(start_s, self._last_end_s)
        self._last_end_s = now_s
        self.seconds["train"] += step_s
        return step_s


def _runs_ahead(device: jax.Device) -> bool:
    """Whether a step is dispatched while the one before runs. Not on virtual devices: they share
    one pool of threads, and there is nothing to gain."""
    return device.platform != "cpu"
