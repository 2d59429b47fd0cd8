"""The real training step, compiled on a laptop for a cluster that is not there.

`compile_plan` traces `mtx.step.step` for abstract arrays that lie on the target's mesh and hands
it to XLA's compiler for that target (`mtx.compile.compiler`): nothing is allocated and no device is
needed. XLA compiles one SPMD program, so 3,072 devices cost what eight do.

It runs in a process of its own (`python -m mtx.compile.step`, JSON in and out), since JAX decides
at its start which devices there are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.compile.buffers import largest_buffers, names_of_arrays
from mtx.compile.compiler import Compiler, find_compiler
from mtx.compile.hlo import Program, TripCounts, read_program
from mtx.compile.hlo_text import Instruction
from mtx.compile.machine import Machine
from mtx.compile.overlap import timeline
from mtx.compile.target import GPU_TARGETS
from mtx.config import RunConfig, from_dict, to_dict
from mtx.errors import UserError
from mtx.plan.attention import kernel_of
from mtx.plan.compiled import Compiled, Spent, Traffic
from mtx.plan.flops import hardware_matmul_flops
from mtx.plan.hardware import hardware
from mtx.plan.held import parameters_per_device
from mtx.sharding.experts import LATER_ROUNDS

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mtx.schedules.schedule import Phase
from mtx.step.trainer import Trainer

__all__ = ["Compiled", "compile_plan"]

_NO_TRITON = "--xla_gpu_enable_triton_gemm=false"


def compile_plan(
    run: RunConfig, *, target: str, program: str | Path | None = None
) -> Compiled:  # fmt: skip
    """The step of `run`, compiled for `target`, a name in `mtx.plan.hardware`.

    program: a file in which to keep the text of the compiled program. The attention is that of a
    run, as far as it can be compiled here; the result says which. weave="auto" is compiled plain,
    as a plan prices it. UserError if no compiler can serve, and if the compiler fails, with the
    line that says why.
    """
    if run.layout.weave == "auto":
        run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, weave="off"))
    layout = run.layout
    hardware(target).check(run.model)
    kernel = kernel_of(run.model, hardware(target).backend, layout.slices)
    if kernel == "cudnn" and layout.attention == "blocked":
        kernel = "blocked"
    compiler = find_compiler(target, layout.devices, kernel=kernel)
    try:
        return _in_own_process(run, target, compiler, program)
    except _TritonFailed:
        without = dataclasses.replace(
            compiler,
            flags=(*compiler.flags, _NO_TRITON),
            label=compiler.label + ", matmuls by cuBLAS (XLA's Triton finds no tiles for some)",
        )
        return _in_own_process(run, target, without, program)


# -- the process -----------------------------------------------------------------------------------


class _TritonFailed(Exception):
    """XLA's Triton found no tiles for a matmul."""


def _in_own_process(
    run: RunConfig, target: str, compiler: Compiler, program: str | Path | None
) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="mtx-compile-") as dump:
        flags = (*compiler.flags, f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(flags),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # it sees what this process does
            "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask the cloud which host this is
            "PYTHONWARNINGS": "ignore",
        }
        request = {
            "run": to_dict(run), "target": target, "dump": dump,
            "compiler": dataclasses.asdict(compiler), "program": program and str(program),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "mtx.compile.step"],
            input=json.dumps(request), capture_output=True, text=True, env=environment,
        )  # fmt: skip
    if done.returncode == 0:
        return Compiled.from_dict(json.loads(done.stdout.splitlines()[-1]))
    if compiler.backend == "gpu" and "tile sizes" in done.stderr and _NO_TRITON not in flags:
        raise _TritonFailed
    raise UserError(f"compiling for {target}: {_reason(done.returncode, done.stderr)}")


