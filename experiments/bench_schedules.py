"""Every schedule on one model and the same devices: measured beside predicted.

    python experiments/bench_schedules.py

trains preset bench-s on four virtual CPU devices with every maker's table that fits it. All start
from the same parameters with the same batch; unless the losses of every step agree to 1e-5,
nothing is printed. Then a table:

step      seconds of a step, measured, and predicted from F, B with W, B, W, embedding with head, an
          idle tick and the optimizer, each timed alone on all devices at once, right before it
work      core-seconds of the process, measured over predicted: unlike a step's time, they are not
          affected by other programs and by waiting
MiB       temporary memory of one device's step by XLA's analysis, and predicted: the table's slots
          times their bytes, plus a constant: what remains of 1F1B's memory without its slots
off       the reason, if a ratio differs from 1 by more than a tenth

Expected time: a quarter of an hour on two cores, a third of it compiling.
Expected result: work and memory within a tenth of the prediction. The exceptions that we found:

cache     if sequences are sliced, XLA copies the keys and values of all microbatches in flight in
          every tick, and one extra copy of them is temporary memory. For terapipe v=2, the worst,
          the compiled program copies 17 MiB two to three times a tick on every device, for 69
          ticks. An op timed alone holds one microbatch, so its price includes no such copies.
cores     the work is as predicted and the time is not: cores were idle or ran other programs.
rounds    some rounds are within a tenth, others are not. A core-second is worth less while another
          program runs on the same core's other thread; keep the machine idle.
constant  memory: the slots hold little, and memory beside them differs from table to table.

If each device has a core, ticks are priced as our program runs them: all stages wait for the
longest F, whose output is sent, and for the longest B and W. `simulate` in lock-step lets one
stage's B overlap another's F of the same tick, so only tables with such ticks are priced otherwise.
With ops that only sleep, so that four devices do not need four cores, at p=4, m=8 and F=B=W, the
program took 1.01 to 1.04 times our price; over `simulate`'s price it took 1.12 for deferred_zb,
1.21 for v_half, 1.20 for v_min, 1.02 to 1.04 for 1f1b, zb_h1 and dualpipe_v.

    python experiments/bench_schedules.py --schedules 1f1b,zb_v,v_min --rounds 10 --json bench.json
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import bench
from bench_pipeline import Training
from rich.table import Table
from step_parts import (
    REFERENCE,
    Beside,
    Costs,
    Ops,
    Seconds,
    Sizes,
    compile_training,
    costs_of,
    timed,
    trainer_of,
)

from mtx.cli import exit_status, parse
from mtx.config import RunConfig, to_dict
from mtx.errors import UserError
from mtx.presets import preset
from mtx.schedules.makers import MAKERS, make, maker
from mtx.schedules.schedule import Schedule

TOLERANCE = 0.1  # a larger relative difference of measured from predicted needs a reason
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """Puts measured beside predicted, in time and memory, for every schedule on one model."""

    preset: str = "bench-s"  # its model, microbatch size and optimizer are used
    schedules: str = ""  # NAME,NAME,...; empty: all that fit the model
    stages: int = 4  # p, one virtual CPU device each
    microbatches: int = 8  # m
    rounds: int = 3  # each times every schedule in turn, right after its ops
    steps: int = 1  # of each schedule per round
    json: str = ""  # FILE for everything that was measured

    def __post_init__(self):
        for name, least in (("stages", 2), ("microbatches", 1), ("rounds", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One table, and the other names that make the same table."""

    name: str
    schedule: Schedule
    also: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[int, int]:
        """(chunks of a stage, slices of a sequence); an op's cost depends on nothing else."""
        return self.schedule.virtual, self.schedule.slices


def rows_of(options: Options, layers: int) -> list[Row]:
    """Every maker's tables with one and with two chunks a stage, each table once."""
    names = [name.strip() for name in options.schedules.split(",") if name.strip()]
    rows: dict[tuple, Row] = {}
    for name in names or MAKERS:
        known = maker(name)
        for virtual in (known.virtual,) if known.virtual else (1, 2):
            if layers % (options.stages * virtual):
                continue
            try:
                schedule = make(
                    name, microbatches=options.microbatches, stages=options.stages, virtual=virtual
                )
            except UserError:
                if names:
                    raise
                continue  # there is no such table of this shape
            label = name + (f" v={virtual}" if virtual > 1 else "")
            row = rows.setdefault(_table_key(schedule), Row(name=label, schedule=schedule))
            if row.name != label:
                rows[_table_key(schedule)] = replace(row, also=(*row.also, label))
    if not rows:
        raise UserError(
            f"layers={layers} cannot be divided over stages={options.stages} with the chunks that "
            f"{', '.join(names) or 'schedules'} ask for; use fewer stages or another preset"
        )
    return list(rows.values())


