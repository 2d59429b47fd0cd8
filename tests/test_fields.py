"""The types of fields, whatever values a file or a notebook gives."""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from mtx.cli.convert import ConvertOptions
from mtx.cli.data import IndexOptions, TokenizerOptions
from mtx.cli.evaluate import EvaluateOptions
from mtx.cli.generate import GenerateOptions
from mtx.cli.plan import PlanOptions
from mtx.cli.schedule import ScheduleOptions
from mtx.cli.train import TrainOptions
from mtx.config import DataConfig, GuardConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.conversion.configs import read_config
from mtx.data.build import build_dataset
from mtx.data.tokenizer import train_bpe, train_wordpiece
from mtx.errors import UserError
from mtx.fields import Between, resolve_types
from mtx.launch.judge import WatchOptions
from mtx.launch.start import use_virtual_devices
from mtx.launch.supervisor import LaunchOptions
from mtx.plan.search import search
from mtx.schedules.makers import make
from mtx.schedules.shape import Shape
from mtx.sharding.axes import AXES
from mtx.train.finetune import Finetuning


@dataclass(frozen=True, kw_only=True)
class Config:
    count: int = 1
    share: float = 0.5
    on: bool = True
    name: str = "a"
    limit: int | None = None
    paths: tuple[str, ...] = ()
    pair: tuple[int, int] = (0, 0)
    level: Literal[1, 3] = 1
    parts: tuple[int, ...] | Literal["even"] = "even"

    def __post_init__(self):
        resolve_types(self)


@pytest.mark.parametrize(
    "name, value, resolved",
    [
        ("count", np.int64(3), 3),
        ("share", 2, 2),
        ("share", np.float32(0.25), 0.25),
        ("on", np.bool_(False), False),
        ("name", Path("a/b"), "a/b"),
        ("limit", None, None),
        ("limit", 4, 4),
        ("paths", "corpus", ("corpus",)),
        ("paths", ["a", Path("b")], ("a", "b")),
        ("pair", [1, 2], (1, 2)),
        ("parts", [1, 1], (1, 1)),
        ("parts", "even", "even"),
    ],
)
def test_what_means_the_same_is_taken(name, value, resolved):
    taken = getattr(Config(**{name: value}), name)
    assert taken == resolved and type(taken) is type(resolved)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("count", 1.5, "a whole number"),
        ("count", True, "a whole number"),
        ("count", "4", "a whole number"),
        ("share", "a", "a number"),
        ("share", True, "a number"),
        ("on", "no", "True or False"),
        ("on", 0, "True or False"),
        ("name", 3, "text"),
        ("limit", "x", "a whole number or None"),
        ("paths", 3, "a list of values, each text"),
        ("paths", [3], "a list of values, each text"),
        ("pair", [1], "a list of 2 values, each a whole number"),
        ("level", "1", "a whole number"),
        ("parts", 2.5, "a list of values, each a whole number or even"),
    ],
)
def test_anything_else_is_refused(name, value, words):
    with pytest.raises(UserError) as caught:
        Config(**{name: value})
    assert str(caught.value) == f"{name}={value!r} must be {words}"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Layout(sequence_parallel="no"), "sequence_parallel='no' must be True or False"),
        (lambda: Layout(schedule=3), "schedule=3 must be text"),
        (lambda: RunConfig(seed=1.5), "seed=1.5 must be a whole number"),
        (lambda: RunConfig(model="gpt"), "model='gpt' must be a ModelConfig"),
        (lambda: RunConfig(out=""), "out='' must be a folder"),
        (lambda: RunConfig(steps=2**31), "steps=2147483648 must be at most 2,147,483,647"),
        (lambda: RunConfig(steps=6, profile=(100, 200)), "profile=100 200 lies beyond steps=6"),
        (lambda: DataConfig(path=("",)), "data path='' must be a file"),
        (lambda: OptimizerConfig(lr=float("inf")), "lr=inf must be finite"),
        (lambda: OptimizerConfig(warmup_steps=2**40), "warmup_steps=.* must be at most"),
        (lambda: ModelConfig(init_std=float("inf")), "init_std=inf must be finite"),
    ],
)
def test_configs_refuse_in_one_line(make, message):
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        make()