def _reason(code: int, stderr: str) -> str:
    """The line that says why a compiler failed, from all that it wrote."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception): ", line)]
    if errors:
        kind, _, message = errors[-1].partition(": ")
        return message if kind.endswith("UserError") else f"{kind.rpartition('.')[2]}: {message}"
    if code < 0:
        name = signal.Signals(-code).name
        memory = ", most likely for want of memory" if name == "SIGKILL" else ""
        fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
        return f"the compiler was ended by {name}{memory}" + (f": {fatal[-1]}" if fatal else "")
    return lines[-1] if lines else f"the compiler ended with status {code}"


def main() -> None:
    """Reads a request from stdin and writes what was compiled to stdout, both as JSON."""
    request = json.load(sys.stdin)
    run, compiler = from_dict(RunConfig, request["run"]), Compiler(**request["compiler"])
    compiled = _compile(run, request["target"], compiler, Path(request["dump"]), request["program"])
    print(json.dumps(compiled.to_dict()))


# -- inside the process ----------------------------------------------------------------------------


def _compile(
    run: RunConfig, target: str, compiler: Compiler, dump: Path, kept: str | None
) -> Compiled:
    import jax

    from mtx.step.trainer import Trainer

    start = time.perf_counter()
    layout, model = dataclasses.replace(run.layout, attention=compiler.attention), run.model
    if compiler.backend == "cpu":
        model = dataclasses.replace(model, compute_dtype="float32")
    compiled_run = dataclasses.replace(run, layout=layout, model=model)
    if compiler.attention == "cudnn":
        _answer_for(target)
    mesh = mesh_of(compiled_run, target, compiler)
    trainer = Trainer(compiled_run, mesh=mesh)
    executable = trainer.compile_step(mesh)
    elapsed = time.perf_counter() - start

    stats, text = executable.memory_analysis(), executable.as_text()
    assert stats is not None and text is not None  # the compilers for CPU, GPU and TPU have both
    if kept:
        Path(kept).write_text(text)
    program, temp = read_program(text), stats.temp_size_in_bytes
    busy, trips = busy_shares(trainer), trip_counts(trainer)
    flops = program.matmul_flops(busy, trip_counts=trips)
    formula = hardware_matmul_flops(
        trainer.run.model, trainer.run.layout, run.global_batch,
        backend="cuda" if compiler.attention == "cudnn" else "xla",
    )  # fmt: skip
    times = None
    if compiler.backend == "gpu":
        machine = Machine.of(hardware(target), mesh_shape=trainer.run.layout.sizes)
        branch = busy_shares(trainer, of_slowest=True)
        times = timeline(program, machine, branch, trip_counts=trips)
        mean = timeline(program, machine, busy, trip_counts=trips)
        times = dataclasses.replace(times, spent=of_mean_stage(trainer, mean.spent))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Compiled(
        target=target,
        devices=run.layout.devices,
        backend=compiler.backend,
        label=compiler.label,
        hint=compiler.hint,
        jax_version=jax.__version__,
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=_halve_temp(temp, run) if compiler.backend == "cpu" else temp,
        host_bytes=stats.host_temp_size_in_bytes,
        largest=_largest(dump, program, trainer),
        collectives=collect_traffic(program, trainer.run.layout.sizes, busy, trips),
        timeline=times,
        matmul_flops=flops * run.layout.devices,
        formula_flops=formula,
        compile_s=elapsed,
        compiler_peak_bytes=peak * (1 if sys.platform == "darwin" else 1024),
    )


def _answer_for(target: str) -> None:
    """Let the target answer when JAX's functions for cuDNN's attention ask a GPU of this machine
    for its compute capability; in this process only."""
    from jax._src.cudnn import fused_attention_stablehlo

    def check(capability: str) -> bool:
        return GPU_TARGETS[target].capability >= int(capability.partition(".")[0])

    fused_attention_stablehlo.check_compute_capability = check


def mesh_of(run: RunConfig, target: str, compiler: Compiler) -> Mesh:
    """The mesh of the run's layout, over devices that need not be there."""
    import jax
    from jax.experimental import topologies

    from mtx.sharding.mesh import make_mesh

    if compiler.backend == "cpu":
        return make_mesh(run.layout, jax.devices())
    if compiler.backend == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=compiler.topology)
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=GPU_TARGETS[target].text(),
            topology=compiler.topology,
        )
    return make_mesh(run.layout, topology.devices)


