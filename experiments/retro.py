"""RETRO trained on Python's help pages, and a test that it reads the neighbours it is given.

    python experiments/retro.py

builds a dataset of bytes, finds the neighbours of its chunks, and trains a small RETRO, 200 steps
on one device, and then on 8 virtual ones: data 2 x pipe 2, interleaved, x tensor 2, ZeRO-3, W apart
from B. It prints how far apart the losses are, and the held-out loss with each sample's own
neighbours and with those of other samples. Each page is stored twice, under two names, so that its
continuation can be found; `--copies 1` stores each of them once.

Expected time: three and a half minutes of one core, the dataset's neighbours included.
Expected result: losses within 1e-5 in the first 20 steps; held out 0.73 nats a byte with its own
neighbours, 2.73 with those of others.
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
    family="retro", layers=4, hidden=64, heads=2, sequence=64, chunk=16, neighbours=1, retrieved=32,
    retrieval_first=1, retrieval_every=1, encoder_layers=1, vocab=256, init_std=0.08,
    compute_dtype="float32",
)  # fmt: skip
MANY = Layout(data=2, pipe=2, tensor=2, virtual=2, zero=3, schedule="deferred_zb")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A RETRO on one device and on eight, with its own neighbours and with others'."""

    out: str = "runs/retro"  # text and dataset
    steps: int = 200
    held_out: int = 8  # batches
    copies: int = 2  # of each page


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="retro.py")
    use_virtual_devices(MANY.devices)
    run = RunConfig(
        model=MODEL, data=DataConfig(path=(_dataset(options),), split="90,10"),
        optimizer=OptimizerConfig(lr=5e-3, min_lr=5e-4, warmup_steps=20), global_batch=16,
        steps=options.steps,
    )  # fmt: skip
    corpus = load_data(run)
    print(corpus.describe())
    one, judged = _trained(replace(run, layout=Layout(microbatch=8)), corpus, options)
    many, _ = _trained(replace(run, layout=MANY), corpus, options)
    apart = np.abs(np.array(one) - np.array(many))
    first, most = apart[:20].max(), apart.max()
    print(f"losses     from {one[0]:.4f} to {one[-1]:.4f}")
    print(f"8 devices  at most {first:.1e} apart in the first 20 steps, {most:.1e} in all")
    print("held out   " + ", ".join(f"{loss:.4f} with {what}" for what, loss in judged.items()))
    return 0


def _dataset(options: Options) -> str:
    """A dataset of Python's help pages with its neighbours; files that exist are kept."""
    from pydoc_data.topics import topics

    out = Path(options.out, f"copies_{options.copies}")
    folder, prefix = out / "pages", f"{out}/pages_text_document"
    if not Path(f"{prefix}.idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in topics.items():
            for copy in range(options.copies):
                (folder / f"{copy}_{name}.txt").write_text(text)
        mtx(["data", "build", str(folder), "--out", str(folder)])
    if not Path(f"{prefix}.neighbours.json").exists():
        how = ["--chunk", "16", "--neighbours", "1", "--split", "90,10"]
        mtx(["data", "neighbours", prefix, *how])
    return prefix


def _trained(run: RunConfig, corpus: Any, options: Options) -> tuple[list[float], dict[str, float]]:
    """(the loss of each step, held-out losses with own neighbours and with those of others)"""
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
