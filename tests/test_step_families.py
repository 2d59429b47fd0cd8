"""Llama and BERT on every kind of layout: losses and gradients equal an unsharded reference's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import reference
import reference_bert
import reference_llama
from errors import names
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.layers.rotary import Rotary, rotate

LLAMA = ModelConfig(
    family="llama", layers=8, hidden=64, heads=8, kv_heads=2, ffn=48, sequence=16, vocab=101,
    tied=False, compute_dtype="float32", vocab_multiple=8,
)  # fmt: skip
BERT = ModelConfig(
    family="bert", layers=8, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32",
    vocab_multiple=8, init_std=0.1,
)  # fmt: skip
POST = dataclasses.replace(BERT, norm_placement="post", gelu="erf")


def packed(batch, seed=0):
    """The batch as documents of random lengths in each row, with positions from 0 in each."""
    begins = np.random.default_rng(seed).random(batch["tokens"].shape) < 0.2
    begins[:, 0] = True
    places = np.arange(begins.shape[1])
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    segments = np.cumsum(begins, axis=1).astype(np.int32)
    return batch | {"segments": segments, "positions": (places - starts).astype(np.int32)}


def pairs_of_texts(rows, seed=0):
    """A batch for BERT: masked tokens, padding at the end, and some rows without an order."""
    random = np.random.default_rng(seed)
    shape = rows, BERT.sequence
    lengths = random.integers(BERT.sequence // 2, BERT.sequence + 1, (rows, 1))
    text = np.arange(BERT.sequence) < lengths
    return {
        "tokens": random.integers(0, BERT.vocab, shape, dtype=np.int32),
        "targets": random.integers(0, BERT.vocab, shape, dtype=np.int32),
        "weights": (text & (random.random(shape) < 0.2)).astype(np.float32),
        "types": (np.arange(BERT.sequence) > lengths // 2).astype(np.int32),
        "segments": text.astype(np.int32),
        "order": random.integers(-1, 2, rows, dtype=np.int32),
    }


@functools.cache
def of_llama(model, rows, *, pack=False):
    """(batch, loss and gradients of the reference)"""
    batch = reference.random_batch(model, rows)
    batch = packed(batch) if pack else batch
    turning = reference_llama.frequencies(model.head_size, model.rotary_base)
    return batch, jax.device_get(
        reference_llama.loss_and_gradients(params_of(model), batch, turning)
    )


logits_of_bert = jax.jit(reference_bert.logits, static_argnames=("post", "form"))


@functools.cache
def of_bert(model, rows):
    batch = pairs_of_texts(rows)
    return batch, jax.device_get(
        reference_bert.loss_and_gradients(
            params_of(model), batch, post=model.norm_placement == "post", form=model.gelu
        )
    )


def check(model, layout, made):
    batch, want = made
    got = mtx.loss_and_gradients(model, layout, batch, params=params_of(model))
    reference.assert_same(got, want)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatch=6),
        Layout(data=2, pipe=2, tensor=2, virtual=2),  # a head of keys and values per device
        Layout(pipe=2, tensor=4, sequence_parallel=False),  # half a head per device
        Layout(tensor=8, microbatch=2, recompute="selective"),  # a quarter of one
        Layout(pipe=4, tensor=2, virtual=2, schedule="deferred_zb", stash="inputs"),
        Layout(data=2, pipe=2, tensor=2, schedule="zb_h1", recompute="full", zero=3),
        Layout(pipe=2, tensor=4, slices=4, schedule="seq1f1b"),
    ],
)
def test_llama_equals_the_reference(layout):
    check(LLAMA, layout, of_llama(LLAMA, 6))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, pipe=2, tensor=2, virtual=2),
        Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases", schedule="aligned_zb"),
    ],
)
def test_packed_documents_do_not_see_each_other(layout):
    check(LLAMA, layout, of_llama(LLAMA, 6, pack=True))


def test_a_packed_gpt_equals_its_documents_one_by_one():
    """The losses of a packed row are those of its documents, each at the start of a row."""
    model = BERT.of_family("gpt")
    batch = packed(reference.random_batch(model, 4))
    apart = {name: np.zeros_like(batch[name]) for name in ("tokens", "targets", "weights")}
    apart = {name: np.repeat(a, 16, axis=0) for name, a in apart.items()}
    for row, column in np.argwhere(batch["positions"] == 0):
        length = int((batch["segments"][row] == batch["segments"][row, column]).sum())
        for name, a in apart.items():
            a[row * 16 + column, :length] = batch[name][row, column : column + length]
    params = params_of(model)
    together = mtx.loss_and_gradients(model, Layout(pipe=2, tensor=2), batch, params=params)
    reference.assert_same(
        together, mtx.loss_and_gradients(model, Layout(microbatch=8), apart, params=params)
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (BERT, Layout(microbatch=3)),
        (POST, Layout(data=2, pipe=2, tensor=2, virtual=2)),
        (POST, Layout(pipe=2, tensor=4, sequence_parallel=False, schedule="zb_h1")),
        (BERT, Layout(data=3, tensor=2, recompute="selective", zero=3, schedule="breadth_first")),
        (POST, Layout(pipe=8, stash="inputs", idle="phases")),
    ],
)
def test_bert_equals_the_reference(model, layout):
    check(model, layout, of_bert(model, 6))


@pytest.mark.parametrize("model", [LLAMA, POST], ids=["llama", "bert"])
def test_dropout_masks_do_not_depend_on_the_layout(model):
    model = dataclasses.replace(model, dropout=0.1, attention_dropout=0.1)
    batch = (of_llama(LLAMA, 6) if model.family == "llama" else of_bert(POST, 6))[0]
    one = mtx.loss_and_gradients(model, Layout(microbatch=6), batch, params=params_of(model))
    layout = Layout(data=2, pipe=2, tensor=2, virtual=2)
    reference.assert_same(
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model)), one
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, pipe=2, tensor=2, virtual=2)])
def test_scores_are_the_losses_and_the_hits_of_the_logits(layout):
    batch, _ = of_bert(POST, 6)
    trainer = mtx.trainer_for(POST, layout, global_batch=6)
    masked, _ = jax.device_get(logits_of_bert(params_of(POST), batch, post=True, form="erf"))
    batch = batch | {"targets": np.where(batch["weights"] > 0, masked.argmax(-1), batch["targets"])}
    losses, hits = trainer.score(trainer.state_from(params_of(POST)), trainer.place(batch))
    chosen = np.take_along_axis(masked, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, np.logaddexp.reduce(masked, axis=-1) - chosen, rtol=2e-5)
    np.testing.assert_array_equal(hits, masked.argmax(-1) == batch["targets"])
    assert 0 < np.mean(hits) < 1


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_frequencies_are_the_published_ones(scaling):
    rotary = Rotary(base=500000.0, scaling=scaling, factor=8.0)
    want = reference_llama.frequencies(128, 500000.0, scaling=scaling, factor=8.0)
    np.testing.assert_allclose(rotary.frequencies(128), want, rtol=1e-12)


SCALED = [
    {"factor": 4.0, "original": 4096}, {"factor": 32.0, "low": 2.0, "high": 16.0},
    {"factor": 8.0, "truncate": False}, {"factor": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("values", SCALED)
@pytest.mark.parametrize(("size", "base"), [(128, 500000.0), (64, 10000.0), (6, 10000.0)])
def test_yarn_is_the_published_one(size, base, values):
    rotary = Rotary(base=base, scaling="yarn", **{"high": 32.0, **values})
    want = reference_llama.yarn_frequencies(size, base, **values)
    np.testing.assert_allclose(rotary.frequencies(size), want, rtol=1e-12)
    assert rotary.amplitude == pytest.approx(0.1 * np.log(values["factor"]) + 1)


@pytest.mark.parametrize("sequence", [512, 4096, 16384, 131072])
def test_dynamic_scaling_is_that_of_the_sequence(sequence):
    values = {"factor": 2.0, "original": 4096, "sequence": sequence}
    rotary = Rotary(base=10000.0, scaling="dynamic", **values)
    want = reference_llama.dynamic_frequencies(128, 10000.0, **values)
    np.testing.assert_allclose(rotary.frequencies(128), want, rtol=1e-12)
    plain = Rotary(base=10000.0).frequencies(128)
    assert (rotary.frequencies(128) == plain).all() == (sequence <= 4096)


def test_yarn_scales_what_it_turns_and_its_gradient():
    rotary = Rotary(base=10000.0, scaling="yarn", factor=4.0, original=16, high=32.0)
    x, dy = np.random.default_rng(0).normal(size=(2, 1, 8, 2, 6)).astype(np.float32)

    @jax.jit
    def both_ways(x, dy):
        turned, back = jax.vjp(lambda x: rotate(x, np.arange(8), rotary), x)
        return turned, back(dy)[0]

    turned, dx = jax.device_get(both_ways(x, dy))
    length = 0.1 * np.log(4) + 1
    np.testing.assert_allclose(np.linalg.norm(turned), length * np.linalg.norm(x), rtol=1e-6)
    np.testing.assert_allclose((dx * x).sum(), (dy * turned).sum(), rtol=1e-5)


def test_layouts_that_a_family_cannot_have_are_refused():
    for model, layout, values in (
        (BERT, Layout(pipe=2, slices=2, schedule="seq1f1b"), ("slices=2",)),
        (
            dataclasses.replace(LLAMA, heads=6, hidden=60, kv_heads=3, ffn=48),
            Layout(tensor=2),
            ("kv_heads=3", "tensor=2"),
        ),
    ):
        with pytest.raises(UserError) as error:
            layout.check(model)
        assert names(error, *values)
    batch = packed(reference.random_batch(LLAMA, 4))
    with pytest.raises(UserError) as error:
        mtx.loss_and_gradients(LLAMA, Layout(pipe=2, slices=2, schedule="seq1f1b"), batch)
    assert names(error, "slices=2")
