"""The walker's rules, on small programs with right and with wrong sums."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from mtx.certify.arrays import reshaped
from mtx.certify.small import small_model, small_run
from mtx.certify.step import RULES, given, walk_all, walk_program
from mtx.certify.walk import Walk
from mtx.config import Layout
from mtx.presets import preset

MESH = AbstractMesh((3, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS = P("data", None), P(None, "tensor")


WHOLE = P()


def found(f, *arguments, out=WHOLE):
    """(axis, finding) of the walker for a function; arguments: (global shape, spec) each."""
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape, _ in arguments]
    mapped = jax.shard_map(
        f, mesh=MESH, in_specs=tuple(spec for _, spec in arguments), out_specs=out,
        check_vma=False,
    )  # fmt: skip
    return [
        (each.axis, each.what) for each in walk_program(jax.jit(mapped).trace(*shapes)).findings
    ]


X = (12, 8), ROWS  # rows over data
W = (8, 16), COLUMNS
SCALE = (8,), P(None)


def total(x, axes=("data",)):
    return lax.psum(x.sum(), axes)


def weight_gradient(x):
    return x.T @ x  # over the rows: partial over data


RIGHT = {
    "a sum over rows": (lambda x: total(x), [X], P()),
    "columns stay shards": (lambda x, w: x @ w, [X, W], P("data", "tensor")),
    "a product over shards, summed": (
        lambda x, w: lax.psum((x @ w) @ w.T, "tensor"), [X, W], ROWS
    ),
    "a weight's gradient, summed": (
        lambda x: lax.psum(weight_gradient(x), "data"), [X], P()
    ),
    "and scattered": (
        lambda x: lax.psum_scatter(weight_gradient(x), "data", scatter_dimension=0, tiled=True),
        [((12, 9), ROWS)], P("data"),
    ),
    "each counted once": (
        lambda x, scale: total((x**2).sum() + (scale**2).sum() / 3), [X, SCALE], P()
    ),
    "a mean of what is the same": (
        lambda scale: lax.psum(scale / 12, ("data", "tensor")), [SCALE], P()
    ),
    "added up in a loop": (
        lambda x: lax.psum(
            lax.fori_loop(0, 5, lambda i, t: t + weight_gradient(x), jnp.zeros((8, 8))), "data"
        ),
        [X], P(),
    ),
    "microbatches, read in a loop": (
        lambda x: lax.psum(
            lax.scan(lambda t, rows: (t + weight_gradient(rows), None), jnp.zeros((8, 8)),
                     x.reshape(2, 2, 8))[0], "data"),
        [X], P(),
    ),
    "gathered": (lambda x: lax.all_gather(x, "data", axis=0, tiled=True), [X], P()),
    "rows cut over two axes, gathered over one, then in halves over the other": (
        lambda x: lax.all_gather(
            jnp.moveaxis(lax.all_gather(x, "tensor"), 0, 1).reshape(3, 2, 4), "data", axis=1,
            tiled=True,
        ),
        [((3, 24), P(None, ("data", "tensor")))], P(),
    ),
    "own part of what is whole": (
        lambda scale: lax.psum(
            (lax.dynamic_slice_in_dim(scale, lax.axis_index("tensor") * 2, 2) ** 2).sum(),
            "tensor",
        ),
        [SCALE], P(),
    ),
    "from one device to all": (
        lambda x: lax.psum(x * (lax.axis_index("tensor") == 0), "tensor"), [X], ROWS
    ),
    "to all heads": (
        lambda x: lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True),
        [((12, 9), ROWS)], P(None, "data"),
    ),
    "around a ring": (
        lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 0)]), [X], ROWS
    ),
    "the largest of all": (lambda x: lax.pmax(x.max(), "data"), [X], P()),
    "a buffer of several kinds": (
        lambda w, scale: jnp.concatenate([w.ravel(), scale])[32:40], [W, SCALE], P()
    ),
    "what nothing reads, tied to what is read": (
        lambda x, scale: lax.optimization_barrier(
            (lax.psum(x.sum(), "data"), lax.all_gather(scale, "tensor"))
        )[0],
        [X, SCALE], P(),
    ),
    "a queue's own counts": (
        lambda x: lax.psum(
            jnp.where(jnp.arange(4) < (x > 0).sum(), x[0, 0], 0).sum(), "data"
        ),
        [X], P(),
    ),
    "of each for each one": (
        lambda x: lax.all_to_all(x.reshape(3, 4, 2), "data", 0, 0, tiled=True).reshape(12, 2),
        [((36, 2), ROWS)], P("data"),
    ),
    "flat rows, added up by the dim that was cut": (
        lambda x: lax.psum(x.reshape(-1).reshape(3, 8).sum(1), "data"),
        [((3, 24), P(None, "data"))], P(),
    ),
    "rows at their own places": (
        lambda x: lax.psum(
            jnp.zeros((12, 8)).at[lax.axis_index("data") * 4 + jnp.arange(4)].add(x), "data"
        ),
        [X], P(),
    ),
    "a branch that all take": (
        lambda x, scale: lax.cond(
            scale[0] > 0, lambda x: total(x), lambda x: 2 * total(x), x
        ),
        [X, SCALE], P(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    f, arguments, out = RIGHT[name]
    assert found(f, *arguments, out=out) == []


def diverged(x):
    return lax.cond(lax.axis_index("data") > 0, lambda x: total(x), lambda x: x.sum(), x)


WRONG = {
    "no sum": (lambda x: x.sum(), [X], P(), "data", "leaves"),
    "a sum over another axis": (
        lambda x: total(x, ("tensor",)), [X], P(), "tensor", "4 times as large"
    ),
    "two sums": (lambda x: total(total(x)), [X], P(), "data", "3 times as large"),
    "divided by another number": (
        lambda scale: lax.psum(scale / 4, ("data", "tensor")), [SCALE], P(), "data", "12 times"
    ),
    "replicas counted": (
        lambda x, scale: total((x**2).sum() + (scale**2).sum()), [X, SCALE], P(), "data", "whole"
    ),
    "shards added up": (lambda x: lax.psum(x, "data"), [X], P(), "data", "element by element"),
    "a root before the sum": (
        lambda x: lax.psum(jnp.sqrt((x**2).sum()), "data"), [X], P(), "data", "sqrt"
    ),
    "divided by a part of a sum": (
        lambda x, scale: total(x) / x.sum(), [X, SCALE], P(), "data", "divided"
    ),
    "a product of sums": (
        lambda x: lax.psum(x.sum() * x.sum(), "data"), [X], P(), "data", "multiplied by another"
    ),
    "no gather": (lambda x: x, [X], P(), "data", "same on all devices"),
    "gathered from another axis": (
        lambda x: lax.all_gather(x, "tensor", axis=0, tiled=True), [X], ROWS, "tensor", "same"
    ),
    "gathered into another dim": (
        lambda x: lax.all_gather(x, "data", axis=1, tiled=True), [X], P(), "data", "into dim 1"
    ),
    "rows gathered over one axis, and into its dim over the other": (
        lambda x: lax.all_gather(lax.all_gather(x, "tensor"), "data", axis=0, tiled=True),
        [((4, 24), P("tensor", "data"))], P(), "data", "into dim 0"
    ),
    "a partial value gathered": (
        lambda x: lax.all_gather(weight_gradient(x), "data"), [X], P(), "data", "unsummed"
    ),
    "own part of own sum": (
        lambda x: lax.dynamic_slice_in_dim(
            weight_gradient(x), lax.axis_index("data") * 3, 3
        ),
        [((12, 9), ROWS)], P("data"), "data", "another part",
    ),
    "a shard of another dim": (lambda x: x, [X], P(None, "data"), "data", "shard of dim 1"),
    "a count that moves something": (
        lambda x: jnp.sign((x > 0).sum(dtype=jnp.float32)), [X], P(), "data", "sign",
    ),
    "a sent sum": (
        lambda x: lax.all_to_all(weight_gradient(x), "data", 0, 0, tiled=True),
        [((12, 9), ROWS)], P("data"), "data", "all-to-all of",
    ),
    "flat rows, added up by another dim": (
        lambda x: lax.psum(x.reshape(-1).reshape(3, 8).sum(0), "data"),
        [((3, 24), P(None, "data"))], P(), "data", "element by element",
    ),
    "a bias added to a part": (
        lambda x, w, b: lax.psum((x @ w) @ w.T + b, "tensor"), [X, W, SCALE], ROWS, "tensor",
        "whole",
    ),
    "in a loop, no sum": (
        lambda x: lax.fori_loop(0, 5, lambda i, t: t + weight_gradient(x), jnp.zeros((8, 8))),
        [X], P(), "data", "leaves",
    ),
    "a branch of some": (diverged, [X], P(), "data", "only some devices take"),
    "a branch without the sum": (
        lambda x, scale: lax.cond(scale[0] > 0, lambda x: total(x), lambda x: x.sum(), x),
        [X, SCALE], P(), "data", "one branch",
    ),
    "another number of turns": (
        lambda x: lax.fori_loop(0, lax.axis_index("data"), lambda i, t: total(x), 0.0),
        [X], P(), "data", "only some devices take",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    f, arguments, out, axis, words = WRONG[name]
    findings = found(f, *arguments, out=out)
    assert any(where == axis and words in what for where, what in findings), findings


def mask_of(x, *numbers):
    key = jax.random.key(0, impl="threefry2x32")
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.bernoulli(key, 0.9, x.shape)


def drop(x, *numbers):
    return jnp.where(mask_of(x, *numbers), x, 0)


def drop_by_one_of_two(x, scale):
    """Two masks, one of which is used."""
    here, there = (mask_of(x, lax.axis_index("data"), number) for number in range(2))
    return jnp.where(lax.select(scale[0] > 0, here, there), x, 0)


def test_random_numbers_differ_where_data_do():
    of_device = lambda x: drop(x, lax.axis_index("data"))  # noqa: E731
    assert found(of_device, X, out=ROWS) == []
    assert found(drop_by_one_of_two, X, SCALE, out=ROWS) == []
    assert found(drop, SCALE) == []
    assert found(drop, X, out=ROWS) == [
        ("data", "the same random numbers are applied to different data")
    ]
    assert (
        "data", "different random numbers are applied to the same data"
    ) in found(of_device, SCALE)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "places"),
    [
        ((12, 5), (3, 4, 5), {0: (0, 1), 1: (2,)}),
        ((3, 4, 5), (12, 5), {0: (0,), 1: (0,), 2: (1,)}),
        ((1, 2, 7), (2, 7), {1: (0,), 2: (1,)}),
        ((2, 7), (1, 2, 7), {0: (1,), 1: (2,)}),
        ((2, 8, 5), (2, 1, 8, 5), {0: (0,), 1: (1, 2), 2: (3,)}),  # heads in one group
        ((2, 1, 8, 5), (2, 8, 5), {0: (0,), 2: (1,), 3: (2,)}),
        ((2, 8, 5), (2, 8, 1, 5), {0: (0,), 1: (1,), 2: (2, 3)}),
        ((2, 1, 8, 5), (2, 1, 1, 8, 5), {0: (0,), 1: (1, 2), 2: (3,), 3: (4,)}),  # one head
        ((2, 1, 1, 8, 5), (2, 1, 8, 5), {0: (0,), 2: (1,), 3: (2,), 4: (3,)}),
        ((6, 1), (2, 3, 1), {0: (0, 1), 1: (2,)}),
        ((), (1, 1), {}),
    ],
)
def test_where_dims_go(before, after, places):
    assert reshaped(before, after) == places


@pytest.mark.parametrize(
    ("name", "devices", "layout"),
    [
        ("gpt-1t", 3072, {}),
        ("llama-3-405b", 16384, {}),
        ("miniature", 8, {"weave": "on", "idle": "phases"}),  # ZeRO-1's buckets of mixed kinds
        ("gemma-2-27b", 256, {"zero": 3, "zero_unit": "layer", "sequence_parallel": False}),
        ("qwen3-32b", 512, {"zero": 3, "zero_unit": "chunk", "schedule": "v_half", "virtual": 2}),
        ("gpt-145b", 1536, {"schedule": "seq1f1b", "virtual": 1, "slices": 2, "idle": "skip"}),
        ("bert-3.9b", 512, {"stash": "inputs"}),
        ("gpt-2-345m", 8, {}),  # with dropout
        ("deepseek-v3", 2048, {"tensor": 2, "data": 4, "weave": "off"}),
        ("gpt-oss-20b", 256, {"context": 2, "expert_dispatch": "gathered", "offload": 0.5}),
    ],
)
def test_steps_at_full_size_have_no_finding(name, devices, layout, quick_orders):
    run = preset(name)
    walked = walk_all(replace(run, layout=replace(run.layout, **layout)))
    assert walked.devices == devices and walked.equations > 3000
    assert [str(each) for each in walked.findings] == []
    assert not walked.unknown and not walked.untold
    assert bool(walked.mixed) == (layout.get("weave") == "on")


@pytest.mark.parametrize(
    ("name", "changes", "layout"),
    [
        ("granite-4-small", {}, {"context": 2, "tensor": 2}),  # both axes cut sequences
        ("nemotron-h-8b", {}, {"context": 2, "tensor": 4}),
        (
            "bamba-9b",
            {},
            {"pipe": 2, "virtual": 2, "tensor": 2, "context": 2, "context_attention": "gather"},
        ),
        (
            "granite-4-small",
            {"aux": "sequence"},
            {"tensor": 2, "expert_tensor": False, "expert_dispatch": "gathered"},
        ),
        ("llama-3-8b", {}, {"context": 2, "tensor": 8}),  # one head a device
        ("gpt-oss-20b", {}, {"tensor": 8}),
        ("llava-1.5-7b", {}, {"pipe": 2, "tensor": 2, "recompute": "full"}),  # frozen layers
    ],
)
def test_steps_of_small_models_have_no_finding(name, changes, layout):
    run = preset(name)
    walked = walk_all(small_run(run, small_model(run.model, **changes), Layout(**layout), 16))
    assert [str(each) for each in walked.findings] == [] and not walked.unknown


# -- values typed `same` are the same --------------------------------------------------------------

SIZES = {"data": 2, "tensor": 4}
PLACES = tuple(SIZES)


def _random_ops(seed: int, count: int = 14):
    """A function of local arrays [4, 4], made of random operations, including collectives."""
    rng = random.Random(seed)
    pairs = (jnp.add, jnp.multiply, jnp.matmul, lambda a, b: jnp.where(a > b, a, b))
    steps = []
    for _ in range(count):
        axis, dim = rng.choice(PLACES), rng.randrange(2)
        size, one = SIZES[axis], rng.random()
        ring = [(n, (n + 1) % size) for n in range(size)]
        alone = (
            lambda a, axis=axis: lax.psum(a, axis),
            lambda a, axis=axis: lax.pmax(a, axis),
            lambda a, axis=axis, ring=ring: lax.ppermute(a, axis, ring),
            lambda a, axis=axis: a * lax.axis_index(axis),
            lambda a, axis=axis: lax.dynamic_slice_in_dim(
                jnp.concatenate([a] * 4), lax.axis_index(axis), 4
            ),
            lambda a, axis=axis, dim=dim: lax.all_gather(a, axis, axis=dim, tiled=True)[:4, :4],
            lambda a, axis=axis, dim=dim: lax.psum_scatter(
                jnp.concatenate([a] * 4, dim), axis, scatter_dimension=dim, tiled=True
            )[:4, :4],
            lambda a, dim=dim: jnp.broadcast_to(a.sum(dim, keepdims=True), a.shape),
            lambda a: a.reshape(2, 8).reshape(4, 4).T,
            lambda a: lax.fori_loop(0, 3, lambda _, t: 0.5 * t + a, jnp.zeros_like(a)),
            lambda a, axis=axis: lax.cond(
                lax.axis_index(axis) > 0, lambda a: 2 * a, lambda a: a, a
            ),
            jnp.tanh,
        )
        steps.append((rng.choice(pairs) if one < 0.4 else None, rng.choice(alone),
                      rng.random(), rng.random()))  # fmt: skip

    def f(*arrays):
        pool = list(arrays)
        for both, alone, i, j in steps:
            a, b = pool[int(i * len(pool))], pool[int(j * len(pool))]
            pool.append(jnp.tanh(both(a, b)) if both else alone(a))
        return tuple(pool)

    return f


@pytest.mark.parametrize("seed", range(24))
def test_what_is_said_to_be_the_same_is_the_same(seed):
    """Random programs run on eight devices: all devices along an axis on which a value is typed
    `same` hold the same value."""
    mesh = jax.make_mesh(tuple(SIZES.values()), PLACES, axis_types=(AxisType.Auto,) * 2)
    specs = P(), P("data", None), P(None, "tensor"), P(PLACES, None)
    shapes = (4, 4), (8, 4), (4, 16), (32, 4)
    values = np.random.default_rng(seed)
    arrays = [values.normal(size=shape).astype(np.float32) for shape in shapes]
    f = _random_ops(seed)

    def everyones(*arrays):
        return tuple(a[None, None] for a in f(*arrays))

    def mapped(f, out):
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)

    program = jax.make_jaxpr(mapped(f, P(PLACES)))(*arrays)
    (eqn,) = program.jaxpr.eqns
    walk = Walk(sizes=SIZES, rules=RULES)
    typed = walk.run(eqn.params["jaxpr"], [given(spec, SIZES) for spec in specs])
    held = jax.jit(mapped(everyones, P("data", "tensor")))(*arrays)
    claims = 0
    for value, everyone in zip(typed, held, strict=True):
        for dim, kind in enumerate(value.kinds):
            if kind.is_same:
                first = np.take(everyone, [0], axis=dim)
                np.testing.assert_allclose(everyone, np.broadcast_to(first, everyone.shape), 1e-5)
                claims += 1
    assert claims > 4 and not walk.unknown
