"""`mtx checkpoint`: list, inspect, verify, export."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig, to_dict
from mtx.convert.safetensors import SafetensorsFile
from mtx.data.tokenizer import ByteTokenizer
from mtx.step.trainer import Trainer

MODEL = ModelConfig(layers=2, hidden=16, heads=2, sequence=8, vocab=256, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(pipe=2), global_batch=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    trainer = Trainer(RUN)
    state = trainer.init()
    with Checkpoints(out / "checkpoints") as checkpoints:
        for step in (10, 20):
            extra = {"held_out": {"step": step, "loss": 2.5}, "consumed": 2 * step}
            numbered = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
            checkpoints.save(trainer, numbered, tokenizer=ByteTokenizer(), extra=extra)
    return out, jax.device_get(jax.jit(trainer.to_canonical)(state.params))


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy whose step 20 has one flipped bit, and an empty directory named as a step."""
    out = shutil.copytree(saved[0], tmp_path / "run")
    (first, *_) = Checkpoints(out).manifest(20).catalog["params.ends.tokens"].blocks
    with (out / "checkpoints" / "20" / "arrays.0.bin").open("r+b") as file:
        file.seek(first.offset)
        byte = file.read(1)[0]
        file.seek(first.offset)
        file.write(bytes([byte ^ 4]))
    (out / "checkpoints" / "30").mkdir()
    return out


def test_list(saved, damaged, capsys):
    assert main(["checkpoint", "list", str(saved[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20"]
    assert all(line.endswith("complete") for line in lines[1:])
    (damaged / "checkpoints" / "10" / "run.json").write_text("{}")
    (damaged / "checkpoints" / "40.aside").mkdir()
    assert main(["checkpoint", "list", str(damaged), "--json"]) == 0
    states = {row["step"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {
        10: "damaged: run.json is not what was written", 20: "complete", 30: "incomplete",
        40: "set aside as 40.aside",
    }  # fmt: skip


def test_inspect(saved, capsys):
    assert main(["checkpoint", "inspect", str(saved[0]), "--step", "10"]) == 0
    text = capsys.readouterr().out
    assert "held out   loss 2.5000 at step 10" in text and "consumed   20" in text
    assert "tokenizer  bytes, vocabulary 256" in text
    assert main(["checkpoint", "inspect", str(saved[0]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 20 and shown["run"] == json.loads(json.dumps(to_dict(RUN)))
    array = shown["arrays"]["mu.block.mlp.up.w"]
    assert (array["shape"], array["dtype"], array["bytes"]) == ([2, 16, 64], "float32", 8192)


def test_verify(saved, damaged, capsys):
    assert main(["checkpoint", "verify", str(saved[0])]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["sound", "sound"]
    assert main(["checkpoint", "verify", str(damaged)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "10", "sound"]
    assert lines[1].split()[:3] == ["step", "20", "DAMAGED"]
    assert "array params.ends.tokens, from byte " in lines[1] and len(lines) == 2
    assert main(["checkpoint", "verify", str(damaged), "--step", "10"]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export(saved, tmp_path, dtype, capsys):
    out = tmp_path / "shared"
    arguments = ["checkpoint", "export", str(saved[0]), "--out", str(out), "--dtype", dtype]
    assert main(arguments) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "model.safetensors", "run.json", "tokenizer.json"
    ]  # fmt: skip
    with SafetensorsFile(out / "model.safetensors") as file:
        for path, wanted in jax.tree.leaves_with_path(saved[1]):
            there = file.read(".".join(key.key for key in path))
            np.testing.assert_array_equal(there, wanted.astype(there.dtype))
    assert main(arguments) == 2
    assert "is there already; name another folder" in capsys.readouterr().err


def test_a_damaged_one_is_not_exported(damaged, tmp_path, capsys):
    out = tmp_path / "shared"
    assert main(["checkpoint", "export", str(damaged), "--out", str(out)]) == 2
    assert "20 is damaged: array params.ends.tokens" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst", "x"], "unknown action 'lst': did you mean 'list'?"),
        (["list"], "name the folder of a training run"),
        (["verify", "nowhere"], "nowhere holds no complete checkpoint"),
        (["export", "nowhere"], "--out is missing"),
        (["inspect", "nowhere"], "nowhere does not exist; name the `out`"),
    ],
)
def test_mistakes(arguments, said, capsys):
    assert main(["checkpoint", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_help(capsys):
    assert main(["checkpoint"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {action}" in text for action in ("list", "inspect", "verify", "export"))
