"""Mistral, Qwen 2 and 3, Gemma 2 and Granite on layouts of every kind: losses and gradients equal
an unsharded reference's, and texts are written with and without kept keys and values."""

import functools

import jax
import numpy as np
import pytest
import reference
import reference_decoder
from parameters import params_of
from reference_decoder import Rules

import mtx
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.evaluation.decoder import Decoder

SIZES = dict(
    layers=4, hidden=48, heads=4, kv_heads=2, ffn=40, sequence=16, vocab=101, init_std=0.2,
    compute_dtype="float32", vocab_multiple=8,
)  # fmt: skip
MODELS = {
    "mistral": (
        ModelConfig(family="mistral", window=5, tied=False, **SIZES),
        Rules(kinds=("block",) * 4, windows=(5,) * 4),
    ),
    "qwen2": (
        ModelConfig(family="qwen2", window=6, full_layers=2, **SIZES),
        Rules(kinds=("full", "full", "window", "window"), windows=(None, None, 6, 6)),
    ),
    "qwen3": (
        ModelConfig(family="qwen3", head_dim=20, **SIZES),
        Rules(kinds=("block",) * 4, windows=(None,) * 4),
    ),
    "gemma2": (
        ModelConfig(
            family="gemma2", head_dim=16, window=3, score_scale=24.0, score_cap=3.0, logit_cap=2.0,
            **SIZES,
        ),
        Rules(
            kinds=("window", "full") * 2, windows=(3, None) * 2, epsilon=1e-6, offset=1.0,
            scale=24.0**-0.5, score_cap=3.0, logit_cap=2.0, embed_scale=48.0**0.5, gelu=True,
        ),
    ),
    "granite": (
        ModelConfig(
            family="granite", embedding_scale=5.0, attention_scale=0.2, residual_scale=0.22,
            logit_divisor=3.0, **SIZES,
        ),
        Rules(
            kinds=("block",) * 4, windows=(None,) * 4, scale=0.2, embed_scale=5.0,
            residual_scale=0.22, logit_scale=1 / 3,
        ),
    ),
}  # fmt: skip


@functools.cache
def made(name):
    """(model, parameters with random biases and norms, batch, loss and gradients)"""
    model, rules = MODELS[name]
    random = np.random.default_rng(0)

    def stirred(path, a):
        small = path[-1].key in ("q_bias", "kv_bias", "scale")
        return a + 0.3 * random.normal(size=a.shape).astype(np.float32) if small else a

    params = jax.tree.map_with_path(stirred, params_of(model))
    batch = reference.random_batch(model, 6)
    want = reference_decoder.loss_and_gradients(params, batch, rules)
    return model, params, batch, jax.device_get(want)


LAYOUTS = [
    Layout(microbatch=6),
    Layout(data=2, pipe=2, tensor=2, virtual=2),  # chunks of one layer
    Layout(pipe=2, tensor=4, sequence_parallel=False),  # two devices share keys and values
    Layout(data=2, pipe=2, tensor=2, schedule="zb_h1", recompute="selective", zero=3),
    Layout(pipe=2, tensor=4, slices=4, schedule="seq1f1b", stash="inputs"),
    Layout(data=2, pipe=2, tensor=2, stage_layers=(3, 1), recompute="full", idle="phases"),
]


# Each family on three or more layouts, each layout with two or more families.
TRIED = {"mistral": (0, 3, 4), "qwen2": (1, 2, 5), "qwen3": (0, 1, 2), "gemma2": (1, 3, 4, 5)}
TRIED |= {"granite": (1, 3, 4)}


@pytest.mark.parametrize(
    ("name", "layout"), [(name, number) for name, tried in TRIED.items() for number in tried]
)
def test_losses_and_gradients_are_those_of_the_reference(name, layout):
    model, params, batch, want = made(name)
    got = mtx.loss_and_gradients(model, LAYOUTS[layout], batch, params=params)
    reference.assert_same(got, want)


logits = jax.jit(reference_decoder.logits, static_argnums=2)


@pytest.mark.parametrize("name", ["gemma2", "qwen2", "mistral", "granite"])
def test_what_is_kept_of_a_text_gives_the_logits_of_the_whole(name):
    """Token by token beyond a window, on stages with different kinds of layers."""
    model, params, _, _ = made(name)
    layout = Layout(data=2, pipe=2, tensor=2, stage_layers=(1, 3), microbatch=2)
    trainer = mtx.Trainer(RunConfig(model=model, layout=layout, global_batch=4))
    decoder = Decoder(trainer, trainer.state_from(params), vocab=model.vocab)
    text = np.random.default_rng(1).integers(0, model.vocab, 12).tolist()
    texts = [text[:4], text[2:5]]
    decoder.begin(texts, room=12)
    for length in range(8):
        token = text[length]
        got = decoder.extend([token] * 2, [len(each) for each in texts])
        texts = [[*each, token] for each in texts]
        for each, choices in zip(texts, got, strict=True):
            tokens = np.zeros((1, model.sequence), np.int32)
            tokens[0, : len(each)] = each
            want = logits(params, {"tokens": tokens}, MODELS[name][1])
            np.testing.assert_allclose(choices.logits, want[0, len(each) - 1], atol=2e-5)
