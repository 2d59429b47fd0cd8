"""`mtx train DIRECTORY`: a run continues as if it had not stopped, and a model from Hugging Face is
trained from its weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hugging
import numpy as np
import pytest
from parameters import params_of

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.conversion.checkpoint import SavedParameters
from mtx.conversion.huggingface import HuggingFaceModel
from mtx.data import load_data
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.data.tokenizer_files import write_tokenizer
from mtx.evaluation.score import score_batch
from mtx.step.trainer import Trainer
from mtx.train.start import find_start

pytestmark = pytest.mark.usefixtures("kept_programs")

TEXT = "What goes on was there before; what was there before goes on. \n" * 60
TINY = [
    "--model.hidden", "16", "--model.layers", "2", "--model.heads", "2", "--model.sequence", "16",
    "--eval-batches", "1", "--eval-every", "0", "--global-batch", "4", "--optimizer.rate",
    "constant", "--optimizer.warmup-steps", "0", "--layout.data", "1", "--layout.pipe", "1",
    "--layout.tensor", "1", "--layout.virtual", "1", "--layout.microbatch", "2", "--data.path",
    "text.txt",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    return tmp_path


def write_llama(name="llama", *, tokenizer=True, **changes) -> Path:
    """Write a Llama in Hugging Face's format, with its own tokenizer."""
    tokens = train_bpe([TEXT], vocab=270)
    changes = {"eos_token_id": tokens.eod} | changes
    config, shapes = hugging.llama(vocab_size=tokens.vocab + 2, **changes)
    shapes |= {
        name: (tokens.vocab + 2, *shape[1:])
        for name, shape in shapes.items()
        if shape[0] == hugging.V
    }
    hugging.write(Path(name), config, hugging.random_tensors(shapes), dtype="F16")
    if tokenizer:
        write_tokenizer(tokens, f"{name}/tokenizer.json")
    return Path(name)


def arrays_of(directory: str, step: int) -> dict[str, np.ndarray]:
    with Checkpoints(directory).open(step) as store:
        return {
            name: store.read(name, (0,) * len(info.shape), info.shape)
            for name, info in store.catalog.items()
        }


