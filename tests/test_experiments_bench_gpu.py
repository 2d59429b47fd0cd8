"""The benchmark of one GPU, as far as a CPU can run it: it does nothing without a GPU, and reads
its measurements right."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mtx.config import Layout, RunConfig
from mtx.families.gpt import GPT
from mtx.plan.hardware import hardware
from mtx.step.trainer import Trainer

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def bench_gpu():
    """The script's module, with its folder first in the path, as Python does for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        yield importlib.import_module("bench_gpu")


def test_without_a_gpu_nothing_is_measured(bench_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_gpu, "devices_of_gpu", lambda: "")
    assert bench_gpu.main(["--json", str(tmp_path / "gpu.json")]) == 0
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_a_shard_has_the_heads_of_its_device(bench_gpu):
    """175B over 8: 12 heads of 128, and an eighth of each matrix."""
    shard = bench_gpu.shard(12288, 96, 8, layers=4)
    assert (shard.heads, shard.head_size, shard.ffn_hidden) == (12, 128, 6144)


def test_a_plain_loop_gives_the_gradients_of_the_pipeline(bench_gpu):
    """Otherwise the table would compare steps that compute different things."""
    model = GPT(layers=2, hidden=16, heads=2, sequence=8, vocab=32, compute_dtype="float32")
    run = RunConfig(model=model, layout=Layout(microbatch=2), global_batch=4)
    found = []
    for pipeline in (None, bench_gpu.PlainLoop):
        trainer = Trainer(run)
        if pipeline:
            trainer.pipeline = pipeline(model=trainer.model)
        found.append(trainer.loss_and_gradients(trainer.init(), bench_gpu._batch(run)))
    (loss, gradients), (plain, of_loop) = found
    assert plain == pytest.approx(loss, rel=1e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_loop), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_kernels_of_a_trace_are_summed_by_kind(bench_gpu, tmp_path):
    """Only kernels of the GPU's streams count, not the host's or those of rows that repeat them."""

    def named(kind, name, pid, tid=0):
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def kernel(name, us, pid=1, tid=14):
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": us}

    events = [
        named("process_name", "/device:GPU:0", 1), named("process_name", "/host:CPU", 2),
        named("thread_name", "Stream #14(Compute)", 1, 14),
        named("thread_name", "XLA Ops", 1, 15), named("thread_name", "Stream #9", 2, 14),
        kernel("nvjet_sm90_tst_256x128", 60.0), kernel("nvjet_sm90_tst_256x128", 40.0),
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash", 30.0), kernel("memcpy128", 5.0),
        kernel("loop_multiply_fusion_5", 20.0), kernel("fusion", 999.0, tid=15),
        kernel("nvjet", 999.0, pid=2),
    ]  # fmt: skip
    with gzip.open(tmp_path / "a.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    seconds = bench_gpu.kernel_seconds(tmp_path / "a.trace.json.gz")
    expected = {"matmul": 1e-4, "attention": 3e-5, "copy": 5e-6, "other": 2e-5}
    assert seconds == pytest.approx(expected)


def test_rates_have_the_flops_of_their_sizes(bench_gpu):
    """FLOP/s times seconds is 2 m n k, and half of a square of scores for attention."""
    rows = bench_gpu.measure_rates(bench_gpu.Options(tiny=True), hardware("h100"))
    found = {}
    for row in rows:
        found[row["name"]] = row["tflops"] * 1e12 * row["seconds"]
        if row["name"].startswith("attention"):
            break
    assert found["8192 cubed"] == pytest.approx(2 * 512**3)
    assert found["175B / 8 up"] == pytest.approx(2 * 128 * 384 * 768)
    assert found["175B / 8 up, dw in float32"] == pytest.approx(2 * 128 * 384 * 768)
    assert found["attention 1 x 128, 12 x 128"] == pytest.approx(2 * 12 * 128**3)
