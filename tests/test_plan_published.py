"""The paper's numbers: complete, consistent with each other, and found for the right runs only."""

import dataclasses

import pytest

from mtx.config import Layout
from mtx.pipeline.makers import make
from mtx.plan.flops import sc21_flops
from mtx.plan.hardware import hardware
from mtx.plan.published import (
    FIGURE_12,
    FIGURE_13,
    FIGURE_18,
    TABLE_1,
    TRAINING_TIMES,
    bubble,
    published_throughput,
    published_training_time,
)
from mtx.presets import TABLE1, preset


def test_table_1_has_the_presets_of_table_1():
    assert tuple(row.preset for row in TABLE_1) == TABLE1


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row.preset)
def test_columns_of_table_1_agree(row):
    gpus = preset(row.preset).layout.devices
    assert row.aggregate_pflops == pytest.approx(row.tflops_per_gpu * gpus / 1000, rel=0.005)
    peak = hardware("a100-80gb").peak_tflops["float16"]
    assert row.percent_of_peak == pytest.approx(100 * row.tflops_per_gpu / peak, abs=0.6)


def test_a_step_of_the_largest_model_took_102_seconds():
    run, row = preset("gpt-1t"), TABLE_1[-1]
    assert sc21_flops(run.model, run.global_batch) / (row.aggregate_pflops * 1e15) == pytest.approx(
        102.4, abs=0.05
    )


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row.preset)
def test_the_rows_run_is_found(row):
    assert published_throughput(preset(row.preset)) is row


def test_other_runs_are_not_in_the_table():
    run = preset("gpt-1t")
    for other in (
        preset("gpt-3-175b"),
        preset("miniature"),
        dataclasses.replace(run, global_batch=1536),
        dataclasses.replace(run, layout=dataclasses.replace(run.layout, virtual=2)),
        dataclasses.replace(run, model=dataclasses.replace(run.model, sequence=4096)),
    ):
        assert published_throughput(other) is None
        assert published_training_time(other) is None


def test_what_the_table_does_not_say_does_not_matter():
    run = preset("gpt-1t")
    model = dataclasses.replace(run.model, compute_dtype="float16")
    layout = dataclasses.replace(run.layout, recompute="selective", idle="skip")
    assert published_throughput(dataclasses.replace(run, model=model, layout=layout)) is TABLE_1[-1]


def test_training_time_is_that_of_the_run():
    assert published_training_time(preset("gpt-1t")) is TRAINING_TIMES[-1]
    assert published_training_time(preset("gpt-530b")) is None
    assert [time.days for time in TRAINING_TIMES] == [34, 84]


@pytest.mark.parametrize(("pipe", "virtual", "m"), [(1, 1, 4), (4, 1, 8), (4, 2, 8), (8, 3, 24)])
def test_bubble_is_the_tables_idle_time_over_ideal_time(pipe, virtual, m):
    """F and B in ticks of one chunk: a stage works m v ticks and waits p - 1 of either kind."""
    schedule = make("1f1b", microbatches=m, stages=pipe, virtual=virtual)
    idle = sum(phase.stop - phase.start for phase in schedule.phases if phase.forward) - m * virtual
    assert bubble(Layout(pipe=pipe, virtual=virtual), m) == pytest.approx(idle / (m * virtual))


def test_figures_are_whole_curves():
    for series in (*FIGURE_12, FIGURE_13, *FIGURE_18):
        assert len(series.x) == len(series.tflops_per_gpu) == 5
    plain, interleaved = FIGURE_12
    gains = [b / a for a, b in zip(plain.tflops_per_gpu, interleaved.tflops_per_gpu, strict=True)]
    assert gains == sorted(gains, reverse=True)  # the gap closes as the batch grows
    assert all(pipe * tensor == 64 for pipe, tensor in FIGURE_13.x)
    assert FIGURE_13.x[FIGURE_13.tflops_per_gpu.index(max(FIGURE_13.tflops_per_gpu))] == (8, 8)
    assert FIGURE_18[1].tflops_per_gpu == interleaved.tflops_per_gpu
