"""The benchmarks: autodiff's pipeline computes what ours does; tables show what was measured."""

import ast
import importlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from mtx.cli import exit_status
from mtx.compile.hlo import read_program
from mtx.config import ModelConfig, RunConfig
from mtx.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
MODEL = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8
)
RUN = RunConfig(model=MODEL)
MACHINE = {"cores": 2, "jax": "0.10.2", "load_at_start": 0.1}


@pytest.fixture(scope="module", autouse=True)
def beside_the_scripts():
    """Put the scripts' folder first in the path, as Python does for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        yield


@pytest.fixture(scope="module")
def bench(beside_the_scripts):
    return importlib.import_module("bench")


@pytest.fixture(scope="module")
def pipeline(beside_the_scripts):
    return importlib.import_module("bench_pipeline")


@pytest.fixture(scope="module")
def peers(beside_the_scripts):
    return importlib.import_module("bench_peers")


def by_autodiff(pipeline, **options):
    """The rows that autodiff runs: GPipe and the circular order."""
    rows = pipeline.pipelines(pipeline.Options(stages=2, **options), 1)
    return [row for row in rows if row.autodiff]


def printed(module, result) -> list[str]:
    console = Console(width=module.bench.WIDTH, file=io.StringIO())
    console.print(module.table_of(result))
    return [*console.file.getvalue().splitlines(), module.title_of(result)]


def test_autodiff_computes_what_our_program_does(pipeline):
    gpipe, _ = by_autodiff(pipeline)
    _, circular = by_autodiff(pipeline, virtual=2, recompute="full")
    batch = pipeline.random_batch(MODEL, 3)
    ours = replace(gpipe, autodiff=False).trainer(RUN, 3)
    state = ours.init()
    want, want_gradients = ours.loss_and_gradients(state, batch)
    for row in (gpipe, circular):
        trainer = row.trainer(RUN, 3)
        start = state if row is gpipe else trainer.init()
        loss, gradients = trainer.loss_and_gradients(start, batch)
        assert float(loss) == pytest.approx(float(want), rel=1e-6)
        for (path, got), expected in zip(
            jax.tree.leaves_with_path(gradients), jax.tree.leaves(want_gradients), strict=True
        ):
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error < 1e-5, f"{row.name} {jax.tree_util.keystr(path)}: {error:.2e}"


@pytest.fixture(scope="module")
def measured(pipeline):
    """Two rows, trained for one round."""
    options = pipeline.Options(stages=2, microbatches=2, steps=1, quick=True)
    rows = [row for row in pipeline.pipelines(options, 1) if row.name in NAMES]
    return pipeline.measure(rows, RUN, options, MACHINE)


NAMES = ("1F1B, skip", "GPipe by autodiff")


def test_what_is_measured(pipeline, measured):
    assert json.loads(json.dumps(measured)) == measured
    assert [row["name"] for row in measured["rows"]] == list(NAMES)
    assert [row["ticks"] for row in measured["rows"]] == [4, 6]
    for row in measured["rows"]:
        assert len(row["step_s"]) == 1 and len(row["losses"]) == 2
        assert row["losses"][1] < row["losses"][0]
        assert 0 < row["min_s"] <= row["median_s"] and row["compile_s"] > 0
        assert list(row["temp_mib"]) == ["2"] and row["temp_mib"]["2"] > 0
    assert measured["rows"][1]["speed_up"] == 1.0
    floor = measured["floor"]
    assert floor["gflop"] == measured["rows"][0]["gflop"] > 0
    assert floor["step_s"] * floor["gflop_per_s"] == pytest.approx(floor["gflop"])
    notes = " ".join(pipeline.notes_of(measured))
    assert "Floor" in notes and "Other programs" not in notes


def test_autodiff_executes_the_matmuls_that_the_table_says_and_keeps_every_tick(pipeline, measured):
    row, _ = by_autodiff(pipeline)
    trainer = row.trainer(RUN, 8)
    compiled = trainer.compile_step()
    # The head runs in 8 of the forward ticks and 8 of the backward; no other conditional has
    # matmuls.
    share = 8 / (row.ticks(trainer) / 2)
    device_flops = read_program(compiled.as_text()).matmul_flops(lambda _: (1 - share, share))
    assert 2 * device_flops == pytest.approx(row.matmul_flops(MODEL, 8), rel=1e-12)
    few_mib = measured["rows"][1]["temp_mib"]["2"]
    assert compiled.memory_analysis().temp_size_in_bytes > 1.5 * few_mib * 2**20


def filled(pipeline, options, *, step_s=(12.3456, 11.0), losses=(4.0, 3.0)):
    """Every row as if it had been measured."""
    return [
        pipeline.Measured(
            pipeline=row, ticks=1234, gflop=1234.5, compile_s=123.4,
            temp_mib=dict.fromkeys(options.memory_microbatches, 1234.5),
            step_s=list(step_s), losses=list(losses),
        )
        for row in pipeline.pipelines(options, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("virtual", [1, 2])
def test_table_of_all_rows_fits_the_page(pipeline, virtual):
    options = pipeline.Options(virtual=virtual)
    rows = filled(pipeline, options)
    assert len(rows) == (5 if virtual == 1 else 8)
    result = pipeline.result_of(rows, [0.5], options=options, model=MODEL, machine=MACHINE)
    lines = printed(pipeline, result)
    assert len(lines) == len(rows) + 3  # two lines of header and the title: no row is wrapped
    assert max(map(len, lines)) <= 100 and "…" not in "".join(lines)
    assert "measured, 2 cores, jax 0.10.2" in lines[-1]
    assert "m=128" in lines[1] and "11.673" in lines[2]  # the median of 12.3456 and 11.0


def test_memory_alone_has_no_times(pipeline):
    options = pipeline.Options(memory_only=True)
    rows = filled(pipeline, options, step_s=(), losses=())
    result = pipeline.result_of(rows, [], options=options, model=MODEL, machine=MACHINE)
    assert result["floor"] is None and "step_s" in result["rows"][0]
    assert "step s" not in "".join(printed(pipeline, result))
    assert pipeline.disagreement(rows) == ""


@pytest.mark.parametrize("wrong", [3.0002, float("nan")])
def test_other_losses_are_found(pipeline, wrong):
    rows = filled(pipeline, pipeline.Options())
    assert pipeline.disagreement(rows) == ""
    rows[4].losses[1] = wrong
    assert "step 1" in pipeline.disagreement(rows)
    assert repr(rows[4].pipeline.name) in pipeline.disagreement(rows)


def test_speed_up_is_of_neighbours_in_time(bench):
    assert bench.speed_up([1.0, 10.0, 3.0], [0.5, 5.0, 2.0]) == 2.0


def record(loss):
    return {
        "processes": 1,
        "threads": 2,
        "step_s": [1.0, 3.0],
        "loss_first": 4.61,
        "loss_last": loss,
    }


def test_peers_are_started_in_turn(peers):
    options = peers.Options(torch=("1f1b", "zbv"))
    names = [row.name for row in peers.trainers(options, ["torch", "megatron"])]
    assert names[:3] == ["mtx none", "torch 1f1b", "megatron 1f1b"]
    assert names[3:6] == ["mtx 1f1b", "torch zbv", "megatron interleaved"]
    alone = peers.trainers(options, [])
    assert [row.name for row in alone] == [f"mtx {name}" for name in peers.OURS]
    for row in alone:
        row.records += [record(4.5), record(4.5)]
    peers.check_losses(alone, MODEL.vocab)
    result = peers.result_of(alone, {}, options=options, machine=MACHINE)
    assert json.loads(json.dumps(result))["rows"][0]["speed_up"] is None
    assert "torch, megatron, jaxpp. pip install" in peers.notes_of(result)[-1]
    lines = printed(peers, result)
    assert len(lines) == len(alone) + 3 and max(map(len, lines)) <= 100
    alone[1].records[0]["loss_last"] = 4.51
    with pytest.raises(peers.bench.LossesDiffer, match="mtx 1f1b"):
        peers.check_losses(alone, MODEL.vocab)


def test_both_sides_have_as_many_stages_as_asked(peers):
    options = peers.Options(torch=("1f1b",), stages=2)
    for row in peers.trainers(options, ["torch", "megatron"]):
        assert row.command[row.command.index("--stages") + 1] == "2"
    layouts = {name: peers.our_layout(name, options.stages) for name in peers.OURS}
    assert {name: layout.pipe for name, layout in layouts.items()} == {
        "none": 1, "1f1b": 2, "interleaved": 2, "interleaved_selective": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match="stages=3 must be 2 or 4"):
        peers.Options(stages=3)


def test_peers_are_compared_round_by_round(peers):
    rows = peers.trainers(peers.Options(torch=("1f1b",)), ["torch"])
    for row in rows:
        row.records += [record(4.5), record(4.5)]
        if row.side == "torch":
            row.records[1]["step_s"] = [6.0, 6.0]
    result = peers.result_of(rows, {}, options=peers.Options(), machine=MACHINE)
    speed_ups = {row["name"]: row["speed_up"] for row in result["rows"]}
    assert speed_ups["torch 1f1b"] == 1.0 and speed_ups["mtx 1f1b"] == 2.0  # of 1 and 3


def test_jaxpp_runs_in_an_interpreter_of_its_own(peers):
    options = peers.Options(jaxpp=("dualpipev",), jaxpp_python="/other/python")
    (row,) = [row for row in peers.trainers(options, ["jaxpp"]) if row.side == "jaxpp"]
    assert row.python == "/other/python" and row.command[1:3] == ["--schedule", "dualpipev"]
    assert {row.python for row in peers.trainers(options, ["torch"])} == {sys.executable}
    with pytest.raises(UserError, match="/other/python does not run: No such file"):
        peers.is_installed("jaxpp", options)
    tree = ast.parse(peers._SCRIPTS["jaxpp"].read_text())
    (known,) = [
        ast.literal_eval(line.value)
        for line in tree.body
        if isinstance(line, ast.Assign) and line.targets[0].id == "CHUNKS"
    ]
    assert set(typing.get_args(peers.JaxppSchedule)) == set(known)


def test_jaxpp_is_asked_for_where_it_is_said_to_be(peers, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    options = peers.Options(jaxpp_python=f"{python}")
    with pytest.raises(UserError, match="has no package jaxpp: install it there"):
        peers.is_installed("jaxpp", options)
    (tmp_path / "jaxpp").mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    assert peers.is_installed("jaxpp", options)


def test_what_a_process_says_is_passed_on(peers):
    assert peers.run_once(["-c", "print('so'); print('{\"a\": 1}')"], 60) == {"a": 1}
    with pytest.raises(peers.TrainerFailed, match="exit status 3: gone"):
        peers.run_once(["-c", "import sys; print('gone', file=sys.stderr); sys.exit(3)"], 60)


def test_every_schedule_of_the_peers_can_be_named(peers):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install 'mtx[peers]'")
    theirs = importlib.import_module("peers.torch_pipeline")
    assert set(typing.get_args(peers.TorchSchedule)) == set(theirs.SCHEDULES)
    assert set(typing.get_args(peers.OurRow)) == set(peers.OURS)
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs Megatron-Core: pip install 'mtx[peers]'")
    command = [sys.executable, f"{peers._SCRIPTS['megatron']}", "--schedule", "?"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    known = re.findall(r"\w+", refused.stderr.split("choose from")[1])
    assert known == list(typing.get_args(peers.MegatronSchedule))


def test_the_scripts_explain_themselves(peers, pipeline, capsys):
    for module in (peers, pipeline):
        assert exit_status(lambda module=module: module.main(["--help"])) == 0
        assert "--json" in capsys.readouterr().out
