"""mtx on one NVIDIA GPU: rates, layers and steps, measured beside the planner's estimates.

    python experiments/bench_gpu.py

measures on the first GPU of this machine; without one it says so and exits with status 0. Parts:

parity    loss and gradients of small models on the GPU, plain and woven, against the CPU's
rates     matmuls of GPT's layers, attention, memory: measured, and as the planner estimates them
layers    steps of a few layers, sharded as on one device of a tensor-parallel group, plain and
          woven: measured, estimated by the compiled program's timeline, and compiled without a GPU
steps     GPT-2 345M and GPT 1.3B with AdamW, plain and woven
torch     the same models and batches in PyTorch, with torch.compile
pipeline  the cost of the scan over a table, beside a plain loop that adds up gradients
options   steps with another value of one of the XLA options that mtx sets

Expected time: twelve minutes on an H100, two thirds of it compilation.

    python experiments/bench_gpu.py --parts rates layers --json gpu.json --keep programs
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import bench
import numpy as np
from rich.table import Table

from mtx.cli import exit_status, parse
from mtx.config import Layout, RunConfig
from mtx.families import ModelConfig
from mtx.families.gpt import GPT
from mtx.plan.calibration import calibration_of
from mtx.plan.flops import model_flops
from mtx.plan.gemm import matmul_s
from mtx.plan.hardware import Hardware, find_hardware, hardware

Part = Literal["parity", "rates", "layers", "steps", "torch", "pipeline", "options"]
PARTS: tuple[Part, ...] = typing.get_args(Part)
_TORCH = Path(__file__).resolve().parent / "peers" / "torch_gpu.py"
_GIB = 2**30
_STEPS = 5  # timed, after two untimed ones
_CALLS = 20  # of one function in a row, timed together


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures mtx on one NVIDIA GPU."""

    parts: tuple[Part, ...] = PARTS
    json: str = ""  # a file for the result
    keep: str = ""  # a folder for the compiled programs and a trace of one step of each
    tiny: bool = False  # sizes that a CPU can run, to try this program itself
    limit_s: int = 300  # for one part, which is then stopped


@dataclass(frozen=True, kw_only=True)
class Shard(GPT):
    """One device's shard of a GPT that is split over `shards` devices of `tensor`, as a model:
    heads and ffn are the device's, hidden is the whole model's."""

    shards: int = 1

    @property
    def head_size(self) -> int:
        """K, as in the whole model, which has `shards` times as many heads."""
        return self.hidden // (self.heads * self.shards)


def shard(hidden: int, heads: int, shards: int, *, layers: int, **rest) -> Shard:
    """A `Shard` of a few layers."""
    return Shard(
        layers=layers, hidden=hidden, heads=heads // shards, ffn=4 * hidden // shards,
        shards=shards, **{"sequence": 2048, "vocab": 8192} | rest,
    )  # fmt: skip


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: a row of a table."""

    name: str
    run: RunConfig


def layer_cases(tiny: bool) -> list[Case]:
    """175B, 7.5B and 1.7B of SC'21, table 1, on the same numbers of devices over `tensor`."""
    if tiny:
        shards = [("tiny / 2", shard(64, 4, 2, layers=2, sequence=64, vocab=256), 1)]
    else:
        shards = [
            ("175B / 8", shard(12288, 96, 8, layers=4), 1),
            ("7.5B / 4", shard(4096, 32, 4, layers=8), 2),
            ("1.7B / 1", shard(2304, 24, 1, layers=8), 8),
        ]
    ways = {"plain": {"weave": "off"}, "woven": {"weave": "on", "idle": "phases"}}
    return [
        Case(
            name=f"{name}, {way}",
            run=RunConfig(
                model=model, layout=Layout(microbatch=rows, **fields), global_batch=8 * rows
            ),
        )
        for name, model, rows in shards
        for way, fields in ways.items()
    ]


