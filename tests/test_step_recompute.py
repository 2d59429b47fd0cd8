"""Recomputation around attention: gradients as without, and one forward pass of attention."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_pipeline_head import GEMMA, batch_of, params_of
from test_step_families import BERT, LLAMA

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.layers import fused
from mtx.layers.model import Model
from mtx.step.trainer import Trainer
from mtx.strand import Strand, needed_of
from mtx.vjp import LayerVJP

GPT = ModelConfig(
    layers=8, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8
)
ROWS, WAY = 8, "around_attention"
CASES = {
    "1f1b": (GPT, dict(data=2, pipe=2, tensor=2)),
    "interleaved": (LLAMA, dict(pipe=2, tensor=2, virtual=2, idle="phases")),
    "w apart": (GPT, dict(pipe=4, tensor=2, schedule="zb_h1")),
    "w apart in a v": (LLAMA, dict(pipe=2, virtual=2, schedule="zb_v", idle="phases")),
    "slices": (GPT, dict(pipe=2, tensor=2, slices=4, schedule="seq1f1b")),
    "woven": (LLAMA, dict(pipe=2, tensor=2, virtual=2, idle="phases", weave="on")),
    "zero 3, a layer": (GPT, dict(data=4, tensor=2, zero=3, zero_unit="layer")),
    "zero 3, woven": (GPT, dict(data=4, zero=3, zero_unit="layer", weave="on", idle="phases")),
    "zero 3, a chunk": (GPT, dict(data=2, pipe=2, zero=3, zero_unit="chunk")),
    "kinds": (GEMMA, dict(pipe=2, tensor=2)),
    "bert": (BERT, dict(data=2, tensor=2)),
}


def trainer_of(model, **layout):
    return Trainer(RunConfig(model=model, layout=Layout(**layout), global_batch=ROWS))


def gradients(model, **layout):
    trainer = trainer_of(model, **layout)
    return trainer.loss_and_gradients_of(trainer.masters_from(params_of(model)), batch_of(model))


@functools.cache
def plain(model):
    return gradients(model)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_recomputation(case):
    model, layout = CASES[case]
    reference.assert_same(gradients(model, recompute=WAY, **layout), plain(model))


def layer_of(recompute, *, kernel="blocked", slices=1):
    model = ModelConfig(
        layers=2, hidden=64, heads=4, sequence=64, vocab=128,
        compute_dtype="bfloat16" if kernel == "described" else "float32",
    )  # fmt: skip
    made = Model(model, recompute=recompute, kernel=kernel, slices=slices)
    dtype = jnp.dtype(model.compute_dtype)
    params = jax.eval_shape(functools.partial(made.init_layer, "block", 0), 0)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)
    x = {"x": jax.ShapeDtypeStruct((2, 64 // slices, 64), dtype)}
    rows = jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((2,), "uint32")
    context = jax.eval_shape(lambda *rows: made.context(0, {}, *rows, 1), *rows)
    cache = (jax.eval_shape(lambda: made.empty_cache("block", 2)),) if slices > 1 else ()
    layer = functools.partial(made.layer, "block")
    return LayerVJP(layer, params, x, context, *cache), params, (context, *cache)


def flops(recompute, **how):
    """FLOPs of the compiled backward pass of a layer."""
    vjp, params, given = layer_of(recompute, **how)
    arguments = vjp.residuals, params, given, vjp.output
    text = jax.jit(vjp.backward).lower(*arguments).compile().as_text()
    return read_program(text).matmul_flops()


def needed(recompute, **how) -> list:
    """The equations that the gradients of a layer need."""
    vjp, params, given = layer_of(recompute, **how)
    strand = Strand.of(vjp.backward, vjp.residuals, params, given, vjp.output)
    return [strand.eqns[i] for i in sorted(needed_of(strand.eqns, strand.outvars))]


def products(recompute, **how) -> Counter:
    """Products of activations alone, counted by shape; these shapes begin with rows and heads."""
    dots = [eqn for eqn in needed(recompute, **how) if eqn.primitive.name == "dot_general"]
    shapes = [eqn.outvars[0].aval.shape for eqn in dots]
    return Counter(shape for shape in shapes if shape[:2] == (2, 4))


def test_the_products_of_attention_are_not_computed_again():
    """Two per block of queries; the four blocks see 10/16 of the square. The backward pass needs
    the scores anyway, and XLA computes them once."""
    again = products("full") - products(WAY)
    assert sum(again.values()) == 2 * 4 and not products(WAY) - products("none")
    assert flops("full") - flops(WAY) == 2 * 2 * 4 * 64 * 64 * 16 * 10 / 16
    out, up, qkv = (2 * 2 * 64 * 64 * columns for columns in (64, 256, 192))
    assert flops(WAY) - flops("none") == qkv + out + up


@pytest.mark.parametrize(("way", "times"), [("none", 0), ("selective", 1), (WAY, 0), ("full", 1)])
def test_the_fused_kernel_runs_forward_once(way, times):
    wanted = Counter(eqn.primitive.name for eqn in needed(way, kernel="described"))
    assert wanted[fused.FORWARD.name] == times and wanted[fused.BACKWARD.name] == 1


@pytest.mark.parametrize("slices", [1, 4])
def test_what_waits_is_the_input_and_what_attention_gives(slices):
    vjp, *_ = layer_of(WAY, slices=slices)
    positions = 2 * 64 // slices
    kept = [np.prod(a.shape) for a in vjp.residuals if a.ndim]
    assert sorted(kept) == sorted([positions * 64, positions * 64, positions * 4])


def test_a_third_forward_pass_is_refused():
    with pytest.raises(UserError) as error:
        Layout(stash="inputs", recompute=WAY)
    assert "stash='inputs'" in str(error.value) and WAY in str(error.value)
