"""From launch to the first step: where the time goes, and where compiled programs are kept."""

from __future__ import annotations

import stat
import sys

import jax
import pytest

from mtx.errors import UserError
from mtx.launch import startup
from mtx.launch.startup import StartUp, process_age_s, use_compile_cache


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; the process began 3 s before it."""
    now = [100.0]
    monkeypatch.setattr(startup.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(startup, "process_age_s", lambda: 3.0)
    return now


def test_parts_add_up_to_the_whole(clock):
    parts = StartUp.of_process()
    parts.mark("python")
    for part, seconds in (("compile", 5.0), ("data", 0.5), ("compile", 2.0)):
        clock[0] += seconds
        parts.mark(part)
    clock[0] += 0.25
    assert parts.end("first step")
    clock[0] += 99
    parts.mark("later")
    assert not parts.end("first step")
    assert parts.parts == {"python": 3.0, "compile": 7.0, "data": 0.5, "first step": 0.25}
    assert parts.describe() == (
        "10.8 s from launch to the first step: python 3.0, compile 7.0, data 0.5, first step 0.2"
    )


def test_what_begins_later_counts_from_there(clock):
    parts = StartUp("the fault")
    clock[0] += 1.5
    assert parts.end("restore")
    assert parts.describe() == "1.5 s from the fault to the first step: restore 1.5"


@pytest.mark.skipif(sys.platform != "linux", reason="another system does not say")
def test_a_process_has_an_age():
    first = process_age_s()
    assert 0 < first <= process_age_s()


@pytest.fixture
def updates(monkeypatch):
    """The updates to JAX's config, recorded instead of applied."""
    given = {}
    monkeypatch.setattr(jax.config, "update", given.__setitem__)
    return given


def test_the_compile_cache_is_the_users_alone(tmp_path, monkeypatch, updates):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = use_compile_cache("auto")
    assert path == tmp_path / "mtx" / "compiled"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert updates == {"jax_compilation_cache_dir": str(path)}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "other"))
    assert use_compile_cache("auto") == tmp_path / "other"
    assert use_compile_cache(str(tmp_path / "own")) == tmp_path / "own"


@pytest.mark.parametrize(("directory", "processes"), [("none", 1), ("auto", 2)])
def test_no_compile_cache(monkeypatch, updates, directory, processes):
    monkeypatch.setattr(jax, "process_count", lambda: processes)  # on CPUs, where it helps only one
    assert use_compile_cache(directory) is None
    assert updates == {"jax_enable_compilation_cache": False}


def test_a_compile_cache_that_cannot_be(tmp_path, updates):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        use_compile_cache(str(tmp_path / "file" / "x"))
