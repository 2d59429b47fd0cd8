"""Our pipeline beside PyTorch's, Megatron's and JaxPP's: same model and cores, in turn.

    python experiments/bench_peers.py

trains preset bench-s (float32, m = 8, four stages or --stages of them) in rounds. In each, every
trainer is started anew, in processes of its own: ours, torch.distributed.pipelining's,
Megatron-Core's and JaxPP's. It takes two steps that do not count and then the timed ones, and ends
before the next begins. Nothing else should run: on a busy machine the ratios mean little. Trainers
that are not installed are left out. JaxPP may need another JAX than ours: --jaxpp-python names the
interpreter of an environment that has both (peers/jaxpp_pipeline.py says which).

Expected time: fifteen minutes on two idle cores, twice as long with JaxPP, which is slow to
compile; two and a half minutes with --rounds 1 --torch 1f1b.
Expected result: torch, ours and JaxPP with our JAX are level, within the machine's noise (10 to
30 %); Megatron, and JaxPP with an older JAX, are slower. With more stages than cores no schedule
gains: others use the cores during the bubble of one process.

    python experiments/bench_peers.py --rounds 5 --torch 1f1b interleaved --json peers.json
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import bench
from rich.table import Table

import mtx
from mtx.cli import exit_status, parse
from mtx.config import Layout, to_dict
from mtx.errors import UserError
from mtx.launch.start import usable_cores
from mtx.presets import preset

_HERE = Path(__file__).resolve()
_SCRIPTS = {
    "torch": _HERE.parent / "peers" / "torch_pipeline.py",
    "megatron": _HERE.parent / "peers" / "megatron_pipeline.py",
    "jaxpp": _HERE.parent / "peers" / "jaxpp_pipeline.py",
}
BASELINE = "torch 1f1b"
TorchSchedule = Literal[
    "none", "1f1b", "gpipe", "interleaved", "interleaved_zb", "looped_bfs", "zbv", "dualpipev"
]
MegatronSchedule = Literal["1f1b", "interleaved"]
JaxppSchedule = Literal["1f1b", "eager", "zero_bubble", "interleaved", "dualpipev"]
Side = Literal["mtx", "torch", "megatron", "jaxpp"]
OurRow = Literal["none", "1f1b", "interleaved", "interleaved_selective"]
OURS: dict[OurRow, dict] = {  # changes to the preset's layout
    "none": {"pipe": 1},
    "1f1b": {},
    "interleaved": {"virtual": 2},
    "interleaved_selective": {"virtual": 2, "recompute": "selective"},
}
_NOTES = (
    "All: the same sizes, microbatches, AdamW and clipping, float32, nothing recomputed but "
    "where a row says so, one fixed random batch. 'none' adds up gradients without a pipeline.",
    "mtx: one process, XLA's threads on all cores; tied output layer, sharded over the stages.",
    "torch: one process a stage and the cores shared out among them; a stage owns its parameters, "
    "so the output layer is untied (2.1 million parameters more for AdamW) and lies on the last "
    "one. Eager: the zero-bubble schedules refuse torch.compile. On AMD's CPUs its MKL takes AVX2 "
    "where XLA takes AVX-512, for half the speed.",
    "megatron: as torch, with Megatron-Core's layers and optimizer; without Transformer Engine its "
    "attention is not fused. The output layer is tied, and copied to the last stage.",
    "jaxpp: one process, a device a stage, XLA's threads on all cores; our attention in blocks of "
    "queries, untied output layer on the last stage, its own JAX.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times our pipeline, torch.distributed.pipelining, Megatron-Core and JaxPP in turn."""

    rounds: int = 3  # each starts every trainer once
    steps: int = 4  # timed in every round
    warmup: int = 2  # untimed steps before them
    stages: int = 4  # of the pipelines; with a core for each, no stage has to share one
    torch: tuple[TorchSchedule, ...] = ("none", "1f1b", "interleaved", "interleaved_zb", "zbv")
    megatron: tuple[MegatronSchedule, ...] = ("1f1b", "interleaved")
    jaxpp: tuple[JaxppSchedule, ...] = ("1f1b", "zero_bubble", "interleaved", "dualpipev")
    jaxpp_python: str = ""  # the interpreter that has JaxPP; empty: this one
    timeout_s: int = 600  # for one trainer in one round
    json: str = ""  # FILE for everything that was measured

    def __post_init__(self):
        for name in ("rounds", "steps", "warmup", "timeout_s"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.stages not in (2, 4):
            raise UserError(
                f"stages={self.stages} must be 2 or 4: the 8 layers of bench-s are cut into two "
                "chunks for each"
            )


@dataclass(kw_only=True)
class Trained:
    """One trainer and the records that its processes printed, one per round."""

    side: Side
    schedule: str
    command: list[str]
    python: str = sys.executable  # the interpreter that runs it
    records: list[dict] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.side} {self.schedule}"

    def step_s(self) -> list[list[float]]:
        return [record["step_s"] for record in self.records]


