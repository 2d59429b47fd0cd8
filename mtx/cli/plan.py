"""`mtx plan`: a preset, a plan file or sizes in; a page, a picture, a plan file or JSON out."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import tyro

from mtx.cli.options import File, Flag, Line, part, read_line, split_names, with_family
from mtx.cli.output import check_picture, say
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.config.run import RUN_FILE
from mtx.errors import UserError
from mtx.fields import require_above
from mtx.plan.candidates import Fixed
from mtx.plan.compare import Change, changes, reasons
from mtx.plan.hardware import load_hardware
from mtx.plan.memory import Zero
from mtx.plan.page import change_lines, plan_lines, ranking_lines
from mtx.plan.plan import Plan, is_plan_file, load_plan, make_plan, save_plan
from mtx.plan.search import Candidate, Found, fewest_gpus, search
from mtx.presets import NAMES, preset
from mtx.sharding.axes import AXES, RARE
from mtx.sizes import Devices, Sequences

_ZERO = tyro.conf.arg(
    help="sharded over `data`: 0: nothing (only priced); 1: the optimizer; 3: all parameters too"
)
_Layout = part(Layout, zero=Annotated[Literal[0, 1, 3], _ZERO])
_Name = Annotated[str | None, tyro.conf.arg(metavar="NAME")]

_STEP_TOKENS = 3.2e6  # per step if no batch is given: as many as GPT-3's


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options left out are taken from the preset, or chosen and reported."""

    target: _Name = None  # a100-80gb, h100, tpu-v5p, ..., or a TOML file of your own
    gpus: Devices | None = None  # how many; by default the preset's, or as few as hold the model
    global_batch: Sequences | None = None  # sequences per step; by default the preset's
    scatter_gather: bool = True  # split messages between stages over tensor
    expert_imbalance: float | None = None  # the fullest expert's tokens over the mean; by default 1
    search: Flag = False  # choose every part of the layout that is not given
    compile: Flag = False  # compile the step for the target, and show what the compiler reports
    # a picture: .svg, .png or .pdf, of the plan or of a steady tick if compiled for GPUs
    draw: File = None
    save: File = None  # write a plan file for mtx train: .toml or .json
    tokens: float | None = None  # tokens of a training run, to predict its days: 300e9
    price: float | None = None  # price per GPU-hour, in any currency
    json: Flag = False  # print every number as JSON, with units in the names
    model: ModelConfig = field(default_factory=part(type(ModelConfig())))
    layout: Layout = field(default_factory=_Layout)
    optimizer: OptimizerConfig = field(default_factory=part(OptimizerConfig))


def plan_command(arguments: list[str]) -> None:
    """Show what a model needs on a cluster: memory, time, layout, cost; with --search, the best.

    PRESET is gpt-1t if neither it nor sizes are given; PLAN is a file that --save has written
    (.toml, .json), RUN_DIR the --out of a training run. Sizes that are given replace those of its
    model; without PRESET, --hidden and --layers are enough. The layout is the preset's unless
    --gpus or --search ask for another.
    Nothing is run: everything is computed from closed forms or, with --compile, read from the
    compiled program.
    """
    base = _base(*split_names(arguments)[0][:1])
    default = PlanOptions(model=part(type(base[0].model))())
    line = read_line(arguments, default, "mtx plan [PRESET | PLAN | RUN_DIR]", plan_command)
    options = line.options
    above_0 = ("tokens", "price", "expert_imbalance")
    given = [name for name in above_0 if getattr(options, name) is not None]
    require_above(options, 0, *given)
    check_picture(options.draw)
    plan, found = _plan(_Asked(line), *base)
    if options.compile:
        if plan.zero != plan.run.layout.zero:
            raise UserError(
                f"--compile compiles this program's step; layout.zero={plan.zero} is only priced: "
                "use --layout.zero 1"
            )
        from mtx.compile.step import compile_plan

        plan = replace(plan, compiled=compile_plan(plan.run, target=plan.hardware.name))
    if options.save:
        save_plan(plan, options.save)
    if options.draw:
        from mtx.view.plan import draw_plan
        from mtx.view.tick import draw_tick

        (draw_tick if plan.compiled_tick else draw_plan)(plan, options.draw)
    _print(plan, found, options)


class _Asked:
    """What a command line asks for: options, and the sizes and layout fields it gives."""

    def __init__(self, line: Line[PlanOptions]):
        self.name, self.options = line.name, line.options
        self.sizes, self.layout = line.changes("model"), line.changes("layout")
        self._optimizer = line.changes("optimizer")
        self.zero: Zero | None = self.layout.pop("zero", None)
        self.target = line.options.target
        self.imbalance = line.options.expert_imbalance
        sizes: list[Any] = [self.layout.get(axis) for axis in ("data", "pipe", "tensor")]
        sizes += [self.layout.get(axis, 1) for axis in RARE]
        self.mesh = None if None in sizes else math.prod(sizes)  # its devices, if all are given

    def optimizer(self, run: RunConfig) -> OptimizerConfig:
        """The run's optimizer, with the given fields replaced. UserError if training refuses it."""
        optimizer = replace(run.optimizer, **self._optimizer)
        if self._optimizer.keys() & {"name", "rest"}:
            from mtx.step.optimizer import check_optimizer

            for name in filter(None, (optimizer.name, optimizer.rest)):
                check_optimizer(name)
        return optimizer