def _halve_temp(temp: int, run: RunConfig) -> int:
    """Temporary bytes in the run's own type, from those in float32: gradients stay float32, and on
    one replica the parameters become a copy of the masters; all else is half as large."""
    if run.model.compute_dtype == "float32":
        return temp
    held = parameters_per_device(run.model, run.layout)
    gradients = min(temp, 4 * held)
    copy = 2 * held if run.layout.token_shards == 1 else 0
    return gradients + (temp - gradients) // 2 + copy


_TAKEN_OR_NOT = re.compile(
    r"/(F|(?:B/)?(?:all_gather|reduce_scatter)|B|W|embed|head|ends|embed_backward|empty)/cond$"
)


def busy_shares(
    trainer: Trainer, *, of_slowest: bool = False
) -> Callable[[Instruction], Sequence[float]]:
    """A function from a conditional of the step to the share of its executions per branch.

    The step's conditionals are the ops that a stage sits out, or has no layers for, and, with
    zero=3, the begins and ends of runs of one chunk's ops. Shares are those of the mean stage, or
    `of_slowest`, in each tick, of the stage that has most to do, for which the others wait.
    """
    schedule, phases = trainer.schedule, trainer.pipeline.phases

    def share_of(taken, kind: str) -> float:
        return _share(taken, phases, kind, of_slowest=of_slowest)

    forward, backward, weight = schedule.forward, schedule.backward, schedule.weight
    woven = trainer.run.layout.weave == "on"
    shares = {
        "F": share_of(forward.busy, "forward"),
        "B": share_of(backward.busy, "backward"),
        "embed": share_of(schedule.embed >= 0, "forward"),
        "head": share_of(schedule.head >= 0, "backward"),
        "embed_backward": share_of(schedule.embed_backward >= 0, "backward"),
        **dict.fromkeys(("all_gather", "F/all_gather"), share_of(forward.runs[0], "forward")),
        "B/all_gather": share_of(backward.runs[0], "backward"),
        "B/reduce_scatter": share_of(backward.runs[1], "backward"),
        "empty": _without_layers(trainer),
    }
    if woven:  # a woven tick looks two ticks ahead, and one back
        shares["embed"] = share_of(schedule.enters(2) >= 0, "any")
        shares["embed_backward"] = share_of(schedule.left(1) >= 0, "any")
        shares["ends"] = share_of(schedule.head >= 0, "some")
        shares["head"] = 1.0  # asked only if there is one
        shares["W"] = shares["B"]  # of a tick's last layer
    if weight is not None:
        shares |= {
            "W": share_of(weight.busy, "weight"),
            "reduce_scatter": share_of(weight.runs[1], "weight"),
        }

    def branches(conditional: Instruction) -> Sequence[float]:
        count, where = len(conditional.branches), _TAKEN_OR_NOT.search(conditional.op_name)
        if where and count == 2:
            taken = shares[where[1]]
            true_first = "true_computation=" in conditional.attributes
            return (taken, 1 - taken) if true_first else (1 - taken, taken)
        if conditional.op_name.endswith("/woven/cond") and trainer.placement.periods is None:
            return () if of_slowest else _of_stages(trainer, count)
        if conditional.op_name.endswith(("/chunk/cond", "/woven/cond")) or count == schedule.slices:
            return (1 / count,) * count  # of chunks, or of attention's slices: equally often
        if count == len(trainer.placement.kinds):
            layers = [trainer.placement.pattern.count(kind) for kind in trainer.placement.kinds]
            return tuple(number / sum(layers) for number in layers)
        raise UserError(
            f"the conditional {conditional.op_name!r} is none of those that the step is known to "
            f"have ({', '.join(shares)}): how often it is taken is not known"
        )

    return branches


