"""The reader of compiled programs, on programs with FLOPs and collectives counted by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mtx.compile.hlo import read_program
from mtx.errors import UserError

M, K = 64, 128
DOT = 2 * M * K * K  # x[M, K] @ w[K, K]
MESH = {"pipe": 2, "data": 2, "tensor": 2}


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(function, *arguments):
    return read_program(jax.jit(function).lower(*arguments).compile().as_text())


def on_mesh(function, *arguments, specs, out, devices=None):
    devices = np.array(jax.devices()[:8] if devices is None else devices)
    mesh = Mesh(devices.reshape(tuple(MESH.values())), tuple(MESH), axis_types=(AxisType.Auto,) * 3)
    # check_vma=False, as in the training step: its collectives carry their own gradients.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return compiled(mapped, *arguments)


def dots(x, w_LKK):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w_LKK)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_matmul(dtype):
    program = compiled(jnp.matmul, floats(M, K, dtype=dtype), floats(K, 3 * K, dtype=dtype))
    assert program.matmul_flops() == 3 * DOT


def test_batched_matmul_counts_its_batch():
    q = floats(4, 32, 8, 16)
    program = compiled(lambda q, k: jnp.einsum("bshk,bthk->bhst", q, k), q, q)
    assert program.matmul_flops() == 2 * 4 * 8 * 32 * 32 * 16


def test_matmul_inside_elementwise_work():
    program = compiled(lambda x, w: jax.nn.gelu(x @ w) + x, floats(M, K), floats(K, K))
    assert program.matmul_flops() == DOT


def test_scan_counts_every_iteration():
    program = compiled(dots, floats(M, K), floats(5, K, K))
    assert program.matmul_flops() == 5 * DOT


def test_nested_scans_multiply():
    def outer(x, w):
        return lax.scan(lambda c, inner: (dots(c, inner), None), x, w)[0]

    assert compiled(outer, floats(M, K), floats(3, 5, K, K)).matmul_flops() == 15 * DOT


def test_gradient_of_a_scan_is_three_forwards():
    program = compiled(
        jax.grad(lambda w, x: dots(x, w).sum(), argnums=(0, 1)), floats(4, K, K), floats(M, K)
    )
    assert program.matmul_flops() == 3 * 4 * DOT


def test_rematerialised_scan_is_four_forwards():
    def block(c, w):
        up, down = w
        return jnp.sin(jnp.sin(c @ up) @ down), None

    def loss(w, x):
        return lax.scan(jax.checkpoint(block, prevent_cse=False), x, w)[0].sum()

    w = (floats(4, K, K), floats(4, K, K))
    program = compiled(jax.grad(loss, argnums=(0, 1)), w, floats(M, K))
    assert program.matmul_flops() == 4 * 4 * 2 * DOT


def test_conditional_by_its_costliest_branch_by_the_sum_or_by_weights():
    def body(c, w):
        return lax.cond(c.sum() > 0, lambda c: jnp.tanh(c @ w) @ w, lambda c: c @ w, c), None

    program = compiled(lambda x, w: lax.scan(body, x, w)[0], floats(M, K), floats(10, K, K))
    assert program.matmul_flops() == program.matmul_flops("max") == 10 * 2 * DOT
    assert program.matmul_flops("sum") == 10 * 3 * DOT
    # XLA lists the branches by the index: false, then true.
    assert program.matmul_flops(lambda conditional: (0.75, 0.25)) == 7.5 * DOT + 2.5 * 2 * DOT
    with pytest.raises(ValueError):
        program.matmul_flops(lambda conditional: (1.0,))


def test_branch_weights_see_where_the_conditional_stands():
    def step(x, w):
        with jax.named_scope("idle_half"):
            return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)

    seen = []

    def weights(conditional):
        seen.append(conditional.op_name)
        return (1, 0) if "idle_half" in conditional.op_name else (0, 1)

    assert compiled(step, floats(M, K), floats(K, K)).matmul_flops(weights) == 0
    assert len(seen) == 1


def test_switch_takes_the_costliest_of_many():
    branches = [lambda x, w: x, lambda x, w: x @ w, lambda x, w: jnp.sin(x @ w) @ w]
    program = compiled(
        lambda i, x, w: lax.switch(i, branches, x, w),
        floats(dtype=jnp.int32), floats(M, K), floats(K, K),
    )  # fmt: skip
    assert program.matmul_flops() == 2 * DOT
    assert program.matmul_flops("sum") == 3 * DOT


def test_loop_without_a_trip_count():
    program = compiled(
        lambda n, x, w: lax.fori_loop(0, n, lambda i, c: c @ w, x),
        floats(dtype=jnp.int32), floats(M, K), floats(K, K),
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        program.matmul_flops()
    names(error, "known_trip_count", "trip_counts=")
    name = str(error.value).split("'")[1]
    assert program.matmul_flops(trip_counts=7) == 7 * DOT
    assert program.matmul_flops(trip_counts={name: 6}) == 6 * DOT


def test_loop_without_a_trip_count_that_holds_no_matmul_is_no_obstacle():
    program = compiled(
        lambda n, x, w: lax.fori_loop(0, n, lambda i, c: c * 2 + i, x @ w),
        floats(dtype=jnp.int32), floats(M, K), floats(K, K),
    )  # fmt: skip
    assert program.matmul_flops() == DOT


def reductions(x):
    return (
        lax.psum(x, "tensor"),
        lax.psum(2 * x, ("pipe", "data")),
        lax.psum_scatter(x, "data", tiled=True),
        lax.all_gather(x, "pipe", tiled=True),
        lax.ppermute(x, "pipe", [(0, 1), (1, 0)]),
        lax.ppermute(3 * x, "pipe", [(0, 1)]),
        lax.all_to_all(x, ("data", "tensor"), 0, 0, tiled=True),
    )


@pytest.mark.parametrize("order", ["by id", "shuffled"])
def test_collectives_by_axis_and_bytes(order):
    """Positions in the mesh, not ids of devices: a shuffled mesh compiles to the same program."""
    devices = jax.devices()[:8]
    if order == "shuffled":
        devices = [devices[i] for i in (3, 1, 4, 0, 5, 7, 2, 6)]
    program = on_mesh(reductions, floats(8, 6), specs=P(), out=(P(),) * 7, devices=devices)
    n = 8 * 6 * 4
    found = sorted(
        (c.kind, c.axes(MESH), c.operand_bytes, c.result_bytes, c.count, c.dtype)
        for c in program.collectives()
    )
    assert found == sorted(
        [
            ("all-reduce", ("tensor",), n, n, 1, "f32"),
            ("all-reduce", ("pipe", "data"), n, n, 1, "f32"),
            ("reduce-scatter", ("data",), n, n // 2, 1, "f32"),
            ("all-gather", ("pipe",), n, 2 * n, 1, "f32"),
            ("collective-permute", ("pipe",), n, n, 1, "f32"),
            ("collective-permute", ("pipe",), n, n, 1, "f32"),
            ("all-to-all", ("data", "tensor"), n, n, 1, "f32"),
        ]
    )
    permutes = [set(c.groups) for c in program.collectives() if c.kind == "collective-permute"]
    there = {(0, 4), (1, 5), (2, 6), (3, 7)}
    back = {(target, source) for source, target in there}
    assert sorted(permutes, key=len) == [there, there | back]


def test_collectives_in_loops_and_branches():
    def step(x, w):
        def body(c, w):
            c = lax.ppermute(c, "pipe", [(0, 1), (1, 0)])
            held = lambda c: lax.psum(c @ w, "tensor")  # noqa: E731
            stage = lax.axis_index("pipe")
            return lax.cond(stage == 0, held, lambda c: c, c), None

        return lax.scan(body, x, w)[0]

    program = on_mesh(step, floats(16, 16), floats(6, 16, 16), specs=(P(), P()), out=P())
    assert {c.kind: c.count for c in program.collectives()} == {
        "collective-permute": 6,
        "all-reduce": 6,
    }
    weighted = program.collectives(lambda conditional: (0.5, 0.5))
    assert {c.kind: c.count for c in weighted} == {"collective-permute": 6, "all-reduce": 3}
    assert program.matmul_flops() == 6 * 2 * 16**3
    assert all("while/body" in c.op_name for c in program.collectives())


def test_combined_collective_adds_its_bytes():
    program = on_mesh(
        partial(lax.psum, axis_name="data"), {"a": floats(8), "b": floats(4, 4)}, specs=P(), out=P()
    )
    assert sum(c.operand_bytes for c in program.collectives()) == (8 + 16) * 4


def test_no_module_is_an_error():
    with pytest.raises(UserError) as error:
        read_program("module @jit_f { }")
    names(error, "compiled.as_text()")
