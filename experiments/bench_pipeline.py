"""Our pipelines against the ones that other JAX trainers run: same model, same process.

    python experiments/bench_pipeline.py

trains preset bench-s (8.5 million parameters, float32) on four virtual CPU devices in several ways:
our 1F1B and interleaved 1F1B, GPipe by the same program, GPipe and the circular order by autodiff
through the forward scan, and one device without a pipeline, which adds up the gradients of the
microbatches. All start from the same parameters with the same batch; unless the losses of every
step agree to 1e-5, nothing is printed. Then a table:

MiB       temporary memory of one device's step by XLA's analysis, at m, 4m and 16m
          microbatches (compiled, not run)
step      seconds of a step; all rows take a step in turn, so that drift affects them alike
speed-up  over GPipe by autodiff, at equal recomputation
GFLOP     matmuls that all devices execute in a step, including idle halves if those compute

Expected time: six minutes on two idle cores, half of it compiling; with --quick two.
Expected result: the memory of our 1F1B does not grow with m; autodiff's does. Ours are faster, by
the idle ticks that autodiff computes and throws away, and by more if they skip idle ticks.

    python experiments/bench_pipeline.py --recompute full --steps 10 --json bench.json
    python experiments/bench_pipeline.py --memory-only --stages 2 --virtual 4
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import bench
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from peers.autodiff import AutodiffPipeline
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.config import Layout, ModelConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.plan.flops import hardware_matmul_flops
from mtx.presets import preset
from mtx.step.trainer import Trainer

BASELINE = "GPipe by autodiff"
_MATMUL_SIZE = 2048
_MIB = 2**20
_Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compares memory and time of our pipelines and of autodiff's, on one model."""

    preset: str = "bench-s"  # its model, microbatch size and optimizer are used
    stages: int = 4  # p, one virtual CPU device each
    virtual: int = 2  # v of the interleaved and circular rows; 1 leaves these rows out
    microbatches: int = 8  # m
    steps: int = 5  # timed rounds
    recompute: Literal["none", "full"] = "none"  # within a block, in all rows
    json: str = ""  # FILE for everything that was measured
    memory_only: _Switch = False  # compile and compare memory, run nothing
    quick: _Switch = False  # two rounds at most, and memory at m alone

    def __post_init__(self):
        for name in ("stages", "virtual", "microbatches", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def rounds(self) -> int:
        return min(self.steps, 2) if self.quick else self.steps

    @property
    def memory_microbatches(self) -> tuple[int, ...]:
        """Values of m at which memory is compared."""
        return tuple(self.microbatches * times for times in ((1,) if self.quick else (1, 4, 16)))


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A way to run the model: a row of the table."""

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
        """Ticks of a step; autodiff runs all ticks up to the last F, and then as many backward."""
        if self.autodiff:
            return 2 * (int(trainer.schedule.forward_ticks.max()) + 1)
        return trainer.schedule.ticks

    def matmul_flops(self, model: ModelConfig, microbatches: int) -> float:
        """FLOPs of one step's matmuls on all devices. Autodiff computes F in every forward tick and
        B in every backward tick, as our program does with GPipe's table in phases."""
        layout = self.layout
        if self.autodiff:
            layout = replace(layout, schedule="gpipe", idle="phases")
        batch = microbatches * layout.microbatch
        return hardware_matmul_flops(model, layout, batch, backend="xla")


def pipelines(options: Options, microbatch: int) -> list[Pipelined]:
    """The rows of the table, in order. The floor is that of the first."""
    v = options.virtual
    one = Layout(pipe=options.stages, microbatch=microbatch, recompute=options.recompute)
    many = replace(one, virtual=v)
    rows = [
        Pipelined(name="1F1B, skip", layout=one),
        Pipelined(name="1F1B, phases", layout=replace(one, idle="phases")),
        Pipelined(name=f"interleaved v={v}, skip", layout=many),
        Pipelined(name=f"interleaved v={v}, phases", layout=replace(many, idle="phases")),
        Pipelined(name="GPipe table, skip", layout=replace(one, schedule="gpipe")),
        Pipelined(name=BASELINE, layout=one, autodiff=True),
        Pipelined(name=f"circular v={v} by autodiff", layout=many, autodiff=True),
        Pipelined(name="one device, no pipeline", layout=replace(one, pipe=1)),
    ]
    return [row for row in rows if v > 1 or "v=1" not in row.name]


# --- measuring ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Measured:
    """The measurements of a row; times and losses are those of m microbatches."""

    pipeline: Pipelined
    ticks: int
    gflop: float
    compile_s: float  # tracing included
    temp_mib: dict[int, float]  # by microbatches
    step_s: list[float] = field(default_factory=list)  # without the first step
    losses: list[float] = field(default_factory=list)  # of all steps


@dataclass(kw_only=True)
class Training:
    """A step, its state and its batch."""

    step: Callable
    state: Any
    batch: Any

    def advance(self) -> tuple[float, float]:
        """(seconds, loss) of the next step."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start, float(metrics.loss)


def random_batch(model: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """Random tokens, the same every time; every position counts."""
    ids = np.random.default_rng(0).integers(0, model.vocab, (rows, model.sequence + 1), np.int32)
    weights = np.ones((rows, model.sequence), np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def compile_row(
    row: Pipelined, run: RunConfig, options: Options, work: bench.Work
) -> tuple[Measured, Callable, Trainer]:
    """Compile the row for every number of microbatches; returns the step and trainer of m."""
    steps, trainers, temp_mib, seconds = {}, {}, {}, {}
    for microbatches in options.memory_microbatches:
        work.begin(f"compiling {row.name}, m={microbatches}")
        trainers[microbatches] = row.trainer(run, microbatches)
        start = time.perf_counter()
        steps[microbatches] = trainers[microbatches].compile_step()
        seconds[microbatches] = time.perf_counter() - start
        analysis = steps[microbatches].memory_analysis()
        temp_mib[microbatches] = analysis.temp_size_in_bytes / _MIB
    m = options.microbatches
    measured = Measured(
        pipeline=row,
        ticks=row.ticks(trainers[m]),
        gflop=row.matmul_flops(run.model, m) / 1e9,
        compile_s=seconds[m],
        temp_mib=temp_mib,
    )
    return measured, steps[m], trainers[m]


def time_rounds(
    rows: Sequence[Measured], trainings: Sequence[Training], model: ModelConfig, rounds: int,
    work: bench.Work,
) -> list[float]:  # fmt: skip
    """Time a step of every row in turn, `rounds` times after a first round that does not count.
    Returns the seconds of the large matmul that ends each round."""
    matmul_s = []
    for number in range(rounds + 1):
        work.begin(f"round {number} of {rounds}" if number else "first steps")
        for row, training in zip(rows, trainings, strict=True):
            seconds, loss = training.advance()
            row.step_s.append(seconds)
            row.losses.append(loss)
        matmul_s.append(_time_matmul(model.compute_dtype))
    for row in rows:
        del row.step_s[0]
    return matmul_s[1:]


def _time_matmul(dtype: str) -> float:
    """Seconds of a product of square matrices on one virtual device, which uses all cores."""
    a = jnp.ones((_MATMUL_SIZE, _MATMUL_SIZE), dtype).block_until_ready()
    start = time.perf_counter()
    jnp.matmul(a, a).block_until_ready()
    return time.perf_counter() - start


def disagreement(rows: Sequence[Measured]) -> str:
    """A description of the first step whose losses differ between rows; "" if there is none."""
    for step, losses in enumerate(zip(*(row.losses for row in rows), strict=True)):
        names = [row.pipeline.name for row in rows]
        if found := bench.differing(dict(zip(names, losses, strict=True))):
            return f"the losses of step {step} differ: {found}"
    return ""


# --- printing -------------------------------------------------------------------------------------


def result_of(
    rows: Sequence[Measured], matmul_s: list[float], *, options: Options, model: ModelConfig,
    machine: dict,
) -> dict:  # fmt: skip
    """All measurements, as plain data from which the table is made."""
    base = next(row for row in rows if row.pipeline.name == BASELINE)
    floor = None
    if matmul_s:
        rate = 2e-9 * _MATMUL_SIZE**3 / min(matmul_s)
        floor = {
            "gflop": rows[0].gflop,
            "gflop_per_s": rate,
            "step_s": rows[0].gflop / rate,
            "matmul_size": _MATMUL_SIZE,
            "matmul_s": matmul_s,
        }
    return {
        "benchmark": "pipeline",
        "machine": machine,
        "options": to_dict(options),
        "model": to_dict(model),
        "rows": [_row_of(row, base) for row in rows],
        "floor": floor,
    }


def _row_of(row: Measured, base: Measured) -> dict:
    values = {
        "name": row.pipeline.name,
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
        values["speed_up"] = bench.speed_up(base.step_s, row.step_s)
    return values


def table_of(result: dict) -> Table:
    """One line per row; values that were not measured have no column."""
    rows, timed = result["rows"], result["floor"] is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("\npipeline", no_wrap=True)
    for header in (
        "\nticks",
        *(f"{'' if n else 'MiB at'}\nm={m}" for n, m in enumerate(rows[0]["temp_mib"])),
        "compile\ns",
        *(("step s\nmedian", "\nleast", "\nspeed-up") if timed else ()),
        "\nGFLOP",
    ):
        table.add_column(header, justify="right", overflow="fold")
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
    options, machine = result["options"], result["machine"]
    return (
        f"{options['preset']}, p={options['stages']} virtual CPU devices, "
        f"m={options['microbatches']}, recompute={options['recompute']}: "
        f"{bench.measured_on(machine)}"
    )


def notes_of(result: dict) -> list[str]:
    """What a reader needs to judge the table."""
    floor, first = result["floor"], result["rows"][0]
    notes = [
        "MiB: temporary memory of one device's step by XLA's analysis; neither state nor batch.",
        "A tick is an F and a B half of one chunk; in GPipe and autodiff only one of the two.",
    ]
    if floor is None:
        return [*notes, "Compiled only: no times, and the losses were not compared."]
    return [
        *notes,
        f"speed-up: over {BASELINE}, the median over rounds of the ratio within a round.",
        "The devices share the cores, so an idle half that is computed and thrown away costs time, "
        "which it would not on devices of their own. GFLOP shows who does; between rows of equal "
        "GFLOP the speed-up owes nothing to it.",
        f"Floor: {floor['step_s']:.3f} s, the {floor['gflop']:.1f} GFLOP of {first['name']!r} at "
        f"{floor['gflop_per_s']:.0f} GFLOP/s, the best of {len(floor['matmul_s'])} matmuls of "
        f"{floor['matmul_size']}^3 on all cores, one a round. Its least time is "
        f"{first['min_s'] / floor['step_s']:.2f} of that.",
        f"Losses of all rows agree to {bench.LOSS_TOLERANCE:g} in each of the first "
        f"{len(first['losses'])} steps.",
        *bench.load_notes(result["machine"]),
    ]


def measure(rows: Sequence[Pipelined], run: RunConfig, options: Options, machine: dict) -> dict:
    """Compile and time the rows; returns the result. LossesDiffer if their losses differ."""
    batch = random_batch(run.model, options.microbatches * rows[0].layout.microbatch)
    measured, trainings, matmul_s = [], [], []
    parts = len(rows) * len(options.memory_microbatches)
    with bench.Work(parts + (0 if options.memory_only else options.rounds + 1)) as work:
        for row in rows:
            found, step, trainer = compile_row(row, run, options, work)
            measured.append(found)
            if not options.memory_only:
                state = trainer.init()
                trainings.append(Training(step=step, state=state, batch=trainer.place(batch)))
        if trainings:
            matmul_s = time_rounds(measured, trainings, run.model, options.rounds, work)
    if wrong := disagreement(measured):
        raise bench.LossesDiffer(wrong)
    return result_of(measured, matmul_s, options=options, model=run.model, machine=machine)


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_pipeline.py")
    run = preset(options.preset)
    timed = pipelines(options, run.layout.microbatch)

    def show(result: dict) -> None:
        bench.print_table(title_of(result), table_of(result), notes_of(result))

    return bench.on_virtual_devices(
        options.stages,
        lambda machine: measure(timed, run, options, machine),
        show,
        path=options.json,
    )


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
