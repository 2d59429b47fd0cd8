"""Everything that defines a run. No JAX.

The model decides the values, `Layout` only how they are computed: the same model, seed and global
batch give the same losses and parameters on every layout, to rounding. Configs are validated once,
at construction, and every error names a remedy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from mtx.config.data import OF_OBJECTIVES, DataConfig
from mtx.config.layout import Layout
from mtx.config.optimizer import OptimizerConfig
from mtx.errors import UserError, shown, unknown_name
from mtx.families import ModelConfig, family_module
from mtx.fields import Between, resolve_types
from mtx.sizes import Interval, NotNegative, Seed, Sequences, Step

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RUN_FILE = "run.json"  # a run's config, in its `out`


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Checks for numbers that go wrong, and how often a run may roll back because of them."""

    spike_nats: NotNegative = 0.0  # roll back if the loss is this far above the usual; 0: off
    spike_window: Annotated[int, Between(1, 10_000)] = 50  # window of steps for the usual loss
    compare_every: Interval = 200  # steps between comparisons of the replicas' states; 0: never
    checksums: bool = False  # check masters and moments by checksum from each step to the next
    rollbacks: Interval = 3  # roll back at most this often in one session
    most_skipped: Step = 50  # end the run after this many steps in a row without finite gradients

    def __post_init__(self):
        resolve_types(self)


Track = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run; written next to each checkpoint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    global_batch: Sequences = 16  # sequences a step, over all replicas
    steps: Step = 100  # optimizer steps, counted from the run's beginning
    seed: Seed = 0  # seed for initial values and dropout
    out: str = "runs/mtx"  # folder for the log, config and checkpoints
    eval_every: Interval = 50  # steps between evaluations; 0: only at the end
    eval_batches: Step = 4  # global batches of held-out text per evaluation
    save_every: Interval = 0  # steps between checkpoints; 0: only at the end
    keep: Step = 2  # how many of the newest checkpoints are kept
    keep_every: Interval = 0  # also keep checkpoints at multiples of this many steps; 0: none
    resume: bool = True  # continue from the newest checkpoint in `out`, if there is one
    track: tuple[Track, ...] = ()  # trackers that record each step, besides log.jsonl
    profile: tuple[Interval, Interval] = (0, 0)  # first and last step of a profile; 0 0: none

    def __post_init__(self):
        resolve_types(self)
        if not self.out:
            raise UserError("out='' must be a folder; '.' is this one")
        first, last = self.profile
        if (first, last) != (0, 0) and not 1 <= first <= last:
            raise UserError(
                f"profile={first} {last} must be a first step of at least 1 and a last one from "
                "there on; 0 0 turns it off"
            )
        if first > self.steps:
            raise UserError(f"profile={first} {last} lies beyond steps={self.steps}")
        self.layout.check(self.model)
        self.layout.microbatches(self.global_batch)
        self._check_data()

    def _check_data(self) -> None:
        data, family, objective = self.data, self.model.family, self.model.objective
        if data.packed and objective != "next token":
            what = "pairs" if objective == "masked tokens" else objective
            raise UserError(f"data packed=True is not for family={family!r}, of {what}")
        if data.packed and self.model.reads_images:
            raise UserError(f"data packed=True is not for family={family!r}, of images")
        if data.tokenizer == "wordpiece" and objective != "masked tokens":
            raise UserError(
                f"data tokenizer='wordpiece' is not for family={family!r}; use bytes or bpe"
            )
        for each in dataclasses.fields(DataConfig):
            value, objectives = getattr(data, each.name), OF_OBJECTIVES.get(each.name, ())
            if objectives and objective not in objectives and value != each.default:
                raise UserError(
                    f"data {each.name}={value} is for models of {' or '.join(objectives)}, not for "
                    f"family={family!r}; leave it out"
                )

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)


def to_dict(config: DataclassInstance) -> dict:
    """A config as plain nested dicts and lists, as JSON reads them back."""
    return _as_lists(dataclasses.asdict(config))


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_lists(each) for name, each in value.items()}
    return [_as_lists(each) for each in value] if isinstance(value, list | tuple) else value


_PARTS = {
    "model": ModelConfig, "layout": Layout, "optimizer": OptimizerConfig, "data": DataConfig,
    "guard": GuardConfig,
}  # fmt: skip


T = TypeVar("T")


def from_dict(kind: type[T], values: dict) -> T:
    """The inverse of `to_dict`; an unknown name is a UserError that names the nearest one."""
    made: Any = kind
    if made is ModelConfig:
        made = family_module(values.get("family", ModelConfig.family)).CONFIG
    known = {f.name: f for f in dataclasses.fields(made)}
    for name in values:
        if name not in known:
            raise unknown_name(f"{made.__name__} field", name, known)
    parts, read = _PARTS if kind is RunConfig else {}, {}
    for name, value in values.items():
        if name in parts:
            if not isinstance(value, dict):
                fields = parts[name].__name__
                raise UserError(f"{name}={shown(value)} must be a table of {fields} fields")
            value = from_dict(parts[name], value)
        read[name] = tuple(value) if isinstance(value, list) else value
    return made(**read)


_ONCE_SHARED = {
    "kv_heads", "rotary_base", "rotary_scaling", "rotary_factor", "rotary_low", "rotary_high",
    "rotary_original", "norm_placement", "gelu",
}  # fmt: skip


def own_fields(model: dict) -> dict:
    """A model's fields as saved when all families shared one config, without other families'."""
    config = family_module(model.get("family", ModelConfig.family)).CONFIG
    others = _ONCE_SHARED - {each.name for each in dataclasses.fields(config)}
    return {name: value for name, value in model.items() if name not in others}
