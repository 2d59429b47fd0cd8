"""`mtx checkpoint`: list, inspect, verify, export."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig, to_dict
from mtx.conversion.safetensors import SafetensorsFile
from mtx.data.tokenizer import ByteTokenizer
from mtx.step.trainer import Trainer
from mtx.train.session import MOST_LOSS

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
    return out, trainer.to_canonical(jax.device_get(state.params))


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy whose step 20 has one flipped bit, and an empty directory named as a step."""
    out = shutil.copytree(saved[0], tmp_path / "run")
    (first, *_) = Checkpoints(out).manifest(20).catalog["params.embed.tokens"].blocks
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
    (damaged / "checkpoints" / "x.aside").mkdir()  # somebody else's
    (damaged / "checkpoints" / "50.aside.txt").touch()
    assert main(["checkpoint", "list", str(damaged), "--json"]) == 0
    states = {row["step"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {
        10: "damaged: run.json is not what was written", 20: "complete", 30: "incomplete",
        40: "set aside as 40.aside",
    }  # fmt: skip


def test_inspect_says_of_a_usual_loss_whether_it_is_known(tmp_path, capsys):
    for name, usual in (("known", 2.5), ("not", MOST_LOSS)):
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            trainer = Trainer(RUN)
            extra = {"usual_loss": usual}
            checkpoints.save(trainer, trainer.init(), tokenizer=ByteTokenizer(), extra=extra)
        assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert ("2.5" in text) == (name == "known") and "1e+30" not in text


def test_inspect(saved, capsys):
    assert main(["checkpoint", "inspect", str(saved[0]), "--step", "10"]) == 0
    text = capsys.readouterr().out
    assert "held out   loss 2.5000 at step 10" in text and "consumed   20" in text
    assert "tokenizer  bytes, vocabulary 256" in text
    assert main(["checkpoint", "inspect", str(saved[0]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 20 and shown["run"] == json.loads(json.dumps(to_dict(RUN)))
    array = shown["arrays"]["mu.layers.block.mlp.up.w"]
    assert (array["shape"], array["dtype"], array["bytes"]) == ([2, 16, 64], "float32", 8192)


def test_verify(saved, damaged, capsys):
    assert main(["checkpoint", "verify", str(saved[0])]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["sound", "sound"]
    assert main(["checkpoint", "verify", str(damaged)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "10", "sound"]
    assert lines[1].split()[:3] == ["step", "20", "DAMAGED"]
    assert "array params.embed.tokens, from byte " in lines[1] and len(lines) == 2
    assert main(["checkpoint", "verify", str(damaged), "--step", "10"]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export(saved, tmp_path, dtype, capsys):
    out = tmp_path / "shared"
    arguments = ["checkpoint", "export", str(saved[0]), "--out", str(out), "--dtype", dtype]
    assert main(arguments) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "model.safetensors", "run.json", "tokenizer.json"
    ]  # fmt: skip
    file = SafetensorsFile(out / "model.safetensors")
    for path, wanted in jax.tree.leaves_with_path(saved[1]):
        there = file.read(".".join(key.key for key in path))
        np.testing.assert_array_equal(there, wanted.astype(there.dtype))
    assert main(arguments) == 2
    assert "is there already; name another" in capsys.readouterr().err


def test_a_damaged_one_is_not_exported(damaged, tmp_path, capsys):
    out = tmp_path / "shared"
    assert main(["checkpoint", "export", str(damaged), "--out", str(out)]) == 2
    assert "20 is damaged: array params.embed.tokens" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst", "x"], ("lst", "did you mean 'list'?")),
        (["list"], ("RUN_DIR", "--out")),
        (["verify", "nowhere"], ("nowhere",)),
        (["export", "nowhere"], ("--out",)),
        (["inspect", "nowhere"], ("nowhere", "`out`")),
    ],
)
def test_mistakes(arguments, said, capsys):
    assert main(["checkpoint", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(value in error for value in said)


def test_help(capsys):
    assert main(["checkpoint"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {action}" in text for action in ("list", "inspect", "verify", "export"))


# -- for others ------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()


def blocks_of_the_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def without_mtx(code: str, *arguments: object) -> str:
    """The output of a program that cannot import mtx."""
    program = f"import sys\nsys.modules['mtx'] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True,
        env={name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    with Checkpoints(folder).open(step) as store:
        return {name: store.read(name) for name in store.catalog}


def assert_same_bits(there: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert there.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (there[name].dtype, there[name].shape) == (values.dtype, values.shape)
        assert there[name].tobytes() == values.tobytes(), name


def test_the_page_s_reader_needs_numpy_alone(saved, damaged, tmp_path):
    reader, _ = blocks_of_the_page()
    assert len(reader.splitlines()) <= 33
    names: dict = {}
    exec(compile(reader, "docs/checkpoints.md", "exec"), names)
    folder = saved[0] / "checkpoints" / "20"
    assert_same_bits(names["read_checkpoint"](folder), all_arrays(saved[0], 20))
    with pytest.raises(AssertionError) as error:
        names["read_checkpoint"](damaged / "checkpoints" / "20")
    assert "params.embed.tokens" in str(error.value)
    (damaged / "checkpoints" / "20" / "checkpoint.json").write_text(
        (folder / "checkpoint.json").read_text().replace('"step":20', '"step":21')
    )
    with pytest.raises(AssertionError) as error:
        names["read_checkpoint"](damaged / "checkpoints" / "20")
    assert "checkpoint.json" in str(error.value)
    heavy = "{'jax', 'orbax', 'ml_dtypes'}"
    told = f"{reader}\nprint(len(read_checkpoint(sys.argv[1])), {heavy} & set(sys.modules))"
    assert without_mtx(told, folder) == f"{len(all_arrays(saved[0], 20))} set()\n"


def test_every_array_of_the_page_is_there(saved):
    arrays = all_arrays(saved[0], 20)
    section = PAGE.partition("### Arrays")[2].partition("### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = re.findall(r"`([\w.]+)`", " ".join(rows))
    assert len(named) == 7 and set(named) <= arrays.keys()


@pytest.mark.parametrize(("dtype", "optimizer"), [("float32", True), ("bfloat16", False)])
def test_orbax_alone_reads_an_export(saved, tmp_path, dtype, optimizer):
    """In a process that cannot import mtx, with the code of the page."""
    out, found = tmp_path / "shared", tmp_path / "found.npz"
    arguments = ["checkpoint", "export", str(saved[0]), "--out", str(out), "--format", "orbax"]
    assert main([*arguments, "--dtype", dtype, *["--optimizer"] * optimizer]) == 0
    _, lines = blocks_of_the_page()
    without_mtx(
        lines.replace('"/path/to/FOLDER"', "sys.argv[1]")
        + "import jax, numpy as np\n"
        + "named = {jax.tree_util.keystr(path, simple=True, separator='.'): a "
        + "for path, a in jax.tree.leaves_with_path(state)}\n"
        + "as_bytes = lambda a: np.frombuffer(a.tobytes(), np.uint8)\n"
        + "np.savez(sys.argv[2], **{f'{n} {a.dtype} {a.shape}': as_bytes(a) "
        + "for n, a in named.items()})",
        out, found,
    )  # fmt: skip
    wanted = {}
    for name, values in all_arrays(saved[0], 20).items():
        if name.startswith("params."):
            values = values.astype(jnp.dtype(dtype))
        if optimizer or name.startswith("params."):
            wanted[f"{name} {values.dtype} {values.shape}"] = values.tobytes()
    there = {name: values.tobytes() for name, values in np.load(found).items()}
    assert there == wanted
    assert json.loads((out / "run.json").read_text()) == json.loads(json.dumps(to_dict(RUN)))
    assert (out / "tokenizer.json").is_file()


def test_the_optimizer_s_state_as_safetensors(saved, tmp_path, capsys):
    out = tmp_path / "shared"
    arguments = ["checkpoint", "export", str(saved[0]), "--out", str(out), "--step", "10"]
    assert main([*arguments, "--optimizer", "--dtype", "bfloat16"]) == 0
    assert "parameters in bfloat16 and the optimizer's state" in capsys.readouterr().out
    assert json.loads((out / "state.json").read_text()) == {
        "loss_scale": {"good_steps": 0, "scale": 1.0}, "skipped": 0, "step": 10,
    }  # fmt: skip
    moments = {n: a for n, a in all_arrays(saved[0], 10).items() if n.startswith(("mu.", "nu."))}
    file = SafetensorsFile(out / "optimizer.safetensors")
    assert_same_bits({name: file.read(name) for name in file.tensors}, moments)


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_an_export_that_finds_no_room(saved, tmp_path, form, capsys, caplog):
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount")
    try:
        arguments = ["checkpoint", "export", str(saved[0]), "--format", form, "--optimizer"]
        assert main([*arguments, "--out", str(tmp_path / "shared")]) == 2
        error = capsys.readouterr().err
        assert "No space left on device" in error or "and 32,768 are free" in error
        assert f"{tmp_path / 'shared'} cannot be written" in error and error.count("\n") == 1
        assert list(tmp_path.iterdir()) == [] and not caplog.records
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
