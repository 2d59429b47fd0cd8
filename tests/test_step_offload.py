"""Residuals of which a part waits in the host's memory: the numbers of a step without, and the
bytes that the planner says. CPUs have one memory, in which both parts lie."""

from dataclasses import replace
from functools import cache

import pytest
from errors import names
from reference import assert_same, random_batch

from mtx.compile.compiler import find_compiler
from mtx.compile.step import compile_plan
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError
from mtx.plan.hardware import hardware
from mtx.plan.memory import predict_host_bytes, predict_memory
from mtx.plan.mix import Mixer, resolve_offload
from mtx.plan.offload import predict_copies
from mtx.plan.plan import make_plan
from mtx.step.trainer import Trainer

MODEL = ModelConfig(
    family="llama", layers=4, hidden=32, heads=4, kv_heads=2, sequence=32, vocab=60,
    vocab_multiple=8, compute_dtype="float32",
)  # fmt: skip
GPT3 = ModelConfig(layers=8, hidden=1024, heads=16, sequence=4096, compute_dtype="bfloat16")


def loss_and_gradients(layout):
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=8))
    return trainer.loss_and_gradients(trainer.init(), random_batch(MODEL, 8))


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
    ],
    ids=["interleaved", "zero 3", "uneven", "split"],
)
def test_the_numbers_do_not_depend_on_where_residuals_wait(layout):
    assert_same(loss_and_gradients(Layout(**layout)), wanted())


def test_the_hosts_bytes_compiled_are_the_planners():
    if find_compiler("a100-80gb", 4).backend != "gpu":
        pytest.skip("no compiler for GPUs here")
    layout = Layout(pipe=2, tensor=2, offload=0.25, idle="phases")
    run = RunConfig(model=GPT3, layout=layout, global_batch=4)
    compiled = compile_plan(run, target="a100-80gb")
    assert compiled.host_bytes == predict_host_bytes(GPT3, layout, 4) > 0


def test_the_least_fraction_that_fits_is_chosen():
    device, optimizer = hardware("a100-40gb"), OptimizerConfig()

    def chosen(sequence):
        model = ModelConfig(
            layers=32, hidden=4096, heads=32, sequence=sequence, compute_dtype="bfloat16"
        )
        layout = Layout(tensor=8, offload="auto")
        return model, resolve_offload(layout, model, 1, device, zero=1, optimizer=optimizer)[0]

    assert chosen(4096)[1].offload == 0
    model, layout = chosen(65536)
    assert 0 < layout.offload < 1
    room, less = 0.9 * device.memory_bytes, Layout(tensor=8, offload=layout.offload - 1 / 64)
    assert predict_memory(model, layout, 1).total_bytes <= room
    assert predict_memory(model, less, 1).total_bytes > room
    copies = predict_copies(model, layout, 1, device, share=0.5)
    assert copies.host_bytes == copies.moved_bytes  # one microbatch, of one stage
    assert copies.each_way_s == copies.moved_bytes / (0.5 * 32e9)


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