def _table_key(schedule: Schedule) -> tuple:
    tables = schedule.forward_ticks, schedule.backward_ticks, schedule.weight_ticks
    arrays = [table for table in (*tables, schedule.virtual_stages) if table is not None]
    return schedule.slices, *((array.shape, array.tobytes()) for array in arrays)


# --- predicting -----------------------------------------------------------------------------------


def step_on_own_cores(schedule: Schedule, costs: Costs) -> float:
    """Time of a step if each device has a core: in every tick, all wait for the longest F, whose
    output is sent, and then for the longest B and W."""
    forward, *others = (half.busy for half in schedule.halves)
    prices = (costs.backward, costs.weight) if schedule.split else (costs.both,)
    longest = sum(price * busy for price, busy in zip(prices, others, strict=True)).max(axis=1)
    ops = costs.forward * forward.any(axis=1).sum() + longest.sum()
    return float(ops) + _beside_ops(schedule, costs)


def step_on_shared_cores(schedule: Schedule, costs: Costs) -> float:
    """Time of a step if devices share fewer cores: the sum of all work, since an idle stage leaves
    its cores to the others. Costs are measured on all stages at once, so they are sums already."""
    backward = costs.backward + costs.weight if schedule.split else costs.both
    ops = schedule.items * schedule.virtual
    return ops * (costs.forward + backward) + _beside_ops(schedule, costs)


def _beside_ops(schedule: Schedule, costs: Costs) -> float:
    return schedule.items * costs.ends + schedule.ticks * costs.tick + costs.once


def slot_bytes(schedule: Schedule, sizes: Sizes) -> int:
    """Bytes of all slots of the table, including values in flight between two ticks."""
    total = schedule.slots * sizes.residuals
    total += (schedule.receive_slots + len(schedule.receives) + 1) * sizes.input
    if schedule.split:
        total += schedule.weight_stash.slots * sizes.deferred
    if schedule.cache:
        total += (schedule.cache.slots + schedule.gradient_cache.slots) * sizes.cache
    return total


# --- measuring ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Measured:
    """The measurements of a row; lists have an entry per round."""

    row: Row
    sizes: Sizes
    temp_bytes: int
    compile_s: float
    steps: list[Seconds] = field(default_factory=list)
    costs: list[tuple[Costs, Costs]] = field(default_factory=list)  # seconds and core-seconds
    losses: list[float] = field(default_factory=list)  # of all steps, the first round's too

    def advance(self, training: Training, costs: tuple[Costs, Costs], count: int) -> None:
        """Run a round of `count` steps; costs: of a step's parts at that time."""
        taken = []
        for _ in range(count):
            seconds, (_, loss) = timed(training.advance)
            taken.append(seconds)
            self.losses.append(loss)
        self.steps.append(Seconds(*map(statistics.mean, zip(*taken, strict=True))))
        self.costs.append(costs)

    def forget_first(self) -> None:
        """Drop the round in which everything ran for the first time."""
        del self.steps[0], self.costs[0]


def measure(rows: Sequence[Row], run: RunConfig, options: Options, machine: dict) -> dict:
    """Compile and time the rows; returns the result. LossesDiffer if their losses differ."""
    reference = make(REFERENCE, microbatches=options.microbatches, stages=options.stages)
    measured, trainings, ops = [], [], {}
    with bench.Work(len(rows) + options.rounds + 2) as work:
        for row in rows:
            work.begin(f"compiling {row.name}")
            training, compile_s = compile_training(row.schedule, run)
            if row.parts not in ops:
                ops[row.parts] = Ops(trainer_of(row.schedule, run))
            trainings.append(training)
            temp_bytes = training.step.memory_analysis().temp_size_in_bytes
            sizes = ops[row.parts].sizes
            measured.append(
                Measured(row=row, sizes=sizes, temp_bytes=temp_bytes, compile_s=compile_s)
            )
        work.begin("compiling what stands beside the ops")
        constant_bytes = _constant_bytes(reference, run, measured)
        beside = Beside(reference, run)
        for number in range(options.rounds + 1):
            work.begin(f"round {number} of {options.rounds}" if number else "first steps")
            other = beside.time()
            for one, training in zip(measured, trainings, strict=True):
                # Ops are timed right before the step they predict: other programs come and go.
                one.advance(training, costs_of(ops[one.row.parts].time(), other), options.steps)
    for one in measured:
        one.forget_first()
    names = [one.row.name for one in measured]
    for step, losses in enumerate(zip(*(one.losses for one in measured), strict=True)):
        if wrong := bench.differing(dict(zip(names, losses, strict=True))):
            raise bench.LossesDiffer(f"the losses of step {step} differ: {wrong}")
    return result_of(measured, constant_bytes, options=options, run=run, machine=machine)


