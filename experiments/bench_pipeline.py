"""Our pipelines against the ones that other JAX trainers run, in one process, on the same model.

    python experiments/bench_pipeline.py

trains preset bench-s (8.5 million parameters, float32) on four virtual CPU devices by each pipeline:
1F1B and interleaved 1F1B as ours run them, GPipe from the same program, GPipe and the circular order
by autodiff through the forward scan, and one device without a pipeline, which adds up the gradients
of the microbatches. All are given the same batch and the same parameters; the losses of all steps
must agree to 1e-5 or nothing is printed. Then a table:

temp     MiB of temporary memory of a device's step, by XLA's own analysis, at m, 4m and 16m
         microbatches (compiled, not run): what 1F1B is about
step     seconds of a step, all pipelines in turn in every round, so that drift hits them alike
GFLOP    matmuls that all devices together execute in a step, idle halves included where they compute
speed-up over GPipe by autodiff, at equal recomputation

Expected time: five minutes on two idle cores, most of it compiling; --quick: one and a half.
Expected result: temp of our 1F1B does not grow with m, and by autodiff it does, about eightfold;
ours are faster, too, by what autodiff computes in idle ticks and more.

    python experiments/bench_pipeline.py --recompute full --steps 10 --json bench.json
    python experiments/bench_pipeline.py --memory-only --stages 2 --virtual 4 --microbatches 4
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from bench import (
    Work, check_path, load_note, machine, measured_on, print_table, speed_up, write_json,
)  # fmt: skip
from peers.autodiff import AutodiffPipeline
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.config import Layout, ModelConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.plan.flops import hardware_matmul_flops
from mtx.presets import preset
from mtx.train.launch import use_virtual_devices
from mtx.train.step import Trainer

LOSS_TOLERANCE = 1e-5  # relative, between any two pipelines in any step
BASELINE = "GPipe by autodiff"
_MATMUL_SIZE = 2048
_MIB = 2**20
_Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times our pipelines and autodiff's on one model, and compares their memory."""

    preset: str = "bench-s"  # whose model, optimizer and microbatch size are taken
    stages: int = 4  # p, one virtual CPU device each
    virtual: int = 2  # v of the interleaved and circular rows; 1 leaves them out
    microbatches: int = 8  # m
    steps: int = 5  # timed rounds
    recompute: Literal["none", "full"] = "none"  # within a block, in all rows
    json: str = ""  # FILE for everything that was measured
    memory_only: _Switch = False  # compile, time nothing
    quick: _Switch = False  # two rounds, and memory at m alone

    def __post_init__(self):
        for name in ("stages", "virtual", "microbatches", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def rounds(self) -> int:
        return min(self.steps, 2) if self.quick else self.steps

    @property
    def memory_microbatches(self) -> tuple[int, ...]:
        """The m at which memory is compared."""
        return tuple(self.microbatches * times for times in ((1,) if self.quick else (1, 4, 16)))


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """One row: a way to run the model."""

    name: str
    layout: Layout
    autodiff: bool = False

    def trainer(self, run: RunConfig, microbatches: int) -> Trainer:
        """The trainer of `run`'s model, laid out this way."""
        batch = microbatches * self.layout.microbatch
        trainer = Trainer(replace(run, layout=self.layout, global_batch=batch))
        if self.autodiff:
            trainer.pipeline = AutodiffPipeline(
                model=trainer.model, schedule=trainer.schedule, placement=trainer.placement,
                layout=self.layout, axes=trainer.axes,
            )  # fmt: skip
        return trainer

    def ticks(self, trainer: Trainer) -> int:
        """Ticks of a step. Autodiff goes through those of the F halves, and back."""
        if not self.autodiff:
            return trainer.schedule.ticks
        return 2 * (int(trainer.schedule.forward_ticks.max()) + 1)

    def matmul_flops(self, model: ModelConfig, microbatches: int) -> float:
        """Of one step, all devices. Autodiff computes F in every tick of the way there and B in
        every tick of the way back, which is what our program does with GPipe's table in phases."""
        layout = self.layout
        if self.autodiff:
            layout = replace(layout, schedule="gpipe", idle="phases")
        batch = microbatches * layout.microbatch
        return hardware_matmul_flops(model, layout, batch, backend="xla")


def pipelines(options: Options, microbatch: int) -> list[Pipelined]:
    """The rows of the table, in its order."""
    v = options.virtual
    one = Layout(pipe=options.stages, microbatch=microbatch, recompute=options.recompute)
    many = replace(one, virtual=v)
    rows = [
        Pipelined(name="1F1B, skip", layout=one),
        Pipelined(name="1F1B, phases", layout=replace(one, idle="phases")),
        Pipelined(name="1F1B, masked", layout=replace(one, idle="masked")),
        Pipelined(name=f"interleaved v={v}, skip", layout=many),
        Pipelined(name=f"interleaved v={v}, phases", layout=replace(many, idle="phases")),
        Pipelined(name="GPipe, our program, skip", layout=replace(one, schedule="gpipe")),
        Pipelined(name=BASELINE, layout=one, autodiff=True),
        Pipelined(name=f"circular v={v} by autodiff", layout=many, autodiff=True),
        Pipelined(name="one device, no pipeline", layout=replace(one, pipe=1)),
    ]
    return [row for row in rows if v > 1 or f"v={v}" not in row.name]


# --- measuring ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Measured:
    """What is known of a row; times and losses are those of m microbatches."""

    pipeline: Pipelined
    ticks: int
    gflop: float
    compile_s: float  # tracing included
    temp_mib: dict[int, float]  # by microbatches
    step_s: list[float] = field(default_factory=list)  # without the first step
    losses: list[float] = field(default_factory=list)  # of all steps

    @property
    def name(self) -> str:
        return self.pipeline.name


@dataclass(kw_only=True)
class Training:
    """A compiled step, its state and its batch."""

    step: Callable
    state: Any
    batch: Any

    def advance(self) -> tuple[float, float]:
        """(seconds, loss) of the next step."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start, float(metrics.loss)


def compile_all(
    rows: Sequence[Pipelined], run: RunConfig, options: Options, work: Work
) -> tuple[list[Measured], list[Training]]:
    """Each row compiled for every number of microbatches, and, for m, ready to train."""
    measured, trainings = [], []
    batch = random_batch(run.model, options.microbatches * run.layout.microbatch)
    for row in rows:
        temp_mib = {}
        for microbatches in options.memory_microbatches:
            work.begin(f"compiling {row.name}, m={microbatches}")
            trainer = row.trainer(run, microbatches)
            start = time.perf_counter()
            step = trainer.compile_step()
            compile_s = time.perf_counter() - start
            temp_mib[microbatches] = step.memory_analysis().temp_size_in_bytes / _MIB
            if microbatches != options.microbatches:
                continue
            measured.append(
                Measured(
                    pipeline=row,
                    ticks=row.ticks(trainer),
                    gflop=row.matmul_flops(run.model, microbatches) / 1e9,
                    compile_s=compile_s,
                    temp_mib=temp_mib,
                )
            )
            if not options.memory_only:
                state = trainer.init()
                trainings.append(Training(step=step, state=state, batch=trainer.place(batch)))
    return measured, trainings


def random_batch(model: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """The same random tokens every time; every position counts."""
    ids = np.random.default_rng(0).integers(0, model.vocab, (rows, model.sequence + 1), np.int32)
    weights = np.ones((rows, model.sequence), np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def time_rounds(
    measured: Sequence[Measured], trainings: Sequence[Training], rounds: int, work: Work, matmul
) -> list[float]:
    """A step of every row in turn, `rounds` times after a first that is not timed; the seconds of
    a large matmul at the end of each."""
    matmul_s = []
    for number in range(rounds + 1):
        work.begin(f"round {number} of {rounds}" if number else "first steps")
        for row, training in zip(measured, trainings, strict=True):
            seconds, loss = training.advance()
            row.losses.append(loss)
            if number:
                row.step_s.append(seconds)
        seconds = matmul()
        if number:
            matmul_s.append(seconds)
    return matmul_s


def make_matmul(dtype: str) -> Callable[[], float]:
    """Seconds of a product of two square matrices of `_MATMUL_SIZE`; one device has all cores."""
    multiply = jax.jit(jnp.matmul)
    a = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), dtype)

    def seconds() -> float:
        start = time.perf_counter()
        multiply(a, a).block_until_ready()
        return time.perf_counter() - start

    return seconds


def disagreement(measured: Sequence[Measured]) -> str:
    """The first step in which two rows' losses differ, in words; empty where they agree."""
    for step, losses in enumerate(zip(*(row.losses for row in measured), strict=True)):
        low, high = np.argmin(losses), np.argmax(losses)
        if not losses[high] - losses[low] <= LOSS_TOLERANCE * abs(losses[low]):  # NaN as well
            return (
                f"the losses of step {step} differ by more than {LOSS_TOLERANCE:g}: "
                f"{measured[low].name} {losses[low]!r}, {measured[high].name} {losses[high]!r}"
            )
    return ""


# --- saying it ------------------------------------------------------------------------------------


def result_of(
    options: Options, run: RunConfig, machine: dict, measured: Sequence[Measured], matmul_s: list
) -> dict:
    """All of it as plain data, from which the table is made."""
    base = next(row for row in measured if row.name == BASELINE)
    result = {
        "benchmark": "pipeline",
        "machine": machine,
        "options": to_dict(options),
        "model": to_dict(run.model),
        "rows": [_row_of(row, base) for row in measured],
        "floor": None,
    }
    if matmul_s:
        gflops = 2e-9 * _MATMUL_SIZE**3 / min(matmul_s)
        gflop = measured[0].gflop
        result["floor"] = {
            "gflop": gflop,
            "matmul_gflops": gflops,
            "matmul_size": _MATMUL_SIZE,
            "matmul_s": matmul_s,
            "step_s": gflop / gflops,
        }
    return result


def _row_of(row: Measured, base: Measured) -> dict:
    values = {
        "name": row.name,
        "autodiff": row.pipeline.autodiff,
        "layout": to_dict(row.pipeline.layout),
        "ticks": row.ticks,
        "gflop": row.gflop,
        "compile_s": row.compile_s,
        "temp_mib": {str(m): mib for m, mib in row.temp_mib.items()},
        "losses": row.losses,
        "step_s": row.step_s,
    }
    if row.step_s:
        values["median_s"] = statistics.median(row.step_s)
        values["min_s"] = min(row.step_s)
        values["speed_up"] = speed_up(base.step_s, row.step_s)
    return values


def table_of(result: dict) -> Table:
    """A line a row; what was not measured has no column."""
    rows, timed = result["rows"], result["floor"] is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("\npipeline", no_wrap=True)
    for header in (
        "\nticks",
        *(f"temp MiB\nm={m}" for m in rows[0]["temp_mib"]),
        "compile\ns",
        *(("step s\nmedian", "step s\nmin", "\nspeed-up") if timed else ()),
        "\nGFLOP",
    ):
        table.add_column(header, justify="right")
    for row in rows:
        times = ()
        if timed:
            times = f"{row['median_s']:.3f}", f"{row['min_s']:.3f}", f"{row['speed_up']:.2f}x"
        table.add_row(
            row["name"],
            f"{row['ticks']}",
            *(f"{mib:.1f}" for mib in row["temp_mib"].values()),
            f"{row['compile_s']:.1f}",
            *times,
            f"{row['gflop']:.1f}",
        )
    return table


def title_of(result: dict) -> str:
    options = result["options"]
    return (
        f"{options['preset']}, {options['stages']} stages on virtual CPU devices, "
        f"m={options['microbatches']}, recompute={options['recompute']}: "
        f"{measured_on(result['machine'])}"
    )


def notes_of(result: dict) -> list[str]:
    """What a reader needs to judge the table."""
    notes = [
        "temp: temporary memory of one device's step, by XLA's analysis; not the state, the batch.",
        "A tick is an F and a B half of one chunk; with GPipe and autodiff only one of the two.",
    ]
    floor = result["floor"]
    if floor is None:
        return [*notes, "Nothing was run: neither times nor losses were compared."]
    least_s = result["rows"][0]["min_s"]
    return [
        *notes,
        "The devices share the cores. A half tick that is computed and thrown away costs time here; "
        "on devices of their own its stage would wait in that time. GFLOP says who computes it: "
        "at equal GFLOP, speed-up is the program's alone.",
        f"speed-up: over {BASELINE}, the median over rounds of the ratio within one.",
        f"Floor: {floor['step_s']:.3f} s, which is {floor['gflop']:.1f} GFLOP at "
        f"{floor['matmul_gflops']:.0f} GFLOP/s, the best of {len(floor['matmul_s'])} matmuls of "
        f"{floor['matmul_size']}^3 on all cores in this run. {result['rows'][0]['name']} takes "
        f"{least_s / floor['step_s']:.2f} times that, at its best.",
        f"The losses of all rows agree to {LOSS_TOLERANCE:g} in {len(result['rows'][0]['losses'])} "
        "steps from the same parameters.",
        *load_note(result["machine"]),
    ]


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_pipeline.py")
    check_path(options.json)
    run = preset(options.preset)
    rows = pipelines(options, run.layout.microbatch)
    this_machine = machine("jax", "jaxlib")
    use_virtual_devices(options.stages)
    if jax.default_backend() != "cpu":
        raise UserError(
            "bench_pipeline.py compares pipelines on virtual CPU devices, and JAX runs on "
            f"{jax.default_backend()}; set JAX_PLATFORMS=cpu"
        )
    parts = len(rows) * len(options.memory_microbatches)
    with Work(parts + (0 if options.memory_only else options.rounds + 1)) as work:
        measured, trainings = compile_all(rows, run, options, work)
        matmul_s = []
        if trainings:
            matmul = make_matmul(run.model.compute_dtype)
            matmul_s = time_rounds(measured, trainings, options.rounds, work, matmul)
    if wrong := disagreement(measured):
        print(f"bench_pipeline.py: {wrong}", file=sys.stderr)
        return 1
    result = result_of(options, run, this_machine, measured, matmul_s)
    print_table(title_of(result), table_of(result), notes_of(result))
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