def test_one_path_alone_is_a_path():
    assert DataConfig(path="ct").path == ("ct",)
    assert Layout(pipe=2, stage_layers=[3, 5]).stage_layers == (3, 5)


@pytest.mark.parametrize(
    "kind",
    [
        ModelConfig, Layout, OptimizerConfig, DataConfig, GuardConfig, RunConfig, Shape, Finetuning,
        LaunchOptions, WatchOptions, ScheduleOptions, PlanOptions, TrainOptions, GenerateOptions,
        EvaluateOptions, TokenizerOptions, IndexOptions, ConvertOptions,
    ],
)  # fmt: skip
def test_every_number_of_things_has_a_bound_of_its_own(kind):
    """Nothing is made of a number beyond it, so that none can take all memory or time."""

    def bounds(hint) -> list[Between]:
        if isinstance(hint, Between):
            return [hint]
        parts = (*getattr(hint, "__metadata__", ()), *typing.get_args(hint))
        return [found for part in parts for found in bounds(part)]

    def whole(hint) -> bool:
        if hint is int:
            return True
        return typing.get_origin(hint) is not Literal and any(map(whole, typing.get_args(hint)))

    hints = typing.get_type_hints(kind, include_extras=True)
    open_ones = {name for name, hint in hints.items() if whole(hint) and not bounds(hint)}
    assert open_ones == ({"stop_token"} if kind is GenerateOptions else set())
    for hint in hints.values():
        assert all(each.most < 2**32 for each in bounds(hint) if whole(hint))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ModelConfig(layers=10**9), "layers=1000000000 must be at most 16,384"),
        (lambda: ModelConfig(vocab=10**5000), "vocab=a number of thousands of digits must be at"),
        (
            lambda: Layout(data=2**20, tensor=2),
            r"\*".join(AXES) + "=2097152 must be at most",
        ),
        (lambda: Layout(stage_layers=(10**9,)), "stage_layers=1000000000 must be at most"),
        (lambda: RunConfig(global_batch=10**12), "global_batch=1000000000000 must be at most"),
        (lambda: OptimizerConfig(lr=10**400), "lr=.* must be finite"),
        (lambda: OptimizerConfig(lr=float("nan")), "lr=nan must be finite"),
        (lambda: make("1f1b", microbatches=10**9, stages=2), "microbatches=.* must be at most"),
        (lambda: make("1f1b", microbatches=10**6, stages=8), "stages=8 .* is too large a table"),
        (lambda: search(ModelConfig(), gpus=10**18, global_batch=8, hardware=None), "gpus=1000000"),
        (lambda: use_virtual_devices(10**6), "virtual devices=1000000 must be at most 8,192"),
        (lambda: train_bpe([], vocab=10**9), "vocab=1000000000 must be at most 1,048,576"),
        (lambda: train_wordpiece([], vocab=10**9), "vocab=1000000000 must be at most 1,048,576"),
        (lambda: build_dataset([], "x", None, processes=10**9), "processes=1000000000 must be at"),
        (
            lambda: read_config({"model_type": "gpt2", "n_layer": 10**9}, "c"),
            "c: layers=1000000000",
        ),
        (lambda: Layout(schedule="x" * 10**6), r"unknown schedule 'x+\.\.\.x+': known are"),
        (lambda: ModelConfig(layers="9" * 10**6), r"layers='9+\.\.\.9+' must be a whole number"),
    ],
)
def test_sizes_out_of_all_bounds_are_refused_at_once(call, words):
    with pytest.raises(UserError, match=f"^{words}[^\n]*$") as caught:
        call()
    assert len(str(caught.value)) < 400
