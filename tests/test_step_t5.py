"""T5 on every kind of layout: losses and gradients equal an unsharded reference's."""

import dataclasses
import functools

import jax
import pytest
import reference
import reference_t5
from errors import names
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig
from mtx.errors import UserError

T5 = ModelConfig(
    family="t5", layers=8, hidden=32, heads=4, head_dim=10, ffn=48, sequence=12,
    encoder_sequence=20, buckets=8, farthest=10, vocab=101, compute_dtype="float32",
    vocab_multiple=8, init_std=0.1,
)  # fmt: skip
# A decoder that begins within a stage, and is the longer side
GATED = dataclasses.replace(
    T5, feed_forward="gated-gelu", tied=False, encoder_layers=3, sequence=64, encoder_sequence=28
)


@functools.cache
def made(model):
    batch = reference_t5.batch_of_spans(model, 4)
    return batch, jax.device_get(reference_t5.loss_and_gradients(params_of(model), batch, model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GATED, Layout(microbatch=4, recompute="selective")),
        (T5, Layout(data=2, pipe=2, tensor=2, weave="on", idle="phases")),
        (GATED, Layout(data=2, pipe=2, tensor=2, virtual=2, schedule="deferred_zb", zero=3)),
        (GATED, Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases", stash="inputs")),
    ],
)
def test_t5_equals_the_reference(model, layout):
    batch, want = made(model)
    reference.assert_same(
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model)), want
    )


def test_dropout_masks_do_not_depend_on_the_layout():
    model = dataclasses.replace(T5, layers=2, dropout=0.1, attention_dropout=0.1)
    batch = reference_t5.batch_of_spans(model, 4)
    one, other = (
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model))
        for layout in (Layout(microbatch=4), Layout(data=2, pipe=2, tensor=2))
    )
    reference.assert_same(other, one)
    plain = dataclasses.replace(model, dropout=0.0, attention_dropout=0.0)
    without, _ = reference_t5.loss_and_gradients(params_of(plain), batch, plain)
    assert abs(float(one[0]) - float(without)) > 1e-3, "something is dropped"


def test_texts_beyond_the_vocabulary_are_refused():
    batch = reference_t5.batch_of_spans(T5, 4)
    batch = batch | {"inputs": batch["inputs"] + 1000}
    with pytest.raises(UserError) as error:
        mtx.trainer_for(T5, Layout(), global_batch=4).place(batch)
    assert names(error, "inputs", "vocab=101")
