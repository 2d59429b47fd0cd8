"""Whether ticks are woven if a layout leaves it open: by a plan's target, and on devices."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mtx
from mtx.plan.calibration import calibration_of
from mtx.plan.hardware import find_hardware, hardware
from mtx.plan.memory import predict_memory
from mtx.plan.plan import make_plan
from mtx.plan.time import predict_step
from mtx.plan.woven import choose_weave
from mtx.presets import preset

H100, A100 = hardware("h100"), hardware("a100-80gb")
LLAMA = preset("llama-2-70b")
H100_KIND = H100.device_kinds[0]


def with_layout(run, **changes):
    return replace(run, layout=replace(run.layout, **changes))


def seconds(run, weave, device=H100, **options):
    run = with_layout(run, weave=weave)
    return predict_step(run.model, run.layout, run.global_batch, device, **options).step_s


@pytest.mark.parametrize("name", ["llama-2-70b", "gpt-175b", "qwen3-30b-a3b", "gemma-2-9b"])
def test_it_is_on_where_it_takes_less_time(name):
    run = preset(name)
    assert run.layout.weave == "auto"
    layout, why = choose_weave(run, H100)
    assert layout == replace(run.layout, weave="on")
    plain, woven = seconds(run, "off"), seconds(run, "on")
    assert woven < plain == seconds(run, "auto") and f"{woven:.4g} s, {plain:.4g}" in why
    plan = make_plan(run, target="h100")
    assert plan.run.layout == layout and plan.time.step_s == woven
    assert any(each.startswith("weave on") for each in plan.chosen) and plan.chose("weave")


def test_the_reason_has_the_seconds_of_the_plan():
    """Even if experts are not evenly loaded."""
    plan = make_plan(preset("mixtral-8x7b"), target="h100", expert_imbalance=2.0)
    (why,) = plan.chosen
    assert plan.run.layout.weave == "on" and f"in {plan.time.step_s:.4g} s" in why


@pytest.mark.parametrize(
    "run",
    [
        preset("gpt-1.7b"),  # replicas alone: nothing to hide
        with_layout(LLAMA, idle="skip"),
        with_layout(LLAMA, stash="inputs"),
        with_layout(LLAMA, offload=0.5),
        with_layout(LLAMA, weave="off"),
        with_layout(preset("gpt-1.7b"), weave="on"),  # as asked for
    ],
)
def test_else_a_layout_stays_as_it_is(run):
    assert choose_weave(run, H100) == (run.layout, "")
    assert make_plan(run, target="h100").run.layout.weave == run.layout.weave


def test_a_plan_of_anothers_program_is_not_woven():
    """A GPT on A100s is priced as Megatron-LM; if our program is to run there, it weaves."""
    run = preset("gpt-1t")
    assert choose_weave(run, A100) == (run.layout, "")
    ours = calibration_of(A100, "mtx")
    layout, _ = choose_weave(run, A100, calibration=ours)
    assert layout.weave == "on"
    woven, plain = (seconds(run, each, A100, calibration=ours) for each in ("on", "off"))
    assert woven < plain


def test_what_would_not_fit_is_not_woven():
    plain, woven = (
        predict_memory(LLAMA.model, replace(LLAMA.layout, weave=weave), LLAMA.global_batch)
        for weave in ("off", "on")
    )
    between = (plain.total_bytes + woven.total_bytes) / 2 / 0.9 / 2**30
    layout, why = choose_weave(LLAMA, replace(H100, memory_gib=between))
    assert layout == LLAMA.layout
    assert "do not fit" in why and f"{woven.total_bytes / 2**30:,.1f} GiB" in why


def trainer_on(platform, kind, run=LLAMA):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return mtx.Trainer(run, mesh=SimpleNamespace(devices=np.array([device] * 8)))


def test_training_weaves_on_gpus_that_are_known(monkeypatch):
    for version, platform, kind, weave in (
        ((0, 12), "gpu", H100_KIND, "on"),
        ((0, 11), "cuda", A100.device_kinds[0], "on"),
        ((0, 10), "gpu", H100_KIND, "auto"),  # its matmuls do not read weights in place
        ((0, 12), "gpu", "NVIDIA of next year", "auto"),
        ((0, 12), "cpu", "cpu", "auto"),
        ((0, 12), "tpu", "TPU v5p", "auto"),
    ):
        monkeypatch.setattr("mtx.step.xla.version", lambda version=version: version)
        trainer = trainer_on(platform, kind)
        assert trainer.run.layout.weave == weave
        assert trainer.schedule.head_ahead == (weave == "on")
        assert [each.split(":")[0] for each in trainer.reasons] == ["weave on"] * (weave == "on")
    assert find_hardware(H100_KIND) == H100


def test_training_weaves_by_our_own_times(monkeypatch):
    """Even if a plan would by default be Megatron-LM's."""
    monkeypatch.setattr("mtx.step.xla.version", lambda: (0, 12))
    assert trainer_on("gpu", A100.device_kinds[0], preset("gpt-1t")).run.layout.weave == "on"
    assert trainer_on("gpu", H100_KIND, preset("gpt-1.7b")).run.layout.weave == "auto"


def test_training_has_the_memory_that_jax_takes(monkeypatch):
    monkeypatch.setattr("mtx.step.xla.version", lambda: (0, 12))
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        for told, weave in ((None, "on"), ("0.25", "auto"), ("0.5", "on")):
            monkeypatch.delenv(name, raising=False)
            if told:
                monkeypatch.setenv(name, told)  # 23.7 of 80 GiB are needed
            trainer = trainer_on("gpu", H100_KIND)
            assert trainer.run.layout.weave == weave
            assert any("do not fit" in each for each in trainer.reasons) == (weave == "auto")
        monkeypatch.delenv(name, raising=False)
