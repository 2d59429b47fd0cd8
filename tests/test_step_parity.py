"""Every layout gives the loss, the gradients and the training of the unsharded reference."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
from errors import names

import mtx
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError

MODEL = ModelConfig(
    layers=8, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8
)
UNTIED = ModelConfig(
    layers=8, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32", tied=False,
    vocab_multiple=8,
)  # fmt: skip
DROPOUT = ModelConfig(
    layers=8, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32", dropout=0.1,
    attention_dropout=0.1,
)  # fmt: skip
ROWS = 16  # the largest of any case: all cases of a model share one compiled reference


def batch_of(rows, seed=0, model=MODEL):
    return reference.random_batch(model, rows, seed)


params_of = functools.cache(mtx.init_params)


@functools.cache
def reference_of(model, rows):
    """(loss, gradients) of the reference, with the parameters that training starts from."""
    batch = reference.padded(batch_of(rows, model=model), ROWS)
    return jax.device_get(reference.loss_and_gradients(params_of(model), batch))


# data, pipe, tensor, virtual, microbatch, rows of the global batch, more
LAYOUTS = [
    (1, 1, 1, 1, 2, 4, {}),
    (1, 1, 1, 4, 1, 3, {}),
    (8, 1, 1, 1, 1, 16, {}),
    (3, 2, 1, 2, 1, 9, {}),  # replicas divide neither hidden nor layers: padded masters
    (1, 8, 1, 1, 1, 11, {"idle": "phases"}),
    (1, 1, 8, 1, 2, 4, {}),
    (1, 1, 8, 1, 2, 4, {"sequence_parallel": False, "recompute": "selective"}),
    (2, 2, 2, 2, 1, 6, {"recompute": "full"}),
    (2, 2, 2, 4, 1, 10, {"idle": "phases", "recompute": "selective"}),
    (1, 4, 2, 2, 1, 4, {"stash": "inputs"}),
    (1, 4, 2, 2, 2, 12, {"idle": "phases", "stash": "inputs", "sequence_parallel": False}),
    (2, 4, 1, 2, 1, 14, {"idle": "phases", "recompute": "full"}),
    (1, 2, 2, 3, 1, 4, {"stage_layers": "balanced"}),
    (1, 4, 1, 2, 1, 5, {"stage_layers": (0, 1, 1, 2, 2, 1, 1, 0), "idle": "phases"}),
]


def layout_of(data, pipe, tensor, virtual, microbatch, more):
    return Layout(
        data=data, pipe=pipe, tensor=tensor, virtual=virtual, microbatch=microbatch, **more
    )


@pytest.mark.parametrize(
    ("data", "pipe", "tensor", "virtual", "microbatch", "rows", "more"), LAYOUTS
)
def test_gradients_equal_the_reference(data, pipe, tensor, virtual, microbatch, rows, more):
    layout = layout_of(data, pipe, tensor, virtual, microbatch, more)
    batch = batch_of(rows)
    got = mtx.loss_and_gradients(MODEL, layout, batch, params=params_of(MODEL))
    reference.assert_same(got, reference_of(MODEL, rows))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, pipe=2, tensor=2, virtual=2),
        Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases"),
    ],
)
def test_gradients_of_untied_output_equal_the_reference(layout):
    got = mtx.loss_and_gradients(UNTIED, layout, batch_of(6), params=params_of(UNTIED))
    reference.assert_same(got, reference_of(UNTIED, 6))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, pipe=2, tensor=2, virtual=2),
        Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases", recompute="full"),
        Layout(data=2, tensor=4, microbatch=3, recompute="selective"),
        Layout(pipe=8, stash="inputs"),
    ],
)
def test_dropout_masks_do_not_depend_on_the_layout(layout):
    batch = batch_of(6)
    got = mtx.loss_and_gradients(DROPOUT, layout, batch, params=params_of(DROPOUT))
    reference.assert_same(got, unsharded_dropout())
    assert abs(float(got[0]) - float(reference_of(DROPOUT, 6)[0])) > 1e-4


@functools.cache
def unsharded_dropout():
    return mtx.loss_and_gradients(
        DROPOUT, Layout(microbatch=6), batch_of(6), params=params_of(DROPOUT)
    )


def test_initial_values_do_not_depend_on_the_layout():
    for layout in (
        Layout(data=3, pipe=2, virtual=2, zero=3),
        Layout(tensor=8),
        Layout(pipe=4, tensor=2, virtual=2, schedule="zb_v"),
    ):
        trainer = mtx.trainer_for(UNTIED, layout, global_batch=12)
        params = jax.device_get(jax.jit(trainer.to_canonical)(trainer.init().params))
        jax.tree.map(np.testing.assert_array_equal, params, params_of(UNTIED))


TRAINING = OptimizerConfig(lr=3e-3, rate="constant", weight_decay=0.1, clip=0.5, b2=0.95)


def train_losses(layout, batches):
    trainer = mtx.Trainer(
        RunConfig(model=MODEL, layout=layout, global_batch=8, optimizer=TRAINING, steps=10)
    )
    state, losses = trainer.state_from(params_of(MODEL)), []
    for batch in batches:
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
    return losses


@pytest.fixture(scope="module")
def ten_steps():
    batches = [batch_of(8, seed=step % 2) for step in range(10)]
    losses = reference.adamw_steps(
        params_of(MODEL),
        batches,
        rate=3e-3,
        b1=0.9,
        b2=0.95,
        epsilon=1e-8,
        decay=0.1,
        clip=0.5,
    )
    return batches, losses


@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatch=4),
        Layout(data=2, pipe=2, tensor=2, virtual=2),
        Layout(pipe=4, tensor=2, virtual=2, microbatch=2, sequence_parallel=False),
        Layout(data=2, pipe=2, tensor=2, virtual=2, zero=3, schedule="breadth_first"),
        Layout(data=4, tensor=2, zero=3, schedule="aligned_zb"),
    ],
)
def test_ten_steps_give_the_losses_of_the_reference(layout, ten_steps):
    batches, want = ten_steps
    assert want[-1] < want[1]  # the same batch, eight steps later
    np.testing.assert_allclose(train_losses(layout, batches), want, rtol=2e-6)


def test_a_batch_of_another_size_is_refused():
    trainer = mtx.trainer_for(MODEL, Layout(data=2, pipe=2), global_batch=4)
    state = trainer.init()
    for rows in (2, 8):
        with pytest.raises(UserError) as error:
            trainer.train_step(state, trainer.place(batch_of(rows)))
        assert names(error, rows, "global_batch=4")


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"tokens": 101}, ("tokens", 101, "vocab=101")),
        ({"targets": -1}, ("targets", -1)),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(change, values):
    batch = {name: a.copy() for name, a in batch_of(2).items()}
    for name, value in change.items():
        batch[name][1, 3] = value
    with pytest.raises(UserError) as error:
        mtx.loss_and_gradients(MODEL, Layout(), batch)
    assert names(error, *values)
    with pytest.raises(UserError) as error:
        mtx.trainer_for(MODEL, Layout(), global_batch=2).place(batch)
    assert names(error, *values)


def test_a_batch_of_another_shape_is_refused():
    batch = batch_of(2)
    for other, values in (
        ({name: np.tile(a, 2) for name, a in batch.items()}, (2, 32, "sequence=16")),
        (
            batch | {"targets": batch["targets"][:1]},
            ("targets", "(1, 16)"),
        ),
        ({"tokens": batch["tokens"], "targets": batch["targets"]}, ("weights",)),
    ):
        with pytest.raises(UserError) as error:
            mtx.loss_and_gradients(MODEL, Layout(), other)
        assert names(error, *values)
    longer = {name: np.tile(a, 2) for name, a in batch.items()}
    with pytest.raises(UserError) as error:
        mtx.trainer_for(MODEL, Layout(), global_batch=2).place(longer)
    assert names(error, 32, "sequence=16")


def test_a_schedules_name_in_the_place_of_a_table_is_refused():
    with pytest.raises(UserError) as error:
        mtx.loss_and_gradients(MODEL, Layout(), batch_of(2), schedule="gpipe")
    assert names(error, "schedule='gpipe'")


def test_parameters_of_another_model_are_refused():
    for other, values in (
        (replace(MODEL, hidden=64), (64, 32)),
        (UNTIED, ("params['head']['output']",)),
    ):
        with pytest.raises(UserError) as error:
            mtx.loss_and_gradients(MODEL, Layout(), batch_of(2), params=params_of(other))
        assert names(error, *values)


def test_cudnn_is_refused_where_there_is_no_such_gpu():
    trainer = mtx.trainer_for(MODEL, Layout(attention="cudnn"), global_batch=1)
    with pytest.raises(UserError) as error:
        trainer.init()
    assert names(error, "attention='cudnn'", "cpu", "auto")


def test_shapes_need_no_devices():
    trainer = mtx.trainer_for(MODEL, Layout(data=64, tensor=8), global_batch=64)
    assert trainer.states.param_shapes["embed"]["tokens"].shape[1] == MODEL.hidden
    assert trainer.states.shapes.params["embed"]["tokens"].shape[1] == 64  # padded to the replicas


def test_gradients_equal_the_reference_in_bfloat16():
    model = ModelConfig(layers=4, hidden=64, heads=8, sequence=64, vocab=101)
    batch = batch_of(8, model=model)
    want_loss, want = reference_of(model, 8)
    layout = Layout(data=2, pipe=2, tensor=2, virtual=2)
    got = mtx.loss_and_gradients(model, layout, batch, params=params_of(model))
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(got[1]))
    reference.assert_same(got, (want_loss, want), loss=2e-3, gradient=0.03)
