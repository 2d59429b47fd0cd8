"""A plan: a run on a target, with its predicted time and memory; and plan files, which keep one.

A plan file (.toml or .json) is a run's config and a table `plan` with the target and what was
predicted. `mtx plan` writes and reads it, `mtx train` and experiments/ read the run in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtx.config import RunConfig, from_dict, to_dict
from mtx.errors import UserError, require_kind
from mtx.fields import checked
from mtx.files import read_json, read_toml
from mtx.paths import user_path
from mtx.plan import flops
from mtx.plan.choose import resolve, with_zero
from mtx.plan.compiled import Compiled
from mtx.plan.differences import differences
from mtx.plan.experts import check_imbalance
from mtx.plan.hardware import DEFAULT, Hardware, load_hardware
from mtx.plan.memory import Memory, Zero, predict_memory
from mtx.plan.mix import Room
from mtx.plan.page import rows_html
from mtx.plan.priced import GIB, PricedRun
from mtx.plan.published import published_throughput
from mtx.plan.summary import plan_rows
from mtx.plan.time import StepTime, predict_step
from mtx.plan.woven import choose_weave
from mtx.presets import brings_data

_PLAN_SUFFIXES = (".toml", ".json")
_TOKENS = 300e9  # GPT-3's training, and SC'21's example for equation (4)


@dataclass(frozen=True, kw_only=True)
class Plan(PricedRun):
    """A run on a target: what it needs and how fast it will be, as JSON and for a notebook."""

    def to_dict(
        self, *, tokens: float | None = None, price_per_gpu_hour: float | None = None
    ) -> dict[str, Any]:
        """Every number, with its unit in its name, ready for JSON."""
        numbers = {
            "target": self.target,
            "gpus": self.gpus,
            **_run_numbers(self),
            **_speed_numbers(self),
            **_memory_numbers(self),
            "days_per_300b_tokens": self.days(_TOKENS),
            "chosen": list(self.chosen),
        }
        if tokens is not None:
            numbers |= {
                "tokens": tokens, "days": self.days(tokens), "gpu_hours": self.gpu_hours(tokens)
            }  # fmt: skip
        if price_per_gpu_hour is not None:
            spent = self.gpu_hours(tokens or _TOKENS) * price_per_gpu_hour
            numbers |= {"price_per_gpu_hour": price_per_gpu_hour, "cost": spent}
        if row := published_throughput(self.run):
            numbers["published"] = dataclasses.asdict(row)
        if self.compiled:
            numbers |= _compiled_numbers(self.compiled)
            numbers["closed_form_and_timeline"] = [
                row._asdict() | {"why": row.why} for row in differences(self)
            ]
        return numbers

    def _repr_html_(self) -> str:
        return rows_html(plan_rows(self))


def make_plan(
    run: RunConfig, *, target: str | Hardware = DEFAULT, zero: Zero | None = None,
    scatter_gather: bool = True, expert_imbalance: float = 1.0,
    chosen: tuple[str, ...] = (), compiled: Compiled | None = None,
) -> Plan:  # fmt: skip
    """The plan of `run` on `target`: hardware, its name in `mtx.plan.hardware`, or a TOML file.

    zero: by default the layout's; another value replaces it, and 0 is only priced.
    expert_imbalance: tokens of the fullest expert over the mean, as in the log. chosen: choices
    that nobody asked for, to be reported; for schedule="auto" the plan itself reports what was
    chosen and why.
    """
    require_kind("run", run, RunConfig, "a RunConfig, such as mtx.preset('miniature')")
    zero = run.layout.zero if zero is None else zero
    if zero not in (0, 1, 3):
        raise UserError(f"zero={zero} must be 0 (nothing), 1 (optimizer) or 3 (parameters too)")
    device = target if isinstance(target, Hardware) else load_hardware(target)
    name = target if isinstance(target, str) else target.name
    device.check(run.model)  # if there is no such unit, say so first
    check_imbalance(run.model, expert_imbalance)
    asked = with_zero(run.layout, zero)
    layout, why = resolve(asked, run.model, run.global_batch)
    room = Room(
        model=run.model, global_batch=run.global_batch, hardware=device, zero=zero,
        optimizer=run.optimizer,
    )  # fmt: skip
    layout, how_much = room.resolve(replace(layout, context_attention=asked.context_attention))
    layout, whether = choose_weave(
        replace(run, layout=layout), device, zero=zero, scatter_gather=scatter_gather,
        expert_imbalance=expert_imbalance,
    )  # fmt: skip
    run = replace(run, layout=layout)
    model, batch = run.model, run.global_batch
    return Plan(
        run=run, target=name, hardware=device, zero=zero, scatter_gather=scatter_gather,
        expert_imbalance=expert_imbalance,
        time=predict_step(
            model, layout, batch, device, zero=zero, scatter_gather=scatter_gather,
            expert_imbalance=expert_imbalance,
        ),
        memory=predict_memory(
            model, layout, batch, backend=device.backend, zero=zero, optimizer=run.optimizer
        ),
        chosen=(*chosen, *filter(None, (why, *how_much, whether))), compiled=compiled,
    )  # fmt: skip


# --- numbers --------------------------------------------------------------------------------------


def _run_numbers(plan: Plan) -> dict:
    run = plan.run
    experts = {
        "expert_imbalance": plan.expert_imbalance, "expert_later_rounds": plan.later_rounds
    }  # fmt: skip
    return {
        "model": to_dict(run.model),
        "layout": to_dict(run.layout),
        "zero": plan.zero,
        "scatter_gather": plan.scatter_gather,
        **(experts if run.model.routed_experts else {}),
        "global_batch": run.global_batch,
        "microbatches": run.microbatches,
        "tokens_per_step": plan.tokens_per_step,
        "parameters": flops.parameters(run.model),
        "parameters_by_part": flops.parameters_by_part(run.model),
    }


def _speed_numbers(plan: Plan) -> dict:
    run = plan.run
    executed = flops.hardware_matmul_flops(
        run.model, run.layout, run.global_batch, backend=plan.hardware.backend
    )
    return {
        "software": plan.calibration.software.name,
        "step_time_s": plan.time.step_s,
        "step_time_parts_s": {
            each.name.removesuffix("_s"): getattr(plan.time, each.name) for each in fields(StepTime)
        },
        "sequences_per_s": plan.sequences_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "tflops_per_gpu_sc21": plan.tflops_per_gpu_sc21,
        "tflops_per_gpu_model": plan.tflops_per_gpu_model,
        "mfu": plan.mfu,
        "bubble_over_ideal": plan.bubble_over_ideal,
        "step_flops_sc21": flops.sc21_flops(run.model, run.global_batch),
        "step_flops_model": flops.model_flops(run.model, run.global_batch),
        "step_flops_hardware": executed,
        "forward_flops_by_part": flops.forward_flops(
            run.model, run.global_batch, causal=True
        ).by_part,
    }


def _memory_numbers(plan: Plan) -> dict:
    return {
        "memory_gib": plan.memory.total_bytes / GIB,
        "memory_parts_gib": {
            each.name.removesuffix("_bytes"): getattr(plan.memory, each.name) / GIB
            for each in fields(Memory)
        },
        "device_memory_gib": plan.hardware.memory_gib,
        "memory_share": plan.memory_share,
        "fits": plan.fits,
        "xla_python_client_mem_fraction": plan.memory_fraction,
    }


def _compiled_numbers(compiled: Compiled) -> dict:
    return {
        "compiled_memory_gib": compiled.total_bytes / GIB,
        "compiled_tflop": compiled.matmul_flops / 1e12,
        "formula_tflop": compiled.formula_flops / 1e12,
        "collectives": [dataclasses.asdict(row) for row in compiled.collectives],
        "compiled": compiled.to_dict(),
    }


# --- files ----------------------------------------------------------------------------------------


def is_plan_file(name: str) -> bool:
    """Whether a command's NAME is a plan file and not a preset: it ends with .toml or .json."""
    return Path(name).suffix.lower() in _PLAN_SUFFIXES


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, TOML or JSON by its suffix. UserError if it cannot be written.

    Nothing is written about the data if the run names none (`mtx.presets.brings_data`): they are
    not the plan's to choose, and `mtx train` asks for them.
    """
    _check_plan_suffix(path)
    if load_hardware(plan.target) != plan.hardware:
        raise UserError(
            f"target={plan.target} names other hardware; make the plan of its TOML file"
        )
    described = to_dict(plan.run) | {
        "plan": {
            "target": plan.target,
            "zero": plan.zero,
            "scatter_gather": plan.scatter_gather,
            "expert_imbalance": plan.expert_imbalance,
            "predicted": {
                "step_time_s": plan.time.step_s,
                "memory_gib": plan.memory.total_bytes / GIB,
                "tflops_per_gpu_sc21": plan.tflops_per_gpu_sc21,
            },
        }
    }
    if not brings_data(plan.run):
        del described["data"]
    toml = Path(path).suffix.lower() == ".toml"
    text = to_toml(described) if toml else json.dumps(described, indent=1) + "\n"
    try:
        user_path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def load_plan(path: str | Path) -> Plan:
    """The plan in a file of `save_plan`, priced anew. UserError if it cannot be read."""
    run, options = _read(path)
    try:
        return make_plan(
            run, target=options.get("target", DEFAULT), zero=options.get("zero"),
            scatter_gather=options.get("scatter_gather", True),
            expert_imbalance=options.get("expert_imbalance", 1.0),
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load_run(path: str | Path) -> RunConfig:
    """The run in a plan file, ready to train. UserError if it cannot be read, or is only priced."""
    run, options = _read(path)
    if options.get("zero", run.layout.zero) != run.layout.zero:
        raise UserError(
            f"{path}: zero={options['zero']} is priced, not trained; plan it again with --zero 1"
        )
    return run


def _read(path: str | Path) -> tuple[RunConfig, Mapping]:
    _check_plan_suffix(path)
    read = read_toml if Path(path).suffix.lower() == ".toml" else read_json
    values = read(path, "plan file")
    if not isinstance(values, dict) or not isinstance(values.get("plan", {}), dict):
        raise UserError(f"{path} must be a plan file; `mtx plan PRESET --save FILE` writes one")
    options = values.pop("plan", {})
    try:
        kinds = (("target", str), ("scatter_gather", bool), ("expert_imbalance", float))
        for name, kind in kinds:
            if name in options:
                checked(name, options[name], kind)
        return from_dict(RunConfig, values), options
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_plan_suffix(path: str | Path) -> None:
    if not is_plan_file(str(path)):
        raise UserError(f"plan file {str(path)!r} must end with one of {', '.join(_PLAN_SUFFIXES)}")


def to_toml(values: Mapping, prefix: str = "") -> str:
    """Nested mappings as TOML: numbers, strings, truth values and lists of them. None is left out,
    as TOML has nothing for it."""
    lines = [
        f"{_toml_key(key)} = {_toml_value(value)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    text = "".join(line + "\n" for line in lines)
    for key, value in values.items():
        if isinstance(value, Mapping):
            name = prefix + _toml_key(key)
            text += f"\n[{name}]\n{to_toml(value, name + '.')}"
    return text


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml_text(key)


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)  # whole numbers and floats are written as Python writes them
