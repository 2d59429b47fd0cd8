"""One attempt at a run, after all checks: compile, train, evaluate, save, and report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import to_dict
from mtx.data import Corpus
from mtx.errors import UserError
from mtx.launch.exits import Exit
from mtx.launch.interrupt import StopRequests, stop_requests
from mtx.launch.startup import StartUp
from mtx.launch.watch import Watch
from mtx.plan.flops import parameters
from mtx.step import xla
from mtx.step.state import Metrics, TrainState
from mtx.step.trainer import Trainer
from mtx.train.guard import Faults, RollBack
from mtx.train.history import Clock, History, Seconds
from mtx.train.log import Log
from mtx.train.memory import device_memory, host_memory, spare_memory
from mtx.train.metrics import Meter, StepRecord, loads_of, shares_of
from mtx.train.profile import ProfileWindow
from mtx.train.programs import Programs
from mtx.train.report import Report

_EXPERT_LINES = 200  # lines in a run's log about how full experts are
MOST_LOSS = 1e30  # stands for an unknown usual loss: JSON has no infinity
_COMPILE_TIMEOUT_S = 3600  # of one process, after the others have finished


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """The results of a run, as `run_training` returns them."""

    trainer: Trainer
    state: TrainState
    data: Corpus
    first_eval_loss: float  # on held-out text, before the first step of this call
    last_eval_loss: float
    losses: list[float]  # of this call's newest 10,000 steps; the second of a step taken twice
    skipped: int  # all steps of this call whose gradients were not finite
    rollbacks: int  # how often the run has rolled back to a checkpoint
    interrupted: bool
    exit: Exit  # for the command that ran it: FINISHED, PREEMPTED, INTERRUPTED or UNSAVED
    checkpoint: Path | None  # the newest; None if none could be saved
    log: Path
    seconds: Seconds  # of this call


@dataclass(kw_only=True, eq=False)
class Session:
    """One attempt of `run_training`, after all checks."""

    programs: Programs  # compiled by an earlier attempt, or not yet
    data: Corpus
    batches: Iterator[dict[str, np.ndarray]]  # those after the first `consumed` samples
    local: np.ndarray  # the rows of a global batch that this process reads
    consumed: int  # samples trained on
    checkpoints: Checkpoints
    report: Report
    log: Log
    meter: Meter
    on_step: Callable[[StepRecord], None] | None
    state: TrainState
    step: int  # finished or running
    saved: int | None  # the step of the newest checkpoint
    watch: Watch
    startup: StartUp
    faults: Faults  # of earlier attempts
    history: History  # of this attempt and of earlier ones
    exit: Exit = Exit.FINISHED
    in_flight: tuple[int, Metrics, float] | None = None  # a step, its metrics, its start
    save_owed: bool = False  # a checkpoint is due

    @property
    def clock(self) -> Clock:
        return self.history.clock

    @property
    def trainer(self) -> Trainer:
        return self.programs.trainer

    def run(self) -> Summary:
        self._log_start()
        for kind, what in self.faults.tell():
            self.report.line(f"{kind.upper():<10} {what}")
            self.log.write(kind, {"step": self.step, "what": what})
        if self.step >= self.trainer.run.steps:
            self.report.line(f"finished   already at step {self.step:,}: {self._checkpoint}")
            self._compile(training=False)
            self._evaluate()
            return self._summary(interrupted=False)
        self._compile()
        self.startup.mark("compile")
        self._evaluate()
        self.startup.mark("held-out loss")
        with stop_requests() as stop:
            try:
                interrupted = self._train_and_save(stop)
            except RollBack:
                stop.leave()
                raise
        return self._end(interrupted)

    # -- parts of a run ---------------------------------------------------------------------------

    def _train_and_save(self, stop: StopRequests) -> bool:
        """Trains and saves; returns whether the run was stopped before its end."""
        self._train(stop)
        interrupted = self.step < self.trainer.run.steps
        self.exit = stop.exit if interrupted else Exit.FINISHED
        if not interrupted:
            self._evaluate()
        if self.saved != self.step:
            with self._saving(self.step):
                self._save()
        with self.watch.during("save"), self.clock("save"), self._saving(self.step):
            self.checkpoints.wait()
        if self.saved != self.step:
            self.exit = Exit.UNSAVED
        return interrupted

    def _compile(self, *, training: bool = True) -> None:
        """Compiles the step, if there is training to do, and everything else that communicates. The
        first use of a collective has a deadline, and one process may need longer than that to
        finish compiling after another has. So all of them compile first, and then meet."""
        is_new = not self.programs.compiled
        with self.watch.during("compile"), self.clock("compile"):
            if training:
                self.checkpoints.prepare(self.trainer)
            if is_new:
                what = "the step" if training else "the held-out loss"
                self.report.line(f"compiling  {what}: it can take minutes")
                place, rows = self.trainer.place, self.trainer.run.global_batch
                batch = place(self.data.batch(self.consumed, rows, self.local))
                held_out = place(next(self._held_out_batches()))
                self.programs.compile(self.state, batch, held_out, training=training)
                meet = ocp.multihost.get_barrier_sync_fn()  # of the coordination service
                meet(key=f"mtx_compiled_{self.step}", timeout_ms=_COMPILE_TIMEOUT_S * 1000)
        if is_new and training:
            compile_s = self.clock.seconds["compile"]
            self.report.line(f"compiled   in {compile_s:.1f} s")
            options = xla.options(
                self.programs.trainer.platform,
                offload=self.programs.trainer.run.layout.offload_fraction > 0,
            )
            self.log.write(
                "compile", {"step": self.step, "seconds": compile_s, "xla_options": options}
            )
            if options:
                said = ", ".join(f"{name}={value}" for name, value in options.items())
                self.report.line(f"xla        {said}")
            compiled = self.programs.train_step.memory_analysis()
            spare_memory(compiled)
            room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if said := host_memory(compiled, devices=jax.local_device_count(), room_bytes=room):
                self.report.line(said)
            memory = device_memory(compiled)
            self.log.write("memory", {"step": self.step, **memory})

    def _train(self, stop: Callable[[int], bool]) -> None:
        """Trains until the end, or until `stop`. What is due at the end is left to the caller."""
        run = self.trainer.run
        ahead = _runs_ahead(self.trainer.platform)
        with self.watch.during("loop"), self.report.progress(self.step, run.steps):
            while self.step < run.steps and not stop(self.step):
                self.profile.before(self.step + 1)
                start_s = time.perf_counter()
                batch = self._next_batch()
                with self.watch.during("step"):
                    self.state, metrics = self.programs.train_step(self.state, batch)
                self.step += 1
                self.consumed += run.global_batch
                self._finish_step()  # the step before this one, while this one runs
                self.in_flight = self.step, metrics, start_s
                if not ahead:
                    self._finish_step()
                if self._due(run.eval_every):
                    self._finish_step()
                    self._evaluate()
                with self._saving(self.saved):
                    self.checkpoints.poll()
                if self._due(run.guard.compare_every) and not self._due(run.save_every):
                    self._finish_step()
                    self._compare()
                self.save_owed |= self._due(run.save_every)
                if self.save_owed:
                    self._finish_step()
                    if not self.faults.guard.skipped:  # else as soon as one step is finite again
                        self.save_owed = False
                        with self._saving(self.step):
                            self._save()
                if self.watch.probe_due(self.step):
                    self._finish_step()
                    self.watch.probe(self.step)
                if self.profile.ends(self.step):
                    self._finish_step()
                    self.report.line(f"profile    {self.profile.stop()}")
            self._finish_step()
            self.profile.stop()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0 and self.step < self.trainer.run.steps

    def _finish_step(self) -> None:
        """Waits for the step in flight, if there is one, and records it."""
        if self.in_flight is None:
            return
        step, metrics, start_s = self.in_flight
        self.in_flight = None
        with self.watch.during("step"):
            metrics = jax.device_get(metrics)
        step_s = self.clock.step(start_s)
        record = self.meter.measure(step, metrics, step_s)
        self.watch.finished(step, step_s)
        self.history.add(step, record.loss, finite=record.finite)
        self.log.write("step", asdict(record))
        if loads := loads_of(metrics.counted):
            if step % max(1, self.trainer.run.steps // _EXPERT_LINES) == 0:
                self.log.write(
                    "experts", {"step": step, **shares_of(loads, self.trainer.placement)}
                )
        self.report.step(record)
        if self.startup.end("first step"):
            self.report.line(f"started    {self.startup.describe()}")
            self.log.write("startup", {"step": step, "seconds": self.startup.parts})
        for measured, lines in self.watch.records():
            self.log.write("processes", measured._asdict())
            self.report.lines(lines)
        if self.on_step is not None:
            self.on_step(record)
        with self._roll_back_point():
            self.faults.guard.check(step, record.loss, metrics.corrupt, finite=record.finite)

    def _compare(self) -> None:
        """Raises RollBack if devices that must hold the same values no longer do."""
        with self._roll_back_point():
            self.faults.guard.compare(self.step, self.programs.audit.differences(self.state))

    @contextmanager
    def _roll_back_point(self) -> Iterator[None]:
        try:
            yield
        except RollBack as fault:
            with self._saving(self.saved):
                self.checkpoints.wait()
            fault.consumed, fault.saved = self.consumed, self.saved
            raise

    @cached_property
    def profile(self) -> ProfileWindow:
        run = self.trainer.run
        return ProfileWindow(run.profile, Path(run.out) / "profile")

    def _evaluate(self) -> None:
        with self.watch.during("eval"), self.clock("eval") as seconds:
            losses, tokens = zip(*self._held_out_sums())
        loss = sum(losses) / sum(tokens)
        self.history.evaluated(self.step, loss)
        self.log.write("eval", {"step": self.step, "loss": loss, "seconds": seconds()})
        if memory := device_memory():
            self.log.write("memory", {"step": self.step, **memory})
        self.report.line(f"step {self.step:>6,}  held-out loss {loss:.4f}")

    def _save(self) -> None:
        if self.trainer.run.guard.compare_every:
            self._compare()
        with self.watch.during("save"), self.clock("save") as seconds:
            with self._saving(self.saved):  # if the previous save failed, still do this one
                self.checkpoints.wait()
            path = self.checkpoints.save(
                self.trainer,
                self.state,
                tokenizer=self.data.tokenizer,
                extra={
                    "consumed": self.consumed,
                    "held_out": dict(zip(("step", "loss"), self.history.last_evaluation)),
                    "usual_loss": min(self.faults.guard.usual, MOST_LOSS),
                },
            )
        self.saved = self.step
        saved = {"step": self.step, "consumed": self.consumed, "path": str(path)}
        self.log.write("save", saved | {"seconds": seconds()})

    @contextmanager
    def _saving(self, step: int | None) -> Iterator[None]:
        """Lets the run continue if the save of `step` fails: the state is whole, and the next save
        will come."""
        try:
            yield
        except UserError as error:
            self.saved = self.checkpoints.latest()
            self.report.line(f"NOT SAVED  step {step:,}: {error}")
            self.log.write("save_failed", {"step": step, "what": str(error)})

    def _next_batch(self):
        with self.watch.during("batch"):
            return self.trainer.place(next(self.batches))

    def _held_out_sums(self) -> Iterator[tuple[float, float]]:
        """(sum of losses, tokens) of each held-out batch, one after the other."""
        for batch in self._held_out_batches():
            loss, tokens = self.programs.evaluate(self.state, self.trainer.place(batch))
            yield float(loss), float(tokens)

    def _held_out_batches(self) -> Iterator[dict[str, np.ndarray]]:
        run = self.trainer.run
        return iter(self.data.eval_batches(run.eval_batches, run.global_batch, self.local))

    @property
    def _checkpoint(self) -> Path | None:
        return None if self.saved is None else self.checkpoints.directory / str(self.saved)

    # -- reports ----------------------------------------------------------------------------------

    def _log_start(self) -> None:
        run, devices = self.trainer.run, self.trainer.mesh.devices
        start = {
            "step": self.step, "consumed": self.consumed, "unix_time": time.time(),
            "since_launch_s": self.startup.total_s, "jax": jax.__version__,
            "device_kind": devices.flat[0].device_kind, "devices": devices.size,
            "parameters": parameters(run.model), "run": to_dict(run),
        }  # fmt: skip
        self.log.write("start", start)

    def _end(self, interrupted: bool) -> Summary:
        summary = self._summary(interrupted=interrupted)
        steps = self.trainer.run.steps
        parts = ", ".join(f"{part} {s:.1f} s" for part, s in asdict(summary.seconds).items())
        if self.exit == Exit.UNSAVED:
            self.report.line(
                f"unsaved    step {self.step:,} of {steps:,}; the newest checkpoint is "
                f"{summary.checkpoint or 'none'}: make room, and the same run goes on from there"
            )
        elif interrupted:
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
        if summary.skipped or summary.rollbacks:
            self.report.line(
                f"faults     {summary.skipped} steps skipped, gradients not finite; "
                f"{summary.rollbacks} times back to a checkpoint"
            )
        end = {
            "step": self.step, "interrupted": interrupted, "seconds": summary.seconds,
            "skipped": summary.skipped, "rollbacks": summary.rollbacks,
        }  # fmt: skip
        self.log.write("end", end)
        return summary

    def _summary(self, *, interrupted: bool) -> Summary:
        history = self.history
        return Summary(
            trainer=self.trainer, state=self.state, data=self.data,
            first_eval_loss=history.first_evaluation[1], last_eval_loss=history.last_evaluation[1],
            losses=history.losses, skipped=history.skipped, seconds=history.seconds,
            rollbacks=self.faults.rollbacks, interrupted=interrupted, exit=self.exit,
            checkpoint=self._checkpoint, log=Path(self.trainer.run.out) / "log.jsonl",
        )  # fmt: skip


def _runs_ahead(platform: str) -> bool:
    """Whether a step is dispatched while the previous one runs. Not on virtual devices: they share
    one pool of threads, so there is nothing to gain."""
    return platform != "cpu"
