"""`mtx plan`: from a preset, a plan file or sizes to a page, a picture, a plan file, or JSON."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mtx.cli.options import parse, split_name
from mtx.config import ComputeDtype, Layout, ModelConfig, Recompute, RunConfig
from mtx.errors import UserError
from mtx.presets import preset
from mtx.sizes import Devices, Ffn, Layers, Sequences, Stages, Tokens, Vocab, Width

if TYPE_CHECKING:
    from mtx.plan.candidates import Fixed
    from mtx.plan.plan import Plan
    from mtx.plan.search import Found


def _shown_as(form: str):
    """What --help says of an option that is left open unless it is given."""
    return tyro.conf.arg(metavar=form, help_behavior_hint="")


_INT = _shown_as("INT")
_Width = Annotated[Width | None, _INT]
_Layers = Annotated[Layers | None, _INT]
_Tokens = Annotated[Tokens | None, _INT]
_Vocab = Annotated[Vocab | None, _INT]
_Ffn = Annotated[Ffn | None, _INT]
_Devices = Annotated[Devices | None, _INT]
_Stages = Annotated[Stages | None, _INT]
_Sequences = Annotated[Sequences | None, _INT]
_Number = Annotated[float | None, _shown_as("FLOAT")]
_Name = Annotated[str | None, _shown_as("NAME")]
_File = Annotated[str | None, _shown_as("FILE")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]

_SIZES = ("hidden", "layers", "heads", "kv_heads", "sequence", "vocab", "ffn")
_MESH = ("data", "pipe", "tensor")
_STEP_TOKENS = 3.2e6  # of a step where no batch is given: GPT-3's


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is left out is the preset's, or chosen and said."""

    # of a model without a PRESET; else gpt
    family: str | None = None
    hidden: _Width = None  # the model: size between the layers
    layers: _Layers = None  # transformer blocks
    heads: _Width = None  # of attention; else of 128 each
    kv_heads: _Width = None  # of keys and values, in a llama; else as many
    sequence: _Tokens = None  # tokens; else 2048
    vocab: _Vocab = None  # tokens; else 51200
    ffn: _Ffn = None  # size inside of the MLP; else 4 times hidden
    # of matmuls and activations
    precision: Annotated[ComputeDtype | None, _shown_as("{float32,bfloat16,float16}")] = None

    target: _Name = None  # a100-80gb, h100, tpu-v5p, ..., or a TOML file of your own
    gpus: _Devices = None  # else the preset's, or as few as hold the model
    data: _Devices = None  # replicas
    pipe: _Stages = None  # stages
    tensor: _Devices = None  # tensor shards
    virtual: _Layers = None  # chunks a stage
    microbatch: _Sequences = None  # sequences
    global_batch: _Sequences = None  # sequences a step
    schedule: _Name = None  # as in mtx schedule; "auto" chooses
    # within a block, in the backward pass
    recompute: Annotated[Recompute | None, _shown_as("{none,selective,full}")] = None
    sequence_parallel: _Flag = False  # activations between linears sharded over tensor
    no_sequence_parallel: _Flag = False  # every tensor shard has them whole
    scatter_gather: bool = True  # messages between stages cut over tensor
    # sharded over data: nothing (only priced), the optimizer, or parameters as well
    zero: Annotated[Literal[0, 1, 3] | None, _shown_as("{0,1,3}")] = None

    search: _Flag = False  # choose every part of the layout that is not given
    compile: _Flag = False  # compile the step for the target, and say what the compiler says
    draw: _File = None  # a picture: .svg, .png or .pdf
    save: _File = None  # a plan file, for mtx train: .toml or .json
    tokens: _Number = None  # of the training run whose days are asked for: 300e9
    price: _Number = None  # of a GPU and hour, in any currency
    json: _Flag = False  # every number, units in the names


def plan_command(arguments: list[str]) -> None:
    """Say what a model needs on a cluster: memory, time, layout, cost; with --search, the best.

    PRESET is gpt-1t where neither it nor sizes are given; a plan file (.toml, .json) can stand in
    its place. The layout is the preset's until --gpus or --search ask for another. Nothing is run:
    all of it is computed from closed forms, or with --compile read from the compiled program.
    """
    name, rest = split_name(arguments)
    options = parse(rest, PlanOptions(), prog="mtx plan [PRESET]", about=plan_command)
    _check(options)
    from mtx.plan.plan import save_plan

    plan, found = _plan(name, options)
    if options.compile:
        plan = _compile(plan)
    if options.save:
        save_plan(plan, options.save)
    if options.draw:
        from mtx.view.plan import draw_plan

        draw_plan(plan, options.draw)
    _print(plan, found, options)


def _check(options: PlanOptions) -> None:
    """What can be said before anything is computed."""
    for name in ("tokens", "price"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"{name}={value} must be above 0")
    if options.sequence_parallel and options.no_sequence_parallel:
        raise UserError("--sequence-parallel and --no-sequence-parallel are both given; leave one")
    if options.draw:
        from mtx.view.picture import check_suffix

        check_suffix(options.draw)