def step_cases(tiny: bool) -> list[Case]:
    """GPT-2 345M (Shoeybi et al. 2019) and 1.3B, four microbatches a step."""
    sizes = [("345M", 24, 1024, 16, 1024, 16), ("1.3B", 24, 2048, 16, 2048, 4)]
    if tiny:
        sizes = [("tiny", 2, 64, 4, 64, 2)]
    ways = {"": {"weave": "off"}, ", woven": {"weave": "on", "idle": "phases"}}
    return [
        Case(
            name=name + way,
            run=RunConfig(
                model=GPT(
                    layers=layers, hidden=hidden, heads=heads, sequence=sequence,
                    vocab=256 if tiny else 50257,
                ),
                layout=Layout(microbatch=rows, **fields), global_batch=4 * rows,
            ),
        )
        for name, layers, hidden, heads, sequence, rows in sizes
        for way, fields in ways.items()
    ]  # fmt: skip


def _changed(case: Case, name: str, **fields) -> Case:
    return Case(name=name, run=replace(case.run, layout=replace(case.run.layout, **fields)))


# -- measuring -------------------------------------------------------------------------------------


def measure_step(
    case: Case, *, card: Hardware, keep: str, pipeline: Callable | None = None, aot: bool = False
) -> dict:
    """Compile and time a step; returns a row with its times, its program's timeline and its memory.

    pipeline: makes a replacement of the trainer's; aot: also compile it without the GPU.
    """
    import jax

    from mtx.compile.hlo import read_program
    from mtx.compile.machine import Machine
    from mtx.compile.overlap import timeline
    from mtx.compile.step import busy_shares, trip_counts
    from mtx.step.trainer import Trainer

    trainer = Trainer(case.run)
    if pipeline:
        trainer.pipeline = pipeline(model=trainer.model)
    start = time.perf_counter()
    step = trainer.compile_step()
    row: dict[str, Any] = {"name": case.name, "compile_s": time.perf_counter() - start}
    text, memory = step.as_text(), step.memory_analysis()
    row["temp_gib"] = memory.temp_size_in_bytes / _GIB
    row["whole_gib"] = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / _GIB
    if aot:
        row["aot_temp_gib"] = _compile_without(case.run, card) / _GIB
    if not pipeline:
        machine = Machine.of(card, mesh_shape=trainer.run.layout.sizes)
        shares, trips = busy_shares(trainer), trip_counts(trainer)
        line = timeline(read_program(text), machine, shares, trip_counts=trips)
        row |= {"timeline_s": line.step_s, "timeline": _kinds(line.spent)}
    state, batch = trainer.init(), trainer.place(_batch(case.run))
    times, losses = [], []
    for _ in range(_STEPS + 2):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(jax.block_until_ready((state, metrics))[1].loss))
        times.append(time.perf_counter() - start)
    row |= {"step_s": statistics.median(times[2:]), "all_s": times[2:], "losses": losses}
    flops = model_flops(case.run.model, case.run.global_batch)
    row["mfu"] = flops / row["step_s"] / card.peak_flops(case.run.model.compute_dtype)
    row["tokens_s"] = case.run.global_batch * case.run.model.sequence / row["step_s"]
    stats = jax.devices()[0].memory_stats() or {}
    row["peak_gib"] = stats.get("peak_bytes_in_use", 0) / _GIB  # over all rows so far
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, metrics = jax.block_until_ready(step(state, batch))
        found = list(Path(folder).rglob("*.trace.json.gz"))
        row["kernels"] = kernel_seconds(found[0]) if found else {}
        if keep:
            stem = "".join(c if c.isalnum() else "_" for c in case.name)
            with gzip.open(Path(keep) / f"{stem}.hlo.gz", "wt") as file:
                file.write(text)
            for each in found[:1]:
                shutil.copy(each, Path(keep) / f"{stem}.trace.json.gz")
    del state, metrics, batch, step
    return row