def log_of(directory: str, kind: str) -> list[dict]:
    lines = Path(directory, "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def losses_of(directory: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log_of(directory, "step")}


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["train", *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("mtx: ") and error.count("\n") == 1 and out == ""
    return error[5:-1]


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit(folder, capsys, monkeypatch):
    assert main(["train", *TINY, "--steps", "4", "--out", "whole"]) == 0
    assert main(["train", *TINY, "--steps", "2", "--out", "part"]) == 0
    capsys.readouterr()
    assert main(["train", "part", "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "changed    steps 2 -> 4\n" in said and "out        part\n" in said
    assert losses_of("part") == losses_of("whole")
    whole, part = arrays_of("whole", 4), arrays_of("part", 4)
    assert whole.keys() == part.keys() and any(name.startswith("mu.") for name in whole)
    for name, values in whole.items():
        np.testing.assert_array_equal(part[name], values, err_msg=name)

    # Continue in another place; the first one is not changed.
    before, runs = sorted(path for path in Path("part").rglob("*")), []
    monkeypatch.setattr(
        "mtx.train.loop.run_training", lambda run, **_: runs.append(run) or SimpleNamespace(exit=0)
    )
    assert main(["train", "part/checkpoints", "--no-resume", "--out", "other"]) == 0
    assert "start      copies " in capsys.readouterr().out
    assert (runs[0].out, runs[0].resume, runs[0].steps) == ("other", True, 4)
    assert Checkpoints("other").steps() == [4]
    copied = arrays_of("other", 4)
    assert all((copied[name] == values).all() for name, values in part.items())
    assert main(["train", "part", "--out", "other", "--steps", "9"]) == 0
    assert "start      goes on in other, and not from part again" in capsys.readouterr().out
    assert sorted(path for path in Path("part").rglob("*")) == before

    # A run that began anew, or elsewhere, is never taken for one that began here.
    assert "out=whole holds a run that began anew, not from part" in refused(
        capsys, "part", "--out", "whole", "--steps", "9"
    )
    shutil.copytree("part", "third")
    said = refused(capsys, "third", "--out", "other", "--steps", "9")
    assert f"began from {Path('part').resolve()}, not from third" in said
    assert "mtx train other" in said

    assert "steps=3 is fewer than the 4 that part has done" in refused(
        capsys, "part", "--steps", "3"
    )
    assert "is one checkpoint; name the run that it is of: part" in refused(
        capsys, "part/checkpoints/4"
    )
    Path("part/run.json").unlink()
    assert find_start("part").run == replace(Checkpoints("part").run(), out="part")


def damage_arrays(run: str, step: int) -> None:
    file = Path(run, "checkpoints", str(step), "arrays.0.bin")
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_copied(folder, capsys):
    assert main(["train", *TINY, "--steps", "4", "--save-every", "2", "--out", "source"]) == 0
    damage_arrays("source", 4)
    before = files_of(folder)
    capsys.readouterr()
    assert main(["train", "source", "--steps", "5", "--out", "other"]) == 0
    said = capsys.readouterr().out
    assert "source/checkpoints/4 is damaged" in said and "source/checkpoints/2" in said
    assert losses_of("other").keys() == {3, 4, 5}
    assert {path: data for path, data in files_of(folder).items() if path in before} == before

    damage_arrays("source", 2)
    capsys.readouterr()
    assert main(["train", "source", "--steps", "5", "--out", "third"]) == 2
    assert "source/checkpoints" in capsys.readouterr().err and not Path("third").exists()


NOT_OF_THE_RUN = {
    "--model.hidden 32": ["hidden", "16", "32"],
    "--model.sequence 8": ["sequence", "16", "8"],
    "--model.family llama --model.heads 2": ["family", "llama"],
    "--data.tokenizer bpe --data.bpe-vocab 270": ["270", "model.vocab=256"],
    "--optimizer.name adamw": ["optimizer"],
    "--layout.pipe 2 --layout.tensor 2 --layout.data 4 --layout.microbatch 1": ["16", "8"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps by Lion, to be copied."""
    place = tmp_path_factory.mktemp("trained")
    Path(place, "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert (
            main(["train", *TINY, "--optimizer.name", "lion", "--steps", "2", "--out", "run"]) == 0
        )
    return place


def test_a_torn_config_is_named_once_and_another_found(folder, capsys, trained):
    shutil.copytree(trained / "run", "run")
    Path("run/run.json").write_text('{"steps": ')
    assert refused(capsys, "run").count("run/run.json") == 1
    Path("run/run.json").rename("away")
    assert find_start("run").run.steps == 2


def test_another_optimizer_takes_no_moments_of_the_same_name(folder, capsys):
    """Lion's mu is not AdamW's, whose nu would be lost with the next save."""
    Path("text.txt").write_text(TEXT)
    assert main(["train", *TINY, "--steps", "2", "--out", "run"]) == 0
    capsys.readouterr()
    for option, values in (("name", ("name=adamw", "lion")), ("rest", ("rest", "lion"))):
        line = refused(capsys, "run", "--steps", "3", f"--optimizer.{option}", "lion")
        assert all(value in line for value in values), line


@pytest.mark.parametrize("options", NOT_OF_THE_RUN)
@pytest.mark.parametrize("out", ["run", "new"])
def test_what_does_not_suit_a_run_is_refused_before_anything_is_written(
    folder, capsys, trained, options, out
):
    shutil.copytree(trained / "run", "run")
    before = files_of(folder)
    line = refused(capsys, "run", "--steps", "3", "--out", out, *options.split())
    assert all(value in line for value in NOT_OF_THE_RUN[options]), line
    assert files_of(folder) == before and not Path("new").exists()


# --- a model --------------------------------------------------------------------------------------


def scored(directory: str, batch_of) -> float:
    """The mean loss of a checkpoint of step 0 on a batch of its run's data."""
    checkpoints = Checkpoints(directory)
    trainer = Trainer(checkpoints.run(0))
    batch = batch_of(load_data(trainer.run))
    losses, _ = score_batch(trainer, checkpoints.restore(trainer, 0), batch)
    return float((losses * batch["weights"]).sum() / batch["weights"].sum())


def test_a_model_goes_on_from_what_it_knows(folder, capsys):
    write_llama()
    command = [
        "train", "llama", "--data.path", "text.txt", "--eval-batches", "1", "--global-batch", "4",
        "--model.compute-dtype", "float32", "--layout.data", "2", "--layout.tensor", "1",
        "--layout.pipe", "1", "--optimizer.lr", "1e-3",
    ]  # fmt: skip
    assert main([*command, "--steps", "2"]) == 0
    assert "start      converts llama\n" in capsys.readouterr().out
    run = Checkpoints("runs/llama").run(2)
    assert (run.model.sequence, run.layout, run.optimizer.warmup_steps) == (
        hugging.S, Layout(data=2), 0
    )  # fmt: skip
    assert run.data.tokenizer == "runs/llama/huggingface" and run.optimizer.min_lr == 2e-6

    theirs, rows = HuggingFaceModel(Path("llama")), (slice(0, 5),)
    with Checkpoints("runs/llama").open(0) as store:
        ours = SavedParameters(store)
        theirs.expect(ours.shapes)
        np.testing.assert_array_equal(
            ours.read("embed.tokens", rows), theirs.read("embed.tokens", rows)
        )
    first = log_of("runs/llama", "eval")[0]
    held_out = scored("runs/llama", lambda data: next(iter(data.eval_batches(1, 4))))
    assert first["step"] == 0 and first["loss"] == pytest.approx(held_out, rel=1e-6)
    trained = scored("runs/llama", lambda data: data.batch(0, 4))
    assert losses_of("runs/llama")[1] == pytest.approx(trained, rel=1e-6)

    # The same command continues, even without the model's own directory.
    assert main([*command, "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "start      goes on in runs/llama, and not from llama again" in said
    shutil.rmtree("llama")
    Path("runs/llama").rename("moved")
    assert main(["train", "moved", "--steps", "3"]) == 0
    assert find_start("moved").run.data.tokenizer == "moved/huggingface"
    assert losses_of("moved").keys() == {1, 2, 3}
    assert main(["convert", "moved", "back", "--dtype", "bfloat16"]) == 0
    assert json.loads(Path("back/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_run_that_was_converted_asks_for_data_and_is_spread(folder, capsys):
    write_llama(max_position_embeddings=16)
    assert main(["convert", "llama", "run", "--check", "none"]) == 0
    assert "--data.path is missing" in refused(capsys, "run")
    options = ["--data.path", "text.txt", "--steps", "1", "--eval-batches", "1"]
    assert main(["train", "run", *options, "--layout.pipe", "2"]) == 0
    said = capsys.readouterr().out
    assert "layout     data 4 x pipe 2 x tensor 1" in said and "start  " not in said
    assert Checkpoints("run").steps() == [0, 1]


HEAD_RUN = RunConfig(
    model=ModelConfig(layers=1, hidden=8, heads=1, sequence=8, compute_dtype="float32"),
    global_batch=1,
)
MISTAKES = {
    "llama": "--data.path is missing: it names the text or the datasets that llama",
    "llama --data.path gone.txt": "data path 'gone.txt' does not exist",
    "llama --data.path text.txt --model.hidden 32": "model.hidden=32 must be 16, as llama/config",
    "llama --data.path text.txt --model.sequence 99": "model.sequence=99 must be at most 24",
    "llama --data.path text.txt --model.vocab 9999": "model.vocab=9999 must be 272, as llama",
    "llama --data.path text.txt --out llama": "out=llama is the model that the run goes on from",
    "llama --data.path text.txt --data.tokenizer gone": "cannot read the tokenizer gone",
    "llama --data.path text.txt --lora.rank 4": "llama/config.json has it; adapters of a trained",
    "llama --data.path text.txt --stepps 3": "unknown option --stepps: did you mean --steps?",
    "mute --data.path text.txt": "mute has no tokenizer; name the model's --data.tokenizer",
    "falcon --data.path text.txt": "falcon/config.json: unknown model_type 'falcon': known are",
    "bare --data.path text.txt": "bare has neither model.safetensors nor model.safetensors.index",
    "empty": "empty is neither a run (run.json, checkpoints) nor a Hugging Face directory (config.",
    "text.txt": "text.txt is a file; name a preset, a plan (.toml, .json), the directory of a run",
    "runs/gone": "runs/gone does not exist; name a preset, a plan",
    "head": "head holds a model with a head of mtx finetune",
    "old": "old/run.json: unknown RunConfig field 'stepps': did you mean 'steps'?",
    "~nobody/run": "~nobody/run does not exist; name a preset",
    "x" * 300: "is longer than a path can be",
    "llama --data.path text.txt --out " + "x" * 300: "is longer than a path can be",
    "torn": "torn/run.json is not JSON",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_seen_before_devices_start(folder, capsys, monkeypatch, line):
    write_llama()
    write_llama("mute", tokenizer=False)
    for name in ("falcon", "bare"):
        Path(name).mkdir()
        config = json.loads(Path("llama/config.json").read_text())
        config |= {"model_type": "falcon"} if name == "falcon" else {}
        Path(name, "config.json").write_text(json.dumps(config))
    Path("empty").mkdir()
    Path("torn").mkdir()
    Path("torn/run.json").write_text('{"steps": ')
    Path("old").mkdir()
    Path("old/run.json").write_text('{"stepps": 3}')
    if line == "head":
        trainer = Trainer(HEAD_RUN)
        with Checkpoints(folder / "head" / "checkpoints") as checkpoints:
            checkpoints.save(
                trainer, trainer.state_from(params_of(HEAD_RUN.model)), tokenizer=ByteTokenizer(),
                extra={"labels": ["a", "b"], "options": 1},
            )  # fmt: skip
    before = sorted(folder.rglob("*"))
    if "--out" not in line:
        monkeypatch.setattr("mtx.cli.train.start_devices", None)  # it must not be called
    assert MISTAKES[line] in refused(capsys, *line.split())
    assert sorted(folder.rglob("*")) == before


def test_another_tokenizer_has_its_own_end(folder):
    write_llama(eos_token_id=5)
    start = find_start("llama")
    assert (start.run.data.tokenizer, start.run.data.eod) == ("llama", "5")
    run = replace(start.run, data=replace(start.run.data, path=("text.txt",), tokenizer="bytes"))
    assert start.complete(run, {"--data.tokenizer"}).data.eod == "auto"
    assert start.complete(run, {"--data.tokenizer", "--data.eod"}).data.eod == "5"
    assert start.complete(run, set()).optimizer.warmup_steps == 100
    short = replace(run, steps=50)
    assert start.complete(short, set()).optimizer.warmup_steps == 5
    assert start.complete(short, {"--optimizer.warmup-steps"}).optimizer.warmup_steps == 100


def test_what_data_cannot_serve_is_refused_before_it_is_converted(folder, capsys):
    """BERT's next-sentence pairs, for which a single book does not suffice."""
    config, shapes = hugging.bert(vocab_size=300)
    shapes |= {name: (300, *shape[1:]) for name, shape in shapes.items() if shape[0] == hugging.V}
    hugging.write(Path("bert"), config, hugging.random_tensors(shapes))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.lower().split()))]
    Path("bert/vocab.txt").write_text("\n".join([*words, *"abcdefghijklmnopqrstuvwxyz;."]))
    assert "order='nsp' takes every other second text from another" in refused(
        capsys, "bert", "--data.path", "text.txt"
    )
    assert not Path("runs").exists()


def test_a_layout_of_too_many_devices_is_refused_before_a_model_is_converted(folder, capsys):
    write_llama()
    layout = ["--layout.data", "8", "--layout.tensor", "2", "--global-batch", "8"]
    line = refused(capsys, "llama", "--data.path", "text.txt", *layout)
    assert "16" in line and "8" in line and not Path("runs").exists()