def _base(name: str = "gpt-1t") -> tuple[RunConfig, Plan | None]:
    """The run of that name to start from, and the plan if the name is a plan file."""
    name = name if name in NAMES else _file(name)
    plan = load_plan(name) if is_plan_file(name) else None
    return (plan.run, plan) if plan else (preset(name), None)


def _file(name: str) -> str:
    """For a run's folder, the path of its config, which is read like a plan file; other names as
    they are. UserError for a path that is neither a run's folder nor a plan file."""
    path = os.path.expanduser(name)
    file = os.path.join(path, RUN_FILE)
    if os.path.isfile(file):
        return file
    if is_plan_file(name) or not (os.path.exists(path) or os.path.basename(path) != path):
        return name
    what = "is a file" if os.path.isfile(path) else "does not exist"
    what = f"is a folder without {RUN_FILE}" if os.path.isdir(path) else what
    raise UserError(
        f"{name} {what}; name a preset, a plan (.toml, .json) or the folder of a training run"
    )


def _plan(asked: _Asked, run: RunConfig, file: Plan | None) -> tuple[Plan, Found | None]:
    """The plan that is asked for, and the search if the layout was open."""
    options = asked.options
    if asked.name is None and any(type(value) is int for value in asked.sizes.values()):
        return _search(_model_of(asked.sizes), asked, known=None)
    if file:
        asked.target = asked.target or file.target
        asked.zero = file.zero if asked.zero is None else asked.zero
        asked.imbalance = asked.imbalance or file.expert_imbalance
    family = asked.sizes.get("family", run.model.family)
    model = run.model if family == run.model.family else with_family(run, family).model
    model = replace(model, **asked.sizes)
    if options.search or (options.gpus not in (None, run.layout.devices) and not asked.mesh):
        return _search(model, asked, known=run)
    batch = options.global_batch or run.global_batch
    run = replace(
        run, model=model, layout=_changed(run.layout, asked), global_batch=batch,
        optimizer=asked.optimizer(run),
    )  # fmt: skip
    plan = make_plan(
        run, target=asked.target or "a100-80gb", zero=asked.zero,
        scatter_gather=options.scatter_gather, expert_imbalance=asked.imbalance or 1.0,
    )  # fmt: skip
    return plan, None


