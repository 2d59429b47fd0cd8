"""Masked tokens: which are hidden, and perplexity and accuracy by the reference BERT."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import reference_bert
from errors import names
from parameters import params_of

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.masked import Masking, mask_words
from mtx.data.samples import Rng
from mtx.data.special_tokens import BertVocab, SpecialTokens
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluation.cloze import cloze
from mtx.evaluation.masked import masked_perplexity
from mtx.step.trainer import Trainer

MODEL = ModelConfig(
    family="bert", layers=2, hidden=32, heads=4, sequence=16, vocab=260, compute_dtype="float32",
    init_std=0.2, vocab_multiple=8,
)  # fmt: skip
VOCAB = BertVocab(  # bytes, those beyond ASCII continue a word; and special tokens
    special=SpecialTokens(cls=256, sep=257, mask=258, pad=259),
    continues=np.arange(260) // 128 == 1,
    others=np.arange(256, dtype=np.int32),
)
TEXTS = ["a text of more than one row, or so it seems", "x", "\u00e9t\u00e9 \u4e2d\u6587"]


def trained(layout, global_batch):
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=global_batch))
    return trainer, trainer.state_from(params_of(MODEL, seed=2))


@pytest.fixture(scope="module")
def sharded():
    return trained(Layout(pipe=2, tensor=2, microbatch=2), 4)


def masked_row(part, index, *, seed):
    """(what the model sees, what it has to restore, where), with special tokens and padding"""
    targets = np.array([256, *part, 257], np.int32)
    rng = Rng(seed, index, 5)
    tokens, places = mask_words(targets, VOCAB, rng, Masking(fraction=0.3))
    return tokens, targets, places


def test_masked_perplexity_is_that_of_the_reference(sharded):
    trainer, state = sharded
    params = trainer.to_canonical(jax.device_get(state.params))
    logits = jax.jit(reference_bert.logits, static_argnames=("post", "form"))
    texts = [np.frombuffer(text.encode(), np.uint8) for text in TEXTS]
    parts = [text[start : start + 14] for text in texts for start in range(0, len(text), 14)]
    losses, hits = [], []
    for index, part in enumerate(parts):
        tokens, targets, places = masked_row(part, index, seed=5)
        missing = 16 - len(tokens)
        batch = {
            "tokens": np.pad(tokens, (0, missing), constant_values=259)[None],
            "segments": np.pad(np.ones_like(tokens), (0, missing))[None],
            "types": np.zeros((1, 16), np.int32),
        }
        values, _ = logits(params, batch, post=False, form="tanh")
        values = np.asarray(values, np.float64)[0, places]
        right = values[np.arange(len(places)), targets[places]]
        losses += (np.logaddexp.reduce(values, axis=-1) - right).tolist()
        hits += (values.argmax(-1) == targets[places]).tolist()
    got = masked_perplexity(
        *sharded, ByteTokenizer(), TEXTS, vocab=VOCAB, masking=Masking(fraction=0.3), seed=5
    )
    assert (got.rows, got.masked) == (len(parts), len(losses)) and len(parts) > 4
    assert got.tokens == sum(map(len, texts))
    assert got.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert got.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert got.accuracy == np.mean(hits)


def test_the_seed_decides_what_is_masked(sharded):
    one, same, other = (
        masked_perplexity(*sharded, ByteTokenizer(), TEXTS, vocab=VOCAB, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == same and one.loss != other.loss


def test_every_layout_gives_the_same(sharded):
    expected = masked_perplexity(*sharded, ByteTokenizer(), TEXTS, vocab=VOCAB)
    reports = []
    got = masked_perplexity(
        *trained(Layout(microbatch=3), 3), ByteTokenizer(), TEXTS, vocab=VOCAB,
        report=lambda done, total: reports.append((done, total)),
    )  # fmt: skip
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    assert got.masked == expected.masked and reports[-1] == (got.rows, got.rows)


@pytest.mark.parametrize(
    "change, values",
    [
        ({"vocab": None}, ("bytes",)),
        ({"seed": -1}, ("seed=-1", "0")),
        ({"texts": []}, ("text",)),
        ({"texts": ["a", ""]}, ("text 2", "2")),
    ],
)
def test_mistakes_are_named(sharded, change, values):
    given = {"texts": ["a"], "vocab": VOCAB} | change
    with pytest.raises(UserError) as error:
        masked_perplexity(*sharded, ByteTokenizer(), **given)
    names(error, *values)


def test_each_family_has_its_own_tasks(sharded):
    with pytest.raises(UserError) as error:
        cloze(*sharded, ByteTokenizer(), ["a b"])
    names(error, "'bert'")
    trainer = Trainer(RunConfig(model=ModelConfig(layers=1, hidden=8, heads=1), global_batch=1))
    with pytest.raises(UserError) as error:
        masked_perplexity(trainer, None, ByteTokenizer(), ["a"], vocab=VOCAB)
    names(error, "'gpt'")
