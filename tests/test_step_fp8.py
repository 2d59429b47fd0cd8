"""Training in float8: the same loss on every layout, the gradients of the unsharded reference, and
which parts of the program are float8."""

import functools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
import reference_fp8
from errors import names

import mtx
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs.ask import layer_cost
from mtx.errors import UserError
from mtx.evaluation.decoder import Decoder
from mtx.plan.plan import make_plan

SIZES = dict(
    layers=4, hidden=32, heads=4, sequence=32, vocab=61, ffn_multiple=2, vocab_multiple=8,
    compute_dtype="float32", init_std=0.1,
)  # fmt: skip
GPT = ModelConfig(fp8="hybrid", **SIZES)
E4M3 = replace(GPT, fp8="e4m3")
LLAMA = ModelConfig(family="llama", kv_heads=2, tied=False, fp8="e4m3", **SIZES)
# A sum in another order may fall on the other side of the midpoint of two float8 numbers, for one
# element in a million: losses agree to five digits, gradients of a leaf to three.
LOSS, GRADIENT = 1e-5, 2e-3


params_of = functools.cache(mtx.init_params)


@functools.cache
def batch_of(rows):
    return reference.random_batch(GPT, rows)


@functools.cache
def reference_of(model, rows):
    dtype = {"hybrid": "float8_e5m2", "e4m3": "float8_e4m3fn"}[model.fp8]
    found = reference_fp8.loss_and_gradients(params_of(model), batch_of(rows), dtype)
    return jax.device_get(found)


def found_on(model, layout, rows):
    return mtx.loss_and_gradients(model, layout, batch_of(rows), params=params_of(model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, Layout(pipe=2, virtual=2, tensor=2, microbatch=2)),
        (GPT, Layout(data=2, tensor=2, zero=3, zero_unit="layer", weave="on", idle="phases")),
        (E4M3, Layout(tensor=2, sequence_parallel=False, recompute="selective")),
        (GPT, Layout(data=2, microbatch=2, recompute="full")),
        (GPT, Layout(pipe=2, virtual=2, tensor=2, schedule="zb_v", weave="on", idle="phases")),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_the_references(model, layout):
    got = found_on(model, layout, 4)
    reference.assert_same(got, reference_of(model, 4), loss=LOSS, gradient=GRADIENT)


def test_the_reference_is_far_from_float32():
    """Otherwise the tests above would not notice an operand that is not rounded."""
    exact = reference.loss_and_gradients(params_of(GPT), batch_of(4))
    (loss, gradients), (want, wanted) = exact, reference_of(GPT, 4)
    assert abs(loss / want - 1) > 10 * LOSS
    for name in ("attention", "mlp"):
        for got, other in zip(
            *(jax.tree.leaves(g["layers"]["block"][name]) for g in (gradients, wanted))
        ):
            assert np.linalg.norm(got - other) > 5 * GRADIENT * np.linalg.norm(other)


def test_each_chosen_linear_has_three_products_and_nothing_else_has_any():
    """Products with layers' matrices are float8; those of attention, embedding and head are not."""
    model = replace(LLAMA, compute_dtype="bfloat16")
    cost = layer_cost(model, kind="block", tensor=2, sequence_parallel=True)
    float8 = sorted((each.weight, each.during) for each in cost.matmuls if each.float8)
    weights = ("attention.out.w", "attention.qkv.kv", "attention.qkv.q", "mlp.down.w", "mlp.up.w")
    assert float8 == sorted((name, during) for name in weights for during in "FBW")
    assert all(not each.weight for each in cost.matmuls if not each.float8)
    exact = layer_cost(replace(model, fp8="off"), kind="block", tensor=2, sequence_parallel=True)
    assert cost.flops("FBW", 2) == exact.flops("FBW", 2)
    # Gathered activations have one byte per element, scattered ones two.
    gathered, plain = (
        sum(each.bytes.at(1) for each in c.collectives if each.kind == "all_gather")
        for c in (cost, exact)
    )
    assert gathered * 2 == plain


@pytest.mark.parametrize("layout", [Layout(data=2, pipe=2), Layout(data=2, pipe=2, zero=3)])
def test_weights_are_quantised_once_a_step(layout):
    """Weights are quantised from float32 and gathered as float8, never in the loop of ticks."""
    run = RunConfig(model=GPT, layout=layout, global_batch=8)
    trainer = mtx.Trainer(run)
    text = trainer.train_step.lower(trainer.states.shapes, trainer.model.batch_fields(8)).as_text()
    made = re.findall(
        r"stablehlo.convert .*\(tensor<([\dx]+)xf32>\) -> tensor<[\dx]+xf8E4M3FN>", text
    )
    d, f = GPT.hidden, GPT.ffn_hidden
    up = [shape for shape in made if shape.endswith(f"x{f}") and shape.count("x") == 3]
    stage = 1, 2, d, f
    held = np.prod(stage) // layout.data
    assert [np.prod(list(map(int, shape.split("x")))) for shape in up] == [held]


def test_texts_are_written_in_the_compute_type():
    """With the unquantised parameters, which are held for long."""
    written = []
    for model in (GPT, replace(GPT, fp8="off")):
        trainer = mtx.Trainer(RunConfig(model=model, layout=Layout(pipe=2), global_batch=1))
        decoder = Decoder(trainer, trainer.state_from(params_of(model)), vocab=model.vocab)
        (choices,) = decoder.read([[3, 1, 4, 1, 5]], count=8)
        written.append(choices.logits)
    np.testing.assert_array_equal(*written)


def test_what_does_not_go_is_refused():
    for config, layout, values in (
        (dict(compute_dtype="float16"), Layout(), ("fp8='hybrid'", "float16", "bfloat16")),
        (dict(hidden=40), Layout(), ("fp8='hybrid'", "hidden=40", "32", "48")),
        (
            {},
            Layout(tensor=4, sequence_parallel=False),
            ("fp8='hybrid'", "heads*head_size/tensor=8", "fp8='off'"),
        ),
    ):
        with pytest.raises(UserError) as error:
            RunConfig(model=replace(GPT, **config), layout=layout)
        names(error, *values)
    with pytest.raises(UserError) as error:
        RunConfig(model=LLAMA, layout=Layout(tensor=4))
    names(error, "fp8='e4m3'", "kv_heads=2", "tensor=4")
    with pytest.raises(UserError) as error:
        make_plan(RunConfig(model=replace(GPT, compute_dtype="bfloat16")), target="a100-80gb")
    names(error, "a100-80gb", "fp8='hybrid'", "fp8='off'")


def test_a_plan_is_faster_by_its_matmuls():
    model = ModelConfig(layers=8, hidden=4096, heads=32, sequence=2048, vocab=51200)
    layout = Layout(tensor=8)
    exact, float8 = (
        make_plan(RunConfig(model=replace(model, fp8=fp8), layout=layout), target="h100").time
        for fp8 in ("off", "hybrid")
    )
    assert 0.5 < float8.matmul_s / exact.matmul_s < 0.7
    assert float8.step_s < exact.step_s
