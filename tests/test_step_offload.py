"""Residuals partly kept in the host's memory: the step's values are those without offloading, and
the bytes those of the planner. CPUs have one memory, in which both parts lie."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from errors import names
from parameters import params_of
from reference import assert_same, random_batch

from mtx.compile.compiler import find_compiler
from mtx.compile.step import compile_plan
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.costs.cost import on_host
from mtx.errors import UserError
from mtx.plan import memory as plan_memory
from mtx.plan.calibration import calibration_of
from mtx.plan.candidates import RECOMPUTE
from mtx.plan.compiled import HOST
from mtx.plan.hardware import hardware
from mtx.plan.memory import predict_host_bytes, predict_memory
from mtx.plan.mix import Room
from mtx.plan.offload import predict_copies
from mtx.plan.plan import make_plan
from mtx.plan.slots import slots_of
from mtx.plan.stages import residuals_of_stages
from mtx.plan.time import predict_step
from mtx.presets import preset
from mtx.step.trainer import Trainer
from mtx.train.memory import host_memory

MODEL = ModelConfig(
    family="llama", layers=4, hidden=32, heads=4, kv_heads=2, sequence=32, vocab=60,
    vocab_multiple=8, compute_dtype="float32",
)  # fmt: skip
GPT3 = ModelConfig(layers=8, hidden=1024, heads=16, sequence=4096, compute_dtype="bfloat16")


def loss_and_gradients(layout):
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=8))
    return trainer.loss_and_gradients_of(
        trainer.masters_from(params_of(MODEL)), random_batch(MODEL, 8)
    )


@cache
def wanted():
    return loss_and_gradients(Layout())


@pytest.mark.parametrize(
    "layout",
    [
        {"pipe": 2, "virtual": 2, "tensor": 2, "data": 2, "offload": 0.3, "idle": "phases"},
        {"pipe": 2, "data": 2, "zero": 3, "offload": 1.0},
        {"pipe": 2, "context": 2, "stage_layers": (3, 1), "offload": 0.5},
        {"pipe": 2, "schedule": "zb_h1", "offload": 0.5},
        # Chunks without layers between others, before the copy out that an earlier F leaves to the
        # next, and between the copy back and its B.
        {
            "pipe": 3,
            "virtual": 2,
            "schedule": "v_min",
            "stage_layers": (2, 0, 0, 1, 0, 1),
            "idle": "phases",
            "offload": 0.5,
        },
    ],
    ids=["interleaved", "zero 3", "uneven", "split", "empty chunks"],
)
def test_the_numbers_do_not_depend_on_where_residuals_wait(layout):
    assert_same(loss_and_gradients(Layout(**layout)), wanted())


def test_arrays_without_elements_stay():
    """Experts keep such arrays if no token waits for another round."""
    assert on_host([(4, 400), (0, 0), (8, 800)], 0.4) == (4, 0, 0)
    assert on_host([(0, 0)], 1.0) == (0,)


def test_the_hosts_bytes_compiled_are_the_planners():
    if find_compiler("a100-80gb", 4).backend != "gpu":
        pytest.skip("no compiler for GPUs here")
    layout = Layout(pipe=2, tensor=2, offload=0.25, idle="phases")
    run = RunConfig(model=GPT3, layout=layout, global_batch=4)
    compiled = compile_plan(run, target="a100-80gb")
    assert compiled.host_bytes == predict_host_bytes(GPT3, layout, 4) > 0
    assert compiled.timeline
    (copies,) = (one for one in compiled.timeline.exposures if one.axes == (HOST,))
    device = hardware("a100-80gb")
    share = calibration_of(device, "mtx").host_share
    each_way_s = predict_copies(GPT3, layout, 4, device, share=share).each_way_s
    # Including copies of idle ticks: 5 for 4 microbatches.
    assert 2 * each_way_s < copies.seconds < 2 * 2 * each_way_s
    assert 0 < copies.exposed_s < copies.seconds


# GiB per device, by XLA for absent A100s, jax 0.12.0.1, cuDNN's attention.
COMPILED_GIB = [
    (65536, {"tensor": 8, "offload": 0.5}, 34.57),
    (65536, {"tensor": 8, "offload": 0.25}, 42.27),
    (65536, {"tensor": 8, "offload": 1.0}, 19.79),
    (131072, {"tensor": 8, "offload": 0.25}, 70.47),
    (131072, {"tensor": 8, "offload": 1.0}, 25.50),
    (65536, {"tensor": 8, "offload": 0.5, "recompute": "around_attention"}, 19.73),
    (32768, {"pipe": 2, "virtual": 2, "tensor": 4, "offload": 0.5}, 38.25),
    (2**20, {"context": 8, "zero": 3, "offload": 0.5625, "recompute": "around_attention",
             "context_attention": "ulysses"}, 70.61),
    (2**20, {"context": 8, "zero": 3, "offload": 1.0, "recompute": "around_attention",
             "context_attention": "ulysses"}, 43.27),
]  # fmt: skip


@pytest.mark.parametrize("sequence, layout, compiled_gib", COMPILED_GIB)
def test_a_device_s_memory_is_near_what_the_compiler_assigns(
    sequence, layout, compiled_gib, monkeypatch
):
    monkeypatch.setattr(plan_memory, "conditionals_copy", lambda: False)
    model = replace(preset("llama-2-7b").model, sequence=sequence)
    batch = 4 if "pipe" in layout else 1
    memory = predict_memory(model, Layout(**layout), batch)
    assert memory.total_bytes / 2**30 == pytest.approx(compiled_gib, rel=0.03)


def test_the_fastest_mix_of_those_that_fit_is_chosen_each_with_the_least_fraction():
    device = hardware("a100-40gb")

    def mixes(sequence, **memory):
        model = ModelConfig(
            layers=32, hidden=4096, heads=32, sequence=sequence, compute_dtype="bfloat16"
        )
        room = Room(
            model=model, global_batch=1, hardware=replace(device, **memory), zero=1,
            optimizer=OptimizerConfig(),
        )  # fmt: skip
        asked = Layout(tensor=8, offload="auto")
        found = room.mixes(asked)
        assert room.resolve(asked)[0] == found[0].layout
        return model, found

    assert mixes(4096)[1][0].layout == Layout(tensor=8, offload=0.0)
    model, found = mixes(65536)
    bound = device.memory_bytes * 0.9
    assert {mix.layout.recompute for mix in found} == set(RECOMPUTE) and found[0].fits
    for mix in found:
        time = predict_step(model, mix.layout, 1, device)
        assert (mix.step_s, mix.exposed_s) == (time.step_s, time.host_comm_s)
        assert mix.step_s >= found[0].step_s
        assert predict_memory(model, mix.layout, 1).total_bytes == mix.device_bytes <= bound
        if mix.layout.offload:
            less = replace(mix.layout, offload=mix.layout.offload - 1 / 64)
            assert predict_memory(model, less, 1).total_bytes > bound
    none = next(mix for mix in found if mix.layout.recompute == "none")
    assert 0 < none.layout.offload < 1 and none.host_bytes > 2 * 2**30
    _, short_of = mixes(65536, host_gib=none.host_bytes / 2**30)
    assert not next(mix for mix in short_of if mix.layout.recompute == "none").fits


def test_a_copy_counts_as_far_as_it_takes_longer_than_the_layer_beside_it():
    """At 1 GB/s copies are exposed beyond the time of a layer's F or B; at 1 PB/s none is."""
    model, layout = replace(GPT3, sequence=1024), Layout(offload=1.0)
    slow, fast = (replace(hardware("h100"), host_gb_s=rate) for rate in (1, 1e6))
    copies = predict_copies(model, layout, 2, slow, share=0.8)
    assert copies.host_bytes * 2 == copies.moved_bytes  # two microbatches, one stage
    assert copies.each_way_s == copies.moved_bytes / (0.8 * 1e9)
    without, hidden = (
        predict_step(model, each, 2, fast) for each in (replace(layout, offload=0.0), layout)
    )
    assert hidden == without and hidden.host_comm_s == 0
    time = predict_step(model, layout, 2, slow)
    layers_s = time.matmul_s + time.attention_s + time.elementwise_s
    assert time.host_comm_s == pytest.approx(2 * copies.each_way_s - layers_s)
    assert time.step_s == pytest.approx(without.step_s + time.host_comm_s)


