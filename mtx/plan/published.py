"""What SC'21 published, as data: throughputs of table 1, training times, and the bubble.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC'21 (arXiv 2104.04473v5). A100-SXM4-80GB, fp16, full recomputation, end to end.
Models and layouts of table 1 are those of `mtx.presets`. TeraFLOP/s are in the unit of
`mtx.plan.flops.sc21_flops`. `experiments/published_runs.py` has all single runs, those of the
figures too, next to their predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtx.config import Layout, RunConfig
from mtx.presets import preset


@dataclass(frozen=True)
class Throughput:
    """One row of table 1."""

    preset: str
    parameters_billion: float
    tflops_per_gpu: float
    percent_of_peak: float  # of 312 teraFLOP/s
    aggregate_pflops: float


@dataclass(frozen=True)
class TrainingTime:
    """An end-to-end training time of section 5.1, by equation (4)."""

    preset: str  # the model; the GPUs are those below
    parameters: float
    gpus: int
    tokens: float
    tflops_per_gpu: float
    days: int


TABLE_1 = (
    Throughput("gpt-1.7b", 1.7, 137, 44, 4.4),
    Throughput("gpt-3.6b", 3.6, 138, 44, 8.8),
    Throughput("gpt-7.5b", 7.5, 142, 46, 18.2),
    Throughput("gpt-18b", 18.4, 135, 43, 34.6),
    Throughput("gpt-39b", 39.1, 138, 44, 70.8),
    Throughput("gpt-76b", 76.1, 140, 45, 143.8),
    Throughput("gpt-145b", 145.6, 148, 47, 227.1),
    Throughput("gpt-310b", 310.1, 155, 50, 297.4),
    Throughput("gpt-530b", 529.6, 163, 52, 410.2),
    Throughput("gpt-1t", 1008.0, 163, 52, 502.0),
)
TRAINING_TIMES = (
    TrainingTime("gpt-175b", 175e9, 1024, tokens=300e9, tflops_per_gpu=140, days=34),
    TrainingTime("gpt-1t", 1008e9, 3072, tokens=450e9, tflops_per_gpu=163, days=84),
)


def bubble(layout: Layout, microbatches: int) -> float:
    """Idle time over ideal time (not over wall time): (p - 1) / (v m), section 2.2.

    The same for GPipe, 1F1B (v = 1) and interleaved 1F1B.
    """
    return (layout.pipe - 1) / (layout.virtual * microbatches)


def published_throughput(run: RunConfig) -> Throughput | None:
    """The row of table 1 that is this run: its model, GPUs, layout and batch; or None."""
    for row in TABLE_1:
        if _what_decides_speed(run) == _what_decides_speed(preset(row.preset)):
            return row
    return None


def published_training_time(run: RunConfig) -> TrainingTime | None:
    """The training time that the paper gives for this run, or None."""
    throughput = published_throughput(run)
    for time in TRAINING_TIMES:
        if throughput and time.preset == throughput.preset:
            return time
    return None


def _what_decides_speed(run: RunConfig) -> tuple:
    """What a row of table 1 says about a run; the rest, such as recomputation, is the paper's
    own."""
    model, layout = run.model, run.layout
    return (
        (model.family, model.layers, model.hidden, model.heads),
        (model.sequence, model.vocab, model.ffn_hidden),
        (layout.data, layout.pipe, layout.tensor, layout.virtual, layout.microbatch),
        run.global_batch,
    )
