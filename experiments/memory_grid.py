"""The closed form of a device's memory against XLA's assignment, over a grid of configurations.

    python experiments/memory_grid.py

compiles each of them for GPUs that need not be present (`pip install 'mtx[aot]'`) and prints, in
one row each, the memory by `mtx.plan.memory.predict_memory`, XLA's arguments + outputs - alias +
temp, and the difference. Exits with 1 if a difference is above 10 %. Sizes are those of SC'21's
table 1 and of models between them; layouts, schedules, recomputation, types and batches vary.

Expected time: twenty minutes on two CPU cores, 20 to 50 s a row. `--only 1t` runs the rows with
that in their name, `--target h100` compiles for another GPU, `--parts` prints the parts of each
prediction, `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from mtx.cli import exit_status, parse
from mtx.compile.step import compile_plan
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.plan.compiled import Compiled
from mtx.plan.memory import Memory, predict_memory
from mtx.presets import preset

LARGEST_ERROR = 0.10
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predicted memory beside compiled memory."""

    target: str = "a100-80gb"  # a GPU: h100, b200, ...
    only: str = ""  # rows whose name contains this
    parts: Annotated[bool, tyro.conf.FlagCreatePairsOff] = (
        False  # of the prediction, below each row
    )
    json: str = ""  # a file for the numbers


def grid() -> dict[str, RunConfig]:
    """The configurations, by a name that says what is special about each."""
    rows = {name: preset(name) for name in ("gpt-1t", "gpt-530b", "gpt-310b", "gpt-145b")}
    rows |= {name: preset(name) for name in ("gpt-39b", "gpt-7.5b", "gpt-1.7b")}
    rows["gpt-1t, no SP"] = _vary(preset("gpt-1t"), sequence_parallel=False)
    rows["gpt-1t, selective"] = _vary(preset("gpt-1t"), recompute="selective")
    rows["gpt-175b, v=4"] = preset("gpt-175b")
    rows["76b, none, v=3"] = _vary(preset("gpt-76b"), recompute="none", microbatch=1)
    rows["76b, inputs, skip"] = _vary(
        preset("gpt-76b"), stash="inputs", recompute="none", idle="skip"
    )
    base = RunConfig(
        model=ModelConfig(layers=32, hidden=4096, heads=32, sequence=2048, vocab=51200),
        layout=Layout(data=4, pipe=4, tensor=2, idle="phases", recompute="full"),
        global_batch=128,
    )  # fmt: skip
    rows["7B, full"] = base
    rows["7B, selective"] = _vary(base, recompute="selective")
    rows["7B, none"] = _vary(base, recompute="none")
    rows["7B, none, no SP"] = _vary(base, recompute="none", sequence_parallel=False)
    rows["7B, inputs"] = _vary(base, stash="inputs", recompute="none")
    rows["7B, inputs, v=4"] = _vary(base, stash="inputs", recompute="selective", virtual=4)
    rows["7B, gpipe"] = _vary(base, schedule="gpipe")
    rows["7B, gpipe, v=2, inputs"] = _vary(
        base, schedule="gpipe", virtual=2, stash="inputs", recompute="none"
    )
    rows["7B, skip, v=2"] = _vary(base, idle="skip", virtual=2)
    rows["7B, v=8, one-layer chunks"] = _vary(base, virtual=8)
    rows["7B, zb_h1"] = _vary(base, schedule="zb_h1", recompute="selective")
    rows["7B, seq1f1b, 4 slices"] = _vary(base, schedule="seq1f1b", slices=4)
    rows["7B, zero 3, v=4"] = _vary(base, zero=3, virtual=4, schedule="breadth_first")
    rows["7B, b=4"] = _vary(base, microbatch=4)
    rows["7B, float32"] = _vary(base, {"compute_dtype": "float32"})
    rows["7B, float16, d=1"] = replace(
        _vary(base, {"compute_dtype": "float16"}, data=1), global_batch=32
    )
    rows["7B, t=1, p=8"] = _vary(base, tensor=1, pipe=8, recompute="selective")
    rows["7B, sequence 8192"] = _vary(base, {"sequence": 8192}, recompute="selective", tensor=4)
    rows["7B, untied, V=256000"] = _vary(base, {"tied": False, "vocab": 256000})
    rows["7B, 30 layers, balanced"] = _vary(base, {"layers": 30}, stage_layers="balanced")
    rows["7B, dropout"] = _vary(base, {"dropout": 0.1, "attention_dropout": 0.1}, recompute="none")
    rows["345M, no parallelism"] = replace(
        preset("gpt-2-345m"), layout=Layout(microbatch=4), global_batch=8
    )
    rows["1.3B, d=8"] = RunConfig(
        model=ModelConfig(layers=24, hidden=2048, heads=16, sequence=2048, vocab=50257),
        layout=Layout(data=8, microbatch=2, recompute="selective"),
        global_batch=64,
    )
    return rows | _other_families()