class TrainerFailed(Exception):
    """A process exited with a status other than 0, or did not end in time."""


# --- our side, in its own process -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OurOptions:
    """For the process that this script starts for one of our rows, which prints a line of JSON."""

    ours: OurRow
    stages: int
    steps: int
    warmup: int


def our_layout(name: str, stages: int) -> Layout:
    return replace(preset("bench-s").layout, **{"pipe": stages} | OURS[name])


def train_ours(options: OurOptions) -> dict:
    """Train on virtual devices; the record returned has the same fields as torch_pipeline.py's."""
    from bench_pipeline import Training, random_batch

    run = replace(preset("bench-s"), layout=our_layout(options.ours, options.stages))
    mtx.use_virtual_devices(run.layout.devices)
    trainer = mtx.Trainer(run)
    batch = trainer.place(random_batch(run.model, run.global_batch))
    training = Training(step=trainer.compile_step(), state=trainer.init(), batch=batch)
    steps = [training.advance() for _ in range(options.warmup + options.steps)]
    step_s = [round(seconds, 4) for seconds, _ in steps[options.warmup :]]
    return {
        "trainer": f"mtx {options.ours}",
        "processes": 1,
        "threads": usable_cores(),
        "layout": to_dict(run.layout),
        "step_s": step_s,
        "median_s": statistics.median(step_s),
        "loss_first": steps[0][1],
        "loss_last": steps[-1][1],
    }


# --- the rounds -----------------------------------------------------------------------------------


def interpreter_of(side: Side, options: Options) -> str:
    """The Python that runs a side's trainers."""
    return options.jaxpp_python if side == "jaxpp" and options.jaxpp_python else sys.executable


def is_installed(side: Side, options: Options) -> bool:
    """Whether a side's interpreter has its package. UserError if one that was named lacks it."""
    python = interpreter_of(side, options)
    if python == sys.executable:
        return importlib.util.find_spec(side) is not None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({side!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode
    except OSError as error:
        raise UserError(f"jaxpp_python={python} does not run: {error.strerror}") from None
    if found:
        raise UserError(f"jaxpp_python={python} has no package jaxpp: install it there")
    return True


def trainers(options: Options, installed: Collection[Side]) -> list[Trained]:
    """All trainers in the order in which they run, sides alternating: ours and installed peers."""
    counts = [
        *("--stages", f"{options.stages}"),
        *("--steps", f"{options.steps}", "--warmup", f"{options.warmup}"),
    ]
    limit = ["--timeout-s", f"{options.timeout_s}"]
    sides = [[
        Trained(side="mtx", schedule=name, command=[f"{_HERE}", "--ours", name, *counts])
        for name in OURS
    ]]  # fmt: skip
    schedules = {"torch": options.torch, "megatron": options.megatron, "jaxpp": options.jaxpp}
    for side, names in schedules.items():
        if side in installed:
            one_process = side == "jaxpp"  # the others have to end all their processes in time
            sides.append([
                Trained(
                    side=side,
                    schedule=name,
                    python=interpreter_of(side, options),
                    command=[
                        f"{_SCRIPTS[side]}", "--schedule", name, *counts,
                        *([] if one_process else limit),
                    ],
                )
                for name in names
            ])  # fmt: skip
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*sides))
    return [trainer for trainer in in_turn if trainer]


