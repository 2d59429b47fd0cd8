"""Runs that do not fit are refused, with the preset that would."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from errors import names

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.plan.fit import fit_layout, refuse_if_too_large, spread_layout
from mtx.plan.flops import parameters
from mtx.plan.memory import predict_memory
from mtx.presets import NAMES, preset


def gpus(count: int, gib: float | None, *, processes: int = 1) -> list:
    """Stand-ins for JAX's devices as process 0 sees them; without `gib` they report no memory."""
    client = SimpleNamespace(process_index=lambda: 0)
    stats = {} if gib is None else {"bytes_limit": int(gib * 2**30)}
    return [
        SimpleNamespace(
            platform="gpu", client=client, process_index=i * processes // count,
            memory_stats=lambda: stats,
        )
        for i in range(count)
    ]  # fmt: skip


def cpus(count: int) -> list:
    client = SimpleNamespace(process_index=lambda: 0)
    return [SimpleNamespace(platform="cpu", client=client, process_index=0)] * count


def held_gib(run: RunConfig) -> float:
    memory = predict_memory(run.model, run.layout, run.global_batch)
    return (memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes) / 2**30


def test_the_paper_s_model_fits_its_cluster_and_no_smaller_one(monkeypatch):
    large = [name for name in NAMES if parameters(preset(name).model) > 1e10]
    monkeypatch.setattr("mtx.plan.fit.NAMES", large)  # a smaller preset is not one of the largest
    run = preset("gpt-1t")
    refuse_if_too_large(run, gpus(3072, 72, processes=384))
    with pytest.raises(UserError) as error:
        refuse_if_too_large(run, gpus(8, 72))
    assert str(error.value) == (
        "a model of 1,008,038,758,400 parameters needs at least "
        f"{held_gib(run) * 3072:,.1f} GiB over 3,072 devices for parameters, gradients and "
        "optimizer state, and the 8 devices have 72.0 GiB each; the largest preset that fits 8 "
        "devices is gpt-oss-20b"
    )


def test_the_limit_is_what_has_to_be_held(few_presets):
    run = preset("gpt-39b")
    refuse_if_too_large(run, gpus(512, held_gib(run) + 0.01, processes=64))
    with pytest.raises(UserError) as error:
        refuse_if_too_large(run, gpus(512, held_gib(run) - 0.01, processes=64))
    names(error, "512")


def test_devices_that_do_not_say_are_trusted(few_presets):
    """A single device that reports no memory is enough: it may be larger than the others."""
    run = preset("gpt-1t")
    with pytest.raises(UserError) as error:
        refuse_if_too_large(run, gpus(2, 72))
    names(error, "2", "72.0")
    assert refuse_if_too_large(run, gpus(1, 72) + gpus(1, None)) is None


def test_virtual_devices_share_the_machine(monkeypatch, few_presets):
    run = RunConfig(
        model=ModelConfig(layers=8, hidden=1024, compute_dtype="float32"), layout=Layout(data=4)
    )
    need = held_gib(run) * 4

    def machine_of(gib):
        sizes = {"SC_PHYS_PAGES": int(gib * 2**20), "SC_PAGE_SIZE": 2**10}
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__)

    machine_of(need + 0.01)
    refuse_if_too_large(run, cpus(4))
    refuse_if_too_large(run, cpus(8))  # four of them stay idle
    machine_of(need - 0.01)
    with pytest.raises(UserError) as error:
        refuse_if_too_large(run, cpus(4))
    names(error, f"{need - 0.01:.1f}")
    machine_of(0.001)
    with pytest.raises(UserError) as error:
        refuse_if_too_large(run, cpus(4))
    names(error, "model.layers")


@pytest.mark.parametrize(
    ("devices", "fitted"),
    [(3072, (6, 64, 8)), (1024, (2, 64, 8)), (512, (1, 64, 8)), (100, (1, 64, 1)), (8, (1, 8, 1))],
)
def test_fewer_devices_take_a_part_of_a_layout(devices, fitted):
    layout = fit_layout(preset("gpt-1t").layout, devices)
    assert (layout.data, layout.pipe, layout.tensor) == fitted


def test_a_part_of_an_uneven_pipeline_is_balanced():
    layout, balanced = Layout(pipe=2, stage_layers=(1, 3)), Layout(stage_layers="balanced")
    assert fit_layout(layout, 2) == layout
    assert fit_layout(layout, 1) == fit_layout(layout, 8, {"pipe": 1}) == balanced


def test_what_is_given_stays_and_the_rest_is_fitted_to_it():
    layout = Layout(data=2, pipe=2, tensor=2)
    assert fit_layout(layout, 4, {"tensor": 4}) == Layout(tensor=4)
    assert fit_layout(layout, 8, {"tensor": 4, "virtual": 2}) == Layout(pipe=2, tensor=4, virtual=2)
    assert fit_layout(layout, 1, {"pipe": 4}) == Layout(pipe=4)  # it is refused later


def test_experts_are_on_fewer_devices_where_there_are_fewer():
    layout = Layout(data=2, expert=4, tensor=2)
    assert fit_layout(layout, 4) == Layout(expert=2, tensor=2)
    assert fit_layout(layout, 1) == Layout()


def shape(layout: Layout) -> tuple[int, int, int]:
    return layout.data, layout.pipe, layout.tensor


def small(**changes) -> RunConfig:
    model = ModelConfig(layers=4, hidden=96, heads=4, sequence=128)
    return replace(RunConfig(model=model, global_batch=16), **changes)


def test_a_model_is_spread_with_as_few_shards_as_hold_it():
    assert shape(spread_layout(small(), cpus(8))) == (8, 1, 1)
    assert shape(spread_layout(small(), gpus(8, None))) == (8, 1, 1)
    assert shape(spread_layout(small(global_batch=4), cpus(8))) == (4, 1, 2)
    assert shape(spread_layout(small(global_batch=3), cpus(2))) == (1, 1, 2)
    assert shape(spread_layout(small(), cpus(7))) == (4, 1, 1), "7 and 5 divide nothing of it"
    llama = preset("llama-3-8b")
    model = replace(llama.model, sequence=2048)
    run = RunConfig(model=model, global_batch=16)
    assert shape(spread_layout(run, gpus(8, 62))) == (4, 1, 2)
    assert shape(spread_layout(run, gpus(8, 36))) == (2, 1, 4)
    pairs = spread_layout(run, gpus(16, 28, processes=8))  # of GPUs near each other
    assert (pairs.tensor, pairs.devices) == (2, 16) and pairs.pipe > 1


def test_axes_that_are_kept_and_a_model_that_fits_nowhere():
    run = small(layout=Layout(tensor=2, pipe=2))
    assert shape(spread_layout(run, cpus(8), kept=["tensor", "pipe"])) == (2, 2, 2)
    assert shape(spread_layout(run, cpus(8), kept=["pipe"])) == (4, 2, 1)
    assert spread_layout(run, cpus(3), kept=["tensor", "pipe"]) == run.layout
    big = preset("gpt-39b")
    run = replace(big, layout=Layout(), global_batch=16)
    assert spread_layout(run, gpus(8, 16)).devices == 8, "what then is refused says by how much"
