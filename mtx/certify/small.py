"""A run shrunk to a size that a laptop computes in a moment, with all its features.

Models keep their family and their components; sizes become the smallest that still tell things
apart: several heads on every shard, rows of the vocabulary that are padding, a window shorter than
the sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError
from mtx.schedules.makers import maker
from mtx.sharding.axes import AXES, MESH

HEADS, SEQUENCE = 8, 32
LAYERS = (4, 8)  # a case has one of these
# Fields of a model that are sizes, and what they become; those that a family lacks are left out.
_SIZES: dict[str, Any] = {
    "hidden": 32, "heads": HEADS, "sequence": SEQUENCE, "vocab": 61, "vocab_multiple": 4,
    "ffn_multiple": 2, "init_std": 0.1, "compute_dtype": "float32",
}  # fmt: skip
_WHERE_GIVEN: dict[str, Any] = {
    "ffn": 48, "head_dim": 6, "window": 12, "score_scale": 6.0, "rotary_original": 8,
    "attention_scale": 0.4, "logit_divisor": 2.0,
    "experts": 8, "choices": 3, "expert_ffn": 16, "groups_of_experts": 4, "top_groups": 2,
    "dense_layers": 1, "latent": 10, "query_latent": 14, "plain_size": 6, "turned_size": 4,
    "value_dim": 8, "aux_weight": 0.1, "z_weight": 0.01, "balance_rate": 0.05,
    "ssm_heads": HEADS, "ssm_head_dim": 8, "ssm_state": 6, "ssm_chunk": 5,
    "encoder_layers": 2, "encoder_sequence": 24, "encoder_hidden": 24, "encoder_heads": HEADS,
    "encoder_head_dim": 6, "encoder_ffn": 40, "chunk": 8, "retrieved": 12,
    "buckets": 8, "farthest": 12,
    "vision_layers": 2, "vision_hidden": 32, "vision_heads": HEADS, "vision_ffn": 40,
    "image_size": 12, "patch_size": 4, "image_token": 60,
}  # fmt: skip


def has(model: ModelConfig, field: str) -> bool:
    return any(each.name == field for each in dataclasses.fields(model))


def small_model(model: ModelConfig, **changes: Any) -> ModelConfig:
    """The model, shrunk. changes: fields with other values; those that it lacks are left out."""
    sizes = dict(_SIZES, layers=LAYERS[0])
    given = (name for name in _WHERE_GIVEN if has(model, name) and getattr(model, name))
    sizes |= {name: _WHERE_GIVEN[name] for name in given}
    if getattr(model, "kv_heads", None):
        sizes["kv_heads"] = max(1, HEADS * model.groups // model.heads)
    if getattr(model, "ssm_groups", 1) > 1:
        sizes["ssm_groups"] = 2  # of several heads each: with one the norm removes D
    if has(model, "retrieval_first"):
        sizes |= {"retrieval_first": 2, "retrieval_every": 2}
    if pattern := getattr(model, "pattern", None):
        sizes["pattern"] = "".join(dict.fromkeys(pattern))  # a layer of each kind
    sizes |= {name: value for name, value in changes.items() if has(model, name)}
    return replace(model.without_fp8(), **sizes)


def small_optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    """AdamW whose first steps are as long as its rate, with a clip that is less than the norm.

    Nobody trains with its epsilon, but 1e-8 would turn gradients that are zero except for rounding
    into updates as long as all others, of either sign. Optimizers that only look at signs cannot be
    compared at all, so AdamW stands for every optimizer: each is a function of single elements.
    """
    clip = min(optimizer.clip, 0.5)
    return OptimizerConfig(
        lr=1e-3, rate="constant", epsilon=1e-3, clip=clip, weight_decay=optimizer.weight_decay
    )


def small_layout(layout: Layout, devices: int) -> Layout:
    """The run's own layout with two devices on every axis that it uses, one if that is too many."""
    sizes, room = dict.fromkeys(AXES, 1), devices
    for axis in _by_weight(layout):
        if room >= 2:
            sizes[axis], room = 2, room // 2
    virtual = min(layout.virtual, 2)
    schedule = layout.schedule
    if layout.schedule_is_file or schedule == "auto":
        schedule = "1f1b"
    elif (only := maker(schedule).virtual) is not None:
        virtual = only
    uneven = isinstance(layout.stage_layers, tuple) and layout.pipe > 1
    return replace(
        layout, **sizes, virtual=virtual, microbatch=min(layout.microbatch, 2),
        slices=min(layout.slices, 2), schedule=schedule, attention="blocked",
        stage_layers="balanced" if uneven else
        "even" if isinstance(layout.stage_layers, tuple) else layout.stage_layers,
    )  # fmt: skip


def _by_weight(layout: Layout) -> list[str]:
    """The axes with more than one device, first one for each thing that is split."""
    seen: set[str] = set()
    first, others = [], []
    for axis in MESH:
        if layout.sizes[axis.name] > 1:
            (others if axis.splits in seen else first).append(axis.name)
            seen.add(axis.splits)
    return first + others


def small_run(run: RunConfig, model: ModelConfig, layout: Layout, global_batch: int) -> RunConfig:
    """The small run; UserError if the layout does not fit the model."""
    return RunConfig(
        model=model, layout=layout, optimizer=small_optimizer(run.optimizer), guard=run.guard,
        global_batch=global_batch, seed=run.seed, steps=100,
    )  # fmt: skip


def fits(run: RunConfig) -> bool:
    """Whether the run has a schedule as well."""
    from mtx.step.trainer import Trainer

    layout = run.layout
    if layout.context > 1 and layout.context_attention == "auto":
        # Whichever way is the fastest, everything else is as with this one, and choosing would
        # trace every layer for each of them.
        run = replace(run, layout=replace(layout, context_attention="gather"))
    try:
        Trainer(run).pipeline  # noqa: B018
    except UserError:
        return False
    return True