def _plan(name: str | None, options: PlanOptions) -> tuple[Plan, Found | None]:
    """The plan that is asked for, and the search, where the layout was open."""
    from mtx.plan.plan import is_plan_file, load_plan, make_plan

    if name is None and any(getattr(options, size) is not None for size in _SIZES):
        return _search(_model_of(options), options, known=None)
    base = load_plan(name) if name and is_plan_file(name) else None
    run = base.run if base else preset(name or "gpt-1t")
    if base:
        options = replace(
            options, target=options.target or base.target,
            zero=base.zero if options.zero is None else options.zero,
        )  # fmt: skip
    resized = replace(run, model=_resized(run.model, options), layout=Layout(), global_batch=1)
    if options.search or _is_open(run, options):
        return _search(resized.model, options, known=run)
    batch = options.global_batch or run.global_batch
    run = replace(resized, layout=_changed(run.layout, options), global_batch=batch)
    plan = make_plan(
        run, target=options.target or "a100-80gb",
        zero=options.zero, scatter_gather=options.scatter_gather,
    )  # fmt: skip
    return plan, None


def _is_open(run: RunConfig, options: PlanOptions) -> bool:
    """Whether the number of GPUs asked for leaves the layout open."""
    given = [getattr(options, axis) for axis in _MESH]
    return options.gpus not in (None, run.layout.devices) and not all(given)


def _changed(layout: Layout, options: PlanOptions) -> Layout:
    """The preset's layout with what is given replaced; `data` follows where it is not given."""
    gpus = options.gpus or layout.devices
    pipe, tensor = options.pipe or layout.pipe, options.tensor or layout.tensor
    data = options.data or gpus // (pipe * tensor)
    asked = options.gpus or not all(getattr(options, axis) for axis in _MESH)
    if asked and data * pipe * tensor != gpus and (options.gpus or not options.data):
        raise UserError(
            f"data*pipe*tensor={data or 1}*{pipe}*{tensor} is not gpus={gpus}; change one of them, "
            f"or use --gpus {(data or 1) * pipe * tensor}"
        )
    given = {
        name: value
        for name in ("virtual", "microbatch", "schedule", "recompute")
        if (value := getattr(options, name)) is not None
    }
    parallel = _sequence_parallel(options)
    if parallel is not None:
        given["sequence_parallel"] = parallel
    return replace(layout, data=data, pipe=pipe, tensor=tensor, **given)


def _sequence_parallel(options: PlanOptions) -> bool | None:
    if options.sequence_parallel or options.no_sequence_parallel:
        return options.sequence_parallel
    return None


# --- sizes ----------------------------------------------------------------------------------------


def _resized(model: ModelConfig, options: PlanOptions) -> ModelConfig:
    """The model with the sizes that are given replaced."""
    if options.family not in (None, model.family):
        raise UserError(
            f"family={options.family} is not the model's, {model.family}; leave out --family, or "
            "the PRESET and give sizes"
        )
    sizes = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    if options.precision:
        sizes["compute_dtype"] = options.precision
    return replace(model, **sizes)


