"""Other destinations of a run's numbers, and its profile."""

import sys
import types

import pytest
from errors import names
from test_train_guard import run_of

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.train.log import Log
from mtx.train.profile import ProfileWindow
from mtx.train.track import curves, make_trackers


class Writer:
    """The part of tensorboardX that is used."""

    made = []

    def __init__(self, directory):
        self.directory, self.scalars, self.open = directory, [], True
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.open = False


def test_tensorboard_gets_the_curves_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    trackers = make_trackers(run_of(tmp_path, track=("tensorboard",)))
    with Log(tmp_path / "log.jsonl", trackers) as log:
        log.write("step", {"step": 3, "loss": 2.5, "mfu": None, "finite": True})
        log.write("save", {"step": 3, "path": "there", "seconds": 1.0})
        log.write("eval", {"step": 4, "loss": float("nan")})
    (writer,) = Writer.made
    assert writer.directory == str(tmp_path / "tensorboard")
    assert writer.scalars == [("step/loss", 2.5, 3), ("step/finite", 1.0, 3)]
    assert not writer.open


def test_what_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as error:
        make_trackers(run_of(tmp_path, track=("wandb",)))
    names(error, "'mtx[track]'")
    with pytest.raises(UserError) as error:
        RunConfig(track=("tensorbord",))
    names(error, "'tensorboard'")


def test_curves_are_numbers_of_steps_and_evaluations():
    assert curves("eval", {"kind": "eval", "step": 1, "t_s": 0.1, "loss": 2}) == {"eval/loss": 2.0}
    assert curves("start", {"step": 1, "devices": 8}) == {}


def test_a_profile_holds_its_steps(tmp_path):
    window = ProfileWindow((2, 3), tmp_path / "profile")
    ended = []
    for step in range(1, 6):
        window.before(step)
        if window.ends(step):
            ended.append(step)
            window.stop()
    assert ended == [3]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(UserError) as error:
        RunConfig(profile=(3, 2))
    names(error, "profile=3", "2")
