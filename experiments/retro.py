"""RETRO on Python's help pages: trained, and asked whether it reads what was found for it.

    python experiments/retro.py

builds a dataset of bytes, finds the neighbours of its chunks, and trains a small RETRO, 200 steps
on one device, and then on 8 virtual ones: data 2 x pipe 2, interleaved, x tensor 2, ZeRO-3, W apart
from B. It prints how far the losses are apart, and the held-out loss with each sample's own
neighbours and with those of other samples.

Expected time: ten minutes on two CPU cores.
RESULT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtx.cli import exit_status, parse
from mtx.cli import main as mtx
from mtx.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data import load_data
from mtx.launch.start import use_virtual_devices

MODEL = ModelConfig(
    family="retro", layers=6, hidden=96, heads=4, sequence=128, chunk=16, retrieved=32,
    retrieval_first=2, retrieval_every=2, encoder_layers=2, vocab=256, compute_dtype="float32",
)  # fmt: skip
MANY = Layout(
    data=2, pipe=2, tensor=2, virtual=2, stage_layers=(1, 2, 2, 1), zero=3, schedule="deferred_zb"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A RETRO on one device and on eight, with its own neighbours and with others'."""

    out: str = "runs/retro"  # text and dataset
    steps: int = 200
    held_out: int = 8  # batches


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="retro.py")
    use_virtual_devices(MANY.devices)
    run = RunConfig(
        model=MODEL, data=DataConfig(path=(_dataset(options.out),), split="90,10"),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, warmup_steps=20), global_batch=16,
        steps=options.steps,
    )  # fmt: skip
    corpus = load_data(run)
    print(corpus.describe())
    one, judged = _trained(replace(run, layout=Layout(microbatch=8)), corpus, options)
    many, _ = _trained(replace(run, layout=MANY), corpus, options)
    apart = np.abs(np.array(one) - np.array(many))
    print(f"losses     from {one[0]:.4f} to {one[-1]:.4f}; on {MANY.devices} devices the first 20 are "
          f"at most {apart[:20].max():.1e} apart, all {apart.max():.1e}")  # fmt: skip
    print("held out   " + ", ".join(f"{loss:.4f} with {what}" for what, loss in judged.items()))
    return 0


def _dataset(out: str) -> str:
    """A dataset of Python's help pages with its neighbours; those that are there are kept."""
    from pydoc_data.topics import topics

    folder, prefix = Path(out, "pages"), str(Path(out, "pages_text_document"))
    if not Path(f"{prefix}.idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in topics.items():
            (folder / f"{name}.txt").write_text(text)
        mtx(["data", "build", str(folder), "--out", str(Path(out, "pages"))])
    if not Path(f"{prefix}.neighbours.json").exists():
        how = ["--chunk", "16", "--split", "90,10"]
        mtx(["data", "neighbours", prefix, *how])
    return prefix


def _trained(run: RunConfig, corpus: Any, options: Options) -> tuple[list[float], dict[str, float]]:
    """(the loss of each step, held-out losses with neighbours of one's own and of others)"""
    from mtx.step.trainer import Trainer

    trainer = Trainer(run)
    state, losses = trainer.init(), []
    for step in range(run.steps):
        batch = corpus.batch(step * run.global_batch, run.global_batch)
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
        if step % 20 == 0:
            print(f"step {step:4}  {losses[-1]:.4f}", flush=True)
    sums = {"its own neighbours": np.zeros(2), "those of other samples": np.zeros(2)}
    for batch in corpus.eval_batches(options.held_out, run.global_batch):
        others = batch | {"neighbours": np.roll(batch["neighbours"], 1, axis=0)}
        for total, some in zip(sums.values(), (batch, others)):
            total += [float(a) for a in trainer.evaluate(state, trainer.place(some))]
    return losses, {what: loss / weight for what, (loss, weight) in sums.items()}


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