def _constant_bytes(reference: Schedule, run: RunConfig, measured: Sequence[Measured]) -> int:
    """Temporary memory of the reference's step outside of its slots."""
    for one in measured:
        if _table_key(one.row.schedule) == _table_key(reference):
            return one.temp_bytes - slot_bytes(reference, one.sizes)
    trainer = trainer_of(reference, run)
    temp_bytes = trainer.compile_step().memory_analysis().temp_size_in_bytes
    return temp_bytes - slot_bytes(reference, Ops(trainer).sizes)


# --- printing -------------------------------------------------------------------------------------


def result_of(
    measured: Sequence[Measured], constant_bytes: int, *, options: Options, run: RunConfig,
    machine: dict,
) -> dict:  # fmt: skip
    """Everything measured and predicted, as plain data from which the table is made."""
    own_cores = machine["cores"] >= options.stages
    return {
        "benchmark": "schedules",
        "machine": machine | {"load_at_end": round(os.getloadavg()[0], 2)},
        "options": to_dict(options),
        "model": to_dict(run.model),
        "devices": "own cores" if own_cores else "shared cores",
        "costs": _costs_by_parts(measured),
        "constant_bytes": constant_bytes,
        "rows": [_row_of(one, constant_bytes, own_cores=own_cores) for one in measured],
    }


def _costs_by_parts(measured: Sequence[Measured]) -> list[dict]:
    """Median costs of the ops, for each number of chunks and slices."""
    found: dict[tuple[int, int], list] = {}
    for one in measured:
        found.setdefault(one.row.parts, []).extend(one.costs)
    return [
        {
            "virtual": virtual,
            "slices": slices,
            "seconds": _medians([wall for wall, _ in costs]),
            "core_seconds": _medians([work for _, work in costs]),
        }
        for (virtual, slices), costs in found.items()
    ]


def _medians(costs: Sequence[Costs]) -> dict[str, float]:
    return {
        part.name: statistics.median(getattr(each, part.name) for each in costs)
        for part in fields(Costs)
    }


def _row_of(one: Measured, constant_bytes: int, *, own_cores: bool) -> dict:
    schedule = one.row.schedule
    step_s, work_s = [each.wall for each in one.steps], [each.work for each in one.steps]
    own_cores_s = [step_on_own_cores(schedule, wall) for wall, _ in one.costs]
    shared_cores_s = [step_on_shared_cores(schedule, wall) for wall, _ in one.costs]
    predicted_work_s = [step_on_shared_cores(schedule, work) for _, work in one.costs]
    predicted_s = own_cores_s if own_cores else shared_cores_s
    predicted_bytes = constant_bytes + slot_bytes(schedule, one.sizes)
    values = {
        "name": one.row.name,
        "same_table": list(one.row.also),
        "virtual": schedule.virtual,
        "slices": schedule.slices,
        "split": schedule.split,
        "ticks": schedule.ticks,
        "slots": schedule.slots,
        "weight_slots": schedule.weight_stash.slots if schedule.split else 0,
        "receive_slots": schedule.receive_slots,
        "compile_s": one.compile_s,
        "losses": one.losses,
        "step_s": step_s,
        "work_s": work_s,
        "own_cores_s": own_cores_s,
        "shared_cores_s": shared_cores_s,
        "predicted_work_s": predicted_work_s,
        "median_s": statistics.median(step_s),
        "predicted_s": statistics.median(predicted_s),
        "time_ratio": _ratio(step_s, predicted_s),
        "work_ratio": _ratio(work_s, predicted_work_s),
        "temp_bytes": one.temp_bytes,
        "slot_bytes": asdict(one.sizes),
        "predicted_bytes": predicted_bytes,
        "memory_ratio": one.temp_bytes / predicted_bytes,
    }
    return values | {"reasons": reasons(values)}


