"""The first page of a plan: what a run needs and what it does, each number with where it is from.

given      the run's own config
computed   arithmetic on it, or counted in the schedule's table
predicted  a model of our program's memory, which compiling it confirms or not
published  SC'21's table 1, where the run is one of its rows
"""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from mtx.config import RunConfig
from mtx.pipeline.makers import make
from mtx.plan import flops
from mtx.plan.hardware import Hardware, hardware
from mtx.plan.memory import predict_memory
from mtx.plan.published import (
    Throughput,
    bubble,
    published_throughput,
    published_training_time,
)

Source = Literal["given", "computed", "predicted", "published", "computed from published"]

# JAX takes this part of a GPU's memory unless told otherwise, and cannot use all of it if told so.
_MEMORY_BY_DEFAULT, _MEMORY_AT_MOST = 0.75, 0.9
_GIB, _MIB = 2**30, 2**20
_DAY_S = 86400


class Row(NamedTuple):
    """One fact of the page."""

    section: str
    name: str
    value: str
    source: Source


def plan_rows(run: RunConfig, *, target: str = "a100-80gb") -> list[Row]:
    """The facts of the page, in order. `target`: a name in `mtx.plan.hardware`."""
    device, row = hardware(target), published_throughput(run)
    return [
        *_model(run, row),
        *_layout(run, device),
        *_memory(run, device),
        *_pipeline(run),
        *_work(run, device),
        *(_published(run, row) if row else []),
    ]


def plan_table(run: RunConfig, *, target: str = "a100-80gb") -> Table:
    """The page as a table for the terminal."""
    table = Table(title=f"{_title(run)} on {run.layout.devices:,} x {target}")
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("", no_wrap=True, style="dim")
    section = None
    for row in plan_rows(run, target=target):
        if row.section != section:
            if section is not None:
                table.add_section()
            section = row.section
            table.add_row(f"[bold]{section}[/bold]")
        table.add_row(f"  {row.name}", row.value, row.source)
    table.show_header = False
    return table