def _changed(layout: Layout, asked: _Asked) -> Layout:
    """The preset's layout with the given fields replaced; `data` follows if it is not given."""
    gpus = asked.options.gpus or layout.devices
    sizes = {
        axis: asked.layout.get(axis, getattr(layout, axis))
        for axis in AXES
        if axis != "data" and (axis in layout.shown or axis in asked.layout)
    }
    replica = math.prod(sizes.values())
    data = asked.layout.get("data", gpus // replica)
    follows = asked.options.gpus or "data" not in asked.layout
    if follows and data * replica != gpus:
        raise UserError(
            f"data*{'*'.join(sizes)}={data or 1}*{'*'.join(map(str, sizes.values()))} must be "
            f"gpus={gpus}; change one of them, or use --gpus {(data or 1) * replica}"
        )
    return replace(layout, **asked.layout | {"data": data})


# --- sizes ----------------------------------------------------------------------------------------


def _model_of(sizes: dict) -> ModelConfig:
    """A model from its sizes alone, with heads of 128 if their number is not given."""
    if not {"hidden", "layers"} <= sizes.keys():
        raise UserError("without a PRESET a model needs at least --hidden and --layers")
    hidden, family = sizes["hidden"], sizes.get("family", "gpt")
    heads = next(n for n in range(max(1, hidden // 128), 0, -1) if hidden % n == 0)
    start = {"family": family, "heads": heads, "sequence": 2048, "vocab": 51200}
    tied = ModelConfig(family=family).sequence_is_fixed  # as in GPT-2 and BERT, not in later models
    return ModelConfig(**{**start, "tied": tied, **sizes})


def _batch_for(gpus: int, sequence: int) -> int:
    """Sequences of about as many tokens as GPT-3's step, divisible by the GPUs' odd factors."""
    odd = gpus // (gpus & -gpus)
    sequences = max(1.0, _STEP_TOKENS / sequence / odd)
    return odd * 2 ** round(math.log2(sequences))


# --- search ---------------------------------------------------------------------------------------


def _search(model: ModelConfig, asked: _Asked, *, known: RunConfig | None) -> tuple[Plan, Found]:
    """Choose GPUs, batch and layout if they are not given. known: the preset's run."""
    options, target = asked.options, asked.target or "a100-80gb"
    device = load_hardware(target)
    device.check(model)
    fixed = _fixed(asked)
    chosen = _said_sizes(model, asked.sizes) if known is None else []
    start = known or RunConfig()
    optimizer = asked.optimizer(start)

    def batch_of(gpus: int) -> int:
        given = options.global_batch or (known and known.global_batch)
        return given or _batch_for(gpus, model.sequence)

    gpus = options.gpus or asked.mesh or (known and known.layout.devices)
    if not gpus:
        gpus = fewest_gpus(
            model, hardware=device, batch_of=batch_of, fixed=fixed, optimizer=optimizer
        )
        chosen.append(f"gpus={gpus}: the smallest power of two that holds it")
    if not (options.global_batch or known):
        chosen.append(f"global_batch={batch_of(gpus)}: about {_STEP_TOKENS / 1e6:g}M tokens a step")
    found = search(
        model, gpus=gpus, global_batch=batch_of(gpus), hardware=device, fixed=fixed,
        scatter_gather=options.scatter_gather, expert_imbalance=asked.imbalance or 1.0,
        optimizer=optimizer,
    )  # fmt: skip
    best = found.best
    chosen.append(_said_layout(found, fixed))
    run = replace(
        start, model=model, layout=best.layout, global_batch=batch_of(gpus), optimizer=optimizer
    )
    plan = make_plan(
        run, target=target, zero=best.zero, scatter_gather=options.scatter_gather,
        expert_imbalance=asked.imbalance or 1.0,
        chosen=tuple(chosen),
    )  # fmt: skip
    return plan, found


def _fixed(asked: _Asked) -> Fixed:
    """What the search may not choose. UserError for a layout field that it does not know."""
    known = [each.name for each in fields(Fixed)]
    for name, value in asked.layout.items():
        if name not in known:
            raise UserError(
                f"layout.{name}={value} is not for a search, which chooses among "
                f"{', '.join(known)}; leave it out, or give the layout: --data, --pipe, --tensor"
            )
    return Fixed(**asked.layout, zero=asked.zero)


def _said_sizes(model: ModelConfig, sizes: dict) -> list[str]:
    open_ones = {
        "heads": model.heads, "sequence": model.sequence, "vocab": model.vocab,
        "ffn": model.ffn_hidden, "compute_dtype": model.compute_dtype,
    }  # fmt: skip
    if hasattr(model, "kv_heads"):
        open_ones["kv_heads"] = model.groups
    said = [f"{name}={value}" for name, value in open_ones.items() if name not in sizes]
    return [f"{', '.join(said)}: not given"] if said else []


def _said_layout(found: Found, fixed: Fixed) -> str:
    given = [f"{each.name}={v}" for each in fields(fixed) if (v := getattr(fixed, each.name))]
    said = f" with {', '.join(given)}" if given else ""
    return (
        f"layout: the fastest of {found.meshes} meshes{said}, by {found.priced:,} predicted times "
        f"and {found.measured:,} memories"
    )


# --- output --------------------------------------------------------------------------------------


def _print(plan: Plan, found: Found | None, options: PlanOptions) -> None:
    numbers, lines = {}, []
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 140)
    if options.json:
        numbers = plan.to_dict(tokens=options.tokens, price_per_gpu_hour=options.price)
    if found:
        changed = changes(
            found.best, plan.run.model, global_batch=plan.run.global_batch,
            hardware=plan.hardware, scatter_gather=plan.scatter_gather,
            expert_imbalance=plan.expert_imbalance, optimizer=plan.run.optimizer,
        )  # fmt: skip
        numbers["search"] = search_numbers(plan, found, changed)
        heading = f"Layouts of {plan.gpus:,} x {plan.hardware.name} that fit, fastest first"
        lines += ranking_lines(found, plan.hardware, heading=heading, width=width)
        lines += ["", *change_lines(found.best, changed, width=width), ""]
    lines += plan_lines(plan, tokens=options.tokens, price=options.price, width=width)
    lines += [f"plan file {options.save}"] * bool(options.save)
    lines += [f"picture {options.draw}"] * bool(options.draw)
    say(numbers, lines, as_json=options.json)


def search_numbers(plan: Plan, found: Found, changed: list[Change]) -> dict:
    """A search, ready for JSON."""
    parts = [each.name for each in fields(Fixed) if each.name != "zero"]

    def numbers(one: Candidate) -> dict:
        return {name: getattr(one.layout, name) for name in parts} | {
            "zero": one.zero, "runs": one.runs, "step_time_s": one.time.step_s,
            "memory_gib": one.memory.total_bytes / 2**30,
        }  # fmt: skip

    ranked = [numbers(one) for one in found.ranked]
    for said, one, after in zip(ranked, found.ranked, found.ranked[1:], strict=False):
        said["beats_next_by"] = reasons(one, after, plan.hardware)
    return {
        "meshes": found.meshes, "priced": found.priced, "measured": found.measured,
        "ranked": ranked,
        "changes": [
            {"change": f"{each.name}={each.value}", "fits": each.fits} | numbers(each.candidate)
            for each in changed
        ],
    }  # fmt: skip
