"""The main job from end to end, in miniature; the full size is refused."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import jax
import pytest

from mtx.cli import exit_status
from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.flops import parameters
from mtx.plan.plan import make_plan, save_plan
from mtx.presets import preset

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def gpt_1t():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        return importlib.import_module("gpt_1t")


def test_it_learns_writes_and_says_where_things_are(gpt_1t, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpt_1t, "TOKENS", 24)
    arguments = [
        "--steps", "20", "--seed", "3", "--out", "run", "--eval-batches", "2",
        "--optimizer.warmup-steps", "5", "--model.sequence", "32",
    ]  # fmt: skip
    assert gpt_1t.main(arguments) == 0
    out = capsys.readouterr().out
    # The plan, each number labelled
    for name, value, source in (
        ("by the paper's equation (2)", "1,008,038,707,200", "computed"),
        ("data x pipe x tensor", "6 x 64 x 8 = 3,072 devices", "given"),
        ("of all GPUs", "502.0 petaFLOP/s", "published"),
    ):
        assert re.search(rf"{re.escape(name)} .* {re.escape(value)} .* {source}\b", out)
    # The run
    assert f"At hand: {jax.device_count()} x cpu\n" in out
    assert "layout     data 2 x pipe 2 x tensor 2" in out and "1f1b, v = 2" in out
    first, last, share = re.search(
        r"^Held-out loss +([\d.]+) -> ([\d.]+) nats a token, (\d+)% of the first$", out, re.M
    ).groups()
    assert float(first) == pytest.approx(5.55, abs=0.3), "not about ln 256"
    assert float(last) < 0.7 * float(first) and int(share) == round(
        100 * float(last) / float(first)
    )
    assert all(f"  | {prompt}" in out for prompt in gpt_1t.PROMPTS)
    # Where everything lies
    checkpoint = re.search(r"^Checkpoint +(\S+)$", out, re.M)[1]
    log = re.search(r"^Log +(\S+)$", out, re.M)[1]
    assert Path(checkpoint).is_dir() and checkpoint.endswith("run/checkpoints/20")
    assert Path(log).is_file()
    assert "mtx generate run --prompt 'The ' --virtual-devices 8" in out
    assert "gpt_1t.py --full" in out


@pytest.mark.usefixtures("few_presets")
def test_the_full_size_is_refused_before_anything_is_made(gpt_1t, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"1,008,038,758,400 parameters needs at least [\d,.]+ GiB"):
        gpt_1t.main(["--full", "--data.path", "a.txt", "--data.tokenizer", "bpe"])
    assert "502.0 petaFLOP/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_presets")
def test_a_plan_file_is_what_runs(gpt_1t, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = preset("gpt-39b")
    save_plan(make_plan(run, target="h100"), "best.toml")
    with pytest.raises(UserError, match=f"{parameters(run.model):,} parameters needs at least"):
        gpt_1t.main(
            ["best.toml", "--data.path=a.txt", "--data.tokenizer=bpe", "--out", "elsewhere"]
        )
    page = capsys.readouterr().out
    assert "32 x 2 x 8 = 512 devices" in page and "3,072 devices" not in page
    with pytest.raises(UserError, match="cannot read plan file none.toml"):
        gpt_1t.main(["none.toml"])
    assert [path.name for path in tmp_path.iterdir()] == ["best.toml"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "3"], "unknown option --step: did you mean --steps"),
        (["miniature"], "unexpected argument 'miniature'"),
        (["--full"], "data.path and data.tokenizer are not given"),
        (["--layout.pipe", "3"], "layers=4 cannot be divided over pipe\\*virtual=3\\*2"),
        (["--layout.data", "4"], "asks for 16 devices, and there are 8"),
        (["--data.path", "missing.txt"], "data path 'missing.txt' does not exist"),
    ],
)
def test_mistakes_leave_nothing_behind(gpt_1t, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        gpt_1t.main(arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "devices, data, pipe, tensor, microbatch",
    [
        (1, 1, 1, 1, 2),
        (2, 1, 2, 1, 2),
        (3, 1, 2, 1, 2),
        (4, 1, 2, 2, 2),
        (7, 1, 2, 2, 2),
        (8, 2, 2, 2, 2),
        (24, 4, 2, 2, 2),
        (32, 8, 2, 2, 2),
        (64, 16, 2, 2, 1),
        (3072, 16, 2, 2, 1),
    ],
)
def test_layouts_use_the_devices_there_are(gpt_1t, devices, data, pipe, tensor, microbatch):
    assert gpt_1t.layout_for(devices) == Layout(
        data=data, pipe=pipe, tensor=tensor, virtual=2, microbatch=microbatch
    )


def test_help_is_the_parser_s(gpt_1t, capsys):
    assert exit_status(lambda: gpt_1t.main(["--help"])) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: gpt_1t.py")
    assert "--full " in out and "--no-full" not in out and "--virtual-devices INT" in out
