"""The step as it is compiled for GPUs, run on CPUs: weight gradients in their own order and a
branch for each chunk; and the XLA options that it is compiled with."""

import functools
from dataclasses import replace

import jax
import pytest
import reference
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.step import xla

SIZES = dict(
    layers=8, hidden=32, heads=4, sequence=16, vocab=61, ffn_multiple=2, vocab_multiple=8,
    compute_dtype="float32",
)  # fmt: skip
GPT = ModelConfig(**SIZES)
LLAMA = ModelConfig(family="llama", kv_heads=2, tied=False, **SIZES)


class InPlace(mtx.Trainer):
    """A trainer whose local shards are written for GPUs."""

    @functools.cached_property
    def axes(self):
        return replace(super().axes, in_place=True)


@functools.cache
def on_one_device(model, rows=8):
    """(loss, gradients)"""
    batch = reference.random_batch(model, rows)
    return mtx.loss_and_gradients(model, Layout(), batch, params=params_of(model))


def found_by(trainer, model, layout, rows=8):
    one = trainer(RunConfig(model=model, layout=layout, global_batch=rows))
    masters = one.masters_from(params_of(model))
    return one.loss_and_gradients_of(masters, reference.random_batch(model, rows))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, Layout(data=2, pipe=2, tensor=2, virtual=2)),
        (GPT, Layout(pipe=2, tensor=2, virtual=4, idle="phases", recompute="selective")),
        (GPT, Layout(pipe=4, virtual=2, schedule="zb_v", stash="inputs")),
        (LLAMA, Layout(pipe=2, tensor=4, virtual=2, schedule="deferred_zb")),
        (LLAMA, Layout(data=2, pipe=2, virtual=2, zero=3, sequence_parallel=False)),
        # one stage: with one microbatch at a time, each layer's residuals have their own places
        (GPT, Layout(data=2, tensor=2)),
        (GPT, Layout(tensor=4, recompute="selective", idle="phases")),
        (LLAMA, Layout(data=4, tensor=2, zero=3)),
    ],
)
def test_losses_and_gradients_stay(model, layout, monkeypatch, quick_orders):
    for least in ("_SHORT", "_BRIEF"):  # even B's small collectives lie beside its matmuls
        monkeypatch.setattr(f"mtx.pipeline.nodes.{least}", 0.0)
    reference.assert_same(found_by(InPlace, model, layout), on_one_device(model))


def test_options_are_for_gpus_and_left_alone_where_they_are_given(monkeypatch):
    assert xla.options("cpu") == xla.options("tpu") == {}
    assert len({option.name for option in xla.GPU}) == len(xla.GPU)
    known = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2,), "float32"))
    known.compile(compiler_options=xla.options("gpu"))  # an unknown name raises
    monkeypatch.setattr(xla, "version", lambda: (0, 9))
    assert xla.options("gpu") == {}
    monkeypatch.setattr(xla, "version", lambda: (0, 12))
    assert xla.options("gpu") == {option.name: option.value for option in xla.GPU}
    first, *others = xla.GPU
    monkeypatch.setenv("XLA_FLAGS", f"--{first.name}=false --xla_dump_to=x")
    assert xla.options("gpu") == {option.name: option.value for option in others}
