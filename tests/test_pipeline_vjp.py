"""The backward pass of a layer split in two: its matmuls, values, sizes and collectives."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig
from mtx.layers.model import Model
from mtx.sharding.mesh import Axes, make_mesh
from mtx.vjp import LayerVJP

ROWS, SEQUENCE, HIDDEN, MULTIPLE = 2, 64, 32, 4
LINEAR = 2 * ROWS * SEQUENCE * HIDDEN**2 * (4 + 2 * MULTIPLE)  # FLOPs of the weights' products
WEIGHTS = {("attention", "qkv", "w"), ("attention", "out", "w"), ("mlp", "up", "w")}
WEIGHTS |= {("mlp", "down", "w")}


def config_of(**changes):
    base = dict(layers=2, hidden=HIDDEN, heads=4, sequence=SEQUENCE, vocab=64)
    return ModelConfig(**(base | {"compute_dtype": "float32"} | changes))


def random_like(shapes, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: (
            random.normal(size=a.shape).astype(a.dtype)
            if jnp.issubdtype(a.dtype, jnp.floating)
            else np.zeros(a.shape, a.dtype)
        ),
        shapes,
    )


def layer(*, recompute="none", slices=1, part=0, in_place=False, **model):
    """(vjp, params, x, given): one layer of a GPT on one device, with random values."""
    config = config_of(**model)
    gpt = Model(config, axes=Axes(in_place=in_place), recompute=recompute, slices=slices)
    dtype = jnp.dtype(config.compute_dtype)
    shapes = jax.eval_shape(partial(gpt.init_layer, "block", 0), 0)
    params = jax.tree.map(lambda a: (0.1 * a).astype(dtype), random_like(shapes))
    x = {"x": random_like(jax.ShapeDtypeStruct((ROWS, SEQUENCE // slices, HIDDEN), dtype))}
    given = (gpt.context(0, {}, np.arange(ROWS), np.zeros(2, np.uint32), part),)
    if slices > 1:
        given += (random_like(jax.eval_shape(partial(gpt.empty_cache, "block", ROWS)), seed=1),)
    return LayerVJP(partial(gpt.layer, "block"), params, x, *given), params, x, given


def in_two(vjp, residuals, params, given, dy):
    early, others, waits = vjp.cut.backward(residuals, params, given, dy)
    late = vjp.cut.weight(waits)
    joined = jax.tree.map(
        lambda a, b: b if a is None else a, early, late, is_leaf=lambda a: a is None
    )
    return joined, others


def flops(f, *args):
    """FLOPs of the matmuls that XLA leaves in f."""
    return read_program(jax.jit(f).lower(*args).compile().as_text()).matmul_flops()


@pytest.mark.parametrize("recompute", ["none", "selective", "around_attention", "full"])
def test_w_is_the_matmuls_of_weight_gradients_and_b_is_the_rest(recompute):
    vjp, params, _, given = layer(recompute=recompute)
    arguments = vjp.residuals, params, given, vjp.output
    together = flops(vjp.backward, *arguments)
    assert flops(vjp.cut.weight, vjp.cut.deferred) == LINEAR
    assert flops(vjp.cut.backward, *arguments) == together - LINEAR
    assert together > 2 * LINEAR


@pytest.mark.parametrize(
    "case",
    [
        dict(),
        dict(recompute="selective", dropout=0.1),
        dict(recompute="full", attention_dropout=0.1),
        dict(slices=4, part=2),
        dict(recompute="full", slices=4, part=3),
        dict(recompute="around_attention", dropout=0.1),
        dict(recompute="around_attention", slices=4, part=2),
        dict(compute_dtype="bfloat16"),
    ],
    ids=lambda case: ", ".join(f"{k}={v}" for k, v in case.items()) or "plain",
)
def test_the_two_parts_give_the_gradients_of_the_whole(case):
    vjp, params, x, given = layer(**case)
    dy = random_like(vjp.output, seed=2)

    @jax.jit
    def run(params, x, given, dy):
        _, residuals = vjp.forward(params, x, *given)
        assert [r.shape for r in residuals] == [r.shape for r in vjp.residuals]
        return vjp.backward(residuals, params, given, dy), in_two(vjp, residuals, params, given, dy)

    want, got = run(params, x, given, dy)
    rtol = 1e-2 if "compute_dtype" in case else 1e-5
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(value, np.float32) for value in (a, b))
        assert np.linalg.norm(b) > 0, path
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "around_attention", "full"])
def test_the_weights_wait_and_what_they_need_is_2f_plus_8_hidden_vectors_a_token(recompute, dtype):
    vjp, *_ = layer(recompute=recompute, compute_dtype=dtype, dropout=0.1)
    late = jax.tree.leaves_with_path(vjp.cut.made_by_w)
    assert {tuple(k.key for k in path) for path, is_late in late if is_late} == WEIGHTS
    assert {str(a.dtype) for a in vjp.cut.deferred} == {dtype}
    elements = sum(a.size for a in vjp.cut.deferred)
    assert elements == (2 * MULTIPLE + 8) * ROWS * SEQUENCE * HIDDEN


def test_a_layer_is_traced_once_however_often_it_runs():
    calls = []

    def run(params, x, given):
        calls.append(None)
        return {"x": jnp.tanh(x["x"] @ params["w"])}

    params, x = {"w": np.ones((4, 4), "float32")}, {"x": np.ones((2, 3, 4), "float32")}
    vjp = LayerVJP(run, params, x, None)

    def both(params, x):
        for _ in range(2):
            x, residuals = vjp.forward(params, x, None)
            dparams, (dx,) = vjp.backward(residuals, params, (None,), x)
            deferred = vjp.cut.backward(residuals, params, (None,), x)[2]
        return dparams, dx, vjp.cut.weight(deferred)

    jax.jit(both).trace(params, x)
    assert len(calls) == 1


def test_a_slice_of_the_sequence_defers_its_own_part_only():
    vjp, *_ = layer(slices=4)
    elements = sum(a.size for a in vjp.cut.deferred)
    assert elements == (2 * MULTIPLE + 8) * ROWS * SEQUENCE // 4 * HIDDEN


# -- over `tensor` ---------------------------------------------------------------------------------


def collectives(jaxpr) -> Counter:
    names = ("all_gather", "reduce_scatter", "psum", "ppermute", "all_to_all")
    found = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removesuffix("_invariant")
        found[next((n for n in names if name.startswith(n)), "other")] += 1
        for inner in jaxprs_in_params(eqn.params):
            found += collectives(inner)
    del found["other"]
    return found


def sharded(recompute, sequence_parallel, tensor=2):
    """(shapes deferred, collectives of the whole backward pass, of B, of W) of a tensor shard."""
    axes = Axes.of(Layout(tensor=tensor, sequence_parallel=sequence_parallel))
    gpt, seen = Model(config_of(), axes=axes, recompute=recompute), {}

    def local(params, x):
        vjp = LayerVJP(partial(gpt.layer, "block"), params, {"x": x}, None)
        arguments = vjp.residuals, params, (None,), vjp.output
        parts = dict(whole=vjp.backward, first=vjp.cut.backward)
        for name, f in parts.items():
            seen[name] = collectives(jax.make_jaxpr(f)(*arguments).jaxpr)
        seen["then"] = collectives(jax.make_jaxpr(vjp.cut.weight)(vjp.cut.deferred).jaxpr)
        seen["deferred"] = [a.shape for a in vjp.cut.deferred]
        return x

    rows = P(None, "tensor" if sequence_parallel else None)
    mesh = make_mesh(Layout(tensor=tensor))
    params = jax.eval_shape(partial(gpt.init_layer, "block", 0), 0)
    x = jax.ShapeDtypeStruct((ROWS, SEQUENCE, HIDDEN), jnp.float32)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(gpt.specs["layers"]["block"], rows),
        out_specs=rows,
        check_vma=False,
    )
    jax.eval_shape(mapped, params, x)
    return [seen[name] for name in ("deferred", "whole", "first", "then")]


@pytest.mark.parametrize("recompute", ["none", "selective", "around_attention", "full"])
def test_with_sequence_parallelism_inputs_wait_as_shards_and_w_gathers_them(recompute):
    tensor = 2
    deferred, together, first, then = sharded(recompute, True, tensor)
    assert then == {"all_gather": 2}  # the inputs of q, k, v and of the MLP
    assert first == together - then
    assert first["reduce_scatter"] >= 2
    shards = [shape for shape in deferred if shape[:2] == (ROWS, SEQUENCE // tensor)]
    assert shards == [(ROWS, SEQUENCE // tensor, HIDDEN)] * 2
    # The gradients of the two row layers' outputs, which B gathers itself, are deferred whole.
    split, gathered = (2 * MULTIPLE + 6) // tensor, 2
    elements = sum(int(np.prod(shape)) for shape in deferred)
    assert elements == (split + gathered) * ROWS * SEQUENCE * HIDDEN


def test_without_sequence_parallelism_w_needs_no_collective():
    deferred, together, first, then = sharded("none", False)
    assert not then
    assert first == together == {"psum": 2}
    elements = sum(int(np.prod(shape)) for shape in deferred)
    assert elements == ((2 * MULTIPLE + 4) // 2 + 4) * ROWS * SEQUENCE * HIDDEN


# -- other models' layers --------------------------------------------------------------------------


def check_layer(layer, params):
    """(which gradients W makes, shapes deferred to it); checks the gradients' values."""
    x = random_like(jax.ShapeDtypeStruct((2, 3, 4), jnp.float32))
    vjp = LayerVJP(layer, params, x, None)
    dy = random_like(x, seed=1)

    @jax.jit
    def run(params, x, dy):
        _, residuals = vjp.forward(params, x, None)
        want = jax.vjp(lambda params, x: layer(params, x, None), params, x)[1](dy)
        return in_two(vjp, residuals, params, (None,), dy), want

    got, want = run(params, x, dy)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got[0], want[0])
    np.testing.assert_allclose(got[1][0], want[1], rtol=1e-5, atol=1e-6)
    return vjp.cut.made_by_w, [a.shape for a in vjp.cut.deferred]


def test_a_weight_that_is_used_twice_and_one_that_is_not_used():
    params = random_like(
        {"w": np.zeros((4, 4), "f"), "g": np.zeros(4, "f"), "none": np.zeros(4, "f")}
    )

    def block(p, x, context):
        return x + jax.nn.relu(x @ p["w"]) * p["g"] @ p["w"]

    late, deferred = check_layer(block, params)
    assert late == {"w": True, "g": False, "none": False}
    assert len(deferred) == 4  # two pairs of input and gradient


def test_functions_in_functions_are_seen_through():
    params = random_like({"w": np.zeros((4, 4), "f")})

    def block(p, x, context):
        return x + jax.jit(jax.checkpoint(lambda w, x: jnp.sin(jax.jit(jnp.matmul)(x, w))))(
            p["w"], x
        )

    late, _ = check_layer(block, params)
    assert late == {"w": True}


def test_gradients_that_are_made_in_loops_stay_with_b():
    params = random_like({"loop": np.zeros((3, 4, 4), "f"), "w": np.zeros((4, 4), "f")})

    def block(p, x, context):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["loop"])
        return x @ p["w"]

    late, _ = check_layer(block, params)
    assert late == {"loop": False, "w": True}