def _ratio(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Median ratio over rounds: a slow machine slows both values of a round alike."""
    return statistics.median(m / p for m, p in zip(measured, predicted, strict=True))


REASONS = {
    "cache": "XLA copies the keys and values of slices in every tick, which no op alone shows",
    "cores": "the work is as predicted; cores stood idle or ran other programs",
    "rounds": "some rounds are within a tenth, others not: let the machine be idle",
    "constant": "memory beside the slots differs from that of the other tables",
    "unknown": "none of the reasons that we know",
}


def reasons(row: dict) -> list[str]:
    """Reasons why measured and predicted differ by more than TOLERANCE, judging by the row itself;
    empty if they do not."""
    found = []
    copies = row["slices"] > 1
    if _off(row["work_ratio"]):
        rounds = zip(row["work_s"], row["predicted_work_s"], strict=True)
        disagree = not all(_off(measured / predicted) for measured, predicted in rounds)
        more = copies and row["work_ratio"] > 1
        found.append("cache" if more else "rounds" if disagree else "unknown")
    elif _off(row["time_ratio"]):
        found.append("cores")
    if _off(row["memory_ratio"]):
        found.append("cache" if copies and row["memory_ratio"] > 1 else "constant")
    return list(dict.fromkeys(found))


def _off(ratio: float) -> bool:
    return abs(ratio - 1) > TOLERANCE


_LABELS = {
    "forward": "F",
    "both": "B with W",
    "backward": "B",
    "weight": "W",
    "ends": "embedding and head",
    "tick": "an idle tick",
    "once": "once a step",
}


def table_of(result: dict) -> Table:
    """One line per table; ratios are measured over predicted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("\nschedule", no_wrap=True)
    for header in (
        "\nticks", "step s\nmeasured", "\npredicted", "\nratio", "work\nratio", "MiB\nmeasured",
        "\npredicted", "\nratio",
    ):  # fmt: skip
        table.add_column(header, justify="right", overflow="fold")
    table.add_column("\noff", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['ticks']}",
            f"{row['median_s']:.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['time_ratio']:.2f}",
            f"{row['work_ratio']:.2f}",
            f"{row['temp_bytes'] / _MIB:.1f}",
            f"{row['predicted_bytes'] / _MIB:.1f}",
            f"{row['memory_ratio']:.2f}",
            " ".join(row["reasons"]),
        )
    return table


def title_of(result: dict) -> str:
    options, machine = result["options"], result["machine"]
    return (
        f"{options['preset']}, p={options['stages']} virtual CPU devices, "
        f"m={options['microbatches']}: {bench.measured_on(machine)}"
    )


def notes_of(result: dict) -> list[str]:
    """What a reader needs to judge the table."""
    machine, stages = result["machine"], result["options"]["stages"]
    if result["devices"] == "own cores":
        how = "have a core each: in every tick, all wait for the longest stage"
    else:
        how = "share them: all work, whoever does it, and nothing for a stage that waits"
    notes = [
        f"Predicted for {stages} devices on {machine['cores']} cores, which {how}. Ratios are "
        "measured over predicted, the median of the rounds.",
        *(
            f"Of one item and chunk, v={cost['virtual']} slices={cost['slices']}, ms on all "
            "devices at once: " + ", ".join(
                f"{_LABELS[name]} {1e3 * seconds:.4g}" for name, seconds in cost["seconds"].items()
            )
            for cost in result["costs"]
        ),
        f"Memory beside the slots, from the table of {REFERENCE}: "
        f"{result['constant_bytes'] / _MIB:.1f} MiB.",
    ]  # fmt: skip
    for row in result["rows"]:
        if row["same_table"]:
            notes.append(f"{row['name']} is also the table of {', '.join(row['same_table'])}.")
    used = dict.fromkeys(reason for row in result["rows"] for reason in row["reasons"])
    notes += [f"{reason}: {REASONS[reason]}" for reason in used]
    return [*notes, *bench.load_notes(machine)]


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_schedules.py")
    run = preset(options.preset)
    rows = rows_of(options, run.model.layers)

    def show(result: dict) -> None:
        bench.print_table(title_of(result), table_of(result), notes_of(result))

    return bench.on_virtual_devices(
        options.stages,
        lambda machine: measure(rows, run, options, machine),
        show,
        path=options.json,
    )


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
