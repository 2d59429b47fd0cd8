"""What a certificate says nothing about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mtx.certify.cases import choices
from mtx.certify.certificate import Certificate
from mtx.certify.reference import STEPS
from mtx.certify.small import small_model, small_optimizer
from mtx.certify.ties import NEAR
from mtx.config import RunConfig
from mtx.schedules.makers import MAKERS
from mtx.sharding.axes import MESH

_OF_MODELS = (
    "dropout", "attention_dropout", "kv_heads", "window", "capacity", "z_weight", "aux_weight",
    "balance_rate", "dense_layers", "shared_experts", "second_token",
)  # fmt: skip


def not_covered(made: Certificate) -> list[str]:
    """What is not covered, in plain words, one line each."""
    return list(_lines(made))


def _lines(made: Certificate) -> Iterator[str]:
    run, walked = made.run, made.walked
    if missing := unseen([each.case.run for each in made.compared if not each.undecided]):
        yield f"features that no case had: {', '.join(missing)}"
    model, layout, optimizer = run.model, run.layout, small_optimizer(run.optimizer)
    types = [model.compute_dtype] if model.compute_dtype != "float32" else []
    types += ["float8"] if model.fp8 != "off" else []
    if types:
        yield f"{' and '.join(types)}: cases compute in float32"
    yield "kernels of GPUs, and collectives between machines: cases run on virtual CPU devices"
    yield (
        f"sizes: cases are models of hidden={small_model(model).hidden}, trained for {STEPS} steps"
    )
    yield (
        f"the run's own {run.optimizer.name}: cases train with adamw at other values, "
        f"epsilon={optimizer.epsilon:g}, clip={optimizer.clip:g}, lr={optimizer.lr:g}"
    )
    if layout.schedule_is_file or layout.schedule == "auto":
        yield f"schedule={layout.schedule}: cases have those with names"
    if model.routed_experts:
        yield (
            f"choices of experts between scores that are equal but for rounding, of {NEAR:g}: "
            "batches are drawn that have none"
        )
    yield "what the loader reads, checkpoints, and generating"
    yield (
        "in equations: constant factors, the order of shards along an axis, masks, and which of "
        "the stages is asked: these only cases show"
    )
    if walked.mixed:
        yield (
            f"{walked.mixed} values are taken out of buffers of several kinds, after which their "
            "shards' dims are not known"
        )
    if walked.unknown:
        yield f"primitives without a rule: {', '.join(sorted(walked.unknown))}"
    if walked.untold:
        yield (
            f"{walked.untold} of {walked.outputs} outputs are to be shards, and no more is known "
            "than that they differ"
        )


def unseen(runs: list[RunConfig]) -> list[str]:
    """Features that no case had."""
    wanted: dict[str, Callable[[RunConfig], Any]] = {}
    for axis in MESH:
        wanted[axis.name] = lambda run, a=axis.name: run.layout.sizes[a] > 1
    for name, values in choices().items():
        for value in values:
            if value != "auto":
                wanted[f"{name}={value}"] = lambda run, n=name, v=value: getattr(run.layout, n) == v
    wanted["sequence_parallel=False"] = lambda run: (
        run.layout.tensor > 1 and not run.layout.sequence_parallel
    )
    wanted["slices"] = lambda run: run.layout.slices > 1
    wanted["offload"] = lambda run: run.layout.offload_fraction > 0
    wanted["virtual"] = lambda run: run.layout.virtual > 1
    wanted["uneven stage_layers"] = lambda run: isinstance(run.layout.stage_layers, tuple)
    for name in MAKERS:
        wanted[f"schedule={name}"] = lambda run, n=name: run.layout.schedule == n
    for name in _OF_MODELS:
        if runs and hasattr(runs[0].model, name):
            wanted[name] = lambda run, n=name: bool(getattr(run.model, n))
    if runs and runs[0].model.objective == "next token":
        wanted["tied"] = lambda run: run.model.tied
        wanted["tied=False"] = lambda run: not run.model.tied
    if runs and not runs[0].model.routed_experts:
        wanted = {name: had for name, had in wanted.items() if not name.startswith("expert")}
    elif runs:
        wanted["expert_tensor=False"] = lambda run: not run.layout.expert_tensor
        wanted["expert_room"] = lambda run: run.layout.expert_room < 1
    return [name for name, had in wanted.items() if not any(map(had, runs))]
