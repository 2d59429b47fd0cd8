"""Judges who failed, from the heartbeats of all processes: plain data in, a verdict out; no JAX.

Times are differences of one process's monotonic clock: no two hosts' clocks are compared, and
setting a clock changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from mtx.fields import resolve_types
from mtx.launch.exits import Exit
from mtx.sizes import Interval, Patience


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What counts as dead, and what as hung; in seconds."""

    heartbeat_s: Patience = 10.0  # without a sign of life, a process is lost
    hang_s: Patience = 300.0  # without a finished step, once there was one, the run hangs
    pause_s: Patience = 1800.0  # the same while it starts, compiles, evaluates or saves
    probe_every: Interval = 50  # steps between measurements of each process's own speed; 0: never

    def __post_init__(self):
        resolve_types(self, prefix="watch.")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A process, described so that a person can find it."""

    process: int
    host: str
    pid: int
    stages: tuple[int, ...] = ()  # pipeline stages of its devices; empty before they are known

    def describe(self) -> str:
        plural = "s" if len(self.stages) > 1 else ""
        stages = f", stage{plural} {','.join(map(str, self.stages))}" if self.stages else ""
        return f"process {self.process} (host {self.host}, pid {self.pid}{stages})"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A sign of life."""

    who: Identity
    count: int  # grows by one with each
    step: int  # finished steps
    phase: str  # what its main thread does: batch, step, loop, eval, ...; "done" at the end
    stalled_s: float = 0.0  # for how long, if longer than allowed; 0: it makes progress
    waits: bool = False  # in a phase that may take long, and has not taken too long yet
    error: str = ""  # how its connection to the others broke
    probe: tuple[int, float, float, float] | None = None  # see `mtx.launch.stragglers.Probe`

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        values = json.loads(text, object_hook=_with_tuples)
        return cls(**values | {"who": Identity(**values["who"])})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why all processes stop."""

    text: str  # one line: who, where, at which step, and what was seen
    exit: Exit  # of the processes that are not at fault
    culprits: tuple[int, ...] = ()
    dump: tuple[int, ...] = ()  # the processes that show their stacks

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        values = json.loads(text, object_hook=_with_tuples)
        return cls(**values | {"exit": Exit(values["exit"])})


def _with_tuples(values: dict) -> dict:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}


def patience(phase: str) -> float:
    """The factor by which a process may be silent for longer in `phase`: it starts and compiles in
    C++ calls that may not let its other threads run."""
    return 6.0 if phase in ("start", "compile") else 1.0


@dataclass(kw_only=True)
class Judge:
    """Reads all heartbeats repeatedly, in process 0.

    A process is lost when its heartbeats have stopped for `silent_s`, or only for
    `suspect_s` if another process says that a connection broke. A run hangs when a process has
    stalled and no process is in a phase that may take long.
    """

    silent_s: float
    suspect_s: float
    processes: int = 0  # that must begin, within `begin_s` of each other
    begin_s: float = 300.0
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)  # count, since when
    _broken_s: float = math.inf  # when a process first said that a connection had broken
    _last_s: float | None = None
    _first_s: float | None = None

    def see(self, heartbeats: Mapping[int, Heartbeat], now_s: float) -> Verdict | None:
        """The verdict, if any. `heartbeats`: the last of each process that ever sent one."""
        if self._last_s is None or self._first_s is None:
            self._first_s = self._last_s = now_s
        away_s, self._last_s = now_s - self._last_s, now_s
        # For any longer time, this process itself did not run: that is nobody's silence.
        away_s = max(away_s - self.suspect_s / 2, 0.0)
        self._seen = {p: (count, since_s + away_s) for p, (count, since_s) in self._seen.items()}
        for process, heartbeat in heartbeats.items():
            if process not in self._seen or self._seen[process][0] != heartbeat.count:
                self._seen[process] = heartbeat.count, now_s
        running = {p: one for p, one in heartbeats.items() if one.phase != "done"}
        broken = [one for one in running.values() if one.error]
        if broken:
            self._broken_s = min(self._broken_s, now_s)
        absent = [p for p in range(self.processes) if p not in heartbeats]
        if absent and now_s - self._first_s > self.begin_s:
            numbers = ", ".join(map(str, absent))
            text = f"no sign of life from process {numbers} within {self.begin_s:.0f} s"
            return Verdict(text=text, exit=Exit.LOST, culprits=tuple(absent))
        return self._lost(running, broken, now_s) or _hung(running)

    def _lost(
        self, running: dict[int, Heartbeat], broken: list[Heartbeat], now_s: float
    ) -> Verdict | None:
        limit_s = self.suspect_s if broken else self.silent_s
        silent = {p: now_s - self._seen[p][1] for p in running}
        lost = [p for p, age_s in silent.items() if age_s > limit_s * patience(running[p].phase)]
        given_up = bool(broken) and now_s - self._broken_s > self.silent_s
        if given_up and not lost:  # one last heard of while compiling may be gone as well
            lost = [p for p, age_s in silent.items() if age_s > self.suspect_s]
        if lost:
            who = "; ".join(
                f"{running[p].who.describe()}, last seen at step {running[p].step:,}, in "
                f"{running[p].phase}: no sign of life for {silent[p]:.1f} s (killed, frozen or cut "
                "off)"
                for p in lost
            )
            seen = f"; {_first_error(broken)}" if broken else ""
            return Verdict(text=f"lost {who}{seen}", exit=Exit.LOST, culprits=tuple(lost))
        if given_up:
            text = f"all processes live, but a connection broke: {_first_error(broken)}"
            return Verdict(text=text, exit=Exit.LOST)
        return None


def _first_error(broken: list[Heartbeat]) -> str:
    first = min(broken, key=lambda one: (one.step, one.who.process))
    return f"{first.who.describe()} reports: {first.error}"


def _hung(running: dict[int, Heartbeat]) -> Verdict | None:
    all_of = list(running.values())
    stalled = [one for one in all_of if one.stalled_s > 0]
    if not stalled or any(one.waits for one in all_of):
        return None
    # A step's collectives make all wait for the slowest, which is behind or not in the step.
    first = min(one.step for one in all_of)
    behind = [one for one in all_of if one.step == first]
    culprits = [one for one in behind if one.phase != "step"]
    if not culprits and len(behind) < len(running):
        culprits = behind
    after_s = max(one.stalled_s for one in stalled)
    if not culprits:
        one = f"{stalled[0].who.describe()} is" if len(running) == 1 else "all processes are"
        text = f"hung: {one} in step {first + 1:,}, which has not finished for {after_s:.0f} s"
        return Verdict(text=text, exit=Exit.HUNG, dump=tuple(sorted(running)))
    who = "; ".join(
        f"{one.who.describe()} at step {one.step:,}, in {one.phase}" for one in culprits
    )
    numbers = tuple(one.who.process for one in culprits)
    others = "" if len(running) == len(culprits) else ", and the others wait"
    text = f"hung for {after_s:.0f} s: {who}{others}"
    return Verdict(text=text, exit=Exit.HUNG, culprits=numbers, dump=numbers)
