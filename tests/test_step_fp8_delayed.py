"""Delayed scaling: losses, gradients and histories of several steps equal an unsharded reference's
on every layout; histories in checkpoints; what is refused."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_fp8
from errors import names
from parameters import params_of

import mtx
from mtx.certify.small import small_model
from mtx.certify.step import walk_run
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli.evaluate import EvaluateOptions
from mtx.cli.opened import ComputedIn, changed
from mtx.cli.options import Line
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.conversion.checkpoint import SavedParameters, canonical_shapes
from mtx.costs.ask import layer_cost
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.plan.held import parameters_held
from mtx.plan.memory import weights_bytes
from mtx.sharding import fp8
from mtx.sharding.linear import matmul

GPT = ModelConfig(
    fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=2, fp8_margin=1, layers=4, hidden=32,
    heads=4, sequence=32, vocab=61, ffn_multiple=2, vocab_multiple=8, compute_dtype="float32",
    init_std=0.1,
)  # fmt: skip
CURRENT = replace(GPT.without_fp8(), fp8="hybrid")
LOSS, GRADIENT = 1e-5, 2e-3  # as with current scaling, see test_step_fp8
STILL = OptimizerConfig(lr=1e-12, min_lr=0, b1=0.0, clip=0)  # apart from nu, a gradient is its mean
STEPS = 4
LAYOUTS = (
    Layout(pipe=2, virtual=2, tensor=2),
    Layout(data=2, tensor=2, zero=3, zero_unit="layer", weave="on", idle="phases"),
    Layout(pipe=2, virtual=2, tensor=2, sequence_parallel=False, schedule="zb_v", idle="phases"),
    Layout(context=2, data=2, recompute="full"),
)


@functools.cache
def batches():
    """A tenth as many tokens of the third batch count, so that each gradient is ten times as large
    as in the steps before, and beyond their range."""
    made = [reference.random_batch(GPT, 4, seed) for seed in range(STEPS)]
    few = np.random.default_rng(0).random(made[2]["weights"].shape) < 0.1
    return [*made[:2], made[2] | {"weights": few.astype(np.float32)}, *made[3:]]


@functools.cache
def reference_of():
    return reference_fp8.delayed(params_of(CURRENT), batches(), "float8_e5m2", steps=2, margin=1)


@functools.cache
def trainer_of(layout):
    return mtx.Trainer(RunConfig(model=GPT, layout=layout, global_batch=4, optimizer=STILL))


def steps_of(trainer, state, some):
    losses = []
    for batch in some:
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
    return losses, state


def amax_of(trainer, state):
    amax = trainer.to_canonical(jax.device_get(state.params))["layers"]["block"]["amax"]
    return {name: leaf["w"] for part in amax.values() for name, leaf in part.items()}


def left_of(history, steps):
    """[..., 256] from [..., n]: for each power of two, the number of further steps it counts."""
    left = np.zeros((*history.shape[:-1], 256), np.float32)
    for ago, most in enumerate(np.moveaxis(history, -1, 0)[::-1][:steps]):
        power = 127 + np.ceil(np.log2(most / 1.75)).astype(int)
        now = np.take_along_axis(left, power[..., None], axis=-1)
        np.put_along_axis(left, power[..., None], np.maximum(now, steps - ago), axis=-1)
    return left


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_the_references(layout):
    trainer = trainer_of(layout)
    losses, state = steps_of(trainer, trainer.state_from(params_of(GPT)), batches())
    wanted, gradients, histories = reference_of()
    np.testing.assert_allclose(losses, wanted, rtol=LOSS)
    for name, amax in amax_of(trainer, state).items():
        np.testing.assert_array_equal(amax, left_of(histories[name], 2))
    means = trainer.to_canonical(jax.device_get(state.moments[0].mu))
    means["layers"]["block"].pop("amax")
    reference.assert_same((losses[-1], means), (wanted[-1], gradients[-1]), gradient=GRADIENT)


def test_histories_matter():
    """They change the first step, whose tensors are scaled by 1, and the third, whose gradients
    saturate."""
    wanted, gradients, histories = reference_of()
    for step in (0, 2):
        batch = batches()[step]
        loss, own = reference_fp8.loss_and_gradients(params_of(CURRENT), batch, "float8_e5m2")
        up, other = (g["layers"]["block"]["mlp"]["up"]["w"] for g in (gradients[step], own))
        assert np.linalg.norm(up - other) > 10 * GRADIENT * np.linalg.norm(other)
        assert step or abs(loss / wanted[step] - 1) > 2 * LOSS
    most = histories["up"][:, 2]
    assert (most[:, 2] > 4 * most[:, 1]).all()


def test_a_run_goes_on_bit_by_bit_and_on_another_layout(tmp_path):
    trainer, other = (trainer_of(layout) for layout in (LAYOUTS[0], LAYOUTS[2]))
    _, state = steps_of(trainer, trainer.state_from(params_of(GPT)), batches()[:2])
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
        checkpoints.wait()
        there, here = (checkpoints.restore(each) for each in (other, trainer))
    kept = trainer.to_canonical(jax.device_get(state.params))
    jax.tree.map(
        np.testing.assert_array_equal, kept, other.to_canonical(jax.device_get(there.params))
    )
    losses, state = steps_of(trainer, state, batches()[2:])
    again, here = steps_of(trainer, here, batches()[2:])
    assert losses == again
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, here)))
    np.testing.assert_allclose(steps_of(other, there, batches()[2:])[0], losses, rtol=LOSS)

    # No other parameters have histories.
    with checkpoints.open(2) as store:
        saved = SavedParameters(store)
        assert saved.shapes == canonical_shapes(GPT) == canonical_shapes(CURRENT)
        saved.expect(saved.shapes)


def test_histories_begin_anew_where_a_checkpoint_has_none(tmp_path):
    run = RunConfig(model=CURRENT, layout=LAYOUTS[0], global_batch=4, optimizer=STILL)
    before, trainer = mtx.Trainer(run), trainer_of(LAYOUTS[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(before, before.state_from(params_of(CURRENT)), tokenizer=ByteTokenizer())
        checkpoints.wait()
        state = checkpoints.restore(trainer)
    got = trainer.to_canonical(jax.device_get(state.params))
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(params_of(GPT)))
    assert not any(amax.any() for amax in amax_of(trainer, state).values())


def test_what_an_idle_stage_sees_does_not_count():
    history = jnp.zeros(fp8.HISTORY)

    def seen(busy):
        def linear(history):
            w = fp8.weight(jnp.ones((16, 16)), fp8="hybrid", dtype="float32", history=history)
            params = fp8.with_histories(
                {"w": w.with_transposed(1, 0), "amax": {"w": history}}, busy
            )
            return matmul(jnp.ones((1, 16, 16)), params["w"]).sum()

        return jax.jit(jax.grad(linear))(history)

    assert seen(None).sum() == seen(jnp.array(True)).sum() == 3
    assert not seen(jnp.array(False)).any()


def test_no_largest_magnitude_is_asked_of_other_devices():
    """One all-reduce of the counts per step replaces them."""
    current, delayed = (
        layer_cost(model, kind="block", tensor=2, sequence_parallel=True)
        for model in (CURRENT, GPT)
    )
    assert [each.kind for each in current.collectives].count("pmax") == 8
    assert not [each for each in delayed.collectives if each.kind in ("pmax", "psum")]
    assert delayed.flops("FBW", 2) == current.flops("FBW", 2)
    assert sum(each.float8 for each in delayed.matmuls) == 12


def test_a_plan_counts_histories_and_no_parameters():
    layout, elements = Layout(pipe=2, tensor=2, data=2), 2 * 4 * 3 * 256
    delayed, current = (parameters_held(model, layout) for model in (GPT, CURRENT))
    assert delayed == current._replace(states=elements)
    more = weights_bytes(GPT, layout, 1) - weights_bytes(CURRENT, layout, 1)
    assert more == 4 * 4 * elements  # gradients, masters, two moments


def test_a_certificate_takes_them_for_what_they_are():
    layout = Layout(data=2, pipe=2, tensor=2, sequence_parallel=False, idle="phases")
    walked = walk_run(RunConfig(model=GPT, layout=layout, global_batch=8))
    assert not walked.findings and not walked.unknown
    assert small_model(GPT).fp8_steps == 0


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"fp8": "off"}, ("fp8_recipe='delayed'", "fp8='off'", "fp8='hybrid'")),
        (
            {"fp8_recipe": "tensorwise"},
            ("fp8_amax_history_len=2", "fp8_recipe='tensorwise'", "fp8_recipe='delayed'"),
        ),
        ({"fp8_amax_history_len": 0}, ("fp8_amax_history_len=0",)),
        ({"compute_dtype": "float16"}, ("fp8='hybrid'", "float16")),
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused(changes, values):
    with pytest.raises(UserError) as error:
        replace(GPT, **changes)
    names(error, *values)


def test_experts_are_refused():
    with pytest.raises(UserError) as error:
        ModelConfig(family="mixtral", experts=4, choices=2, fp8="hybrid", fp8_recipe="delayed")
    names(error, "fp8='hybrid'", "experts=4", "fp8='off'")


def test_a_command_leaves_float8_out():
    """`mtx evaluate RUN --model.fp8 off` works whatever the run's recipe."""
    options = EvaluateOptions(model=ComputedIn(fp8="off"))
    line = Line(("RUN",), options, frozenset({"--model.fp8"}))
    assert changed(RunConfig(model=GPT, global_batch=4), line, 1)[0].model == GPT.without_fp8()
