"""A whole run: read the text, build or restore the state, train, evaluate, save.

Everything that can be refused is refused before `run.out` is created and before anything is
allocated on a device.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from rich.console import Console

from mtx.config import RunConfig, to_dict
from mtx.data import TextData, load_text
from mtx.errors import UserError
from mtx.plan.flops import parameters
from mtx.plan.hardware import find_hardware
from mtx.train.checkpoint import Checkpoints
from mtx.train.fit import refuse_if_too_large
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
    refuse_if_too_large(run, jax.devices())
    trainer = Trainer(run)
    _ = trainer.mesh  # refuses a layout of more devices than there are
    data = load_text(run.data, sequence=run.model.sequence)
    if data.vocab > run.model.vocab:
        raise UserError(
            f"the {data.tokenizer.kind} tokenizer has {data.vocab:,} tokens, more than model.vocab="
            f"{run.model.vocab:,}; set model.vocab to {data.vocab} or more"
        )
    out = Path(run.out)
    checkpoints = Checkpoints(out / "checkpoints")
    start = _first_step(run, checkpoints, data)
    _create(out, run)
    report = Report(console)
    report.lines(header(trainer, data.describe(), out))
    leader = jax.process_index() == 0
    with checkpoints, Log(out / "log.jsonl" if leader else None) as log:
        session = _Session(trainer, data, checkpoints, report, log, on_step)
        return session.run(start)


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


class _Session:
    """One call of `train`, after all checks."""

    def __init__(self, trainer, data, checkpoints, report, log, on_step):
        self.trainer: Trainer = trainer
        self.data: TextData = data
        self.checkpoints: Checkpoints = checkpoints
        self.report: Report = report
        self.log: Log = log
        self.on_step: Callable[[StepRecord], None] | None = on_step
        self.state: TrainState
        self.step = 0  # finished or running
        self.saved: int | None = None  # the step of the newest checkpoint
        self.eval_losses: list[tuple[int, float]] = []  # (step, loss)
        self.losses: list[float] = []
        self.clock = _Clock()
        device = trainer.mesh.devices.flat[0]
        row = find_hardware(device.device_kind)
        peak_tflops = row and row.peak_tflops.get(trainer.run.model.compute_dtype)
        self.meter = Meter(trainer.run, peak_flops=peak_tflops and peak_tflops * 1e12)
        # On the CPU a step is finished when its call returns.
        self.ahead = device.platform != "cpu"
        self.in_flight: tuple[int, Metrics, float] | None = None  # step, metrics, its start

    def run(self, start: int) -> Summary:
        run = self.trainer.run
        self.step = start
        self.saved = start or None
        self.state = self.checkpoints.restore(self.trainer, start) if start else self.trainer.init()
        self._log_start()
        if start >= run.steps:
            self.report.line(
                f"finished   already: {self.checkpoints.directory / str(start)} is at step {start} "
                f"of {run.steps}"
            )
            self._evaluate()
            return self._summary(interrupted=False)
        if start:
            self.report.line(f"resumes    from {self.checkpoints.directory / str(start)}")
        step = self._compile()
        self._evaluate()
        interrupted = self._train(step)
        if not interrupted and self.eval_losses[-1][0] != self.step:
            self._evaluate()
        if self.saved != self.step:
            self._save()
        with self.clock("save"):
            self.checkpoints.wait()
        return self._end(interrupted)

    # -- parts of a run ---------------------------------------------------------------------------

    def _compile(self) -> Callable:
        """The compiled step."""
        with self.clock("compile"):
            step = self.trainer.train_step.lower(self.state, self._batch(self.step)).compile()
            # The first use of a collective has a deadline that some compilations would miss; this
            # barrier is one of the coordination service.
            meet = ocp.multihost.get_barrier_sync_fn()
            meet(key="mtx_compiled", timeout_ms=_COMPILE_TIMEOUT_S * 1000)
            jax.block_until_ready(next(self._held_out_sums()))
        self.report.line(f"compiled   in {self.clock.seconds['compile']:.1f} s")
        return step

    def _train(self, train_step: Callable) -> bool:
        """Steps until the end, or until it is interrupted: then True."""
        run = self.trainer.run
        self.report.start(self.step, run.steps)
        with ExitStack() as stack:
            stack.callback(self.report.stop)
            stop = stack.enter_context(_stop_requests())
            while self.step < run.steps and not stop(self.step):
                start_s = time.perf_counter()
                self.state, metrics = train_step(self.state, self._batch(self.step))
                self.step += 1
                self._settle()  # the step before this one, while this one runs
                self.in_flight = self.step, metrics, start_s
                if not self.ahead:
                    self._settle()
                if _due(self.step, run.eval_every):
                    self._settle()
                    self._evaluate()
                if _due(self.step, run.save_every):
                    self._settle()
                    self._save()
            self._settle()
        return self.step < run.steps

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
            sums = jax.device_get(list(self._held_out_sums()))
        loss = float(sum(loss for loss, _ in sums)) / float(sum(tokens for _, tokens in sums))
        self.eval_losses.append((self.step, loss))
        self.log.write("eval", {"step": self.step, "loss": loss})
        self.report.line(f"step {self.step:>6,}  held-out loss {loss:.4f}")

    def _save(self) -> None:
        with self.clock("save"):
            path = self.checkpoints.save(
                self.trainer,
                self.state,
                tokenizer=self.data.tokenizer,
                extra={"held_out_losses": self.eval_losses[-1:]},
            )
        self.saved = self.step
        self.log.write("save", {"step": self.step, "path": str(path)})

    def _batch(self, step: int):
        return self.trainer.place(self.data.batch(step, self.trainer.run.global_batch))

    def _held_out_sums(self) -> Iterator:
        """(sum of losses, tokens) of each held-out batch, on the devices."""
        run = self.trainer.run
        for batch in self.data.eval_batches(run.eval_batches, run.global_batch):
            yield self.trainer.evaluate(self.state, self.trainer.place(batch))

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
                f"interrupted at step {self.step} of {steps}, saved as {summary.checkpoint}; the "
                "same run goes on from there (resume=True)"
            )
        else:
            self.report.line(
                f"finished   step {self.step}: held-out loss {summary.first_eval_loss:.4f} -> "
                f"{summary.last_eval_loss:.4f}, saved as {summary.checkpoint}"
            )
        self.report.line(f"time       {parts}")
        end = {"step": self.step, "interrupted": interrupted, "seconds": summary.seconds}
        self.log.write("end", end)
        return summary

    def _summary(self, *, interrupted: bool) -> Summary:
        directory = self.checkpoints.directory
        return Summary(
            trainer=self.trainer,
            state=self.state,
            data=self.data,
            first_eval_loss=self.eval_losses[0][1],
            last_eval_loss=self.eval_losses[-1][1],
            losses=self.losses,
            interrupted=interrupted,
            checkpoint=None if self.saved is None else directory / str(self.saved),
            log=directory.parent / "log.jsonl",
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


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_requests() -> Iterator[Callable[[int], bool]]:
    """Gives a function that says, before each step, whether somebody wants the run to stop.

    One process: after a first Ctrl-C or SIGTERM; the second one has its usual effect. Several:
    JAX's coordination service takes a SIGTERM to any of them, and all agree on the step; Ctrl-C
    is passed on as one.
    """
    several = jax.process_count() > 1
    requested = threading.Event()
    before = {}

    def request(number, frame):
        restore()
        os.write(2, b"\nmtx: finishing this step, then saving; once more leaves at once\n")
        requested.set()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    def restore():
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    if threading.current_thread() is threading.main_thread():  # no other may have handlers
        for number in (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    try:
        if several:
            yield multihost_utils.reached_preemption_sync_point
        else:
            yield lambda step: requested.is_set()
    finally:
        restore()
