"""Where the time of a run went, over all its sessions, from its log; no JAX.

Goodput is the time in steps that count over the time since the run was first launched. Of a step
that was trained again, after a crash or a rollback, only the last time counts; a step whose
gradients were not finite does not count at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtx.errors import UserError
from mtx.files import parse_json, read_text

Record = dict


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Wall-clock seconds, by what they were spent on."""

    parts: dict[str, float]  # in the order in which they are shown; "steps" are those that count
    sessions: int
    lost_steps: int  # trained again later
    skipped_steps: int
    rollbacks: int
    clock_jumps: int  # sessions that seem to begin before the previous one has ended

    @property
    def wall_s(self) -> float:
        return sum(self.parts.values())

    @property
    def fraction(self) -> float:
        """Goodput, from 0 to 1; 0 for a run without a step."""
        return self.parts["steps"] / self.wall_s if self.wall_s else 0.0


# The fields read from records: the numbers of each kind, those that are null if not finite,
# and those that may be missing.
_NUMBERS = {
    "start": ("step", "unix_time", "parameters", "devices"), "step": ("step", "step_s"),
    "eval": ("step",), "rollback": ("step",), "processes": ("step",),
}  # fmt: skip
_NULLABLE = {"step": ("loss", "tokens_per_s"), "eval": ("loss",)}
_OPTIONAL = (
    "tflops_sc21", "tflops_model", "mfu", "learning_rate", "gradient_norm",
    "compiled_bytes", "aux_loss", "second_loss", "imbalance",
)  # fmt: skip


def read_log(path: str | Path) -> list[Record]:
    """The records of a log.jsonl; a last line that was cut short is left out. Raises UserError for
    a file that is missing or is not such a log."""
    try:
        lines = read_text(path).split("\n")
    except UserError as error:
        raise UserError(f"{error}; name the directory of a training run (its --out)") from None
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # anything after the last newline is torn
        try:
            record = parse_json(line, f"line {number}")
        except UserError:
            record = None
        if not _is_record(record):
            raise UserError(
                f"{path}, line {number} must be a record of a run's log; take that line out"
            )
        records.append(record)
    if not any(record["kind"] == "start" for record in records):
        raise UserError(f"{path} has no session of a run in it")
    return records


def _is_record(record: Any) -> bool:
    try:
        kind = record["kind"]
        numbers = [record[name] for name in _NUMBERS.get(kind, ())]
        numbers += [record.get(name, 0.0) for name in ("t_s", "since_launch_s")]
        nullable = [record[name] for name in _NULLABLE.get(kind, ())]
        nullable += [record.get(name) for name in _OPTIONAL]
        if kind == "start":
            numbers.append(record["run"]["steps"])
        elif kind in ("compile", "eval", "save"):
            numbers.append(record.get("seconds", 0.0))
        elif kind == "processes":
            numbers += [*record["host_s"], *record["device_s"]]
        elif kind == "memory":
            nullable += [device["peak_bytes"] for device in record.get("devices", ())]
    except (KeyError, TypeError, AttributeError):
        return False
    numbers += [value for value in nullable if value is not None]
    return all(isinstance(value, int | float) and abs(value) < 2.0**127 for value in numbers)


def steps_that_count(records: Sequence[Record]) -> list[Record]:
    """Each step's last record, in order."""
    last = {}
    for record in records:
        if record["kind"] == "start":
            last = {step: known for step, known in last.items() if step <= record["step"]}
        elif record["kind"] == "step":
            last[record["step"]] = record
    return [last[step] for step in sorted(last)]


def measure_goodput(records: Sequence[Record]) -> Goodput:
    """Goodput from the records of one log, whose sessions follow one another."""
    sessions = _sessions(records)
    kept = {id(record) for record in steps_that_count(records)}
    names = ("steps", "lost", "skipped", "start", "compile", "eval", "save", "other", "down")
    parts: dict[str, float] = dict.fromkeys(names, 0.0)
    counts = {"lost": 0, "skipped": 0, "rollback": 0, "jumps": 0}
    ended_s, finished = None, False
    for session in sessions:
        start = session[0]
        launched_s = start["unix_time"] - start.get("since_launch_s", 0.0)
        if ended_s is not None:
            gap_s = launched_s - ended_s
            counts["jumps"] += gap_s < -1.0  # less is the rounding of two clocks
            parts["down"] += 0.0 if finished else max(gap_s, 0.0)
        length_s = session[-1].get("t_s", 0.0) - start.get("t_s", 0.0)
        ended_s = start["unix_time"] + length_s
        finished = _has_finished(session)  # then the gap is not downtime: more was asked for
        told = dict.fromkeys(names, 0.0)
        for record in session:
            kind = record["kind"]
            if kind == "step":
                good = record["finite"] and id(record) in kept
                part = "steps" if good else "skipped" if id(record) in kept else "lost"
                told[part] += record["step_s"]
                counts[part] = counts.get(part, 0) + 1
            elif kind in ("compile", "eval", "save"):
                told[kind] += record.get("seconds", 0.0)
            elif kind == "rollback":
                counts["rollback"] += 1
        told["other"] = max(0.0, length_s - sum(told.values()))
        told["start"] = start.get("since_launch_s", 0.0)
        for name in names:
            parts[name] += told[name]
    return Goodput(
        parts=parts, sessions=len(sessions), lost_steps=counts["lost"],
        skipped_steps=counts["skipped"], rollbacks=counts["rollback"],
        clock_jumps=counts["jumps"],
    )  # fmt: skip


def _has_finished(session: Sequence[Record]) -> bool:
    """Whether a session reached its run's last step."""
    done = max((one["step"] for one in session if one["kind"] in ("start", "step")), default=0)
    return done >= session[0]["run"]["steps"]


def _sessions(records: Sequence[Record]) -> list[list[Record]]:
    """The log, split before each "start" record."""
    sessions: list[list[Record]] = []
    for record in records:
        if record["kind"] == "start":
            sessions.append([])
        if sessions:
            sessions[-1].append(record)
    return sessions
