"""The facts of a plan, row by row, each with its source.

given      the run's own config, a preset's included
chosen     by the search, or by a rule that the row names; perhaps not all numbers of a row
computed   arithmetic on that, or counted in the schedule's table
predicted  a model of our program's time and memory, which running or compiling may confirm or not
compiled   read from the program that XLA made for the target
published  SC'21's table 1, if the run is one of its rows
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal, NamedTuple

from mtx.costs.ask import model_parameters
from mtx.plan import flops
from mtx.plan.candidates import MEMORY_AT_MOST
from mtx.plan.choose import schedule_for
from mtx.plan.compare import part_name, seconds
from mtx.plan.compiled import Compiled
from mtx.plan.differences import Difference, differences
from mtx.plan.hardware import hardware
from mtx.plan.makespan import LOOPED
from mtx.plan.offload import predict_copies
from mtx.plan.priced import DAY_S, GIB, MEMORY_BY_DEFAULT, PricedRun
from mtx.plan.published import Throughput, bubble, published_throughput, published_training_time
from mtx.plan.stages import residuals_of_stages, stages_text
from mtx.schedules.simulate import bubble_text

Source = Literal[
    "given", "chosen", "computed", "predicted", "compiled", "published", "computed from published",
    "",  # of a run: measured
]  # fmt: skip
_MIB = 2**20
_PARTS, _FAMILIES = {"mlp": "MLP"}, {"bert": "BERT"}  # as they are written
NOTHING = 1e-9  # of a step: anything less is a sum's rounding error
_MOST_OPS = 500_000  # of a schedule's table that is made only to count its ticks


class Row(NamedTuple):
    """One fact of the page."""

    section: str
    name: str
    value: str
    source: Source


def plan_rows(
    plan: PricedRun, *, tokens: float | None = None, price: float | None = None
) -> list[Row]:
    """The facts of the page, in order. tokens, price: as for `mtx.plan.page.plan_lines`."""
    row = published_throughput(plan.run)
    return [
        *(
            Row("Chosen", name, why, "chosen")
            for name, _, why in (choice.partition(": ") for choice in plan.chosen)
        ),
        *_model(plan, row),
        *_parts(plan),
        *_layout(plan),
        *_memory(plan),
        *_time(plan),
        *_speed(plan, tokens, price),
        *_pipeline(plan),
        *_work(plan),
        *(compiled_rows(plan.compiled, plan) if plan.compiled else []),
        *(_published(plan, row) if row else []),
    ]


def title(plan: PricedRun) -> str:
    model = plan.run.model
    return (
        f"{_FAMILIES.get(model.family, type(model).__name__)}, "
        f"{_short(flops.parameters(model))} parameters, on "
        f"{plan.gpus:,} x {plan.hardware.name}"
    )


def _source(plan: PricedRun, *names: str) -> Source:
    return "chosen" if plan.chose(*names) else "given"


def _model(plan: PricedRun, row: Throughput | None) -> list[Row]:
    model, sizes = plan.run.model, f"{plan.run.model.sequence:,}, {plan.run.model.vocab:,}"
    shape = f"{model.layers} layers of {model.hidden:,}, {model.heads} heads"
    if model.groups != model.heads:
        shape += f", {model.groups} of keys and values"
    rows = [
        Row("Model", "layers of hidden, heads", shape, _source(plan, "heads", "kv_heads")),
        Row("Model", "sequence, vocabulary", sizes, _source(plan, "sequence", "vocab")),
    ]
    as_in_paper = model.ffn_hidden == 4 * model.hidden
    if not as_in_paper:
        layers = model_parameters(model).layers.values()
        twice = 2 * model.hidden * model.ffn_hidden  # a matrix for the gate, and one beside it
        gated = any(each.elements.number == twice for layer in layers for each in layer)
        width = f"{model.ffn_hidden:,}{', gated' if gated else ''}"
        rows.append(Row("Model", "inside of the MLP", width, _source(plan, "ffn")))
    rows.append(Row("Model", "parameters, exactly", f"{flops.parameters(model):,}", "computed"))
    if model.freezes:
        said = f"{flops.trained_parameters(model):,}"
        said += f", of adapters of rank {model.lora_rank}" if model.lora_rank else ""
        rows.append(Row("Model", "of them trained", said, "given"))
    formula = "does not apply: it is of GPTs with f = 4 and a tied head"
    if model.family == "gpt" and as_in_paper and model.tied:
        formula = f"{flops.sc21_parameters(model):,.0f}"
    rows.append(Row("Model", "by the paper's equation (2)", formula, "computed"))
    if row:
        billions = f"{row.parameters_billion:,.1f} billion"
        rows.append(Row("Model", "in the paper's table 1", billions, "published"))
    return rows


def _parts(plan: PricedRun) -> list[Row]:
    """Parameters and the bytes of their weights, by part of the model."""
    model = plan.run.model
    counts = flops.parameters_by_part(model)
    item = 4 if model.compute_dtype == "float32" else 2
    return [
        Row(
            "Parameters and their weights", _PARTS.get(part, part),
            f"{_short(count)} ({count / sum(counts.values()):.1%}), {_size(item * count)}",
            "computed",
        )
        for part, count in counts.items()
        if count
    ]  # fmt: skip


def _layout(plan: PricedRun) -> list[Row]:
    run, layout, device = plan.run, plan.run.layout, plan.hardware
    axes = {"data": layout.data} | layout.shown
    mesh = f"{' x '.join(map(str, axes.values()))} = {layout.devices:,} devices"
    nodes = -(-layout.devices // device.node_devices)
    inside = layout.tensor <= device.node_devices and device.node_devices % layout.tensor == 0
    where = "inside a node" if inside else f"across nodes of {device.node_devices}"
    step = f"{run.global_batch:,} sequences, {plan.tokens_per_step:,} tokens"
    batches = f"m = {run.microbatches} a replica, of b = {layout.microbatch}"
    kept = f"recompute={layout.recompute}, stash={layout.stash}"
    if layout.tensor > 1:
        kept += f", sequence_parallel={layout.sequence_parallel}"
    types = run.model.compute_dtype
    if run.model.fp8 != "off":
        types += f", matmuls of layers' weights in float8 ({run.model.fp8})"
    sharded = {0: "nothing", 1: "masters and moments", 3: "parameters and all"}[plan.zero]
    source, ticks = _source(plan, "layout"), _source(plan, "layout", "schedule", "weave")
    return [
        Row("Layout", " x ".join(axes), mesh, source),
        Row("Layout", "nodes", f"{nodes:,}; tensor groups {where}", "computed"),
        *_context(plan),
        *_experts(plan),
        Row("Layout", "schedule", layout.schedule_text, ticks),
        Row("Layout", "step", step, _source(plan, "global_batch")),
        Row("Layout", "microbatches", batches, "computed"),
        Row("Layout", "computes in", types, _source(plan, "compute_dtype")),
        Row("Layout", "activations", kept, _source(plan, "layout", "activations")),
        Row("Layout", f"sharded over {layout.zero_text}", f"{sharded} (zero={plan.zero})", source),
    ]


def _context(plan: PricedRun) -> list[Row]:
    """How sequences are cut, and the seconds of each way of attention over their parts."""
    run, layout = plan.run, plan.run.layout
    if layout.context == 1:
        return []
    positions = run.model.sequence // layout.context
    rows = [Row("Layout", "positions of a device", f"{positions:,} in two chunks", "computed")]
    for way, time in plan.context_ways.items():
        text = f"a step in {seconds(time.step_s)}, {seconds(time.context_comm_s)} of it exposed"
        name, mine = f"attention over context: {way}", way == layout.context_attention
        rows.append(Row("Layout", name, text + ", taken" * mine, "predicted"))
    return rows


def _experts(plan: PricedRun) -> list[Row]:
    """How full experts are, and what that requires."""
    if not plan.run.model.routed_experts:
        return []
    load, rounds = plan.expert_imbalance, plan.later_rounds
    text = f"{load:g} times the mean" if load > 1 else "as the mean"
    text += f"; room for {plan.run.layout.expert_room:g}"
    text += f"; {rounds} more round{'s' * (rounds > 1)}" if rounds else ""
    return [Row("Layout", "tokens of the fullest expert", text, "given")]


def _memory(plan: PricedRun) -> list[Row]:
    section = "Memory of a device"
    rows = [
        Row(section, part_name(field.name), _size(value), "predicted")
        for field in fields(plan.memory)
        if (value := getattr(plan.memory, field.name))
    ]
    rows.append(Row(section, "in all", _fit(plan.memory.total_bytes, plan), "predicted"))
    if fraction := plan.run.layout.offload_fraction:
        run = plan.run
        copies = predict_copies(
            run.model, run.layout, run.global_batch, plan.hardware,
            share=plan.calibration.host_share,
        )  # fmt: skip
        name = f"{fraction:.4g} of residuals in host memory"
        rows.append(Row(section, name, copies.text(plan.time.host_comm_s), "predicted"))
        rows += _residuals_of_stages(plan)
    if better := plan.better_recompute:
        way, time, memory = better
        faster = f"{_fit(memory.total_bytes, plan)}; a step in {seconds(time.step_s)}, not "
        faster += seconds(plan.time.step_s)
        rows.append(Row(section, f"with recompute={way}", faster, "predicted"))
    return rows


def _residuals_of_stages(plan: PricedRun) -> list[Row]:
    run = plan.run
    layout = run.layout
    if layout.pipe == 1 or layout.pipe * layout.virtual * run.microbatches > _MOST_OPS:
        return []
    others = plan.memory.total_bytes - plan.memory.stash_bytes
    stages = residuals_of_stages(
        run.model, layout, run.global_batch, backend=plan.hardware.backend,
        room_bytes=MEMORY_AT_MOST * plan.hardware.memory_bytes - others,
    )  # fmt: skip
    return [Row("Memory of a device", "residuals by stage", stages_text(stages), "predicted")]


def _fit(total_bytes: float, plan: PricedRun) -> str:
    share = total_bytes / plan.hardware.memory_bytes
    text = f"{_size(total_bytes)} of {plan.hardware.memory_gib:g} GiB: "
    if share > MEMORY_AT_MOST:
        return text + f"does not fit ({share:.0%}; at most {MEMORY_AT_MOST:.0%} can be had)"
    text += f"fits ({share:.0%})"
    if share > MEMORY_BY_DEFAULT:
        text += f" with XLA_PYTHON_CLIENT_MEM_FRACTION={MEMORY_AT_MOST}"
    return text


def _time(plan: PricedRun) -> list[Row]:
    section, whole = "Time of a step", plan.time.step_s
    software = plan.calibration.software
    of = f"{software.name}: {software.source}. Constants: {plan.calibration.source}"
    rows = [(part_name(each.name), getattr(plan.time, each.name)) for each in fields(plan.time)]
    texts = [("of the software", of)]
    texts += [(name, f"{seconds(value)} ({value / whole:.1%})") for name, value in rows
              if value > NOTHING * whole]  # fmt: skip
    texts.append(("the whole step", seconds(whole)))
    if software.name != "mtx":
        own = f"{seconds(plan.time_of('mtx').step_s)} a step"
        texts.append(("with this program's kernels", own))
    return [Row(section, name, text, "predicted") for name, text in texts]


def _speed(plan: PricedRun, tokens: float | None, price: float | None) -> list[Row]:
    section, asked = "Speed", tokens or 300e9
    days = f"{plan.days(asked):,.1f} days, {plan.gpu_hours(asked):,.0f} GPU hours"
    if price is not None:
        days += f", cost {plan.gpu_hours(asked) * price:,.0f} at {price:g} a GPU hour"
    rows = [
        ("sequences, tokens a second", f"{plan.sequences_per_s:,.2f}, {plan.tokens_per_s:,.0f}"),
        ("teraFLOP/s a GPU, paper's unit", f"{plan.tflops_per_gpu_sc21:,.1f}"),
        ("and of the model's FLOPs", f"{plan.tflops_per_gpu_model:,.1f}, MFU {plan.mfu:.1%}"),
        (f"{asked / 1e9:g} billion tokens", days),
    ]
    return [Row(section, name, value, "predicted") for name, value in rows]


def _pipeline(plan: PricedRun) -> list[Row]:
    layout, microbatches = plan.run.layout, plan.run.microbatches
    idle = bubble_text(plan.bubble_over_ideal).removeprefix("bubble ")
    rows = [Row("Pipeline", "bubble", idle, "predicted")]
    if layout.schedule in LOOPED and layout.pipe > 1:
        equal = f"{bubble(layout, microbatches):.2%}, were stages equal and messages free"
        rows.append(Row("Pipeline", "SC'21's (p-1)/(v m)", equal, "computed"))
    if layout.pipe * layout.virtual * microbatches <= _MOST_OPS:
        schedule = schedule_for(layout, microbatches)
        in_flight = f"{schedule.in_flight[0]} on stage 0, {schedule.in_flight[-1]} on the last"
        rows += [
            Row("Pipeline", "ticks of one F and one B", f"{schedule.ticks:,}", "computed"),
            Row("Pipeline", "waiting between F and B", in_flight, "computed"),
        ]
    return rows


def _work(plan: PricedRun) -> list[Row]:
    run = plan.run
    executed = flops.hardware_matmul_flops(
        run.model, run.layout, run.global_batch, backend=plan.hardware.backend
    )
    rows = [
        ("paper's convention", flops.sc21_flops(run.model, run.global_batch)),
        ("model FLOPs (today's MFU)", flops.model_flops(run.model, run.global_batch)),
        ("matmuls our program runs", executed),
    ]
    forward = flops.forward_flops(run.model, run.global_batch, causal=True)
    of_model = [
        (f"F of it, {_PARTS.get(part, part)}", f"{value:.4e} ({value / forward.total:.1%})")
        for part, value in forward.by_part.items()
    ]
    texts = [(name, f"{value:.4e}") for name, value in rows]
    texts[2:2] = of_model  # after the convention that they are parts of
    return [Row("FLOPs of a step", name, text, "computed") for name, text in texts]


def compiled_rows(compiled: Compiled, plan: PricedRun) -> list[Row]:
    """What XLA says: memory next to the closed form, the largest buffers, collectives and how much
    of them nothing hides, FLOPs."""
    section = "Compiled"
    nearer = f". {compiled.hint}" if compiled.hint else ""
    took = f"{compiled.compile_s:.1f} s, {_size(compiled.compiler_peak_bytes)}"
    predicted = _size(plan.memory.total_bytes)
    ratio = compiled.matmul_flops / compiled.formula_flops
    host = [(section, "in the host's memory", _size(compiled.host_bytes))]
    host = host if compiled.host_bytes else []
    rows = [
        (section, "what", compiled.label + nearer),
        (section, "jax, time and memory it took", f"{compiled.jax_version}, {took}"),
        (section, "memory of a device", _fit(compiled.total_bytes, plan)),
        (section, "by the closed form", f"{predicted}"),
        (section, "arguments, temporary", f"{_size(compiled.arguments_bytes)}, "
                                          f"{_size(compiled.temp_bytes)}"),
        *host,
        (section, "matmul FLOPs", f"{compiled.matmul_flops:.4e}, {ratio:.4f} of the formula's"),
    ]  # fmt: skip
    if times := compiled.timeline:
        peak = plan.hardware.peak_flops(plan.run.model.compute_dtype) * compiled.devices
        mfu = flops.model_flops(plan.run.model, plan.run.global_batch) / (times.step_s * peak)
        said = f"{seconds(times.step_s)}, MFU {mfu:.1%}: its program on the plan's machine"
        rows.append((section, "a step, by its timeline", said))
    for one in differences(replace(plan, compiled=compiled)):
        if one.predicted_s + one.compiled_s > NOTHING:
            rows.append(("Closed form, and timeline", part_name(one.part), _against(one)))
    for buffer in compiled.largest:
        rows.append(("Largest buffers", _size(buffer.bytes), f"{buffer.shape}: {buffer.what}"))
    for one in compiled.collectives:
        name = f"{one.kind} over {' x '.join(one.axes) or 'none'}"
        traffic = f"{one.count:,.6g} of {one.group}, {_size(one.bytes)} sent in {one.dtype}"
        rows.append(("Collectives of a step, one device", name, traffic))
    for one in times.exposures if times else ():
        taken = f"{seconds(one.seconds)}, {seconds(one.exposed_s)} of it exposed"
        rows.append(("Time of the collectives, an estimate", f"over {' x '.join(one.axes)}", taken))
    for one in times.costliest if times else ():
        said = f"{one.what}, in {one.part}" if one.part else one.what
        rows.append(("Neither matmuls nor collectives", seconds(one.seconds), said))
    return [Row(*row, "compiled") for row in rows]


def _against(one: Difference) -> str:
    """4.60 s, 4.59 s (+0.2%)"""
    text = f"{seconds(one.predicted_s)}, {seconds(one.compiled_s)}"
    text += f" ({one.share:+.1%})" if one.compiled_s else ""
    return f"{text}: {one.why}" if one.why else text


def _published(plan: PricedRun, row: Throughput) -> list[Row]:
    """The row of table 1 and what follows from it, on the paper's A100s whatever the target is."""
    section, run, devices = "SC'21, on A100-80GB", plan.run, plan.gpus
    model, batch = run.model, run.global_batch
    step_s = flops.sc21_flops(model, batch) / (row.aggregate_pflops * 1e15)
    peak = hardware("a100-80gb").peak_tflops["float16"] * 1e12
    mfu = flops.model_flops(model, batch) / (step_s * devices * peak)
    per_gpu = f"{row.tflops_per_gpu:g} teraFLOP/s, {row.percent_of_peak:g} % of peak"
    follows: Source = "computed from published"
    theirs = "recompute=full, sequence_parallel=False, float16, Megatron-LM of 2021"
    ours = f"recompute={run.layout.recompute}, sequence_parallel={run.layout.sequence_parallel}, "
    ours += f"{model.compute_dtype}, {plan.calibration.software.name}"
    rows = [
        Row(section, "throughput of a GPU", per_gpu, "published"),
        Row(section, "of all GPUs", f"{row.aggregate_pflops:,.1f} petaFLOP/s", "published"),
        Row(section, "a step", f"{step_s:.1f} s", follows),
        Row(section, "in today's MFU", f"{mfu:.1%}", follows),
        Row(section, "with", theirs, "published"),
        Row(section, "predicted above, with", ours, "given"),
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
            Row(section, "by equation (4), 8TP/(nX)", f"{took_s / DAY_S:.1f} days", follows)
        )
    return rows


def _size(value: float) -> str:
    unit, name = (GIB, "GiB") if value >= GIB / 10 else (_MIB, "MiB")
    return f"{value / unit:,.2f} {name}"


def _short(count: float) -> str:
    """1.01 trillion, 345 million."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"
