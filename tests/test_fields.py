"""The types of fields, whatever a file or a notebook gives for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from mtx.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError
from mtx.fields import settle_types


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
        settle_types(self)


@pytest.mark.parametrize(
    "name, value, settled",
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
def test_what_means_the_same_is_taken(name, value, settled):
    taken = getattr(Config(**{name: value}), name)
    assert taken == settled and type(taken) is type(settled)


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
        (lambda: RunConfig(steps=2**31), "steps=2147483648 must be less than 2"),
        (lambda: RunConfig(steps=6, profile=(100, 200)), "profile=100 200 lies beyond steps=6"),
        (lambda: DataConfig(path=("",)), "data path='' must be a file"),
        (lambda: OptimizerConfig(lr=float("inf")), "lr=inf must be finite"),
        (lambda: OptimizerConfig(warmup_steps=2**40), "warmup_steps=.* must be less than 2"),
        (lambda: ModelConfig(init_std=float("inf")), "init_std=inf must be finite"),
    ],
)
def test_configs_refuse_in_one_line(make, message):
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        make()


def test_one_path_alone_is_a_path():
    assert DataConfig(path="ct").path == ("ct",)
    assert Layout(pipe=2, stage_layers=[3, 5]).stage_layers == (3, 5)
