"""Damaged checkpoints, full disks and foreign directories are named; the last good one stays."""

from __future__ import annotations

import concurrent.futures
import os
import random
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from errors import names

from mtx.checkpoint import commit
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.store import Damaged
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.step.trainer import Trainer

MODEL = ModelConfig(layers=2, hidden=16, heads=2, sequence=8, vocab=256, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(pipe=2), global_batch=2)


def save(checkpoints: Checkpoints, trainer: Trainer, state, step: int):
    state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
    return checkpoints.save(trainer, state, tokenizer=ByteTokenizer(), extra={"step": step})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 and 2, which differ only in their numbers."""
    trainer = Trainer(RUN)
    state = trainer.init()
    with Checkpoints(tmp_path_factory.mktemp("run")) as checkpoints:
        for step in (1, 2):
            save(checkpoints, trainer, state, step)
    return SimpleNamespace(trainer=trainer, state=jax.device_get(state), checkpoints=checkpoints)


@pytest.fixture
def copied(saved, tmp_path):
    return Checkpoints(shutil.copytree(saved.checkpoints.directory, tmp_path / "checkpoints"))


def arrays(state) -> list:
    """All arrays except step numbers."""
    return [state.params, *(optax.tree_utils.tree_get(state.moments, n) for n in ("mu", "nu"))]


def found(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    said: list[str] = []
    return checkpoints.find(said.append), said


# -- files that differ from what was written -------------------------------------------------------


def test_a_flipped_bit_anywhere_is_caught_or_does_no_harm(saved, copied):
    """In every file of a checkpoint, at random places: either it is named, or everything that can
    be read is unchanged."""
    rng = random.Random(0)
    files = sorted((copied.directory / "2").iterdir())
    assert {file.name for file in files} >= {
        "arrays.0.bin", "checkpoint.json", "run.json", "tokenizer.json", "extra.json",
    }  # fmt: skip
    caught = dict.fromkeys((file.name for file in files), 0)
    for file in files:
        whole = file.read_bytes()
        for _ in range(12):
            place, bit = rng.randrange(len(whole)), rng.randrange(8)
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            try:
                assert copied.run(2) == RUN and copied.extra(2) == {"step": 2}
                assert copied.tokenizer(2).to_dict() == ByteTokenizer().to_dict()
                state = copied.restore(saved.trainer, 2)
                jax.tree.map(np.testing.assert_array_equal, arrays(state), arrays(saved.state))
            except Damaged as error:
                assert str(copied.directory / "2") in str(error) and file.name in str(error)
                assert "\n" not in str(error)
                caught[file.name] += 1
            file.write_bytes(whole)
    assert caught["run.json"] == caught["tokenizer.json"] == caught["extra.json"] == 12
    assert caught["arrays.0.bin"] >= 6  # the rest lies between the arrays
    assert caught["checkpoint.json"] >= 6


def test_every_flipped_byte_of_an_array_is_named(saved, copied):
    path = copied.directory / "2" / "arrays.0.bin"
    info = copied.manifest(2).catalog["nu.layers.block.mlp.up.w"]
    block = info.blocks[-1]
    with path.open("r+b") as file:
        file.seek(block.offset + 5)
        file.write(b"\xff")
    with pytest.raises(Damaged) as error:
        copied.restore(saved.trainer)
    assert names(
        error,
        copied.directory / "2",
        "nu.layers.block.mlp.up.w",
        f"{block.offset:,}",
        "arrays.0.bin",
    )
    assert int(copied.restore(saved.trainer, 1).step) == 1


@pytest.mark.parametrize("name", ["arrays.0.bin", "run.json", "checkpoint.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_files_that_are_not_whole(saved, copied, name, how):
    path = copied.directory / "2" / name
    content = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    if name == "arrays.0.bin":
        with pytest.raises(Damaged) as error:
            copied.restore(saved.trainer, 2)
        assert names(error, "arrays.0.bin")
    step, said = found(copied)
    assert step == 1
    assert len(said) == 1 and f"{copied.directory}/2 is damaged" in said[0] and name in said[0]


def test_the_one_before_it_is_found_and_the_damaged_one_set_aside(saved, copied):
    (copied.directory / "2" / "run.json").write_text("{}")
    step, said = found(copied)
    assert step == 1
    assert said == [
        f"checkpoint {copied.directory}/2 is damaged: run.json is not what was written; it is now "
        "named 2.aside"
    ]
    assert found(copied) == (1, [])
    (copied.directory / "1" / "run.json").unlink()
    for _ in range(2):  # nor does it start over the next time
        with pytest.raises(UserError) as error:
            copied.find(said.append)
        assert names(error, copied.directory)
    assert sorted(path.name for path in copied.directory.iterdir()) == ["1.aside", "2.aside"]


def test_damage_that_only_reading_the_arrays_finds(saved, copied):
    (copied.directory / "2" / "arrays.0.bin").unlink()
    with pytest.raises(Damaged) as damage:
        copied.restore(saved.trainer)
    assert "it is now named 2.aside" in copied.set_aside(2, f"is damaged: {damage.value.what}")
    assert int(copied.restore(saved.trainer).step) == 1


def test_the_oldest_is_trusted_whatever_it_led_to(copied):
    assert copied.set_aside(1, "has led to two spikes", unless_oldest=True) == ""
    assert copied.set_aside(7, "is not there", unless_oldest=True) == ""
    assert "2.aside" in copied.set_aside(2, "has led to two spikes", unless_oldest=True)
    assert copied.steps() == [1]


@pytest.mark.parametrize("name", ["checkpoint.json", "arrays.0.bin"])
def test_what_may_not_be_read_is_no_damage(saved, copied, name, monkeypatch):
    """Refused by a patch, since root, who may run the tests, can read everything."""
    real_open, real_read = os.open, Path.read_bytes

    def refuse(path) -> None:
        if str(path).endswith(f"2/{name}"):
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", lambda path, *rest: refuse(path) or real_open(path, *rest))
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or real_read(path))
    with pytest.raises(UserError) as error:
        copied.restore(saved.trainer)
    assert names(error, f"2/{name}", "Permission denied")
    assert not isinstance(error.value, Damaged)


def test_directories_named_as_steps(saved, copied):
    (copied.directory / "7").mkdir()
    (copied.directory / "8").write_text("a file")
    (copied.directory / "09").mkdir()
    assert found(copied) == (2, [])
    half_deleted = shutil.copytree(copied.directory / "2", copied.directory / "9")
    (half_deleted / "checkpoint.json").unlink()
    step, said = found(copied)
    assert step == 2 and f"{half_deleted} is damaged: it has no checkpoint.json" in said[0]
    shutil.rmtree(copied.directory / "1")
    shutil.rmtree(copied.directory / "2")
    with pytest.raises(UserError) as error:
        copied.find(said.append)
    assert names(error, copied.directory)


# -- what cannot be written ------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB, if this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(saved, small_disk, caplog):
    state = jax.device_put(saved.state, saved.trainer.shardings(saved.trainer.states.specs))
    checkpoints = Checkpoints(small_disk / "run", keep=1)
    save(checkpoints, saved.trainer, state, 1)
    checkpoints.wait()
    (small_disk / "ballast").write_bytes(bytes(1 << 19))
    while True:
        try:
            with (small_disk / "ballast").open("ab") as file:
                file.write(bytes(1 << 12))
        except OSError:
            break
    for failing in ("at once", "again"):
        del failing
        with pytest.raises(UserError) as error:
            save(checkpoints, saved.trainer, state, 2)
            checkpoints.wait()
        assert names(error, checkpoints.directory, "No space left on device")
        assert checkpoints.steps() == [1]
        checkpoints.wait()
        assert [path.name for path in checkpoints.directory.iterdir()] == ["1"]
    assert not caplog.records  # Orbax's tracebacks
    jax.tree.map(
        np.testing.assert_array_equal, checkpoints.restore(saved.trainer).params, state.params
    )
    (small_disk / "ballast").unlink()
    save(checkpoints, saved.trainer, state, 2)
    checkpoints.wait()
    assert checkpoints.steps() == [2]


def test_a_failure_in_the_background_is_told_between_steps(saved, tmp_path, monkeypatch):
    state = jax.device_put(saved.state, saved.trainer.shardings(saved.trainer.states.specs))
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, saved.trainer, state, 1)
    checkpoints.wait()
    checkpoints.poll()

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "write_parts", fail)
        save(checkpoints, saved.trainer, state, 2)
        concurrent.futures.wait([checkpoints._finishing])
        with pytest.raises(UserError) as error:
            checkpoints.poll()
        assert names(error, checkpoints.directory, "process 0", "Input/output error")
    checkpoints.poll()
    save(checkpoints, saved.trainer, state, 3)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]


def test_a_step_that_is_saved_anew(saved, tmp_path, monkeypatch):
    """The old one counts until the new one is complete, for anyone who asks in between."""
    state = jax.device_put(saved.state, saved.trainer.shardings(saved.trainer.states.specs))
    checkpoints, go_on = Checkpoints(tmp_path), threading.Event()
    save(checkpoints, saved.trainer, state, 1)
    checkpoints.wait()
    written = checkpoints.manifest(1).unix_time
    write_parts = commit.write_parts
    monkeypatch.setattr(commit, "write_parts", lambda *a: go_on.wait(60) and write_parts(*a))
    save(checkpoints, saved.trainer, state, 1)
    checkpoints.poll()
    assert checkpoints.manifest(1).unix_time == written
    go_on.set()
    checkpoints.wait()
    assert checkpoints.steps() == [1] and checkpoints.manifest(1).unix_time > written


def test_a_directory_of_something_else(saved, tmp_path):
    state = jax.device_put(saved.state, saved.trainer.shardings(saved.trainer.states.specs))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        save(Checkpoints(tmp_path / "file" / "checkpoints"), saved.trainer, state, 1)
    assert names(error, tmp_path / "file" / "checkpoints", "Not a directory")
    (tmp_path / "photos" / "1").mkdir(parents=True)
    (tmp_path / "photos" / "1" / "cat.png").write_text("")
    checkpoints = Checkpoints(tmp_path / "photos")
    assert checkpoints.find(print) is None
    with pytest.raises(UserError) as error:
        save(checkpoints, saved.trainer, state, 1)
    assert names(error, tmp_path / "photos" / "1", "out")
    assert (tmp_path / "photos" / "1" / "cat.png").exists()


def test_compute_types_and_other_models_are_told_before_the_arrays_are_read(saved, copied):
    (copied.directory / "2" / "arrays.0.bin").unlink()
    other = Trainer(replace(RUN, model=replace(MODEL, hidden=32)))
    with pytest.raises(UserError) as error:
        copied.restore(other)
    assert names(error, "hidden=16", 32)
