"""Adapters beside frozen weights: loss and gradients are those of an unsharded reference whose
weights are W + scale A B, and nothing is computed or kept of what is frozen."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_llama

import mtx
from mtx.config import Layout, ModelConfig

GPT = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8,
    lora_rank=3, lora_alpha=6.0,
)  # fmt: skip
LLAMA = ModelConfig(
    family="llama", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=16, vocab=101,
    compute_dtype="float32", vocab_multiple=8, lora_rank=3, lora_alpha=6.0,
)  # fmt: skip
ATTENTION = replace(LLAMA, lora_on=("attention",))
ROWS = 8


@functools.cache
def params_of(model):
    """Those that training starts from, but that no B is zero."""
    params = mtx.init_params(model)
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def moved(path, a):
        is_b = "_lora" in str(path) and path[-1].key == "b"
        return np.asarray(0.02 * jax.random.normal(next(keys), a.shape)) if is_b else a

    return jax.tree.map_with_path(moved, params)


def merged(params, scale):
    """W + scale A B in the place of W, and no adapters."""
    found = {}
    for name, value in params.items():
        if name.endswith("_lora"):
            continue
        found[name] = merged(value, scale) if isinstance(value, dict) else value
        if f"{name}_lora" in params:
            a, b = params[f"{name}_lora"]["a"], params[f"{name}_lora"]["b"]
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))
            found[name] = value + scale * product(a, b)
    return found


@functools.cache
def reference_of(model):
    """(loss, gradients of the adapters)"""
    loss = reference.loss if model.family == "gpt" else functools.partial(llama_loss, model)
    params = params_of(model)
    of = functools.partial(run, loss, model.lora_alpha / model.lora_rank)
    found, gradients = jax.jit(jax.value_and_grad(of))(params, batch_of(model))
    return jax.device_get((found, only_adapters(gradients)))


def run(loss, scale, params, batch):
    return loss(merged(params, scale), batch)


def llama_loss(model, params, batch):
    turning = reference_llama.frequencies(model.head_size, model.rotary_base)
    return reference_llama.loss(params, batch, turning)


def only_adapters(tree):
    found = {
        k: only_adapters(v) for k, v in tree.items() if isinstance(v, dict) and k[-5:] != "_lora"
    }
    return found | {k: v for k, v in tree.items() if k.endswith("_lora")}


def batch_of(model):
    return reference.random_batch(model, ROWS)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, Layout(data=2, pipe=2, tensor=2, virtual=2)),
        (LLAMA, Layout(data=2, pipe=2, tensor=2, virtual=2, recompute="selective")),
        (ATTENTION, Layout(data=2, pipe=2, tensor=2, zero=3, recompute="full", virtual=2)),
        (LLAMA, Layout(pipe=2, tensor=4, sequence_parallel=False, stash="inputs")),  # heads repeat
        (LLAMA, Layout(data=4, pipe=2, zero=3, zero_unit="layer", schedule="zb_h1")),
        (LLAMA, Layout(pipe=2, tensor=2, virtual=2, data=2, weave="on", idle="phases")),
    ],
)  # fmt: skip
def test_gradients_equal_the_reference(model, layout):
    got = mtx.loss_and_gradients(model, layout, batch_of(model), params=params_of(model))
    reference.assert_same(got, reference_of(model))
