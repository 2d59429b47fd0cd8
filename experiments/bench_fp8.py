"""Training in float8 beside bfloat16: losses step by step, and on other layouts.

    python experiments/bench_fp8.py

trains a small GPT on one device, in bfloat16 and with fp8 as "hybrid" and "e4m3", and "hybrid" by
delayed scaling, from the same parameters with the same batches: text of a random grammar, in which
the next token depends on the two before it. Then a table:

loss      mean of the last tenth of the steps
off by    its relative difference from bfloat16's
held out  the loss of 64 batches that come after those of training
apart     the largest relative difference of one batch's loss with the trained parameters, between
          one device and the other layouts (virtual CPU devices), computed in float32 so that it is
          due to float8 alone

Expected time: ten minutes on two idle cores.
Expected result: within 0.25 % of bfloat16 after 500 steps; layouts within 1e-5.

    python experiments/bench_fp8.py --steps 100 --hidden 64 --layouts 1x1x2
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import bench
import jax
import numpy as np
from rich.table import Table

from mtx.api import init_params
from mtx.cli import exit_status, parse, start_devices
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.step.trainer import Trainer

WAYS: dict[str, dict[str, Any]] = {  # fields of the model
    "off": {},
    "hybrid": {"fp8": "hybrid"},
    "e4m3": {"fp8": "e4m3"},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
}
_HELD_OUT = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains a small GPT in bfloat16 and in float8."""

    steps: int = 500
    layers: int = 4
    hidden: int = 128
    sequence: int = 64
    rows: int = 16  # sequences a step
    lr: float = 1e-3
    layouts: str = "4x1x1,1x1x2,1x2x1,2x2x2"  # data x pipe x tensor
    json: str = ""  # FILE for everything that was measured

    def __post_init__(self):
        if self.steps < 10:
            raise UserError(f"steps={self.steps} must be at least 10")
        self.each_layout()

    def each_layout(self) -> list[Layout]:
        layouts = []
        for name in filter(None, self.layouts.split(",")):
            try:
                data, pipe, tensor = map(int, name.split("x"))
            except ValueError:
                raise UserError(f"layouts: {name!r} must be the like of 1x2x1") from None
            layouts.append(Layout(data=data, pipe=pipe, tensor=tensor, virtual=min(pipe, 2)))
        return layouts

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            layers=self.layers, hidden=self.hidden, heads=4, sequence=self.sequence, vocab=256
        )


def batches(options: Options, count: int):
    """Batches of a grammar: each pair of tokens has eight possible successors, at its own odds."""
    random = np.random.default_rng(0)
    following = random.integers(0, 256, (256, 16, 8))
    odds = random.dirichlet(np.full(8, 0.5), (256, 16)).cumsum(axis=-1)
    for _ in range(count):
        ids = random.integers(0, 256, (options.rows, options.sequence + 1), dtype=np.int32)
        chance = random.random(ids.shape)
        for place in range(2, ids.shape[1]):
            pair = ids[:, place - 1], ids[:, place - 2] % 16
            choice = (odds[pair] < chance[:, place, None]).sum(axis=-1).clip(max=7)
            ids[:, place] = following[(*pair, choice)]
        weights = np.ones((options.rows, options.sequence), np.float32)
        yield {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def train(options: Options, way: str) -> tuple[list[float], Trainer, Any]:
    """(the loss of each step, the trainer, its last state)"""
    run = RunConfig(
        model=replace(options.model, **WAYS[way]), global_batch=options.rows, steps=options.steps,
        layout=Layout(microbatch=options.rows), optimizer=OptimizerConfig(lr=options.lr),
    )  # fmt: skip
    trainer = Trainer(run)
    state = trainer.state_from(init_params(run.model, seed=run.seed))
    losses = []
    for batch in batches(options, options.steps):
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
    return losses, trainer, state


def held_out(options: Options, trainer: Trainer, state: Any) -> float:
    """The mean loss of batches that training has not seen."""
    every = batches(options, options.steps + _HELD_OUT)
    some = itertools.islice(every, options.steps, None)
    sums = [trainer.evaluate(state, trainer.place(batch)) for batch in some]
    total, count = np.sum(sums, axis=0)
    return float(total / count)


def apart(options: Options, trainer: Trainer, state) -> dict[str, float]:
    """The loss of one batch with these parameters, in float32, by layout."""
    params = trainer.to_canonical(jax.device_get(state.params))
    (batch,) = batches(options, 1)
    model, losses = replace(trainer.run.model, compute_dtype="float32"), {}
    for layout in (Layout(), *options.each_layout()):
        other = Trainer(RunConfig(model=model, layout=layout, global_batch=options.rows))
        total, count = other.evaluate(other.state_from(params), other.place(batch))
        name = f"{layout.data}x{layout.pipe}x{layout.tensor}"
        losses[name] = float(total) / float(count)
    return losses


def measure(options: Options, machine: dict) -> dict:
    rows = {}
    with bench.Work(len(WAYS)) as work:
        for way in WAYS:
            work.begin(way)
            losses, trainer, state = train(options, way)
            rows[way] = {
                "losses": losses, "held_out": held_out(options, trainer, state),
                "layouts": apart(options, trainer, state),
            }  # fmt: skip
    return {"options": to_dict(options), "machine": machine, "rows": rows}


def last_loss(row: dict) -> float:
    losses = row["losses"]
    return float(np.mean(losses[-(len(losses) // 10) :]))


def _held_out_of(row: dict) -> float:
    return row["held_out"]


def table_of(result: dict) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for header in ("fp8", "loss", "off by", "held out", "off by", "apart"):
        table.add_column(header, justify="left" if header == "fp8" else "right", no_wrap=True)
    base, base_held_out = (f(result["rows"]["off"]) for f in (last_loss, _held_out_of))
    for name, row in result["rows"].items():
        one, *others = row["layouts"].values()
        most = max((abs(other / one - 1) for other in others), default=0.0)
        loss, later = last_loss(row), _held_out_of(row)
        table.add_row(
            name, f"{loss:.4f}", f"{loss / base - 1:+.3%}", f"{later:.4f}",
            f"{later / base_held_out - 1:+.3%}", f"{most:.1e}",
        )  # fmt: skip
    return table


def title_of(result: dict) -> str:
    o = result["options"]
    return (
        f"{o['steps']} steps of {o['rows']} x {o['sequence']} tokens, GPT of {o['layers']} layers, "
        f"hidden {o['hidden']}: {bench.measured_on(result['machine'])}"
    )


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_fp8.py")
    bench.check_path(options.json)
    machine = bench.describe_machine("jax", "jaxlib")
    start_devices(max([layout.devices for layout in options.each_layout()], default=1))
    result = measure(options, machine)
    bench.print_table(title_of(result), table_of(result), bench.load_notes(machine))
    bench.write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
