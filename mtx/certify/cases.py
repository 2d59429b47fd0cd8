"""Cases of a run: its own layout, shrunk, and random ones, except those that `RunConfig` or
`Trainer` refuse."""

from __future__ import annotations

import dataclasses
import random
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mtx.certify.small import LAYERS, SEQUENCE, fits, has, small_layout, small_model, small_run
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.schedules.makers import MAKERS, maker
from mtx.sharding.axes import MESH

ROWS = (8, 12)  # of a global batch
_PER_MODEL = 4  # cases of one model: they share a reference
_TRIES = 2000  # one in ten is possible
# What the first random cases have, one each: chance alone would come to it late.
_FIRST: tuple[Callable[[Layout], bool], ...] = (
    lambda layout: layout.tensor > 1 and not layout.sequence_parallel,
    lambda layout: layout.slices > 1,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on a layout, to be compared with one device."""

    number: int
    run: RunConfig
    why: str = ""  # "the run's own"; "" for a random one
    model: tuple[tuple[str, Any], ...] = ()  # the fields in which its model differs from the run's

    @property
    def said(self) -> str:
        """Its layout, in words."""
        said = features(self.run) | {n: v for n, v in self.model if n != "layers"}
        return ", ".join(f"{name}={value}" for name, value in said.items()) or "one device"


def features(run: RunConfig) -> dict[str, Any]:
    """The fields in which a layout differs from the defaults, sizes of axes first."""
    layout, default = run.layout, Layout()
    found: dict[str, Any] = {a: size for a, size in layout.sizes.items() if size > 1}
    idle = {"attention", *layout.sizes}
    idle |= {"sequence_parallel"} if layout.tensor == 1 else set()
    idle |= {"zero_unit"} if layout.zero == 1 else set()
    idle |= {"context_attention"} if layout.context == 1 else set()
    first = "schedule", "virtual", "slices", "microbatch"
    for name in (*first, *(f.name for f in dataclasses.fields(Layout) if f.name not in first)):
        if name not in idle and getattr(layout, name) != getattr(default, name):
            found[name] = getattr(layout, name)
    return found


def choices() -> dict[str, tuple]:
    """The fields of a layout that are one of a few words or numbers, with these values; without the
    attention kernel, of which CPUs have only one."""
    hints = typing.get_type_hints(Layout)
    few = {n: typing.get_args(h) for n, h in hints.items() if typing.get_origin(h) is Literal}
    few["weave"] = ("auto", "on")  # on CPUs "auto" is "off"
    return {name: values for name, values in few.items() if name != "attention"}


def cases_of(run: RunConfig, *, seed: int, devices: int) -> Iterator[Case]:
    """The run's own layout, if it can be shrunk, and then random ones without end."""
    rng, number, first = random.Random(seed), 0, list(_FIRST)
    for way in ways_to_weave(run):
        own = own_case(way, devices)
        if own is not None:
            number += 1
            yield Case(number=number, run=own, why="the run's own")
    while True:
        changes, rows = random_features(run.model, rng), rng.choice(ROWS)
        wanted = list(first)  # what this model refuses waits for another one
        for _ in range(_PER_MODEL):
            number += 1
            model = small_model(run.model, **changes)
            like = wanted.pop(0) if wanted else None
            made = random_run(run, model, rows, rng, devices, like)
            if like is not None and like(made.layout):
                first.remove(like)
            yield Case(number=number, run=made, model=tuple(changes.items()))


def ways_to_weave(run: RunConfig) -> list[RunConfig]:
    """`run`, and if weave="auto" leaves weaving to the devices (on CPUs it is plain), woven too."""
    layout = run.layout
    is_open = layout.weave == "auto" and layout.weaves
    return [run, *([replace(run, layout=replace(layout, weave="on"))] if is_open else [])]


def own_case(run: RunConfig, devices: int) -> RunConfig | None:
    layout = small_layout(run.layout, devices)
    for layers in LAYERS:
        for rows in ROWS:
            try:
                made = small_run(run, small_model(run.model, layers=layers), layout, rows)
            except UserError:
                continue
            if fits(made):
                return made
    return None


def random_features(model: ModelConfig, rng: random.Random) -> dict[str, Any]:
    """Random changes of some fields of a model of this family; none that the family refuses."""
    options: dict[str, list] = {
        "tied": [True, False], "dropout": [0.0, 0.1], "attention_dropout": [0.0, 0.1],
        # A window of one position leaves queries no gradient except rounding.
        "kv_heads": [1, 2, 4, 8], "window": [2, 5, 12, SEQUENCE], "norm_placement": ["pre", "post"],
        "aux": ["none", "batch", "sequence"], "z_weight": [0.0, 0.01], "capacity": [None, 0.7, 1.1],
        "normalised": [True, False], "second_token": [True, False], "dense_layers": [0, 1, 2],
        "shared_experts": [0, 1, 2],
    }  # fmt: skip
    changes: dict[str, Any] = {}
    for name, values in options.items():
        value = rng.choice(values)
        if has(model, name) and rng.random() < 0.4 and value != getattr(small_model(model), name):
            try:
                small_model(model, **changes, **{name: value}).require_read()
            except UserError:
                continue
            changes[name] = value
    return changes | {"layers": rng.choice(LAYERS)}


def random_run(
    run: RunConfig, model: ModelConfig, rows: int, rng: random.Random, devices: int,
    wanted: Callable[[Layout], bool] | None = None,
) -> RunConfig:  # fmt: skip
    """A random case whose layout is as `wanted` if one of those drawn is; else any."""
    other = None
    for _ in range(_TRIES):
        try:
            layout = random_layout(run.layout, model, rng, devices)
            if other and wanted and not wanted(layout):
                continue
            made = small_run(run, model, layout, rows)
        except UserError:
            continue
        if fits(made):
            if wanted is None or wanted(made.layout):
                return made
            other = other or made
    if other is not None:
        return other
    raise UserError(f"devices={devices} leave no layout to compare; use more")


def random_layout(layout: Layout, model: ModelConfig, rng: random.Random, devices: int) -> Layout:
    """A layout that is random in everything a layout says; UserError if it is impossible."""
    sizes, schedule = _random_sizes(rng, devices, model), rng.choice(list(MAKERS))
    known = maker(schedule)
    virtual = known.virtual or rng.choice([known.default_virtual, 1, 2, 3])
    stages = sizes["pipe"] * virtual
    stage_layers: Any = rng.choice(["even", "even", "balanced", "uneven"]) if stages > 1 else "even"
    if stage_layers == "uneven":
        stage_layers = _uneven(model.layers, stages, rng)
    few = {name: rng.choice(values) for name, values in choices().items()}
    if few["zero"] == 1:
        few["zero_unit"] = "auto"
    if sizes["context"] == 1:
        few["context_attention"] = "auto"
    if model.routed_experts:
        few |= {"expert_tensor": rng.random() < 0.7, "expert_room": rng.choice([0.3, 1.2])}
    else:
        few["expert_dispatch"] = "alltoall"
    return replace(
        layout, **sizes, **few, virtual=virtual, schedule=schedule, attention="blocked",
        slices=rng.choice([1, 2, 4]) if known.sliced else 1, microbatch=rng.choice([1, 1, 2, 3]),
        sequence_parallel=rng.random() < 0.7, stage_layers=stage_layers,
        offload=rng.choice([0.0, 0.0, 0.4, 1.0]),
    )  # fmt: skip


def _random_sizes(rng: random.Random, devices: int, model: ModelConfig) -> dict[str, int]:
    """Sizes of axes whose product is more than one and at most `devices`. If there are experts,
    every other case gives devices to their axis first."""
    axes = [axis for axis in MESH if axis.name != "expert" or model.routed_experts]
    while True:
        sizes, room = {}, devices if rng.random() < 0.8 else max(2, devices // 2)
        order = rng.sample(axes, len(axes))
        if model.routed_experts and rng.random() < 0.5:
            order.sort(key=lambda axis: axis.name != "expert")
        for axis in order:
            sizes[axis.name] = rng.choice([n for n in (1, 2, 2, 3, 4, 8) if n <= room])
            room //= sizes[axis.name]
        if any(size > 1 for size in sizes.values()):
            return sizes


def _uneven(layers: int, stages: int, rng: random.Random) -> tuple[int, ...]:
    counts = [0] * stages
    for _ in range(layers):
        counts[rng.randrange(stages)] += 1
    return tuple(counts)