def _model_of(options: PlanOptions) -> ModelConfig:
    """A model from its sizes alone; heads of 128 where their number is not given."""
    if options.hidden is None or options.layers is None:
        raise UserError("without a PRESET a model needs at least --hidden and --layers")
    heads = options.heads or next(
        heads
        for heads in range(max(1, options.hidden // 128), 0, -1)
        if options.hidden % heads == 0
    )
    family = options.family or "gpt"
    start = ModelConfig(
        family=family, hidden=options.hidden, layers=options.layers, heads=heads, sequence=2048,
        vocab=51200, tied=family != "llama",
    )  # fmt: skip
    return _resized(start, options)


def _batch_for(gpus: int, sequence: int) -> int:
    """About as many tokens as GPT-3's step, in a number that the GPUs' odd factors divide."""
    odd = gpus // (gpus & -gpus)
    sequences = max(1.0, _STEP_TOKENS / sequence / odd)
    return odd * 2 ** round(math.log2(sequences))


# --- search ---------------------------------------------------------------------------------------


def _search(
    model: ModelConfig, options: PlanOptions, *, known: RunConfig | None
) -> tuple[Plan, Found]:
    """Chooses GPUs, batch and layout where they are not given. known: the preset's run."""
    from mtx.plan.candidates import Fixed
    from mtx.plan.hardware import load_hardware
    from mtx.plan.plan import make_plan
    from mtx.plan.search import fewest_gpus, search

    target = options.target or "a100-80gb"
    device = load_hardware(target)
    device.peak_flops(model.compute_dtype)
    fixed = Fixed(
        **{axis: getattr(options, axis) for axis in (*_MESH, "virtual", "microbatch")},
        schedule=options.schedule, recompute=options.recompute, zero=options.zero,
        sequence_parallel=_sequence_parallel(options),
    )  # fmt: skip
    chosen = _said_sizes(model, options) if known is None else []

    def batch_of(gpus: int) -> int:
        given = options.global_batch or (known and known.global_batch)
        return given or _batch_for(gpus, model.sequence)

    gpus = options.gpus or _product(options) or (known and known.layout.devices)
    if not gpus:
        gpus = fewest_gpus(model, hardware=device, batch_of=batch_of, fixed=fixed)
        chosen.append(f"gpus={gpus}: the smallest power of two that holds it")
    if not (options.global_batch or known):
        chosen.append(f"global_batch={batch_of(gpus)}: about {_STEP_TOKENS / 1e6:g}M tokens a step")
    found = search(
        model, gpus=gpus, global_batch=batch_of(gpus), hardware=device, fixed=fixed,
        scatter_gather=options.scatter_gather,
    )  # fmt: skip
    best = found.best
    chosen.append(_said_layout(found, fixed))
    start = known or RunConfig()
    run = replace(start, model=model, layout=best.layout, global_batch=batch_of(gpus))
    plan = make_plan(
        run, target=target, zero=best.zero, scatter_gather=options.scatter_gather,
        chosen=tuple(chosen),
    )  # fmt: skip
    return plan, found


def _product(options: PlanOptions) -> int | None:
    sizes = [getattr(options, axis) for axis in _MESH]
    return math.prod(sizes) if all(sizes) else None


def _said_sizes(model: ModelConfig, options: PlanOptions) -> list[str]:
    sizes = {
        "heads": model.heads, "sequence": model.sequence, "vocab": model.vocab,
        "ffn": model.ffn_hidden, "precision": model.compute_dtype,
    }  # fmt: skip
    if model.family == "llama":
        sizes["kv_heads"] = model.groups
    open_ones = [f"{name}={v}" for name, v in sizes.items() if getattr(options, name) is None]
    return [f"{', '.join(open_ones)}: not given"] if open_ones else []


def _said_layout(found: Found, fixed: Fixed) -> str:
    given = [f"{each.name}={v}" for each in fields(fixed) if (v := getattr(fixed, each.name))]
    said = f" with {', '.join(given)}" if given else ""
    return (
        f"layout: the fastest of {found.meshes} meshes{said}, by {found.priced:,} predicted times "
        f"and {found.measured:,} memories"
    )


# --- what is said ---------------------------------------------------------------------------------


def _compile(plan: Plan) -> Plan:
    if plan.zero != plan.run.layout.zero:
        raise UserError(
            f"--compile compiles this program's step; zero={plan.zero} is only priced: use --zero 1"
        )
    from mtx.compile.step import compile_plan

    return replace(plan, compiled=compile_plan(plan.run, target=plan.hardware.name))


def _print(plan: Plan, found: Found | None, options: PlanOptions) -> None:
    from mtx.plan.compare import changes

    changed = []
    if found:
        changed = changes(
            found.best, plan.run.model, global_batch=plan.run.global_batch,
            hardware=plan.hardware, scatter_gather=plan.scatter_gather,
        )  # fmt: skip
    if options.json:
        numbers = plan.to_dict(tokens=options.tokens, price_per_gpu_hour=options.price)
        if found:
            numbers["search"] = search_numbers(plan, found, changed)
        print(json.dumps(numbers, indent=1))
        return
    from mtx.plan.page import change_lines, plan_lines, ranking_lines

    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 140)
    lines = []
    if found:
        heading = f"Layouts of {plan.gpus:,} x {plan.hardware.name} that fit, fastest first"
        lines += ranking_lines(found, plan.hardware, heading=heading, width=width)
        lines += ["", *change_lines(found.best, changed, width=width), ""]
    lines += plan_lines(plan, tokens=options.tokens, price=options.price, width=width)
    lines += [f"plan file {options.save}"] * bool(options.save)
    lines += [f"picture {options.draw}"] * bool(options.draw)
    print("\n".join(lines))


def search_numbers(plan: Plan, found: Found, changed) -> dict:
    """A search, ready for JSON."""
    from mtx.plan.compare import reasons

    def numbers(one) -> dict:
        layout = {
            name: getattr(one.layout, name)
            for name in (*_MESH, "virtual", "microbatch", "schedule", "recompute",
                         "sequence_parallel")
        }  # fmt: skip
        return layout | {
            "zero": one.zero,
            "runs": one.runs,
            "step_time_s": one.time.step_s,
            "memory_gib": one.memory.total_bytes / 2**30,
        }

    return {
        "meshes": found.meshes,
        "priced": found.priced,
        "measured": found.measured,
        "ranked": [
            numbers(one) | ({"beats_next_by": reasons(one, after, plan.hardware)} if after else {})
            for one, after in zip(found.ranked, [*found.ranked[1:], None], strict=True)
        ],
        "changes": [
            {"change": f"{change.name}={change.value}", "fits": change.fits}
            | numbers(change.candidate)
            for change in changed
        ],
    }