def _compile_without(run: RunConfig, card: Hardware) -> int:
    """Bytes of temporaries of the same step, compiled for the card without using it."""
    from mtx.compile.compiler import Compiler
    from mtx.compile.step import mesh_of
    from mtx.step.trainer import Trainer

    compiler = Compiler(backend="gpu", label="", attention="cudnn", topology="1x1x1")
    mesh = mesh_of(run, card.name, compiler)
    run = replace(run, layout=replace(run.layout, attention="cudnn"))
    compiled = Trainer(run, mesh=mesh).compile_step(mesh)
    return compiled.memory_analysis().temp_size_in_bytes


def _kinds(spent) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for one in spent:
        seconds[one.what] = seconds.get(one.what, 0.0) + one.seconds
    return seconds


def kernel_seconds(trace: Path) -> dict[str, float]:
    """Seconds of a traced step's kernels by kind: matmul, attention, copy, other."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"]["name"]
    }
    lanes = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in event["args"]["name"]
    }
    return _by_kind(
        (event["name"], event["dur"] * 1e-6)
        for event in events
        if event.get("ph") == "X" and (where := (event.get("pid"), event.get("tid"))) in lanes
        and where[0] in devices
    )  # fmt: skip


def _by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by `kind_of_kernel`, of kernels given as (name, seconds)."""
    seconds: dict[str, float] = {}
    for name, taken in kernels:
        kind = kind_of_kernel(name)
        seconds[kind] = seconds.get(kind, 0.0) + taken
    return seconds


def kind_of_kernel(name: str) -> str:
    """What a GPU kernel does, judging by its name."""
    name = name.lower()
    if any(part in name for part in ("sdpa", "fmha", "flash")):
        return "attention"
    if any(part in name for part in ("nvjet", "gemm", "cutlass", "xmma", "splitk")):
        return "matmul"
    return "copy" if name.startswith(("memcpy", "memset")) else "other"


def _batch(run: RunConfig) -> dict[str, np.ndarray]:
    """Random tokens, the same every time; every position counts."""
    shape = run.global_batch, run.model.sequence
    ids = np.random.default_rng(0).integers(0, run.model.vocab, shape, np.int32)
    targets = np.roll(ids, -1, axis=1)
    return {"tokens": ids, "targets": targets, "weights": np.ones(shape, np.float32)}


# -- parts -----------------------------------------------------------------------------------------


def measure_parity(options: Options, card: Hardware) -> Iterator[dict]:
    """Loss and gradients of miniature models in bfloat16, relative to the CPU's in float32."""
    import jax

    from mtx.api import init_params
    from mtx.presets import preset
    from mtx.step.trainer import Trainer

    woven = {"weave": "on", "idle": "phases"}
    names = ["gpt-1.7b", "llama-3-8b", "mixtral-8x7b", "mamba2-2.7b", "gpt-oss-20b", "deepseek-v3"]
    for name in names[:1] if options.tiny else names:
        small = _small(preset(name).model)
        batch = _batch(RunConfig(model=small, layout=Layout(), global_batch=4))
        params = init_params(small, seed=0)
        found = {}
        ways = {"cpu": {}, "plain": {}, "woven": woven}
        for way, fields in ways.items():
            dtype = "float32" if way == "cpu" else "bfloat16"
            model = replace(small, compute_dtype=dtype)
            layout = Layout(microbatch=2, **fields)
            run = RunConfig(model=model, layout=layout, global_batch=4)
            devices = jax.devices("cpu" if way == "cpu" else None)[:1]
            trainer = Trainer(run, mesh=_one(layout, devices))
            try:
                loss, gradients = trainer.loss_and_gradients(trainer.state_from(params), batch)
            except Exception as error:  # the table's row shows the error of a family that fails
                found[way] = f"{type(error).__name__}: {str(error)[:160]}"
                continue
            leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(gradients)]
            found[way] = float(loss), leaves
        yield {"name": name} | {way: _off(found[way], found["cpu"]) for way in list(ways)[1:]}


