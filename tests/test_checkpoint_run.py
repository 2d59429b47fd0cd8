"""A run continues if its disk is full for a while, and if its newest checkpoint is damaged."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from errors import names
from rich.console import Console

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.launch.exits import Exit
from mtx.train.loop import run_training

pytestmark = pytest.mark.usefixtures("kept_programs")
MODEL = ModelConfig(layers=2, hidden=16, heads=2, sequence=16, vocab=256, compute_dtype="float32")


def printed(run: RunConfig) -> tuple[list[float], str]:
    console = Console(file=io.StringIO(), width=200)
    return run_training(run, console=console).losses, console.file.getvalue()


def events(run: RunConfig, kind: str) -> list[dict]:
    lines = (Path(run.out) / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def test_a_failed_save_costs_no_other(tmp_path, monkeypatch, caplog, full_disk):
    """Even if the failure is not noticed before the next save is due."""
    run = RunConfig(
        model=MODEL, global_batch=4, steps=4, save_every=1, eval_every=0, eval_batches=1,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    full_disk(3)
    monkeypatch.setattr(Checkpoints, "poll", lambda self: None)
    _, text = printed(run)
    assert "NOT SAVED  step 3: no checkpoint can be written" in text
    assert [event["step"] for event in events(run, "save_failed")] == [3]
    assert Checkpoints(run.out).steps() == [2, 4]
    assert not caplog.records  # such as Orbax's traceback


@pytest.mark.parametrize("save_every, kept", [(2, [2]), (0, [])])
def test_a_last_save_that_fails_leaves_the_older_one_and_says_so(
    tmp_path, full_disk, save_every, kept
):
    run = RunConfig(
        model=MODEL, global_batch=4, steps=4, save_every=save_every, eval_every=0, eval_batches=1,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    full_disk(len(kept) + 1)
    console = Console(file=io.StringIO(), width=300)
    summary = run_training(run, console=console)
    assert summary.exit == Exit.UNSAVED and not summary.interrupted and len(summary.losses) == 4
    newest = Checkpoints(run.out).directory / "2" if kept else "none"
    assert f"unsaved    step 4 of 4; the newest checkpoint is {newest}" in console.file.getvalue()
    assert [event["step"] for event in events(run, "save_failed")] == [4]
    assert Checkpoints(run.out).steps() == kept
    again = run_training(run, console=Console(quiet=True))  # there is room now
    assert again.exit == Exit.FINISHED and Checkpoints(run.out).steps() == [*kept, 4]
    assert again.losses == summary.losses[-2 if kept else 0 :]


def test_a_full_disk_and_a_flipped_bit(tmp_path, full_disk):
    run = RunConfig(
        model=MODEL, global_batch=4, steps=4, save_every=1, eval_every=0, eval_batches=1,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    full_disk(2)
    losses, text = printed(run)
    assert "NOT SAVED" in text and "process 0: No space left on device" in text
    assert len(events(run, "save_failed")) == 1
    checkpoints = Checkpoints(run.out)
    assert checkpoints.steps() == [3, 4] and len(losses) == 4

    with (checkpoints.directory / "4" / "arrays.0.bin").open("r+b") as file:
        file.seek(checkpoints.manifest(4).catalog["mu.embed.tokens"].blocks[0].offset)
        file.write(b"\xff\xff\xff\x7f")
    again, text = printed(replace(run, steps=5))
    assert "checkpoints/4 is damaged: array mu.embed.tokens" in text
    assert "it is now named 4.aside" in text
    assert f"resumes    from step 3: {checkpoints.directory}/3\n" in text
    assert len(events(run, "damaged")) == 1
    assert again[0] == losses[3] and len(again) == 2
    assert checkpoints.steps() == [4, 5]

    for step in (4, 5):
        (checkpoints.directory / str(step) / "run.json").unlink()
    with pytest.raises(UserError) as error:
        run_training(replace(run, steps=6), console=Console(file=io.StringIO()))
    assert names(error, checkpoints.directory)
