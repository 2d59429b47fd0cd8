"""Cases of a run: its own layout, shrunk, and random ones; what cannot be is what `RunConfig` and
`Trainer` refuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mtx.certify.small import LAYERS, SEQUENCE, fits, has, small_layout, small_model, small_run
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.schedules.makers import MAKERS, maker
from mtx.sharding.axes import MESH

ROWS = (8, 12)  # of a global batch
_PER_MODEL = 4  # cases of one model: they share a reference
_TRIES = 2000  # of which hardly one in ten is refused by all


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on a layout, to be held against one device."""

    number: int
    run: RunConfig
    why: str = ""  # "the run's own"; of a random one nothing

    @property
    def said(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in features(self.run).items())


def features(run: RunConfig) -> dict[str, Any]:
    """What a layout has beside the defaults, sizes of axes first, and the random parts of a
    model."""
    layout, default = run.layout, Layout()
    found: dict[str, Any] = {a: size for a, size in layout.sizes.items() if size > 1}
    for name in vars(default).keys() - found.keys() - {"attention"}:
        if name in Layout.__dataclass_fields__ and getattr(layout, name) != getattr(default, name):
            found[name] = getattr(layout, name)
    if layout.sizes.get("tensor", 1) == 1:
        found.pop("sequence_parallel", None)
    if layout.zero != 3:
        found.pop("zero_unit", None)
    return found


def cases_of(run: RunConfig, *, count: int, seed: int, devices: int) -> Iterator[Case]:
    """The run's own, if it can be shrunk so, and `count` in all."""
    rng = random.Random(seed)
    number = 0
    own = own_case(run, devices)
    if own is not None:
        yield Case(number=1, run=own, why="the run's own")
        number = 1
    model, rows = small_model(run.model), ROWS[0]
    while number < count:
        if number % _PER_MODEL == 1:
            model, rows = random_model(run.model, rng), rng.choice(ROWS)
        number += 1
        yield Case(number=number, run=random_run(run, model, rows, rng, devices))


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


def random_model(model: ModelConfig, rng: random.Random) -> ModelConfig:
    """With other features of its family, now and then."""
    changes: dict[str, Any] = {"layers": rng.choice(LAYERS)}
    options: dict[str, list] = {
        "tied": [True, False], "dropout": [0.0, 0.1], "attention_dropout": [0.0, 0.1],
        "kv_heads": [1, 2, 4, 8], "window": [1, 5, 12, SEQUENCE], "norm_placement": ["pre", "post"],
    }  # fmt: skip
    for name, values in options.items():
        if has(model, name) and rng.random() < 0.4:
            changes[name] = rng.choice(values)
    try:
        return small_model(model, **changes)
    except UserError:  # a family may refuse one
        return small_model(model, layers=changes["layers"])


def random_run(
    run: RunConfig, model: ModelConfig, rows: int, rng: random.Random, devices: int
) -> RunConfig:
    for _ in range(_TRIES):
        try:
            made = small_run(run, model, random_layout(model, rng, devices), rows)
        except UserError:
            continue
        if fits(made):
            return made
    raise UserError(f"devices={devices} leave no layout to compare; use more")


def random_layout(model: ModelConfig, rng: random.Random, devices: int) -> Layout:
    """May be one that cannot be."""
    sizes = _random_sizes(rng, devices)
    schedule = rng.choice(list(MAKERS))
    known = maker(schedule)
    virtual = known.virtual or rng.choice([known.default_virtual, 1, 2, 3])
    slices = rng.choice([1, 2, 4]) if known.sliced else 1
    stage_layers: Any = rng.choice(["even", "even", "balanced", "uneven"])
    if stage_layers == "uneven":
        stage_layers = _uneven(model.layers, sizes.get("pipe", 1) * virtual, rng)
    zero = rng.choice([1, 1, 3])
    layout = Layout(
        **sizes, virtual=virtual, slices=slices, schedule=schedule, zero=zero,
        microbatch=rng.choice([1, 1, 2, 3]), sequence_parallel=rng.random() < 0.7,
        idle=rng.choice(["skip", "phases"]), stash=rng.choice(["residuals", "residuals", "inputs"]),
        recompute=rng.choice(["none", "selective", "full"]), attention="blocked",
        zero_unit=rng.choice(["layer", "chunk"]) if zero == 3 else "auto",
        stage_layers=stage_layers,
    )  # fmt: skip
    if layout.idle == "phases" and rng.random() < 0.4:
        return replace(layout, weave="on")
    return layout


def _random_sizes(rng: random.Random, devices: int) -> dict[str, int]:
    """Axes whose product is at most the devices, and more than one."""
    while True:
        sizes, room = {}, devices if rng.random() < 0.8 else max(2, devices // 2)
        for axis in rng.sample(MESH, len(MESH)):
            sizes[axis.name] = rng.choice([n for n in (1, 2, 2, 3, 4, 8) if n <= room])
            room //= sizes[axis.name]
        if any(size > 1 for size in sizes.values()):
            return sizes


def _uneven(layers: int, stages: int, rng: random.Random) -> tuple[int, ...]:
    counts = [0] * stages
    for _ in range(layers):
        counts[rng.randrange(stages)] += 1
    return tuple(counts)
