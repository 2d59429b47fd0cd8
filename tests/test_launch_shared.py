"""Two real processes with the same or different `out`, and the same or different requests: both
report a difference before anything else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig, to_dict
from mtx.data.tokenizer import ByteTokenizer
from mtx.launch import shared
from mtx.launch.exits import Exit
from mtx.step.trainer import Trainer
from mtx.train import loop

ROOT = Path(__file__).parent.parent
MODEL = ModelConfig(layers=2, hidden=16, heads=2, sequence=8, vocab=256, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(pipe=2), global_batch=2, steps=9)

_WORKER = """
import json, sys
from mtx.launch.start import join_cluster, use_virtual_devices
use_virtual_devices(1)
join_cluster()
from dataclasses import replace
from pathlib import Path
import jax
from mtx.config import RunConfig, from_dict
from mtx.errors import UserError
from mtx.launch import shared
from mtx.launch.exits import Exit
from mtx.train.loop import run_training

shared._SEEN_S = 2.0
folder, process = Path(sys.argv[1]), jax.process_index()
run = from_dict(RunConfig, json.loads(sys.argv[2]))
real_touch = Path.touch

def refuse(path):
    raise OSError(30, "Read-only file system")


own = folder / f"disk{process}"
cases = {
    "shared": lambda: shared.require_shared(folder / "same" / "run"),
    "not there": lambda: shared.require_shared(own / "new" / "run"),
    "read-only": lambda: shared.require_shared(folder / "same"),
    "a file": lambda: shared.require_shared(folder / "file" / "run"),
    "same": lambda: shared.require_same("run", {"lr": 0.1, "seed": 3}),
    "others": lambda: shared.require_same("run", {"lr": 0.1 + process, "seed": 3 + process}),
}
for name, case in cases.items():
    if name == "read-only" and process == 1:
        Path.touch = refuse
    said = ""
    try:
        case()
    except UserError as error:
        said = str(error)
    Path.touch = real_touch
    print(json.dumps([name, said]), flush=True)
run_training(replace(run, out=str(own / "run")))  # leaves by itself
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """({case: what each of two processes says}, the folder). Both disks have a run's folder with
    the same checkpoint, as if it had been copied there."""
    folder = tmp_path_factory.mktemp("disks")
    for name in ("same", "disk0", "disk1"):
        (folder / name).mkdir()
    (folder / "file").write_text("")
    trainer = Trainer(RUN)
    state = trainer.init()._replace(step=jax.device_put(np.int32(3), trainer.init().step.sharding))
    with Checkpoints(folder / "disk0" / "run" / "checkpoints") as checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
    shutil.copytree(folder / "disk0" / "run", folder / "disk1" / "run")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(folder), json.dumps(to_dict(RUN))],
            env=kept | {
                "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_PROCESSES": "2",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_ID": str(process),
            },
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for process in range(2)
    ]  # fmt: skip
    found: dict[str, list[str]] = {}
    try:
        for process, worker in enumerate(workers):
            out, errors = worker.communicate(timeout=300)
            assert worker.returncode == Exit.MISTAKE, errors
            assert "Traceback" not in errors, errors
            # Process 0 always says it, another only if it was the first to find it.
            lines = [line for line in errors.splitlines() if "out=" in line]
            assert len(lines) == 1 or (process > 0 and not lines), errors
            found.setdefault("restored", []).extend("out=" + s.partition("out=")[2] for s in lines)
            for name, text in map(json.loads, out.splitlines()):
                found.setdefault(name, []).append(text)
    finally:
        for worker in workers:
            worker.kill()
    return folder, found


def test_a_folder_that_all_share(said):
    folder, found = said
    assert found["shared"] == ["", ""]
    assert list((folder / "same").iterdir()) == []


@pytest.mark.parametrize("case", ["not there", "restored"])
def test_a_folder_of_each_host_is_refused_by_all(said, case):
    folder, found = said
    (one,) = set(found[case])  # so none of them waits for another
    out = folder / "disk1" / {"not there": "new/run", "restored": "run"}[case]
    assert f"out={out} is not on a disk that all processes share: process 1 on " in one
    assert "does not see what process 0 writes there" in one and "\n" not in one
    for disk in ("disk0", "disk1"):  # unchanged
        assert [p.name for p in (folder / disk).iterdir()] == ["run"]
        assert [p.name for p in (folder / disk / "run").iterdir()] == ["checkpoints"]
        assert Checkpoints(folder / disk / "run").steps() == [3]


def test_a_folder_that_one_cannot_write_is_refused_by_all(said):
    folder, found = said
    one, other = found["read-only"]
    assert one == other and f"out={folder / 'same'} cannot be written by process 1 on " in one
    assert "(Read-only file system)" in one
    one, other = found["a file"]
    assert one == other and "cannot be written by process 0" in one and "Not a directory" in one


def test_processes_that_were_asked_for_other_things_are_refused_by_all(said):
    _, found = said
    assert found["same"] == ["", ""]
    (one,) = set(found["others"])
    for value in ("lr=0.1", "1.1", "process 0", "process 1"):
        assert value in one
    assert "\n" not in one


def test_a_run_asks_whether_all_processes_have_its_config_and_data(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(loop, "require_same", asked.__setitem__)
    loop.run_training(replace(RUN, layout=Layout(), steps=1, out=str(tmp_path / "run")))
    assert {"optimizer.lr", "global_batch", "seed", "data.split"} <= asked["run"].keys()
    assert not {"out", "data.path", "data.tokenizer"} & asked["run"].keys()  # names on each host
    assert asked["data"]["tokens to train on"] > 0
    assert asked["data"]["tokenizer sha256"] == ByteTokenizer().identity.sha256


def test_what_another_host_sees_late_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "_SEEN_S", 0.3)
    monkeypatch.setattr(shared.time, "sleep", lambda _: (tmp_path / "late").mkdir(exist_ok=True))
    assert shared._appears(tmp_path / "late")
    assert not shared._appears(tmp_path / "never" / "late")