def plan_lines(run: RunConfig, *, target: str = "a100-80gb", width: int = 100) -> list[str]:
    """The page as plain lines of at most `width` characters."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(plan_table(run, target=target))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _title(run: RunConfig) -> str:
    return f"GPT, {_short(flops.parameters(run.model))} parameters,"


def _model(run: RunConfig, row: Throughput | None) -> list[Row]:
    model = run.model
    shape = f"{model.layers} layers of {model.hidden:,}, {model.heads} heads"
    rows = [
        Row("Model", "layers of hidden, heads", shape, "given"),
        Row("Model", "sequence, vocabulary", f"{model.sequence:,}, {model.vocab:,}", "given"),
        Row("Model", "parameters, exactly", f"{flops.parameters(model):,}", "computed"),
    ]
    if model.ffn_multiple == 4 and model.tied:
        formula = f"{flops.sc21_parameters(model):,.0f}"
        rows.append(Row("Model", "by the paper's equation (2)", formula, "computed"))
    if row:
        billions = f"{row.parameters_billion:,.1f} billion"
        rows.append(Row("Model", "in the paper's table 1", billions, "published"))
    return rows


def _layout(run: RunConfig, device: Hardware) -> list[Row]:
    layout = run.layout
    mesh = f"{layout.data} x {layout.pipe} x {layout.tensor} = {layout.devices:,} devices"
    nodes = -(-layout.devices // device.node_devices)
    inside = layout.tensor <= device.node_devices and device.node_devices % layout.tensor == 0
    where = "inside a node" if inside else f"across nodes of {device.node_devices}"
    step = f"{run.global_batch:,} sequences, {run.global_batch * run.model.sequence:,} tokens"
    batches = f"m = {run.microbatches} a replica, of b = {layout.microbatch}"
    kept = f"recompute={layout.recompute}, stash={layout.stash}"
    return [
        Row("Layout", "data x pipe x tensor", mesh, "given"),
        Row("Layout", "nodes", f"{nodes:,}; tensor groups {where}", "computed"),
        Row("Layout", "schedule", f"{layout.schedule}, virtual v = {layout.virtual}", "given"),
        Row("Layout", "step", step, "given"),
        Row("Layout", "microbatches", batches, "computed"),
        Row("Layout", "computes in", run.model.compute_dtype, "given"),
        Row("Layout", "activations", kept, "given"),
    ]


_MEMORY_NAMES = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients, float32",
    "optimizer_bytes": "masters and moments, over data",
    "stash_bytes": "stash between F and B",
    "transfer_bytes": "sends and receives",
    "activations_bytes": "activations of one layer's B",
    "logits_bytes": "logits",
}


def _memory(run: RunConfig, device: Hardware) -> list[Row]:
    memory = predict_memory(run.model, run.layout, run.global_batch, backend=device.backend)
    rows = [
        Row("Memory of a device", _MEMORY_NAMES[field.name], _size(value), "predicted")
        for field in fields(memory)
        if (value := getattr(memory, field.name))
    ]
    share = memory.total_bytes / device.memory_bytes
    total = f"{_size(memory.total_bytes)} of {device.memory_gib:g} GiB: {_fit(share)}"
    return [*rows, Row("Memory of a device", "in all", total, "predicted")]


def _fit(share: float) -> str:
    if share > _MEMORY_AT_MOST:
        return f"does not fit ({share:.0%}; at most {_MEMORY_AT_MOST:.0%} can be had)"
    if share > _MEMORY_BY_DEFAULT:
        return f"fits ({share:.0%}) with XLA_PYTHON_CLIENT_MEM_FRACTION={_MEMORY_AT_MOST}"
    return f"fits ({share:.0%})"


def _pipeline(run: RunConfig) -> list[Row]:
    layout, microbatches = run.layout, run.microbatches
    schedule = make(
        layout.schedule, microbatches=microbatches, stages=layout.pipe, virtual=layout.virtual
    )
    idle = f"{bubble(layout, microbatches):.1%} of ideal time, (p-1)/(vm)"
    in_flight = f"{schedule.in_flight[0]} on stage 0, {schedule.in_flight[-1]} on the last"
    return [
        Row("Pipeline", "bubble", idle, "computed"),
        Row("Pipeline", "ticks of one F and one B", f"{schedule.ticks:,}", "computed"),
        Row("Pipeline", "waiting between F and B", in_flight, "computed"),
    ]


def _work(run: RunConfig, device: Hardware) -> list[Row]:
    model, batch = run.model, run.global_batch
    executed = flops.hardware_matmul_flops(model, run.layout, batch, backend=device.backend)
    rows = [
        ("paper's convention", flops.sc21_flops(model, batch)),
        ("model FLOPs (today's MFU)", flops.model_flops(model, batch)),
        ("matmuls our program runs", executed),
    ]
    return [Row("FLOPs of a step", name, f"{value:.4e}", "computed") for name, value in rows]


def _published(run: RunConfig, row: Throughput) -> list[Row]:
    """The row of table 1 and what follows from it, on the paper's A100s whatever the target is."""
    section, devices = "SC'21, on A100-80GB", run.layout.devices
    model, batch = run.model, run.global_batch
    step_s = flops.sc21_flops(model, batch) / (row.aggregate_pflops * 1e15)
    peak = hardware("a100-80gb").peak_tflops["float16"] * 1e12
    mfu = flops.model_flops(model, batch) / (step_s * devices * peak)
    per_gpu = f"{row.tflops_per_gpu:g} teraFLOP/s, {row.percent_of_peak:g} % of peak"
    follows: Source = "computed from published"
    rows = [
        Row(section, "throughput of a GPU", per_gpu, "published"),
        Row(section, "of all GPUs", f"{row.aggregate_pflops:,.1f} petaFLOP/s", "published"),
        Row(section, "a step", f"{step_s:.1f} s", follows),
        Row(section, "in today's MFU", f"{mfu:.1%}", follows),
    ]
    time = published_training_time(run)
    if time:
        took_s = flops.training_time_s(
            parameters=time.parameters,
            tokens=time.tokens,
            devices=time.gpus,
            flops_per_device=time.tflops_per_gpu * 1e12,
        )
        tokens = f"{time.tokens / 1e9:g} billion tokens"
        rows.append(Row(section, tokens, f"{time.days} days", "published"))
        rows.append(
            Row(section, "by equation (4), 8TP/(nX)", f"{took_s / _DAY_S:.1f} days", follows)
        )
    return rows


def _size(value: float) -> str:
    unit, name = (_GIB, "GiB") if value >= _GIB / 10 else (_MIB, "MiB")
    return f"{value / unit:,.2f} {name}"


def _short(count: float) -> str:
    """1.01 trillion, 345 million."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"
