"""A Llama with latent attention, with sinks, and with a second predicted token: losses and
gradients equal an unsharded reference's on layouts of every kind; texts are written with kept
values."""

import functools
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
import reference
import reference_decoder
from parameters import params_of
from reference_decoder import Rules

import mtx
from mtx.config import Layout, RunConfig
from mtx.evaluation.decoder import Decoder
from mtx.families.llama import Llama
from mtx.layers.attend import Scores
from mtx.layers.latent import Latent
from mtx.layers.layer import Stack
from mtx.layers.multi_token import MultiToken, with_second
from mtx.sharding.mesh import Axes

SCALE = 0.4


@dataclass(frozen=True, kw_only=True)
class Latents(Llama):
    """Queries come from latents and from the stream, in alternate layers."""

    def stack(self):
        def kind(query_latent):
            attention = Latent(
                heads=self.heads, latent=20, query_latent=query_latent, size=10, turned=6,
                value_size=12, norm=self.norm(), rotary=replace(self.rotary(), neighbours=True),
                scores=Scores(scale=SCALE), dropout=self.attention_dropout,
            )  # fmt: skip
            sublayers = ("attention", attention), self.kind().sublayers[1]
            return replace(self.kind(), sublayers=sublayers)

        kinds = {"latent": kind(14), "plain": kind(None)}
        return Stack(kinds=kinds, pattern=("latent", "plain") * 2, **self.edges())


@dataclass(frozen=True, kw_only=True)
class Second(Latents):
    """The last layer predicts the token after the next."""

    def stack(self):
        stack = super().stack()
        plain = stack.kinds["plain"]
        last = MultiToken(sublayers=plain.sublayers, norm=plain.norm)
        return replace(
            stack, kinds=stack.kinds | {"mtp": last}, pattern=(*stack.pattern[:-1], "mtp"),
            head=replace(stack.head, norm=None, second_weight=0.3),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sinks(Llama):
    """Windows in every other layer."""

    def stack(self):
        kinds = {
            "window": self.kind(sinks=True, scores=Scores(window=5)),
            "full": self.kind(sinks=True),
        }
        return Stack(kinds=kinds, pattern=("window", "full") * 2, **self.edges())


SIZES = dict(
    layers=4, hidden=48, heads=4, ffn=40, sequence=16, vocab=101, init_std=0.2,
    compute_dtype="float32", vocab_multiple=8, tied=False,
)  # fmt: skip
MODELS = {
    "latent": (
        Latents(**SIZES),
        Rules(kinds=("latent", "plain") * 2, windows=(None,) * 4, scale=SCALE, turned=6),
    ),
    "second": (
        Second(**SIZES),
        Rules(
            kinds=("latent", "plain", "latent"), windows=(None,) * 3, scale=SCALE, turned=6,
            second_weight=0.3,
        ),
    ),
    "sinks": (
        Sinks(kv_heads=2, **SIZES), Rules(kinds=("window", "full") * 2, windows=(5, None) * 2)
    ),
}  # fmt: skip


logits = jax.jit(reference_decoder.logits, static_argnums=2)
loss = jax.jit(reference_decoder.loss, static_argnums=2)


@functools.cache
def made(name):
    """(model, parameters with random norms and sinks, batch, loss and gradients)"""
    model, rules = MODELS[name]
    random = np.random.default_rng(0)

    def stirred(path, a):
        small = path[-1].key in ("scale", "sinks")
        return a + 0.5 * random.normal(size=a.shape).astype(np.float32) if small else a

    params = jax.tree.map_with_path(stirred, params_of(model))
    batch = reference.random_batch(model, 4)
    want = reference_decoder.loss_and_gradients(params, batch, rules)
    return model, params, batch, jax.device_get(want)


EVERY = Layout(data=2, pipe=2, tensor=2, virtual=2)
SLICES = Layout(pipe=2, tensor=2, slices=4, schedule="seq1f1b")
GATHER = Layout(context=2, tensor=2, pipe=2, context_attention="gather")
CASES = [
    ("latent", EVERY), ("latent", SLICES), ("latent", GATHER),
    ("latent", Layout(pipe=2, tensor=4, sequence_parallel=False, recompute="selective",
                      schedule="zb_h1")),
    ("sinks", EVERY), ("sinks", SLICES),
    ("sinks", Layout(context=2, data=2, context_attention="ring", zero=3)),
    ("sinks", Layout(context=2, pipe=2, context_attention="ulysses")),
    ("second", EVERY), ("second", GATHER),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), CASES, ids=range(len(CASES)))
def test_losses_and_gradients_are_those_of_the_reference(name, layout):
    model, params, batch, want = made(name)
    reference.assert_same(mtx.loss_and_gradients(model, layout, batch, params=params), want)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("latent", GATHER), ("sinks", GATHER), ("second", replace(EVERY, virtual=1))],
)
def test_what_is_kept_of_a_text_gives_the_logits_of_the_whole(name, layout):
    model, params, _, _ = made(name)
    trainer = mtx.Trainer(RunConfig(model=model, layout=layout, global_batch=2))
    decoder = Decoder(trainer, trainer.state_from(params), vocab=model.vocab)
    text = np.random.default_rng(1).integers(0, model.vocab, 12).tolist()
    texts = [text[:4], text[2:5]]
    decoder.begin(texts, room=12)
    for token in text[:7]:
        got = decoder.extend([token] * 2, [len(each) for each in texts])
        texts = [[*each, token] for each in texts]
        for each, choices in zip(texts, got, strict=True):
            tokens = np.zeros((1, model.sequence), np.int32)
            tokens[0, : len(each)] = each
            want = logits(params, {"tokens": tokens}, MODELS[name][1])
            np.testing.assert_allclose(choices.logits, want[0, len(each) - 1], atol=2e-5)
    if name == "latent":  # a latent and a rotated key, on each of the heads' devices
        rows, shards = 2, layout.tensor
        assert decoder.kept_bytes == 4 * rows * shards * model.layers * model.sequence * (20 + 6)


def test_dropout_of_probabilities_does_not_depend_on_the_layout():
    model, params, batch, _ = made("sinks")
    model = replace(model, attention_dropout=0.1)
    one = mtx.loss_and_gradients(model, Layout(microbatch=4), batch, params=params)
    reference.assert_same(mtx.loss_and_gradients(model, GATHER, batch, params=params), one)


def test_held_out_loss_is_that_of_the_next_token():
    model, params, batch, _ = made("second")
    trainer = mtx.Trainer(RunConfig(model=model, layout=GATHER, global_batch=4))
    losses, weights = trainer.evaluate(trainer.state_from(params), trainer.place(batch))
    want = loss(params, batch, MODELS["second"][1])
    assert float(losses / weights) == pytest.approx(float(want), rel=1e-6)


def test_second_targets_stay_within_their_document():
    random = np.random.default_rng(3)
    batch = {
        "targets": random.integers(1, 9, (3, 8)), "weights": random.random((3, 8)),
        "segments": np.cumsum(random.random((3, 8)) < 0.4, axis=1),
    }  # fmt: skip
    found = with_second(batch, Axes())
    for row, place in np.ndindex(3, 8):
        target = weight = 0
        if place < 7:
            target = batch["targets"][row, place + 1]
            same = batch["segments"][row, place] == batch["segments"][row, place + 1]
            weight = batch["weights"][row, place + 1] * same
        assert found["second_targets"][row, place] == target
        assert found["second_weights"][row, place] == pytest.approx(weight)