def _other_families() -> dict[str, RunConfig]:
    rows = {name: preset(name) for name in ("llama-2-7b", "llama-2-70b", "llama-3-8b")}
    rows |= {name: preset(name) for name in ("llama-3-70b", "llama-3-405b")}
    rows |= {name: preset(name) for name in ("bert-336m", "bert-3.9b")}
    llama = replace(
        preset("llama-3-8b"), layout=Layout(data=2, pipe=2, tensor=2, idle="phases"),
        global_batch=32,
    )  # fmt: skip
    rows["llama 8B"] = llama
    rows["llama 8B, selective"] = _vary(llama, recompute="selective")
    rows["llama 8B, t=16"] = _vary(llama, tensor=16)
    rows["llama 8B, zb_h1"] = _vary(llama, schedule="zb_h1", recompute="selective")
    bert = replace(
        preset("bert-1.3b"),
        layout=Layout(data=2, pipe=2, tensor=2, microbatch=8, idle="phases"), global_batch=128,
    )  # fmt: skip
    rows["bert, post"] = _vary(bert, {"norm_placement": "post"})
    rows["bert, post, selective"] = _vary(bert, {"norm_placement": "post"}, recompute="selective")
    rows["bert, no dropout"] = _vary(bert, {"dropout": 0.0, "attention_dropout": 0.0})
    for name in ("t5-base", "t5-3b", "mamba2-hybrid-8b", "bamba-9b", "llava-1.5-7b", "retro-425m"):
        run = preset(name)
        once = run.layout.replicas * run.layout.microbatch
        rows[f"{name}, m = 1"] = replace(run, global_batch=once)
        piped = replace(run.layout, data=2, pipe=2, virtual=2, stage_layers="balanced")
        rows[f"{name}, piped"] = replace(
            run, layout=piped, global_batch=8 * piped.replicas * piped.microbatch
        )
    return rows


def _vary(run: RunConfig, model: dict | None = None, **layout) -> RunConfig:
    return replace(
        run, model=replace(run.model, **model or {}), layout=replace(run.layout, **layout)
    )


def compare(run: RunConfig, target: str) -> tuple[Memory, Compiled]:
    """(prediction, compilation) of the program that always compiles: attention in blocks."""
    compiled = compile_plan(_vary(run, attention="blocked"), target=target)
    if compiled.backend == "cpu":
        raise UserError(f"{target} needs its own compiler here, not a stand-in: {compiled.hint}")
    return predict_memory(run.model, run.layout, run.global_batch, backend="xla"), compiled


def _row(name: str, run: RunConfig, memory: Memory, compiled: Compiled) -> str:
    layout = run.layout
    mesh = f"{layout.data}x{layout.pipe}x{layout.tensor}"
    error = memory.total_bytes / compiled.total_bytes - 1
    return (
        f"{name:<24s} {mesh:>10s} {layout.virtual:2d} {layout.microbatch:3d} {run.microbatches:5d} "
        f"{layout.schedule:>13s} {layout.recompute:>9s} {memory.total_bytes / _GIB:9.2f} "
        f"{compiled.total_bytes / _GIB:8.2f} {error:+7.1%}"
    )


_HEAD = (
    f"{'':24s} {'d x p x t':>10s} {'v':>2s} {'b':>3s} {'m':>5s} {'schedule':>13s} "
    f"{'recompute':>9s} {'predicted':>9s} {'compiled':>8s} {'error':>7s}"
)


def _parts(memory: Memory) -> str:
    values = {field.name: getattr(memory, field.name) / _GIB for field in fields(memory)}
    parts = [f"{name.removesuffix('_bytes')} {size:.2f}" for name, size in values.items() if size]
    return textwrap.fill(", ".join(parts), 100, initial_indent="    ", subsequent_indent="    ")


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="memory_grid.py")
    rows = {name: run for name, run in grid().items() if options.only in name}
    if not rows:
        raise UserError(f"no row's name contains {options.only!r}; there are {', '.join(grid())}")
    errors: dict[str, float] = {}
    numbers = []
    for name, run in rows.items():
        memory, compiled = compare(run, options.target)
        if not errors:
            print(f"{compiled.label}, jax {compiled.jax_version}; GiB of a device\n{_HEAD}")
        print(_row(name, run, memory, compiled), flush=True)
        if options.parts:
            print(_parts(memory), flush=True)
        errors[name] = memory.total_bytes / compiled.total_bytes - 1
        numbers.append(
            {
                "name": name,
                "predicted_bytes": memory.total_bytes,
                "compiled_bytes": compiled.total_bytes,
                "jax_version": compiled.jax_version,
                "target": options.target,
            }
        )
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"{len(errors)} rows; the largest difference is {errors[worst]:+.1%}, of {worst}")
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=1) + "\n")
    return int(abs(errors[worst]) > LARGEST_ERROR)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