def test_each_stage_s_residuals_are_said_and_what_it_would_offload_alone():
    """By hand: 1F1B in full ticks has 2 (p - 1 - s) + 1 in flight on stage s."""
    layout = Layout(pipe=4, offload=0.75, idle="phases")
    whole = predict_memory(GPT3, replace(layout, offload=0.0), 16).stash_bytes
    slots = slots_of(layout, 16).stash
    room = 3 * whole / slots  # for three microbatches
    stages = residuals_of_stages(GPT3, layout, 16, backend="cuda", room_bytes=room)
    assert [each.in_flight for each in stages] == [7, 5, 3, 1]
    assert [each.alone for each in stages] == pytest.approx([4 / 7, 2 / 5, 0, 0])
    for each in stages:
        both = each.device_bytes + each.host_bytes
        assert both == pytest.approx(each.in_flight * whole / slots)
        assert each.host_bytes == pytest.approx(0.75 * both, rel=1e-3)
    host = predict_host_bytes(GPT3, layout, 16)  # as the first stage, plus slots of idle F
    assert stages[0].host_bytes <= host <= slots * stages[0].host_bytes / 7


def test_a_machine_says_what_it_must_hold():
    sizes = SimpleNamespace(host_temp_size_in_bytes=3 * 2**30)
    said = host_memory(sizes, devices=8, room_bytes=32 * 2**30)
    assert "24.0 GiB" in said and "32.0 GiB" in said
    assert "use less offload" in host_memory(sizes, devices=8, room_bytes=16 * 2**30)
    assert "use less offload" not in said
    none = SimpleNamespace(host_temp_size_in_bytes=0)
    assert not host_memory(none, devices=8, room_bytes=0)


def test_what_it_is_not_made_for():
    for other in ({"stash": "inputs"}, {"weave": "on", "idle": "phases"}):
        with pytest.raises(UserError) as error:
            Layout(offload=0.5, **other)
        assert names(error, "offload=0.5", *list(other)[:1])
    with pytest.raises(UserError) as error:
        Layout(offload=1.5)
    assert names(error, "offload=1.5")
    run = RunConfig(model=MODEL, layout=Layout(offload="auto"), global_batch=8)
    with pytest.raises(UserError) as error:
        Trainer(run).compile_step()
    assert names(error, "offload='auto'", "mtx plan")
    assert make_plan(run).run.layout.offload == 0
