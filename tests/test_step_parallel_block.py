"""Parallel attention and MLP (MegaScale's block), with windows: the values of an unsharded
reference, and one reduction per layer."""

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
import reference
from errors import names

import mtx
from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.families.mamba2 import Mamba2
from mtx.layers.layer import Kind
from mtx.layers.mlp import MLP
from mtx.layers.norm import Norm
from mtx.step.trainer import Trainer

SIZES = {
    "layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 101, "vocab_multiple": 8,
    "compute_dtype": "float32", "init_std": 0.1,
}  # fmt: skip
MODEL = ModelConfig(parallel_block=True, window=5, **SIZES)


def _windowed(x, p, window):
    """`reference._attention` to the last `window` positions."""
    q, k, v = jnp.einsum("bsd,dnhk->nbhsk", x, p["qkv"]["w"]) + p["qkv"]["b"][:, None, :, None, :]
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    ones = jnp.ones(scores.shape[-2:], bool)
    unseen = jnp.triu(ones, 1) | jnp.tril(ones, -window)
    weights = jax.nn.softmax(jnp.where(unseen, -1e30, scores), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"]["w"]) + p["out"]["b"]


@functools.cache
def wanted(rows):
    """(parameters, batch, loss and gradients)"""
    batch, params = reference.random_batch(MODEL, rows), mtx.init_params(MODEL)

    def loss(params):
        x = params["embed"]["tokens"][batch["tokens"]] + params["embed"]["positions"]
        for layer in range(MODEL.layers):
            p = jax.tree.map(lambda a, layer=layer: a[layer], params["layers"]["block"])
            h = reference._norm(x, p["norm"])
            x = x + _windowed(h, p["attention"], MODEL.window) + reference._mlp(h, p["mlp"])
        x = reference._norm(x, params["head"]["norm"])
        logits = (x @ params["embed"]["tokens"].T)[..., : MODEL.vocab]
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return params, batch, jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, pipe=2, tensor=2, virtual=2),
        Layout(pipe=2, tensor=4, sequence_parallel=False, recompute="selective"),
        Layout(pipe=2, tensor=2, slices=4, schedule="seq1f1b"),
        Layout(tensor=2, context=2, pipe=2, schedule="zb_h1"),
    ],
)
def test_a_parallel_block_equals_the_reference(layout):
    params, batch, want = wanted(8)
    reference.assert_same(mtx.loss_and_gradients(MODEL, layout, batch, params=params), want)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_mixer_may_stand_beside_an_mlp(sequence_parallel, monkeypatch):
    """With two groups of heads, each on two of four devices."""
    in_turn = Mamba2.stack

    def beside(model):
        stack = in_turn(model)
        kind = stack.kinds["block"]
        both = *kind.sublayers, ("mlp", MLP(ffn=32))
        return replace(stack, kinds={"block": replace(kind, sublayers=both, parallel=True)})

    monkeypatch.setattr(Mamba2, "stack", beside)
    sizes = SIZES | {"layers": 1, "ssm_groups": 2, "ssm_head_dim": 8, "ssm_state": 8}
    model = ModelConfig(family="mamba2", **sizes)
    batch, params = reference.random_batch(model, 2), mtx.init_params(model)
    found = [
        mtx.loss_and_gradients(model, layout, batch, params=params)
        for layout in (Layout(), Layout(tensor=4, sequence_parallel=sequence_parallel))
    ]
    reference.assert_same(*found[::-1])


@pytest.mark.parametrize("also", [{}, {"norm_placement": "both"}])
def test_what_needs_a_sum_of_its_own_is_refused(also):
    @dataclass(frozen=True, kw_only=True)
    class NormedBehind:
        looks_around = False

    sublayers = ("mlp", MLP(ffn=8)), ("mix", NormedBehind())
    with pytest.raises(UserError) as error:
        Kind(sublayers=sublayers, norm=Norm(kind="rms", epsilon=1e-6), parallel=True, **also)
    assert names(error, "mix", "NormedBehind", "parallel=False")


@pytest.mark.parametrize(
    "sequence_parallel, forward, backward",
    [
        # B gathers the layer's input as well: XLA reuses F's, of the same microbatch here.
        (True, {"all-gather": 1, "reduce-scatter": 1}, {"all-gather": 1, "reduce-scatter": 1}),
        (False, {"all-reduce": 1}, {"all-reduce": 1}),
    ],
)
def test_a_layer_has_half_the_collectives(sequence_parallel, forward, backward):
    """The compiled step has one reduction per layer each way; a sequential block has two."""

    def found(parallel_block):
        model = ModelConfig(parallel_block=parallel_block, **SIZES | {"layers": 1})
        layout = Layout(tensor=2, sequence_parallel=sequence_parallel)
        trainer = Trainer(RunConfig(model=model, layout=layout, global_batch=1))
        counts = {"F": Counter(), "B": Counter()}
        for each in read_program(trainer.compile_step().as_text()).collectives():
            if half := re.search(r"(?:closed_call|eval_jaxpr)/([FB])/(?!embed)", each.op_name):
                counts[half[1]][each.kind] += each.count
        return counts

    assert found(True) == {"F": forward, "B": backward}
    twice = {half: {k: 2 * n for k, n in each.items()} for half, each in found(True).items()}
    assert found(False) == twice