def _share(taken, phases: Sequence[Phase], kind: str, *, of_slowest: bool) -> float:
    """The share of ticks that take a branch, among those that ask whether to. taken: bool [T] or
    [T, P]; kind: of the phases that ask, or "any" for those in which any tick takes it, or "some"
    for those in which some ticks do, but not all."""
    taken = taken.reshape(len(taken), -1)
    ticks = {phase: taken[phase.start : phase.stop] for phase in phases}
    asked = [
        own for phase, own in ticks.items()
        if getattr(phase, kind, own.any() and not (kind == "some" and own.all()))
    ]  # fmt: skip
    taken = np.concatenate([taken[:0], *asked])
    return float((taken.any(axis=1) if of_slowest else taken).mean()) if len(taken) else 0.0


def _without_layers(trainer: Trainer) -> float:
    """The share of all B whose chunk has no layers."""
    schedule = trainer.schedule
    layers = trainer.placement.count[np.arange(schedule.stages), schedule.backward.chunk]
    return float((layers == 0)[schedule.backward.busy].mean())


def _of_stages(trainer: Trainer, count: int) -> Sequence[float]:
    """The shares of the branches of woven ticks if stages differ in their layers' kinds or numbers:
    with one chunk by how many stages have those layers, else equally often."""
    chunks = Counter(kinds[0] for kinds in trainer.placement.chunk_kinds)
    if trainer.run.layout.virtual > 1 or len(chunks) != count:
        return (1 / count,) * count
    return tuple(number / chunks.total() for number in chunks.values())


def of_mean_stage(trainer: Trainer, spent: tuple[Spent, ...]) -> tuple[Spent, ...]:
    """The part of its ticks' seconds that the mean stage spends on its own microbatches: with
    idle="phases" some ticks have none. (Else conditionals skip those, by `busy_shares`.)"""
    if trainer.run.layout.idle != "phases":
        return spent
    schedule = trainer.schedule
    asked = (half.busy[half.busy.any(axis=1)] for half in schedule.halves)
    forward, backward, *weight = (float(busy.mean()) for busy in asked)
    shares = {"F": forward, "B": backward, "W": weight[0] if weight else backward}
    shares |= {"woven": backward, "send_x": forward, "send_dx": backward}
    return tuple(
        dataclasses.replace(one, seconds=one.seconds * shares.get(one.part, 1.0)) for one in spent
    )


def trip_counts(trainer: Trainer) -> TripCounts:
    """Trips of loops that do not say theirs: over a chunk's layers, if chunks differ, their mean;
    for what waits for an expert that is too full none, as if experts were evenly loaded."""
    layers = float(trainer.placement.count.mean())
    return lambda loop: 0.0 if LATER_ROUNDS in loop.op_name else layers


def collect_traffic(
    program: Program, sizes: dict[str, int], branch, trip_counts: TripCounts
) -> tuple[Traffic, ...]:
    """A program's collectives by kind, mesh axes and type, most bytes first.

    sizes: of the mesh's axes, in its order; branch, trip_counts: as in `Program.collectives`.
    """
    rows: dict[tuple, Traffic] = {}
    for collective in program.collectives(branch, trip_counts=trip_counts):
        axes = collective.axes(sizes)
        if not axes or not collective.count:
            continue  # of one device, or never taken
        key = collective.kind, axes, collective.dtype, collective.group
        row = rows.get(key) or Traffic(
            kind=collective.kind, axes=axes, group=collective.group, dtype=collective.dtype,
            count=0.0, bytes=0.0,
        )  # fmt: skip
        rows[key] = dataclasses.replace(
            row,
            count=row.count + collective.count,
            bytes=row.bytes + collective.count * collective.sent_bytes,
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))


def _largest(dump: Path, program: Program, trainer: Trainer):
    texts = [*dump.glob("*after_optimizations-buffer-assignment.txt")]
    if not texts:
        return ()  # libtpu dumps none
    text = max(texts, key=lambda path: path.stat().st_size).read_text()
    return largest_buffers(text, program, names_of_arrays(trainer))


if __name__ == "__main__":
    main()
