"""Mamba-2 and its hybrids: chunks against the recurrence, models against an unsharded reference on
every kind of layout, and texts continued from states."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_mamba
from errors import names
from reference_experts import Rules as Experts
from test_step_families import packed

import mtx
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.evaluation.decoder import Decoder
from mtx.families.nemotron_h import allocate
from mtx.layers.ssd import Spans, ssd
from mtx.sharding.mesh import Axes
from mtx.step.trainer import Trainer

SIZES = {
    "hidden": 32, "heads": 4, "sequence": 32, "vocab": 61, "vocab_multiple": 8, "init_std": 0.1,
    "ssm_head_dim": 12, "ssm_state": 6, "ssm_chunk": 5, "conv_width": 3,
    "compute_dtype": "float32",
}  # fmt: skip
HYBRID = ModelConfig(
    family="nemotron_h", layers=8, pattern="M-*M", kv_heads=2, ssm_heads=4, ssm_groups=2,
    least_dt=0.01, tied=False, **SIZES,
)  # fmt: skip
PURE = ModelConfig(family="mamba2", layers=4, ssm_groups=1, **SIZES)
BAMBA = ModelConfig(family="bamba", layers=4, kv_heads=2, ssm_heads=8, **SIZES)
GRANITE = ModelConfig(
    family="granite_hybrid", layers=4, pattern="M*", kv_heads=2, ssm_heads=8, ffn=24, experts=8,
    choices=3, expert_ffn=16, aux="sequence", aux_weight=0.2, embedding_scale=5.0,
    attention_scale=0.2, residual_scale=0.22, logit_divisor=3.0, **SIZES,
)  # fmt: skip
DENSE = replace(GRANITE, experts=0, aux="batch", aux_weight=0.001)
OF_GRANITE = reference_mamba.Rules(
    embedding=5.0, attention=0.2, residual=0.22, logits=1 / 3,
    experts=Experts(choices=3, aux="sequence", aux_weight=0.2),
)  # fmt: skip
RULES = {GRANITE: OF_GRANITE, DENSE: OF_GRANITE._replace(experts=None)}


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [False, True])
def test_chunks_are_the_recurrence(documents):
    """Values, last states and gradients, with a chunk that does not divide the sequence."""
    random = np.random.default_rng(0)
    rows, size, groups, heads, width, state = 2, 37, 2, 3, 4, 5

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32)

    x, dt = draw(rows, size, groups, heads, width), np.abs(draw(rows, size, groups, heads))
    a = -np.abs(draw(groups, heads))
    b, c = draw(2, rows, size, groups, state)
    start = np.zeros_like(draw(rows, groups, heads, width, state))
    starts = random.random((rows, size)) < 0.15
    starts[:, 0] = True
    if not documents:
        start, starts = draw(*start.shape), np.zeros_like(starts)
    dy = draw(rows, size, groups, heads, width)

    def one_by_one(x, dt, a, b, c, start):
        flat = (each.reshape(rows, size, groups * heads, *each.shape[4:]) for each in (x, dt))
        repeated = (jnp.repeat(each, heads, axis=2) for each in (b, c))
        before = start.reshape(rows, -1, width, state)
        y, after = reference_mamba.recurrence(*flat, a.ravel(), *repeated, before, starts)
        return y.reshape(dy.shape), after.reshape(start.shape)

    def in_chunks(x, dt, a, b, c, start):
        segments = np.cumsum(starts, axis=1) if documents else None
        spans = Spans(axes=Axes(), segments_BS=segments)
        x, dt, b, c = (each[:, None] for each in (x, dt, b, c))
        y, after = ssd(x, dt, a, b, c, None if documents else start, chunk=8, spans=spans)
        return y[:, 0], after

    def summed(f):
        def of(*arguments):
            y, after = f(*arguments)
            return (y * dy).sum() + jnp.sin(after).sum(), (y, after)

        return jax.jit(jax.value_and_grad(of, argnums=range(6), has_aux=True))

    (_, want), want_gradients = summed(one_by_one)(x, dt, a, b, c, start)
    (_, got), gradients = summed(in_chunks)(x, dt, a, b, c, start)
    for ours, theirs in zip((*got, *gradients), (*want, *want_gradients), strict=True):
        norm = np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * norm


# -- models ----------------------------------------------------------------------------------------


params_of = functools.cache(mtx.init_params)


@functools.cache
def wanted(model, documents):
    """(batch, loss and gradients of the reference, which is compiled once for both)"""
    batch = reference.random_batch(model, 8)
    batch = packed(batch) if documents else batch
    given = {"segments": np.zeros_like(batch["tokens"])} | batch
    given = {name: given[name] for name in ("tokens", "targets", "weights", "segments")}
    pattern = model.stack().pattern
    rules = RULES.get(model, reference_mamba.HYBRID)
    found = reference_mamba.loss_and_gradients(
        params_of(model), given, pattern, model.least_dt, rules
    )
    return batch, jax.device_get(found)


@pytest.mark.parametrize(
    "model, layout, documents",
    [
        (HYBRID, Layout(data=2, pipe=2, virtual=2, tensor=2), True),
        (HYBRID, Layout(pipe=2, tensor=2, slices=4, schedule="seq1f1b"), False),
        (HYBRID, Layout(context=2, tensor=4, sequence_parallel=False), True),  # half a group each
        (PURE, Layout(pipe=2, context=2, tensor=2, schedule="zb_h1"), False),
        (PURE, Layout(context=4, data=2, zero=3, recompute="selective"), True),
        (GRANITE, Layout(expert=2, pipe=2, virtual=2, tensor=2, recompute="full"), True),
        (GRANITE, Layout(expert=2, context=2, pipe=2, weave="on", idle="phases"), False),
        (GRANITE, Layout(expert=4, data=2, zero=3, schedule="1f1b", microbatch=1), False),
        (DENSE, Layout(data=2, pipe=2, tensor=2, schedule="zb_h1"), False),
    ],
)
def test_models_equal_the_reference(model, layout, documents):
    batch, want = wanted(model, documents)
    got = mtx.loss_and_gradients(model, layout, batch, params=params_of(model))
    reference.assert_same(got, want)


def test_a_hybrid_trains_as_on_one_device():
    def losses(**layout):
        run = RunConfig(model=BAMBA, layout=Layout(**layout), global_batch=8, steps=10)
        trainer = Trainer(run)
        state, found = trainer.state_from(params_of(BAMBA)), []
        for step in range(5):
            batch = reference.random_batch(BAMBA, 8, seed=step)
            state, metrics = trainer.train_step(state, trainer.place(batch))
            found.append(float(metrics.loss))
        return found

    np.testing.assert_allclose(
        losses(data=2, pipe=2, virtual=2, tensor=2, microbatch=2), losses(), rtol=1e-5
    )


# -- texts that are continued ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, layout",
    [
        (HYBRID, {"data": 2, "pipe": 2, "virtual": 2, "tensor": 2}),
        (BAMBA, {"context": 2, "tensor": 2}),
        (GRANITE, {"expert": 2, "pipe": 2, "tensor": 2}),
    ],
)
def test_texts_go_on_from_states(model, layout):
    """Of prompts of several lengths; logits equal those of reading the whole text each time."""
    trainer = Trainer(RunConfig(model=model, layout=Layout(**layout), global_batch=8))
    decoder = Decoder(trainer, trainer.state_from(params_of(model)), vocab=61)
    texts = [[3, 4, 5], [7, 11] * 9, [9], [2, 1, 2]]
    found = decoder.begin(texts, 30)
    for _ in range(6):
        for text, choice in zip(texts, found):
            text.append(int(choice.logits.argmax()))
        found = decoder.extend([text[-1] for text in texts], [len(text) - 1 for text in texts])
        whole = decoder.read(texts)
        for choice, again in zip(found, whole, strict=True):
            np.testing.assert_allclose(choice.logits, again.logits, rtol=1e-4, atol=1e-5)
            assert choice.logits.argmax() == again.logits.argmax()


# -- configs ---------------------------------------------------------------------------------------


def test_the_published_allocation():
    pattern = allocate(56, 4, 28)
    assert Counter(pattern) == {"M": 24, "*": 4, "-": 28}
    assert pattern == "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert allocate(6, 0, 0) == "M" * 6 and allocate(5, 1, 0) == "MM*MM"


@pytest.mark.parametrize(
    "change, layout, values",
    [
        ({"pattern": "M-x"}, {}, ["M-x", "M * -"]),
        ({"pattern": "M-" * 5}, {}, ["layers=8", "layers=10"]),
        ({"ssm_groups": 3}, {}, ["ssm_groups=3", "4 heads"]),
        ({"fp8": "e4m3"}, {}, ["fp8='e4m3'", "fp8='off'"]),
        ({"ssm_heads": 6, "ssm_groups": 3}, {"tensor": 2}, ["ssm_groups=3", "tensor=2"]),
        ({"ssm_heads": 5, "ssm_groups": 1}, {"tensor": 2}, ["ssm_heads=5", "tensor=2"]),
    ],
)
def test_what_cannot_be_is_refused(change, layout, values):
    with pytest.raises(UserError) as error:
        Layout(**layout).check(replace(HYBRID, **change))
    assert names(error, *values)