def _one(layout: Layout, devices):
    from mtx.sharding.mesh import make_mesh

    return make_mesh(layout, devices)


def _off(found, reference) -> Any:
    """(relative difference of the loss, norm of the gradients' difference over their norm)"""
    if isinstance(found, str) or isinstance(reference, str):
        return found if isinstance(found, str) else reference
    (loss, gradients), (base, exact) = found, reference
    apart = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(gradients, exact, strict=True)))
    norm = np.sqrt(sum((b**2).sum() for b in exact))
    return abs(loss - base) / base, float(apart / norm)


def _small(model: ModelConfig) -> ModelConfig:
    """A small version of the model, in sizes that the GPU's kernels accept."""
    from mtx.certify.small import small_model

    sizes = {"hidden": 256, "sequence": 64, "head_dim": 32, "ffn": 128, "expert_ffn": 64,
             "window": 24, "latent": 32, "query_latent": 32, "plain_size": 16, "turned_size": 16,
             "value_dim": 16, "ssm_head_dim": 16, "ssm_state": 16, "ssm_chunk": 16}  # fmt: skip
    given = {name: size for name, size in sizes.items() if getattr(model, name, None)}
    return small_model(model, **given)


def measure_rates(options: Options, card: Hardware) -> Iterator[dict]:
    """Rates of a layer's matmuls, of attention and of a copy."""
    import jax
    import jax.numpy as jnp

    calibration = replace(calibration_of(card, "mtx"), kernel_s=0.0)
    key = jax.random.key(0)

    def row(name: str, f: Callable, shapes, *, flops=0.0, moved=0.0, predicted=0.0) -> dict:
        dtype = jnp.bfloat16
        arguments = [jax.random.normal(key, shape, dtype) for shape in shapes]
        run = jax.jit(f).lower(*arguments).compile()
        jax.block_until_ready([run(*arguments) for _ in range(2)])
        rounds = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready([run(*arguments) for _ in range(_CALLS)][-1])
            rounds.append((time.perf_counter() - start) / _CALLS)
        taken = statistics.median(rounds)
        return {
            "name": name, "seconds": taken, "predicted_s": predicted,
            "tflops": flops / taken / 1e12, "gb_s": moved / taken / 1e9,
        }  # fmt: skip

    def product(name, m, n, k, *, float32=False):
        out = jnp.float32 if float32 else jnp.bfloat16
        sizes = ((k, m), (k, n)) if float32 else ((m, k), (k, n))
        dims = ((0,), (0,)) if float32 else ((1,), (0,))

        def f(a, b):
            return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=out)

        seconds = matmul_s(
            m, n, k, hardware=card, calibration=calibration, dtype="bfloat16"
        )  # fmt: skip
        return row(name, f, sizes, flops=2.0 * m * n * k, predicted=seconds)

    scale = 16 if options.tiny else 1
    yield product("8192 cubed", *(3 * [8192 // scale]))
    sizes = [("175B / 8", 12288, 8, 2048), ("39B / 8", 8192, 8, 8192), ("7.5B / 4", 4096, 4, 4096),
             ("1.7B / 1", 2304, 1, 16384)]  # fmt: skip
    for name, hidden, shards, positions in sizes[:1] if options.tiny else sizes:
        d, m = hidden // scale, positions // scale
        for what, n, k in (
            ("qkv", 3 * d // shards, d), ("out", d, d // shards),
            ("up", 4 * d // shards, d), ("down", d, 4 * d // shards),
        ):  # fmt: skip
            yield product(f"{name} {what}", m, n, k)
            yield product(f"{name} {what}, dw in float32", k, n, m, float32=True)
    elements = 2**30 // scale**3
    rate = card.memory_gb_s * 1e9 * calibration.memory_share
    moved = 4.0 * elements
    yield row("copy", lambda a: a + 1, ((elements,),), moved=moved, predicted=moved / rate)
    for rows, sequence, heads, size in [(1, 2048, 12, 128), (2, 2048, 8, 128), (8, 2048, 24, 96),
                                        (1, 8192, 16, 128)]:  # fmt: skip
        yield from _attention(row, rows, sequence // scale, heads, size, card, options.tiny)


def _attention(row, rows, sequence, heads, size, card, tiny) -> Iterator[dict]:
    import jax

    way = "xla" if tiny else "cudnn"

    def forward(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=way)

    def both(q, k, v, dy):
        y, vjp = jax.vjp(forward, q, k, v)
        return y, *vjp(dy)

    shape = rows, sequence, heads, size
    flops = 2.0 * rows * heads * sequence * sequence * size  # halved, being causal
    share = calibration_of(card, "mtx").attention_share * card.peak_flops("bfloat16")
    name = f"attention {rows} x {sequence}, {heads} x {size}"
    yield row(name, forward, [shape] * 3, flops=flops, predicted=flops / share)
    yield row(f"{name}, F and B", both, [shape] * 4, flops=3.5 * flops,
              predicted=3.5 * flops / share)  # fmt: skip


def measure_layers(options: Options, card: Hardware) -> Iterator[dict]:
    for index, case in enumerate(layer_cases(options.tiny)):
        aot = not options.tiny and index < 1
        yield measure_step(case, card=card, keep=options.keep, aot=aot)


def measure_steps(options: Options, card: Hardware) -> Iterator[dict]:
    for case in step_cases(options.tiny):
        yield measure_step(case, card=card, keep=options.keep)


def measure_torch(options: Options, card: Hardware) -> Iterator[dict]:
    for case in step_cases(options.tiny)[::2]:
        model, layout = case.run.model, case.run.layout
        sizes = (
            model.layers, model.hidden, model.heads, model.sequence, layout.microbatch,
            case.run.global_batch,
        )  # fmt: skip
        command = [sys.executable, str(_TORCH), *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["?"])[-1]
            yield {"name": case.name, "failed": last}
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        flops = model_flops(model, case.run.global_batch)
        row["mfu"] = flops / row["step_s"] / card.peak_flops(model.compute_dtype)
        row["tokens_s"] = case.run.global_batch * model.sequence / row["step_s"]
        row["kernels"] = _by_kind(row["by_name"].items())
        yield row | {"name": f"{case.name}, torch.compile"}


def measure_pipeline(options: Options, card: Hardware) -> Iterator[dict]:
    base = step_cases(options.tiny)[0]
    rows = max(1, base.run.layout.microbatch // 2)
    run = replace(base.run, layout=replace(base.run.layout, microbatch=rows), global_batch=8 * rows)
    plain = Case(name="1f1b, skip", run=run)
    yield measure_step(
        Case(name="a plain loop", run=run), card=card, keep=options.keep, pipeline=PlainLoop
    )
    yield measure_step(plain, card=card, keep=options.keep)
    yield measure_step(_changed(plain, "1f1b, phases", idle="phases"), card=card, keep="")
    yield measure_step(_changed(plain, "interleaved, v = 2", virtual=2), card=card, keep="")
    woven = _changed(plain, "woven, v = 2", virtual=2, weave="on", idle="phases")
    yield measure_step(woven, card=card, keep="")


@dataclass(frozen=True, kw_only=True)
class PlainLoop:
    """Replaces a pipeline by a loop over microbatches that adds up autodiff's gradients, for one
    stage with one chunk of layers of one kind."""

    model: Any
    chunk_shards = None  # the step gathers all parameters, and scatters all gradients

    def gradients(self, params, batch, samples_MB, key, loss_weight):
        """(sums of losses by name, gradients), as `Pipeline.gradients`."""
        import jax
        import jax.numpy as jnp

        def one(kept, microbatch):
            rows, samples_B = microbatch

            def scaled(params):
                loss = self._loss(params, rows, samples_B, key)
                return loss * loss_weight, loss

            gradients, loss = jax.grad(scaled, has_aux=True)(params)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), kept, (loss, gradients)), ()

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params)
        (loss, gradients), _ = jax.lax.scan(one, (jnp.float32(0), zeros), (batch, samples_MB))
        return {"loss": loss}, gradients

    def _loss(self, params, batch, samples_B, key):
        import jax
        import jax.numpy as jnp

        def context(layer):
            return self.model.context(layer, batch, samples_B, key, 0)

        def layer(stream, weights_and_n):
            weights, n = weights_and_n
            weights = jax.tree.map(_in_its_type, weights)  # per layer, or the loop has float32
            return {"x": self.model.layer("block", weights, stream, context(n))["x"]}, None

        def shared():
            ends = {part: params[part] for part in ("embed", "head")}
            return jax.tree.map(_in_its_type, ends)

        layers = jax.tree.map(lambda a: a[0], params["layers"]["block"])
        count = len(jax.tree.leaves(layers)[0])
        stream = {"x": self.model.embed(shared(), batch, context(-1))["x"]}
        stream, _ = jax.lax.scan(layer, stream, (layers, jnp.arange(count)))
        return self.model.loss(shared(), stream, batch)


def _in_its_type(weight):
    """The weight itself, with its gradient cast to its type, as autodiff's loops require: matmuls
    here give float32."""
    import jax

    dtype = weight.dtype
    same = jax.custom_vjp(lambda a: a)
    same.defvjp(lambda a: (a, None), lambda _, d: (d.astype(dtype),))
    return same(weight)


def measure_options(options: Options, card: Hardware) -> Iterator[dict]:
    case = layer_cases(options.tiny)[1]
    yield measure_step(case, card=card, keep="")
    for name, value in (
        ("xla_gpu_enable_dynamic_slice_fusion", False), ("xla_gpu_enable_triton_gemm", True),
    ):  # fmt: skip
        with _option(name, value):
            other = Case(name=f"{case.name}, {name.removeprefix('xla_gpu_')} {value}", run=case.run)
            yield measure_step(other, card=card, keep="")


@contextmanager
def _option(name: str, value) -> Iterator[None]:
    """Compile steps in this context with another value of one of XLA's options."""
    from mtx.step import xla

    before = xla.GPU
    xla.GPU = tuple(
        replace(option, value=value) if option.name == name else option for option in before
    )
    try:
        yield
    finally:
        xla.GPU = before


MEASURES: dict[Part, Callable[[Options, Hardware], Iterator[dict]]] = {
    "parity": measure_parity, "rates": measure_rates, "layers": measure_layers,
    "steps": measure_steps, "torch": measure_torch, "pipeline": measure_pipeline,
    "options": measure_options,
}  # fmt: skip

# -- printing --------------------------------------------------------------------------------------


def table_of(part: Part, rows: Sequence[dict]) -> Table:
    """A table of one part's rows."""
    table = Table(box=None, pad_edge=False)
    table.add_column(part)
    names = {
        "parity": ("plain: loss, gradients off", "woven: loss, gradients off"),
        "rates": ("ms", "TFLOP/s", "GB/s", "planner ms", "off"),
    }.get(part, ("step ms", "MFU", "tokens/s", "timeline", "off", "temp GiB", "AOT", "compile s"))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        cells = _CELLS.get(part, _step_cells)(row) if "failed" not in row else [row["failed"][:60]]
        table.add_row(row["name"], *cells)
    return table


def _parity_cells(row: dict) -> list[str]:
    return [
        row[way] if isinstance(row[way], str) else "{:.1e}, {:.1e}".format(*row[way])
        for way in ("plain", "woven")
    ]


def _rate_cells(row: dict) -> list[str]:
    return [
        f"{row['seconds'] * 1e3:.3f}", f"{row['tflops']:.0f}" if row["tflops"] else "",
        f"{row['gb_s']:.0f}" if row["gb_s"] else "", f"{row['predicted_s'] * 1e3:.3f}",
        _percent(row["predicted_s"], row["seconds"]),
    ]  # fmt: skip


def _step_cells(row: dict) -> list[str]:
    def ms(name: str) -> str:
        return f"{row[name] * 1e3:.1f}" if name in row else ""

    def gib(name: str) -> str:
        return f"{row[name]:.2f}" if name in row else ""

    off = _percent(row["timeline_s"], row["step_s"]) if "timeline_s" in row else ""
    return [
        ms("step_s"), f"{row['mfu']:.1%}", f"{row['tokens_s']:,.0f}", ms("timeline_s"), off,
        gib("temp_gib"), gib("aot_temp_gib"), gib("compile_s"),
    ]  # fmt: skip


_CELLS: dict[str, Callable[[dict], list[str]]] = {"parity": _parity_cells, "rates": _rate_cells}


def _percent(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"


def notes_of(part: Part, rows: Sequence[dict]) -> list[str]:
    """Where the time of each step went, by its trace and by the timeline."""

    def said(kind: str, seconds: dict[str, float]) -> str:
        parts = (f"{what} {s * 1e3:.1f} ms" for what, s in sorted(seconds.items()))
        return f"{kind} {', '.join(parts)}"

    return [
        f"{row['name']}: "
        + "; ".join(said(kind, row[kind]) for kind in ("kernels", "timeline") if row.get(kind))
        for row in rows
        if row.get("kernels")
    ]


def measure(part: Part, options: Options) -> list[dict]:
    """Measure one part in this process and print each row; a failure is printed as a row too."""
    import jax

    kind = jax.devices()[0].device_kind
    card, rows = find_hardware(kind) or hardware("h100"), []
    try:
        for row in MEASURES[part](options, card):
            rows.append(row)
            print(json.dumps(row), flush=True)
    except Exception as error:  # the other parts are still worth measuring
        message = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if os.environ.get("MTX_TRACEBACK"):
            raise
        print(json.dumps({"name": "", "failed": message}), flush=True)
    return rows


def in_own_process(part: Part, options: Options) -> list[dict]:
    """Rows of one part, from a separate process, so that the card's memory is free afterwards."""
    arguments = [sys.executable, __file__, "--parts", part, "--keep", options.keep]
    arguments += ["--tiny"] if options.tiny else []
    environment = os.environ | {_INNER: "1"}
    with tempfile.TemporaryFile("w+") as out:
        try:
            subprocess.run(
                arguments, stdout=out, env=environment, timeout=options.limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{part}: ended after {options.limit_s} s", file=sys.stderr)
        out.seek(0)
        return [json.loads(line) for line in out if line.startswith("{")]


_INNER = "MTX_BENCH_GPU_PART"


def devices_of_gpu() -> str:
    """JAX's name of the first GPU here; "" if there is none. A separate process looks it up."""
    code = "import jax; print(jax.devices('gpu')[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else ""


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_gpu.py")
    if os.environ.get(_INNER):
        measure(options.parts[0], options)
        return 0
    bench.check_path(options.json)
    kind = "CPU" if options.tiny else devices_of_gpu()
    if not kind:
        print("bench_gpu.py: JAX finds no GPU here; nothing is measured", file=sys.stderr)
        return 0
    if options.keep:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
    machine = bench.describe_machine("jax", "jaxlib", "torch") | {"device": kind}
    result: dict[str, Any] = {"machine": machine}
    with bench.Work(len(options.parts)) as work:
        for part in options.parts:
            work.begin(part)
            result[part] = in_own_process(part, options)
            bench.write_json(options.json, result)
            stamp = f"{part}, measured on 1x {kind}, jax {machine['jax']}"
            bench.print_table(stamp, table_of(part, result[part]), notes_of(part, result[part]))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
