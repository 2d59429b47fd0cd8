"""Tensors in float8: rounding, scales, and products."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from errors import names

from mtx.errors import UserError
from mtx.sharding import fp8
from mtx.sharding.linear import column_products, matmul
from mtx.sharding.mesh import Axes

TYPES = ("float8_e4m3fn", "float8_e5m2")
_16_BITS = np.arange(2**16, dtype=np.uint16)


def floats():
    """Random float32 over all exponents, and values between neighbouring float8 numbers."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = random.uniform(-500, 500, 50_000).astype(np.float32)
    small = random.uniform(-(2.0**-8), 2.0**-8, 50_000).astype(np.float32)
    eighths = np.arange(2**8, dtype=np.uint8)
    every = np.concatenate(
        [eighths.view(getattr(ml_dtypes, name)).astype(np.float32) for name in TYPES]
    )
    every = np.unique(every[np.isfinite(every)])
    middle = (every[1:] + every[:-1]) / 2
    ties = [middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    return np.concatenate([bits, near, small, every, *map(np.float32, ties)])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    "x", [_16_BITS.view(ml_dtypes.bfloat16), floats()], ids=["all bfloat16", "float32"]
)
def test_saturate_rounds_as_ml_dtypes(name, x):
    """Bit by bit: to nearest even, subnormals, saturation, NaN."""
    dtype = getattr(ml_dtypes, name)
    most = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        want = np.clip(x.astype(np.float32), -most, most).astype(dtype)
    got = np.asarray(jax.jit(lambda x: fp8.saturate(x.astype(jnp.float32), name))(x))
    is_nan = np.isnan(want.astype(np.float32))
    assert (is_nan == np.isnan(x.astype(np.float32))).all() and is_nan.any()
    assert (np.isnan(got.astype(np.float32)) == is_nan).all()
    numbers = ~is_nan & ~(np.abs(x.astype(np.float32)) < 2.0**-126)  # CPUs flush those to zero
    assert (got.view(np.uint8)[numbers] == want.view(np.uint8)[numbers]).all()


@pytest.mark.parametrize("name", TYPES)
def test_scales_are_the_largest_powers_of_two_that_fit(name):
    most = float(jnp.finfo(name).max)
    tops = np.float32([most, 1.0, 1.75, 3.0, 3.5, 448, 1e-20, 3e20])
    amax = np.concatenate([tops, np.nextafter(tops, np.inf), np.nextafter(tops, 0)])
    scale, unit = map(np.asarray, fp8._powers(jnp.asarray(amax), name))
    assert (np.frexp(scale)[0] == 0.5).all() and (scale * unit == 1).all()
    assert (amax * scale <= most).all() and (2 * amax * scale > most).all()


def test_scales_of_nothing_and_of_what_is_not_finite():
    for x in (np.zeros(4, np.float32), np.float32([0, 2.0**-130, 0, 0])):
        values, unit = fp8.quantise(x, TYPES[0], fp8.largest(x))
        assert np.isfinite(unit) and not np.asarray(values, np.float32).any()
    for bad in (np.inf, np.nan):
        x = np.float32([1, bad])
        values, unit = fp8.quantise(x, TYPES[0], fp8.largest(x))
        assert np.isnan(np.asarray(values, np.float32)).all() and np.isnan(unit)


@pytest.mark.parametrize("name", TYPES)
def test_another_largest_magnitude_rounds_the_same(name):
    """Except values below the least normal number."""
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    amax = np.abs(x).max()

    def rounded(amax):
        values, unit = fp8.quantise(x, name, jnp.float32(amax))
        return np.asarray(values, np.float32) * np.asarray(unit)

    for wider in (1.3, 4.0, 16.0):
        same = np.abs(x) > wider * amax * (2.0**-14 if name == TYPES[0] else 2.0**-29)
        assert same.any() and (rounded(amax)[same] == rounded(wider * amax)[same]).all()


def quantised(w, inputs, form):
    return fp8.weight(w, fp8=form, dtype="float32").with_transposed(inputs, 0)


def dequantised(x, name):
    values, unit = fp8.quantise(x, name, fp8.largest(x))
    return np.asarray(values, np.float32) * np.asarray(unit)


