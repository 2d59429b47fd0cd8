"""The paper's numbers: complete, consistent with each other, and found for the right runs only."""

import dataclasses

import pytest
from published_runs import (
    ELSEWHERE,
    FIGURE_11,
    FIGURE_12,
    FIGURE_13,
    FIGURE_18,
    FITTED_RUNS,
    HELD_OUT_RUNS,
    KORTHIKANTI,
    LLAMA_3,
    MEGASCALE,
    TABLE_1_RUNS,
    TABLE_2,
)

from mtx.config import Layout
from mtx.families.gpt import TABLE1
from mtx.plan.flops import forward_flops, sc21_flops
from mtx.plan.hardware import hardware
from mtx.plan.published import (
    TABLE_1,
    TRAINING_TIMES,
    bubble,
    published_throughput,
    published_training_time,
)
from mtx.presets import preset
from mtx.schedules.makers import make

ALL_RUNS = FITTED_RUNS + HELD_OUT_RUNS + ELSEWHERE


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
        preset("gpt-175b"),
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
    """In ticks of F and B of one chunk, a stage works m v ticks and idles p - 1 of each kind."""
    schedule = make("1f1b", microbatches=m, stages=pipe, virtual=virtual)
    idle = sum(phase.stop - phase.start for phase in schedule.phases if phase.forward) - m * virtual
    assert bubble(Layout(pipe=pipe, virtual=virtual), m) == pytest.approx(idle / (m * virtual))


# --- single runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ALL_RUNS, ids=lambda run: f"{run.where} {run.series} {run.x}")
def test_every_published_run_can_be_laid_out(run):
    run.layout.check(run.model)
    assert run.layout.microbatches(run.global_batch) >= 1
    if run not in ELSEWHERE:
        assert run.model.sequence == 2048
        assert run.model.vocab == 51200
    if run not in MEGASCALE + LLAMA_3 and not run.where.startswith("Korthikanti"):
        assert run.layout.recompute == "full" and not run.layout.sequence_parallel


def test_no_run_is_both_fitted_and_held_out():
    def key(run):
        layout = run.layout
        return (run.model, layout, run.global_batch, run.scatter_gather, run.unit, run.zero)

    fitted = {key(run) for run in FITTED_RUNS}
    assert not [run for run in HELD_OUT_RUNS if key(run) in fitted]
    assert len(HELD_OUT_RUNS) > len(FITTED_RUNS)


def test_runs_of_table_1_are_its_rows():
    for run, row in zip(TABLE_1_RUNS, TABLE_1, strict=True):
        as_preset = preset(row.preset)
        assert run.published == row.tflops_per_gpu
        assert run.layout.devices == as_preset.layout.devices
        assert (run.model.layers, run.model.hidden) == (
            as_preset.model.layers, as_preset.model.hidden,
        )  # fmt: skip


def test_only_one_stage_reduces_under_b():
    """--DDP-impl torch in SC'21's scripts, for table 1's models of one stage, and nowhere else."""
    for run in ALL_RUNS:
        torch_ddp = run.where == "table 1" and run.layout.pipe == 1
        assert (run.software == "megatron-2021-torch-ddp") == torch_ddp


def test_figures_are_whole_curves():
    assert [run.layout.devices for run in FIGURE_11] == 2 * [8, 16, 32, 64]
    plain, interleaved = FIGURE_12[:5], FIGURE_12[5:]
    gains = [b.published / a.published for a, b in zip(plain, interleaved, strict=True)]
    assert gains == sorted(gains, reverse=True)  # the gap closes as the batch grows
    assert all(run.layout.devices == 64 for run in FIGURE_13)
    best = max(FIGURE_13, key=lambda run: run.published)
    assert (best.layout.pipe, best.layout.tensor) == (8, 8)
    without, together = FIGURE_18[:5], FIGURE_18[5:]
    assert [run.published for run in together] == [run.published for run in interleaved]
    assert not any(run.scatter_gather for run in without)


def test_table_2_compares_equal_work():
    """PTD-P beats ZeRO-3 on as many GPUs: by at least 70 % at 1,536 and 2,240 (section 5.2)."""
    rates = {(run.series, run.x): run.published for run in TABLE_2}
    assert rates["PTD-P, 175B", "1536 GPUs"] > 1.7 * rates["ZeRO-3, 175B", "1536 GPUs"]
    assert rates["PTD-P, 530B", "2240 GPUs"] > 1.7 * rates["ZeRO-3, 530B", "2240 GPUs"]
    assert all(run.layout.tensor * run.layout.pipe == 1 for run in TABLE_2 if run.zero == 3)


# Days for 300 billion tokens, the table's last column.
DAYS = {
    "PTD-P, 175B": (84, 43, 23),
    "PTD-P, 530B": (156, 80, 42),
    "ZeRO-3, 175B": (90, 74, 74),
    "ZeRO-3, 530B": (169, 137, 140),
}


def test_table_2s_throughputs_and_days_agree():
    for series, days in DAYS.items():
        runs = [run for run in TABLE_2 if run.series == series]
        for run, published in zip(runs, days, strict=True):
            steps = 300e9 / (run.global_batch * run.model.sequence)
            flops = steps * sc21_flops(run.model, run.global_batch)
            seconds = flops / (run.layout.devices * run.published * 1e12)
            assert seconds / 86400 == pytest.approx(published, abs=1.0, rel=0.015)


def test_korthikantis_seconds_and_utilization_agree():
    """The MFU of the same runs in Megatron-LM's README, by their formula: the full square."""
    utilization = []
    for run in KORTHIKANTI[4:]:
        flops = 3 * forward_flops(run.model, run.global_batch, causal=False).total
        utilization.append(100 * flops / (run.published * run.layout.devices * 312e12))
    assert utilization == pytest.approx([41.5, 51.4, 56.0, 56.3], abs=0.2)


def test_megascales_seconds_and_utilization_agree():
    """The MFU that table 2 gives beside the seconds counts the same FLOPs as our formula."""
    published = 53.0, 49.9, 46.7, 44.7, 48.7, 47.8, 43.3, 41.2
    for run, percent in zip(MEGASCALE, published, strict=True):
        flops = 3 * forward_flops(run.model, run.global_batch, causal=True).total
        utilization = 100 * flops / (run.published * run.layout.devices * 312e12)
        assert utilization == pytest.approx(percent, rel=0.03)


def test_selective_recomputation_was_a_third_faster():
    full, selective = KORTHIKANTI[:4], KORTHIKANTI[4:]
    gains = [a.published / b.published - 1 for a, b in zip(full, selective, strict=True)]
    assert gains == pytest.approx([0.29, 0.318, 0.297, 0.321], abs=0.005)  # the paper's column
