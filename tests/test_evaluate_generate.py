"""Sampled text: the reference's own choice, on every layout, and what ends or bounds it."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import reference

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluate.generate import generate
from mtx.train.step import Trainer

MODEL = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=300, compute_dtype="float32", init_std=0.3,
    vocab_multiple=8,
)  # fmt: skip
PROMPTS = ["in the beginning", "", "x"]


def trained(layout: Layout, global_batch: int):
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=global_batch))
    return trainer, trainer.init(seed=3)


@pytest.fixture(scope="module")
def sharded():
    """With the batch that 3 or 4 prompts need: it is compiled once, for all tests."""
    return trained(Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=2), 4)


@pytest.fixture(scope="module")
def next_logits(sharded):
    """ids -> the reference's logits float32 [V of Latin] of the token after them."""
    trainer, state = sharded
    params = jax.device_get(trainer.to_canonical(state.params))
    logits = jax.jit(reference.logits)

    def after(ids):
        window = ids[-MODEL.sequence :]
        padded = np.array([window + [0] * (MODEL.sequence - len(window))])
        return np.asarray(logits(params, padded))[0, len(window) - 1, : Latin.vocab]

    return after


class Latin(ByteTokenizer):
    """One character a byte, so that what was sampled can be read back."""

    def encode(self, text):
        return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


class LatinUpTo99(Latin):
    vocab = 100


def test_temperature_0_takes_the_choice_of_the_reference(sharded, next_logits):
    texts = generate(*sharded, Latin(), PROMPTS, tokens=6, temperature=0)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = Latin().encode(prompt).tolist() or [Latin.eod]
        for _ in range(6):
            ids.append(int(next_logits(ids).argmax()))
            if ids[-1] == Latin.eod:
                break
        assert text == Latin().decode(ids)
    assert len(texts[0]) > MODEL.sequence, "no window has been slid"


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(data=3, microbatch=2), Layout(pipe=4, tensor=2, microbatch=4)]
)
def test_every_layout_writes_the_same_text(sharded, layout):
    expected = generate(*sharded, Latin(), PROMPTS, tokens=5, temperature=1.0, seed=7)
    other = trained(layout, 12)
    assert generate(*other, Latin(), PROMPTS, tokens=5, temperature=1.0, seed=7) == expected
    assert expected[0].startswith(PROMPTS[0]) and len(expected[0]) == len(PROMPTS[0]) + 5


def test_the_seed_decides_the_text(sharded):
    one, again, other = (
        generate(*sharded, Latin(), ["a", "a", "b"], tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert one[0] != one[1], "two prompts share a stream"


def test_the_other_prompts_do_not_matter(sharded):
    with_others = [PROMPTS[0], "other", "prompts", "here"]
    (one, *_), (same, *_) = (
        generate(*sharded, Latin(), prompts, tokens=4, temperature=1.0, seed=5)
        for prompts in (PROMPTS, with_others)
    )
    assert one == same


def test_text_ends_at_the_end_of_document(sharded):
    first = generate(*sharded, Latin(), ["ab"] * 3, tokens=1, temperature=0)

    class EndsThere(Latin):
        eod = ord(first[0][-1])

    assert generate(*sharded, EndsThere(), ["ab"] * 3, tokens=50, temperature=0) == first


def test_no_token_is_beyond_the_tokenizer(sharded):
    """The model has 300 tokens, and at this temperature all are about as likely."""
    texts = generate(*sharded, LatinUpTo99(), ["a", "b", "c"], tokens=20, temperature=1e6)
    sampled = [ord(character) for text in texts for character in text[1:]]
    assert max(sampled) < 100 and len(set(sampled)) > 10


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_by_their_probability(sharded, next_logits, temperature):
    """The first token after "a", 80 times, against softmax(logits / temperature)."""
    scaled = next_logits([ord("a")]).astype(float) / temperature
    wanted = np.exp(scaled - np.logaddexp.reduce(scaled))
    texts = [
        text
        for seed in range(20)
        for text in generate(
            *sharded, Latin(), ["a"] * 4, tokens=1, temperature=temperature, seed=seed
        )
    ]
    surprise = -np.log([wanted[ord(text[1])] for text in texts])
    entropy = -(wanted * np.log(wanted)).sum()
    spread = np.sqrt((wanted * np.log(wanted) ** 2).sum() - entropy**2)
    assert abs(surprise.mean() - entropy) < 4 * spread / np.sqrt(80)


def test_the_batch_is_as_small_as_the_prompts_allow(sharded):
    trainer, state = sharded
    large = Trainer(replace(trainer.run, global_batch=16))
    assert generate(large, state, Latin(), []) == []
    texts = generate(large, state, Latin(), PROMPTS, tokens=1)
    assert "predict" not in vars(large), "the whole batch has been run"
    assert texts == generate(trainer, state, Latin(), PROMPTS, tokens=1)
    assert "predict" in vars(trainer), "a trainer of the right size is used as it is"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be at least 0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_mistakes_are_named(sharded, wrong, message):
    with pytest.raises(UserError, match=message):
        generate(*sharded, Latin(), ["a"], **wrong)