def run_once(command: list[str], timeout_s: float, python: str = sys.executable) -> dict:
    """The record that a trainer prints as its last line. TrainerFailed quotes its last error."""
    root = str(Path(mtx.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [python, *command], capture_output=True, text=True, timeout=timeout_s,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TrainerFailed(f"not done after {timeout_s:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise TrainerFailed(f"exit status {done.returncode}: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_rounds(rows: Sequence[Trained], options: Options) -> dict[str, str]:
    """Fill in the rows' records. Returns the rows that failed, with the reason: a peer's schedule
    that its version cannot run is left out. TrainerFailed if one of ours fails."""
    failed: dict[str, str] = {}
    with bench.Work(options.rounds * len(rows)) as work:
        for number in range(1, options.rounds + 1):
            for row in rows:
                work.begin(f"round {number} of {options.rounds}: {row.name}")
                if row.name in failed:
                    continue
                try:
                    # torch's own time limit comes first, since it ends all its processes
                    record = run_once(row.command, options.timeout_s + 30, row.python)
                    row.records.append(record)
                except TrainerFailed as error:
                    if row.side == "mtx":
                        raise TrainerFailed(f"{row.name}: {error}") from None
                    failed[row.name] = str(error)
    return failed


def check_losses(rows: Sequence[Trained], vocab: int) -> None:
    """LossesDiffer unless each side's rows agree with each other, and all begin near ln V. The
    first step's loss cannot agree between the sides: each has its own initial values and batch."""
    for side in typing.get_args(Side):
        records = {row.name: row.records[0] for row in rows if row.side == side}
        for when in ("loss_first", "loss_last"):
            losses = {name: record[when] for name, record in records.items()}
            if losses and (found := bench.differing(losses)):
                raise bench.LossesDiffer(f"{when} differs: {found}")
        for name, record in records.items():
            if not abs(record["loss_first"] - math.log(vocab)) < 0.1:
                raise bench.LossesDiffer(
                    f"{name} begins with a loss of {record['loss_first']:.4f}, far from "
                    f"ln {vocab} = {math.log(vocab):.4f}"
                )


# --- printing -------------------------------------------------------------------------------------


def result_of(
    rows: Sequence[Trained], failed: dict[str, str], *, options: Options, machine: dict
) -> dict:
    """All measurements, as plain data from which the table is made."""
    medians = {row.name: [statistics.median(step_s) for step_s in row.step_s()] for row in rows}
    base = medians.get(BASELINE)
    result_rows = []
    for row in rows:
        record, all_s = row.records[0], list(itertools.chain.from_iterable(row.step_s()))
        result_rows.append({
            "name": row.name,
            "side": row.side,
            "processes": record["processes"],
            "threads": record["threads"],
            "layout": record.get("layout"),
            "step_s": row.step_s(),
            "median_s": statistics.median(all_s),
            "min_s": min(all_s),
            "speed_up": bench.speed_up(base, medians[row.name]) if base else None,
            "loss_first": record["loss_first"],
            "loss_last": record["loss_last"],
        })  # fmt: skip
    return {
        "benchmark": "peers",
        "machine": machine,
        "options": to_dict(options),
        "rows": result_rows,
        "failed": failed,
    }


def table_of(result: dict) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("\ntrainer", no_wrap=True)
    for header in (
        "processes\nx threads", "step s\nmedian", "\nleast", f"speed-up over\n{BASELINE}",
        "loss of\nfirst step", "\nlast",
    ):  # fmt: skip
        table.add_column(header, justify="right", overflow="fold")
    sides = typing.get_args(Side)  # ours first
    for row in sorted(result["rows"], key=lambda row: sides.index(row["side"])):
        table.add_row(
            row["name"],
            f"{row['processes']} x {row['threads']}",
            f"{row['median_s']:.3f}",
            f"{row['min_s']:.3f}",
            "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
            f"{row['loss_first']:.4f}",
            f"{row['loss_last']:.4f}",
        )
    return table


def title_of(result: dict) -> str:
    options = result["options"]
    return (
        f"bench-s, {options['stages']} stages, m=8, {options['rounds']} rounds of "
        f"{options['steps']} steps: {bench.measured_on(result['machine'])}"
    )


def notes_of(result: dict) -> list[str]:
    """What a reader needs to judge the table."""
    notes = [
        f"speed-up: over {BASELINE}, the median over rounds of the ratio of a round's medians.",
        "mtx interleaved has v=2, as torch's; interleaved_selective recompute='selective', too.",
        *_NOTES,
        *(f"{name} is left out: {reason}" for name, reason in result["failed"].items()),
        *bench.load_notes(result["machine"]),
    ]
    measured = {row["side"] for row in result["rows"]}
    if missing := [side for side in _SCRIPTS if side not in measured]:
        notes.append(
            f"Not measured: {', '.join(missing)}. pip install 'mtx[peers]'; jaxpp: --jaxpp-python"
        )
    return notes


def main(arguments: Sequence[str]) -> int:
    if "--ours" in arguments:
        ours = OurOptions(ours="1f1b", stages=4, steps=1, warmup=1)
        print(json.dumps(train_ours(parse(list(arguments), ours, prog="bench_peers.py"))))
        return 0
    options = parse(list(arguments), Options(), prog="bench_peers.py")
    bench.check_path(options.json)
    machine = bench.describe_machine("jax", "jaxlib", "torch", "megatron-core")
    rows = trainers(options, [side for side in _SCRIPTS if is_installed(side, options)])
    try:
        failed = run_rounds(rows, options)
        rows = [row for row in rows if row.name not in failed]
        check_losses(rows, preset("bench-s").model.vocab)
    except (TrainerFailed, bench.LossesDiffer) as error:
        print(f"bench_peers.py: {error}", file=sys.stderr)
        return 1
    result = result_of(rows, failed, options=options, machine=machine)
    bench.print_table(title_of(result), table_of(result), notes_of(result))
    bench.write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
