"""Runs on indexed datasets: what they read, where they continue, and what they leave behind."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import exit_status
from mtx.cli.data import data_command
from mtx.cli.generate import generate_command
from mtx.cli.train import train_command
from mtx.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data import batches, load_data
from mtx.data.subwords import SubwordTokenizer
from mtx.errors import UserError
from mtx.train import loop
from mtx.train.loop import run_training

pytestmark = pytest.mark.usefixtures("kept_programs")

S = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer and a dataset that was made with it."""
    folder = tmp_path_factory.mktemp("data")
    lines = (json.dumps({"text": f"{n} times {n + 1} makes {n * n + n}. " * 3}) for n in range(60))
    (folder / "docs.jsonl").write_text("\n".join(lines))
    names = [str(folder / name) for name in ("docs.jsonl", "tok.json", "c")]
    data_command(["tokenizer", names[0], "--out", names[1], "--vocab", "290"])
    build = ["build", names[0], "--out", names[2], "--tokenizer", names[1], "--processes", "1"]
    data_command(build)
    return folder


def small_run(folder: Path, out: Path, **changes) -> RunConfig:
    run = RunConfig(
        model=ModelConfig(
            layers=1, hidden=16, heads=2, sequence=S, vocab=290, compute_dtype="float32"
        ),
        layout=Layout(data=2),
        optimizer=OptimizerConfig(lr=1e-2, decay_steps=10),
        data=DataConfig(
            path=(str(folder / "c_text_document"),), tokenizer=str(folder / "tok.json"),
            split="8,2", packed=True,
        ),
        global_batch=4, steps=4, eval_every=0, eval_batches=2, out=str(out),
    )  # fmt: skip
    return replace(run, **changes)


@pytest.fixture
def read(monkeypatch):
    """The tokens of every row that a run takes from the loader, in order."""
    rows: list[list[int]] = []

    @contextmanager
    def read_ahead(*arguments, **options):
        with batches.read_ahead(*arguments, **options) as ahead:

            def watched():
                for batch in ahead:
                    assert batch["segments"].any() and batch["positions"].any()
                    rows.extend(batch["tokens"].tolist())
                    yield batch

            yield watched()

    monkeypatch.setattr(loop, "read_ahead", read_ahead)
    return rows


def test_the_whole_way_by_the_command_line(folder, tmp_path, capsys, read):
    """A run continues after the samples that it has consumed, even with another global batch and
    more steps; and its results need neither the dataset nor the tokenizer's file."""
    for name in ("c_text_document.bin", "c_text_document.idx", "c_text_document.json", "tok.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    prefix, out = str(tmp_path / "c_text_document"), str(tmp_path / "out")
    options = [
        "miniature", "--data.path", prefix, "--data.tokenizer", str(tmp_path / "tok.json"),
        "--data.split", "2,1", "--data.packed", "--model.layers", "1", "--model.hidden", "16",
        "--model.sequence", str(S), "--model.vocab", "290", "--model.heads", "2", "--layout.pipe",
        "1", "--layout.tensor", "1", "--layout.virtual", "1", "--eval-every", "0",
        "--eval-batches", "1", "--out", out,
    ]  # fmt: skip
    first = [*options, "--steps", "4", "--global-batch", "32"]
    assert exit_status(lambda: train_command(first)) == 0
    printed = capsys.readouterr().out
    assert f"data       dataset {prefix}, split 2,1; " in printed
    assert "tok.json tokenizer, vocab " in printed and "; documents packed" in printed
    second = [*options, "--steps", "6", "--global-batch", "64"]
    assert exit_status(lambda: train_command(second)) == 0
    capsys.readouterr()
    checkpoints = Checkpoints(out)
    assert checkpoints.extra()["consumed"] == 4 * 32 + 2 * 64
    run = replace(checkpoints.run(), steps=999, global_batch=8)
    data = load_data(run)
    assert len(data.train) < 256  # more than an epoch
    assert data.batch(0, 256)["tokens"].tolist() == read
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    noted = [(line["step"], line["consumed"]) for line in log if line["kind"] in ("start", "save")]
    assert noted == [(0, 0), (4, 128), (4, 128), (6, 256)]

    other = list(second)
    other[other.index("--data.tokenizer") + 1] = "bytes"
    assert exit_status(lambda: train_command(other)) == 2
    assert "was made with tok.json" in capsys.readouterr().err
    for path in tmp_path.glob("*.*"):
        path.unlink()
    assert exit_status(lambda: generate_command([out, "--prompt", "3 times", "--tokens", "3"])) == 0
    assert capsys.readouterr().out.startswith("3 times")
    assert isinstance(checkpoints.tokenizer(), SubwordTokenizer)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tokenizer": "bytes"}, "was made with tok.json"),
        ({"split": "1"}, "part 'valid' of split='1' has 0 of"),
        ({"path": ("0", "{c}", "0", "{c}")}, "sum to zero"),
        ({"path": ("{foreign}",), "eod": "none", "packed": False}, "sample 0 holds token 9"),
    ],
)
def test_data_that_cannot_be_trained_on_leaves_nothing(folder, tmp_path, change, said):
    prefix = str(folder / "c_text_document")
    foreign = tmp_path / "foreign"
    index = Path(f"{prefix}.idx").read_bytes()
    foreign.with_suffix(".idx").write_bytes(index)
    tokens = np.fromfile(f"{prefix}.bin", np.uint16) + 900
    tokens.tofile(foreign.with_suffix(".bin"))
    if "path" in change:
        names = {"c": prefix, "foreign": str(foreign)}
        change = change | {"path": tuple(part.format(**names) for part in change["path"])}
    run = small_run(folder, tmp_path / "out")
    run = replace(run, data=replace(run.data, **change))
    with pytest.raises(UserError) as caught:
        run_training(run, console=Console(quiet=True))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
