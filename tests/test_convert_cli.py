"""`mtx convert`: SOURCE decides the direction, and a mistake is one line."""

from __future__ import annotations

import json

import hugging
import pytest

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama in Hugging Face's format."""
    directory = tmp_path_factory.mktemp("source") / "llama"
    config, shapes = hugging.llama(eos_token_id=7)
    hugging.write(directory, config, hugging.random_tensors(shapes), dtype="BF16")
    (directory / "generation_config.json").write_text('{"top_k": 3}')
    return directory


def test_there_and_back(source, tmp_path, capsys):
    run, back = tmp_path / "run", tmp_path / "back"
    assert (
        main(["convert", str(source), str(run), "--model.sequence", "12", "--check", "ours"]) == 0
    )
    printed = capsys.readouterr().out
    assert "largest difference 0.00e+00 " in printed and "from our model" in printed
    assert "computes in bfloat16" in printed and "has no tokenizer" in printed
    model = Checkpoints(run).run().model
    assert (model.sequence, model.compute_dtype) == (12, "bfloat16")
    assert main(["convert", str(run), str(back), "--json", "--check", "ours"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["target"] == str(back) and said["notes"][0] == "tensors are bfloat16"
    assert said["comparison"]["largest_difference"] == 0 < said["comparison"]["largest_logit"]
    assert (
        main(
            [
                "convert",
                str(source),
                f"{run}32",
                "--model.compute-dtype",
                "float32",
                "--check",
                "none",
            ]
        )
        == 0
    )
    assert Checkpoints(f"{run}32").run().model.compute_dtype == "float32"
    assert (back / "generation_config.json").read_text() == '{"top_k": 3}'
    config = json.loads((back / "config.json").read_text())
    assert config["eos_token_id"] == 7 and config["max_position_embeddings"] == hugging.S
    assert (back / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], ["SOURCE"]),
        (["{source}"], ["TARGET"]),
        (["nowhere", "out"], ["nowhere"]),
        (["{empty}", "out"], ["empty", "config.json"]),
        (["{source}", "out", "--dtype", "float16"], ["--model.compute-dtype"]),
        (["{source}", "out", "--dtype", "int8"], ["int8", "--dtype"]),
        (["{source}", "out", "--step", "3"], ["--step"]),
        (["{source}", "out", "--model.sequence", "99"], ["sequence=99", "24"]),
        (["{source}", "out", "--data.tokenizer", "gone"], ["gone"]),
        (["{source}", "out", "--check", "all"], ["all", "--check"]),
    ],
)
def test_mistakes(source, tmp_path, capsys, monkeypatch, arguments, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    names = {"source": source, "empty": "empty"}
    assert main(["convert", *(argument.format(**names) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtx: ") and error.count("\n") == 1
    assert all(value in error for value in what)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
