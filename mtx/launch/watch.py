"""The processes of a run watch each other: one that dies, hangs or cannot be reached ends the run,
and is named.

Through JAX's coordination service, every process sends heartbeats that say where it is; process 0
reads them all and judges (`mtx.launch.judge`); all read the verdict with their next heartbeat,
print it and leave. A process that is killed, frozen or cut off is named within `heartbeat_s` and a
second, or a third of that if a connection to it broke; a run that hangs, within `hang_s`.

Nothing is left to the interpreter's normal exit, where JAX would wait for processes that are gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the coordination service's client has no public name
from jax.sharding import Mesh

from mtx.errors import UserError
from mtx.launch.exits import Exit, on_abort
from mtx.launch.judge import Heartbeat, Identity, Judge, Verdict, WatchOptions, patience
from mtx.launch.status import StatusPipe
from mtx.launch.stragglers import Probe, Record, Stragglers, gather, make_device_probe

_TICK_S = 0.1
_HEARTBEAT, _VERDICT, _ENDED = "mtx/heartbeat/", "mtx/verdict", "mtx/ended/"
_watches = itertools.count()  # all processes enter equally many
_SLOW_STEPS = 10  # a step of this many times the longest so far is a hang, if longer than hang_s
# What JAX says when the other end of a connection is gone.
_BROKEN = (
    "Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "Connection",
    "Socket closed",
)  # fmt: skip


class Watch:
    """Watches while it is entered; with `options` None, only if there are several processes.

    With several processes, an exception that leaves it ends the process at once, after the
    exception has been printed and the others have been told.
    """

    def __init__(self, options: WatchOptions | None = None):
        self._several = jax.process_count() > 1
        self._on = self._several or options is not None
        self._options = options or WatchOptions()
        # However many processes there are, at most a thousand heartbeats a second.
        self._interval_s = max(self._options.heartbeat_s / 20, jax.process_count() / 1000)
        process = jax.process_index()
        self._who = Identity(process=process, host=socket.gethostname(), pid=os.getpid())
        self._heartbeats = 0
        self._step, self._phase = 0, "start"
        self._entered_s = self._since_s = time.monotonic()  # the phase; the last sign of progress
        self._armed, self._longest_s = False, 0.0
        self._host_s, self._host_steps, self._late_s = 0.0, 0, 0.0
        self._probe: Probe | None = None
        self._probe_device: Callable[[], float] | None = None
        self._probed_at_s = time.monotonic()
        self._error = ""
        self._records: deque[Record] = deque()
        self._last_record = 0  # its step
        self._names: dict[int, str] = {}  # of all processes
        self._stragglers = Stragglers()
        self._leader: Heartbeat | None = None  # process 0's, as this process last saw it
        self._leader_s = time.monotonic()  # since when
        self._clock_s = _clock_offset_s()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._ended, self._ended_key = threading.Event(), f"{_ENDED}{next(_watches)}"
        self._leaving = threading.Lock()
        self._status = StatusPipe.inherited()
        self._client: Any = distributed.global_state.client if self._several else None
        self._answered_s = time.monotonic()  # when the coordination service last answered

    # -- what the run says ------------------------------------------------------------------------

    def place(self, mesh: Mesh) -> None:
        """Begins an attempt, the first or another: records which stages this process computes."""
        self._switch("start")
        self._armed = False
        axis = mesh.axis_names.index("pipe")
        placed, process = np.ndenumerate(mesh.devices), self._who.process
        own = {index[axis] for index, device in placed if device.process_index == process}
        self._who = replace(self._who, stages=tuple(sorted(own)))

    def started(self, step: int) -> None:
        """Reports that the run begins, or continues, after `step` finished steps."""
        self._step = step
        self._status.send(start=step)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Says that the main thread is in `phase`. The phases of a step ("batch", "step", and
        "loop" between them) may take `hang_s`, all others `pause_s`."""
        outer = self._phase
        self._switch(phase)
        yield  # an exception leaves the phase as it is, to tell where it happened
        self._switch(outer)

    def _switch(self, phase: str) -> None:
        now_s = time.monotonic()
        if self._phase in ("batch", "loop"):
            self._host_s += now_s - self._entered_s
        self._phase, self._entered_s, self._since_s = phase, now_s, now_s

    def finished(self, step: int, step_s: float) -> None:
        """Records that a step is finished."""
        self._step, self._since_s = step, time.monotonic()
        self._host_steps += 1
        self._longest_s = max(self._longest_s, step_s) if self._armed else 0.0
        self._armed = True
        self._stragglers.step_s = step_s

    def probe_due(self, step: int) -> bool:
        """Whether to call `probe` after `step`, with nothing in flight."""
        every = self._options.probe_every
        return self._several and every > 0 and step % every == 0

    def probe(self, step: int) -> None:
        """Measures this process alone."""
        if self._probe_device is None:
            self._probe_device = make_device_probe()
        self._switch(self._phase)
        now_s = time.monotonic()
        self._probe = Probe(
            step=step, host_s=self._host_s / max(self._host_steps, 1),
            device_s=self._probe_device(),
            late_s=min(self._late_s / max(now_s - self._probed_at_s, _TICK_S), 1.0),
        )  # fmt: skip
        self._host_s, self._host_steps, self._late_s = 0.0, 0, 0.0
        self._probed_at_s = self._entered_s = time.monotonic()

    def records(self) -> Iterator[tuple[Record, list[str]]]:
        """In process 0: what all processes measured, and the lines to print about it."""
        while self._records:
            record = self._records.popleft()
            yield record, self._stragglers.see(record, self._names)

    # -- from beginning to end --------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if not self._on:
            return self
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        threads = [self._guard]
        if self._several:
            threads.append(self._exchange)
            self._abort_handler = on_abort(self._aborted)
        self._threads = [threading.Thread(target=body, daemon=True) for body in threads]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self._on:
            return
        if error is not None and self._several:
            self._fail(error)
        self._phase = "done"
        self._status.send(step=self._step, phase="done")
        if self._several:
            # A process killed in its last moments is still noticed: JAX would wait for it in vain.
            self._wake.set()
            self._ended.wait()
        self._stop.set()
        self._wake.set()
        faulthandler.cancel_dump_traceback_later()
        if self._several:
            on_abort(None)
            self._threads[1].join(self._options.heartbeat_s)

    def _fail(self, error: BaseException) -> None:
        """Ends this process because of `error`, after the others have been told."""
        what = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if isinstance(error, Exception) and _connection_broke(error):
            self._error = what[:500]
            self._wake.set()
            # Most likely another process died: process 0 finds out which.
            self._stop.wait(self._options.heartbeat_s + 5)
            self._leave(Verdict(text=what, exit=Exit.LOST, culprits=(self._who.process,)))
        self._be_first()
        where = f"{self._who.describe()} at step {self._step:,}, in {self._phase}"
        if isinstance(error, UserError):
            verdict = Verdict(text=f"{where}: {error}", exit=Exit.MISTAKE)
            if self._publish(verdict) or self._who.process == 0:
                print("mtx:", " ".join(str(error).splitlines()), file=sys.stderr)
            self._end(Exit.MISTAKE)
        if isinstance(error, SystemExit | KeyboardInterrupt):
            status = error.code if isinstance(error, SystemExit) else Exit.INTERRUPTED
            self._publish(Verdict(text=f"{where} was interrupted", exit=Exit.LOST))
            self._end(status if isinstance(status, int) else Exit.FAILED)
        self._publish(Verdict(text=f"{where} failed: {what}", exit=Exit.LOST))
        traceback.print_exception(error)
        print(f"mtx: {where} failed", file=sys.stderr)
        self._end(Exit.FAILED)

    def _leave(self, verdict: Verdict) -> None:
        """Says why, and ends this process. Does not return."""
        self._be_first()
        if verdict.exit != Exit.MISTAKE or self._who.process == 0:  # else only where it was made
            print(
                f"mtx: {self._who.describe()} stops at step {self._step:,}, exit status "
                f"{int(verdict.exit)}: {verdict.text}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        if self._who.process in verdict.dump:
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._end(verdict.exit)

    def _be_first(self) -> None:
        """Lets one thread say why this process ends and end it; any other waits here until then."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()

    def _end(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self._who.process == 0 and self._several:
            # The coordination service ends with this process: let the others hear first.
            time.sleep(2 * self._interval_s)
        os._exit(status)

    # -- threads ----------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Looks at this process alone: does it run, and does the coordination service answer?"""
        last_s, armed_s = time.monotonic(), 0.0
        while not self._stop.wait(_TICK_S):
            now_s = time.monotonic()
            late_s = max(now_s - last_s - 2 * _TICK_S, 0.0)
            last_s = now_s
            self._late_s += late_s
            self._answered_s += late_s  # this process was frozen: nobody could answer it
            self._leader_s += late_s
            self._since_s += late_s
            if now_s - armed_s > 1:
                armed_s = now_s
                # If a thread holds the interpreter, no other Python can run, but this can. By
                # then, the other processes have given this one up.
                if self._several or self._status.descriptor is not None:
                    limit_s = self._options.heartbeat_s * patience(self._phase)
                    faulthandler.dump_traceback_later(limit_s + 1, exit=self._several, file=2)
                self._status.send(step=self._step, phase=self._phase, stages=self._who.stages)
            silent_s = now_s - self._answered_s
            if self._several and self._who.process and silent_s > self._options.heartbeat_s:
                self._leave(self._without_leader(f"it has not answered for {silent_s:.1f} s"))
            if not self._several and (verdict := Judge(silent_s=1e9, suspect_s=1e9).see(
                {0: self._heartbeat()}, now_s
            )):  # fmt: skip
                self._leave(verdict)

    def _exchange(self) -> None:
        """Sends heartbeats and reads the verdict; in process 0, judges all."""
        judge = Judge(
            silent_s=self._options.heartbeat_s, suspect_s=max(self._interval_s * 4, 2.0),
            processes=jax.process_count(),
        )  # fmt: skip
        while not self._stop.is_set():
            try:
                key, sent = f"{_HEARTBEAT}{self._who.process}", self._heartbeat().to_json()
                self._client.key_value_set(key, sent, allow_overwrite=True)
                self._answered_s = time.monotonic()
                if self._who.process == 0:
                    self._judge(judge)
                else:
                    self._see_leader(judge.begin_s)
                    self._hear_of_the_end()
                # Not a blocking get: at exit, the interpreter cannot take a thread out of one.
                self._leave(Verdict.from_json(self._client.key_value_try_get(_VERDICT)))
            except jax.errors.JaxRuntimeError:
                pass  # no verdict; or no answer, and `_guard` knows since when
            self._wake.wait(self._interval_s / (5 if self._phase == "done" else 1))
            self._wake.clear()

    def _hear_of_the_end(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_try_get(self._ended_key)
            self._ended.set()

    def _see_leader(self, begin_s: float) -> None:
        """Judges the judge: process 0 may hang while its coordination service, in C++, lives on."""
        try:
            leader = Heartbeat.from_json(self._client.key_value_try_get(f"{_HEARTBEAT}0"))
        except jax.errors.JaxRuntimeError:  # it has not begun
            leader = None
        now_s = time.monotonic()
        if leader and (self._leader is None or leader.count != self._leader.count):
            self._leader, self._leader_s = leader, now_s
        silent_s = now_s - self._leader_s
        limit_s = self._options.heartbeat_s * patience(leader.phase) if leader else begin_s
        if silent_s > limit_s and not (leader and leader.phase == "done"):
            verdict = self._without_leader(f"it has given no sign of life for {silent_s:.1f} s")
            self._publish(verdict)
            self._leave(verdict)

    def _judge(self, judge: Judge) -> None:
        texts = (text for _, text in self._client.key_value_dir_get(_HEARTBEAT))
        heartbeats = {one.who.process: one for one in map(Heartbeat.from_json, texts)}
        if verdict := judge.see(heartbeats, time.monotonic()):
            self._publish(verdict)
            self._leave(verdict)
        done = [one for one in heartbeats.values() if one.phase == "done"]
        if self._phase == "done" and len(done) == judge.processes and not self._ended.is_set():
            self._client.key_value_set(self._ended_key, "")
            self._ended.set()
        probes = {process: one.probe for process, one in heartbeats.items()}
        record = gather(probes, jax.process_count(), self._last_record)
        if record:
            self._last_record = record.step
            self._names = {process: one.who.describe() for process, one in heartbeats.items()}
            self._records.append(record)

    # -- parts ------------------------------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        phase, now_s = self._phase, time.monotonic()
        brief = phase in ("batch", "step", "loop") and self._armed
        limit_s = self._options.pause_s
        if brief:
            limit_s = max(self._options.hang_s, _SLOW_STEPS * self._longest_s)
        at_it_s = now_s - self._since_s
        self._heartbeats += 1
        return Heartbeat(
            who=self._who, count=self._heartbeats, step=self._step, phase=phase,
            stalled_s=at_it_s if at_it_s > limit_s and phase != "done" else 0.0,
            waits=not brief and at_it_s <= limit_s, error=self._error, probe=self._probe,
        )  # fmt: skip

    def _publish(self, verdict: Verdict) -> bool:
        """Tells all processes. False if another was first, or if nobody can be told."""
        try:
            self._client.key_value_set(_VERDICT, verdict.to_json())
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def _without_leader(self, why: str) -> Verdict:
        leader = self._leader
        who = leader.who.describe() if leader else "process 0"
        at = f", last seen at step {leader.step:,}" if leader else ""
        address = distributed.global_state.coordinator_address
        text = f"lost {who}{at}, the coordinator at {address}: {why} (killed, frozen or cut off)"
        return Verdict(text=text, exit=Exit.LOST, culprits=(0,))

    def _aborted(self) -> None:
        """Runs on SIGABRT, with which JAX's C++ ends this process when the coordination service
        breaks off, or when a clock is set back to before the run's beginning, because JAX's
        heartbeats go by the clock."""
        set_by_s = _clock_offset_s() - self._clock_s
        if abs(set_by_s) > 5:
            text = (
                f"the clock was set by {set_by_s:+,.0f} s, and JAX's coordination service took all "
                "processes for lost"
            )
            self._leave(Verdict(text=text, exit=Exit.LOST))
        host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError as error:
            if self._who.process:
                why = f"its service has gone ({error.strerror or error})"
                self._leave(self._without_leader(why))
        faulthandler.dump_traceback(file=2, all_threads=True)


def _clock_offset_s() -> float:
    """The time of day minus the monotonic clock, which nobody sets."""
    return time.time() - time.monotonic()


def _connection_broke(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return any(words in str(error) for words in _BROKEN)
        error = error.__cause__ or error.__context__
    return False
