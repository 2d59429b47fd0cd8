"""The update: learning rates, the loss scale of float16, and steps that are not finite."""

import re

import jax
import numpy as np
import pytest
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.step.optimizer import learning_rate

TINY = dict(layers=2, hidden=16, heads=2, sequence=8, vocab=30, vocab_multiple=8)


def rates(**config):
    schedule = learning_rate(OptimizerConfig(lr=1.0, min_lr=0.1, **config), 100)
    return np.array(jax.vmap(schedule)(np.arange(101)))


def test_warmup_is_linear_and_ends_at_the_peak():
    values = rates(warmup_steps=10)
    np.testing.assert_allclose(values[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert values.argmax() in (9, 10)


def test_cosine_linear_and_constant_rates():
    np.testing.assert_allclose(
        rates()[[0, 50, 100]], [1.0, 0.1 + 0.45 * (1 + np.cos(np.pi / 2)), 0.1], rtol=1e-6
    )
    np.testing.assert_allclose(rates(rate="linear")[[0, 50, 100]], [1.0, 0.55, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates(rate="constant"), 1.0)


def test_warmup_stable_decay():
    values = rates(rate="wsd", warmup_steps=10, wsd_decay_fraction=0.2)
    np.testing.assert_allclose(values[10:80], 1.0)
    np.testing.assert_allclose(values[[90, 100]], [0.55, 0.1], rtol=1e-5)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 50, 95, 99])
@pytest.mark.parametrize("rate", ["cosine", "linear", "wsd"])
def test_the_least_rate_is_reached_at_the_last_step(rate, warmup, fraction):
    values = rates(rate=rate, warmup_steps=warmup, wsd_decay_fraction=fraction)
    assert values[warmup] == 1.0 and values[100] == pytest.approx(0.1)
    assert values[99] > 0.1 and (np.diff(values[warmup:]) <= 0).all()
    if rate == "wsd":  # Megatron-LM's formula, with a decay that the warm-up leaves room for
        decaying = min(round(100 * fraction), 100 - warmup)
        part = np.clip((np.arange(101) - (100 - decaying)) / decaying, 0, 1)
        np.testing.assert_allclose(values[warmup:], (1 - 0.9 * part)[warmup:], rtol=1e-5)


def test_a_run_may_end_within_its_warmup():
    values = rates(warmup_steps=200)
    np.testing.assert_allclose(values, np.arange(1, 102) / 200, rtol=1e-6)
    constant = rates(rate="constant", warmup_steps=50, decay_steps=10)  # it has no decay
    np.testing.assert_allclose(constant[49:], 1.0)


def trainer_in(dtype: str, **optimizer) -> mtx.Trainer:
    model = ModelConfig(compute_dtype=dtype, **TINY)
    layout = Layout(data=2, pipe=2, tensor=2)
    return mtx.Trainer(
        RunConfig(
            model=model, layout=layout, global_batch=4, optimizer=OptimizerConfig(**optimizer)
        )
    )


def first_of(trainer):
    return trainer.state_from(params_of(trainer.run.model))


def batch_of(trainer):
    ids = np.random.default_rng(0).integers(0, 30, (4, 9), dtype=np.int32)
    weights = np.ones((4, 8), np.float32)
    return trainer.place({"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights})


def test_float16_skips_overflowing_steps_until_the_scale_fits():
    trainer = trainer_in("float16", loss_scale=2.0**30, loss_scale_window=2, lr=1e-2)
    state, batch = first_of(trainer), batch_of(trainer)
    before = jax.device_get(state.params)
    scales, finite, losses = [], [], []
    for step in range(25):
        state, metrics = trainer.train_step(state, batch)
        scales.append(float(metrics.loss_scale))
        finite.append(bool(metrics.finite))
        losses.append(float(metrics.loss))
        if step == 0:
            assert not finite[0]
            jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert int(state.skipped) == finite.count(False) > 0
    for now, following, good in zip(scales, scales[1:], finite):
        assert following == (now / 2 if not good else following) and following in (
            now / 2,
            now,
            now * 2,
        )
    assert max(following / now for now, following in zip(scales, scales[1:])) == 2  # grown again
    assert losses[-1] < losses[0]


def test_float16_gradients_equal_float32_ones():
    model = ModelConfig(compute_dtype="float32", **TINY)
    half = ModelConfig(compute_dtype="float16", **TINY)
    ids = np.random.default_rng(1).integers(0, 30, (4, 9), dtype=np.int32)
    batch = {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((4, 8), np.float32)
    }  # fmt: skip
    loss, gradients = mtx.loss_and_gradients(
        model, Layout(microbatch=4), batch, params=params_of(model)
    )
    half_loss, half_gradients = mtx.loss_and_gradients(
        half, Layout(pipe=2, tensor=2), batch, params=params_of(model)
    )
    assert float(half_loss) == pytest.approx(float(loss), rel=1e-3)
    for got, want in zip(jax.tree.leaves(half_gradients), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_a_step_that_is_not_finite_changes_nothing_but_the_count():
    trainer = trainer_in("float32")
    broken, batch = jax.tree.map(np.copy, params_of(trainer.run.model)), batch_of(trainer)
    broken["embed"]["positions"][0, 0] = np.nan
    state = trainer.state_from(broken)
    before = jax.device_get((state.params, state.moments))
    state, metrics = trainer.train_step(state, batch)
    assert not np.isfinite(float(metrics.gradient_norm)) and float(metrics.finite) == 0
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.device_get((state.params, state.moments))
    )
    assert (int(state.step), int(state.skipped)) == (1, 1)


def test_padded_vocabulary_is_neither_predicted_nor_trained():
    model = ModelConfig(compute_dtype="float32", **TINY)  # 30 of 32 rows
    trainer = mtx.Trainer(RunConfig(model=model, layout=Layout(pipe=2), global_batch=4))
    state, batch = first_of(trainer), batch_of(trainer)
    for _ in range(2):
        state, _ = trainer.train_step(state, batch)
    table = jax.device_get(state.params["embed"]["tokens"])
    assert table.shape[0] == 32 and not table[30:].any() and table[:30].all(axis=1).any()
    last = np.array([7, 3, 0, 1], np.int32)
    rows = {"tokens": jax.device_get(batch["tokens"]), "last": last}
    logits = jax.device_get(trainer.predict(state, trainer.place(rows)))
    assert np.isneginf(logits[:, 30:]).all() and np.isfinite(logits[:, :30]).all()


@pytest.mark.parametrize("zero", [1, 3])
def test_gathered_parameters_lie_row_major(zero):
    """By default XLA:GPU would put the gathered dim before the layers, and each layer's weights
    would be copied out of their stack."""
    layout = Layout(data=2, microbatch=2, zero=zero)
    trainer = mtx.Trainer(RunConfig(model=ModelConfig(**TINY), layout=layout, global_batch=8))
    text = trainer.train_step.lower(trainer.states.shapes, trainer.model.batch_fields(8)).as_text()
    layouts = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[?([\d, ]+)", text)
    assert len(layouts) >= sum(s.dim is not None for s in jax.tree.leaves(trainer.states.shards))
    for axes in layouts:
        minor_to_major = [int(axis) for axis in axes.split(",")]
        assert minor_to_major == sorted(minor_to_major, reverse=True)