@pytest.mark.parametrize("form", fp8.GRADIENTS)
def test_products_are_those_of_the_quantised_operands(form):
    """Forward, gradient of the input, gradient of the weight: exact for float32 operands."""
    random = np.random.default_rng(0)
    x, w, dy = (
        random.standard_normal(shape).astype(np.float32) * scale
        for shape, scale in (((2, 16, 32), 3), ((32, 3, 16), 0.02), ((2, 16, 3, 16), 1e-4))
    )
    x8, w8 = dequantised(x, TYPES[0]), dequantised(w, TYPES[0])
    dy8 = dequantised(dy, fp8.GRADIENTS[form])
    assert not np.array_equal(x, x8) and not np.array_equal(dy, dy8)
    want = (
        np.einsum("bsd,dnk->bsnk", x8, w8),
        np.einsum("bsnk,dnk->bsd", dy8, w8),
        np.einsum("bsd,bsnk->dnk", x8, dy8),
    )
    for function in (
        lambda x, w: column_products(x, (w,), (None,), Axes())[0],
        lambda x, w: matmul(x, w, 1, Axes()),
    ):
        y, vjp = jax.vjp(function, x, quantised(w, 1, form))
        dx, dw = vjp(jnp.asarray(dy))
        for got, wanted in zip((y, dx, dw.values), want, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_a_matmul_of_something_else_is_refused():
    w = quantised(np.ones((16, 16), np.float32), 1, "hybrid")
    with pytest.raises(UserError) as error:
        jnp.ones((2, 16)) @ w
    names(error, "fp8", "'matrix'", "mtx.sharding.linear")


# -- delayed scaling -------------------------------------------------------------------------------


def history_after(steps, *seen):
    """The history after steps that saw these values of input, weight and output gradient."""
    history, rule = jnp.zeros(fp8.HISTORY), fp8.Delayed(steps)
    w = quantised(np.ones((16, 16), np.float32), 1, "hybrid")
    for devices in seen:
        counts = sum(
            fp8.counts_of(*(replace(w, seen=jnp.float32(each), history=history) for each in three))
            for three in devices
        )
        history = rule(history, counts)
    return history


@pytest.mark.parametrize("steps", [1, 3])
def test_scales_follow_from_earlier_steps(steps):
    """As in Transformer Engine's DelayedScaling, which keeps largest magnitudes: scales follow from
    the largest of the last `steps`, over devices and microbatches, and stay if that is zero."""
    random = np.random.default_rng(0)
    seen = 2.0 ** random.integers(-30, 30, (12, 4, 3)) * random.uniform(1, 2, (12, 4, 3))
    seen[3] = seen[7:11, :, 2] = 0  # zero in one step, and in more steps than count
    kept = np.ones(3)
    for n in range(12):
        amax = seen[max(0, n - steps) : n].max(axis=(0, 1), initial=0)
        for row, name in enumerate((TYPES[0], *TYPES)):
            if amax[row]:
                kept[row] = 2.0 ** np.floor(np.log2(float(jnp.finfo(name).max) / amax[row]))
        got = fp8.scales_of(history_after(steps, *seen[:n]), TYPES[1])
        np.testing.assert_array_equal(got, np.stack([kept, 1 / kept], axis=-1))
        less = fp8.scales_of(history_after(steps, *seen[:n]), TYPES[1], margin=2)
        first = (seen[:n].max(axis=(0, 1), initial=0) > 0) * 2
        np.testing.assert_array_equal(less[:, 0], kept / 2.0**first)


@pytest.mark.parametrize("name", TYPES)
def test_beyond_the_scale_is_the_end_of_the_range(name):
    """Infinite values become NaN, so that the step is skipped; neither changes a history."""
    most = float(jnp.finfo(name).max)
    x = np.float32([0.5 * most, most, 1.5 * most, -1e30, 3e38, np.inf, -np.inf, np.nan])
    got = np.asarray(fp8.quantise_delayed(x, name, jnp.float32(4)), np.float32)
    np.testing.assert_array_equal(got, [most] * 3 + [-most, most] + [np.nan] * 3)
    one = np.asarray(fp8.quantise_delayed(x[:1], name, jnp.float32(1)), np.float32)
    assert one == x[0]
    before = history_after(3, [(1, 1, 1)])
    after = history_after(3, [(1, 1, 1)], [(np.inf, np.nan, 0)])
    np.testing.assert_array_equal(after, np.maximum(before - 1, 0))
