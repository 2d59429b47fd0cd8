"""A BERT trained on text, by the same command and loop as any model."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from errors import names
from rich.console import Console

from mtx.config import Layout
from mtx.errors import UserError
from mtx.presets import preset
from mtx.train.loop import run_training

TEXT = "\n".join(
    f"{n} is {'even' if n % 2 == 0 else 'odd'}, and the number after {n} is {n + 1}."
    for n in range(400)
)


@pytest.fixture
def run(tmp_path):
    """The laptop's BERT, but even smaller and on one device."""
    (tmp_path / "text.txt").write_text(TEXT)
    run = preset("miniature-bert")
    return replace(
        run,
        model=replace(run.model, layers=2, hidden=32, sequence=32, vocab=300),
        layout=Layout(microbatch=16),
        data=replace(run.data, path=(str(tmp_path / "text.txt"),), bpe_vocab=300),
        optimizer=replace(run.optimizer, lr=1e-2, warmup_steps=5),
        global_batch=16, steps=30, eval_every=0, out=str(tmp_path / "out"),
    )  # fmt: skip


def train_quietly(run):
    return run_training(run, console=Console(file=io.StringIO()))


def test_it_learns(run, tmp_path):
    summary = train_quietly(run)
    assert summary.last_eval_loss < summary.first_eval_loss - 1.5
    assert summary.data.describe().endswith("wordpiece tokenizer, vocab 300")
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["run"]["data"]["order"] == "sop"


def test_a_vocabulary_that_is_too_small_is_refused(run):
    small = replace(run, model=replace(run.model, vocab=100))
    with pytest.raises(UserError) as error:
        train_quietly(small)
    names(error, "model.vocab", "300")
