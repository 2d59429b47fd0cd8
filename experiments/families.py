"""A Mamba-2 hybrid, a T5 and a LLaVA: 200 steps on eight virtual devices, and the same on one.

    python experiments/families.py

trains each of them twice, from the same seed and on the same batches: Python's help pages, a byte a
token, and drawn shapes with captions. The eight devices are data 2 x pipe 2, interleaved, x tensor
2, with layers divided by their cost. Then a table, one row per model:

loss          of the first and of the last step's batch, on eight devices
apart, 20     the largest relative difference of a loss between the two runs in the first 20 steps
apart, all    the same in all steps: rounding grows as in any training, faster at high rates
held out      after the last step, on eight devices and on one

Expected time: seven minutes of one core; `--only t5` runs the models with that in their name.
Expected result: less than 1e-6 apart in the first 20 steps, for the hybrid and the T5 in all steps,
and the same held-out losses: 1.8604, 4.3179 and 0.0612.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from table1 import columns

from mtx.cli import exit_status, parse
from mtx.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data import load_data
from mtx.errors import UserError
from mtx.launch.start import use_virtual_devices
from mtx.presets import preset

MANY = Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=2, stage_layers="balanced")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains models of several kinds of layers on eight virtual devices and on one."""

    only: str = ""  # models whose name contains this
    steps: int = 200

    def __post_init__(self):
        if self.steps < 20:
            raise UserError(f"steps={self.steps} must be at least 20")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's losses, and its held-out loss."""

    losses: np.ndarray
    held_out: float


def runs() -> dict[str, RunConfig]:
    """The runs by the names of their models."""
    text = RunConfig(
        model=ModelConfig(
            family="nemotron_h", layers=6, pattern="M-M*M-", hidden=64, heads=4, kv_heads=2,
            sequence=64, ssm_heads=8, ssm_head_dim=16, ssm_state=16, ssm_groups=2, ssm_chunk=16,
            init_std=0.08, compute_dtype="float32",
        ),
        layout=MANY, data=DataConfig(tokenizer="bytes"), global_batch=16, eval_batches=8,
        optimizer=OptimizerConfig(lr=2e-3, min_lr=2e-4, warmup_steps=20),
    )  # fmt: skip
    t5 = ModelConfig(
        family="t5", layers=4, hidden=64, heads=4, ffn=256, sequence=32, encoder_sequence=96,
        vocab=384, compute_dtype="float32",
    )  # fmt: skip
    slow = OptimizerConfig(lr=5e-4, min_lr=5e-5, warmup_steps=20)  # T5's scores are not scaled
    return {
        "Mamba-2 hybrid": text, "T5": replace(text, model=t5, optimizer=slow),
        "LLaVA": preset("miniature-llava"),
    }  # fmt: skip


def train(run: RunConfig) -> Trained:
    from mtx.step.trainer import Trainer

    trainer, corpus, losses = Trainer(run), load_data(run), []
    state = trainer.init()
    for step in range(run.steps):
        batch = corpus.batch(step * run.global_batch, run.global_batch)
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
        if step % 20 == 0:
            print(f"step {step:4}  {losses[-1]:.4f}", flush=True)
    total = np.zeros(2)
    for batch in corpus.eval_batches(run.eval_batches, run.global_batch):
        total += [float(a) for a in trainer.evaluate(state, trainer.place(batch))]
    return Trained(losses=np.array(losses), held_out=total[0] / total[1])


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="families.py")
    use_virtual_devices(MANY.devices)
    found = {name: run for name, run in runs().items() if options.only.lower() in name.lower()}
    if not found:
        raise UserError(f"no model's name contains {options.only!r}; there are {', '.join(runs())}")
    table = columns("", "loss", "apart, 20", "apart, all", "held out", left=1)
    for name, run in found.items():
        run = replace(run, steps=options.steps)
        print(f"{name}, {run.layout.mesh_text}, then one device")
        many = train(run)
        one = train(replace(run, layout=Layout(microbatch=run.global_batch)))
        apart = np.abs(many.losses / one.losses - 1)
        table.add_row(
            name, f"{many.losses[0]:.4f} to {many.losses[-1]:.4f}", f"{apart[:20].max():.1e}",
            f"{apart.max():.1e}", f"{many.held_out:.4f}, {one.held_out:.4f}",
        )  # fmt: skip
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
