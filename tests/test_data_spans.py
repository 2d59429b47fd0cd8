"""Span corruption: what a T5 reads and writes for a text."""

import re

import numpy as np
import pytest
from errors import names

from mtx.config import DataConfig, Layout, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.spans import SpanTokenizer, find_span_vocab, sample_lengths
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError


def t5(**changes):
    return ModelConfig(**dict(
        family="t5", layers=2, hidden=16, heads=2, vocab=384, encoder_sequence=64, sequence=24,
    ) | changes)  # fmt: skip


def test_lengths_are_t5s_own():
    """For 512 tokens, as compute_input_and_target_lengths in T5's and transformers' code."""
    model = t5(encoder_sequence=512, sequence=128)
    found = sample_lengths(model, DataConfig())
    assert (found.text, found.inputs, found.targets) == (568, 512, 114)


def test_a_sample_is_its_text_and_nothing_is_lost(tmp_path):
    """Replacing sentinels by their spans gives the text; every epoch leaves out different spans."""
    text = "".join(chr(97 + n % 26) for n in range(2000))
    (tmp_path / "text.txt").write_text(text)
    data = DataConfig(path=(str(tmp_path / "text.txt"),), eval_fraction=0.2)
    run = RunConfig(model=t5(), data=data, global_batch=4, layout=Layout(data=1, pipe=1, tensor=1))
    corpus = load_data(run)
    tokenizer = SpanTokenizer(corpus.tokenizer)
    batch = corpus.batch(0, 4)
    lengths = sample_lengths(run.model, data)
    assert (batch["segments"].sum(axis=1) == lengths.inputs).all()
    assert (batch["weights"].sum(axis=1) == lengths.targets).all()
    assert (batch["tokens"][:, 0] == find_span_vocab(corpus.tokenizer).pad).all()
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all(
        where=batch["weights"][:, 1:] > 0
    )
    for row in range(4):
        written = tokenizer.decode(batch["targets"][row])
        pieces = re.split(r"<extra_id_(\d+)>", written)
        spans = dict(zip(pieces[1::2], pieces[2::2]))
        assert list(spans) == [str(n) for n in range(lengths.spans)] and all(spans.values())
        read = tokenizer.decode(batch["inputs"][row])
        whole = re.sub(r"<extra_id_(\d+)>", lambda found, spans=spans: spans[found[1]], read)
        assert len(whole) == lengths.text and whole in text
    again = corpus.batch(0, 4)
    assert all((again[name] == batch[name]).all() for name in batch)
    first, later = corpus.train[0], corpus.train[corpus.train.distinct]
    assert not np.array_equal(first.inputs, later.inputs)


@pytest.mark.parametrize(
    ("model", "tokenizer", "tokens"),
    [(t5(vocab=256), "bytes", 357), (ModelConfig(vocab=256, sequence=24), "bpe", 270)],
)
def test_more_tokens_than_the_model_has_are_refused(tmp_path, model, tokenizer, tokens):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 90)
    data = DataConfig(path=(str(tmp_path / "text.txt"),), tokenizer=tokenizer, bpe_vocab=270)
    with pytest.raises(UserError) as error:
        load_data(RunConfig(model=model, data=data))
    assert names(error, tokens, "vocab=256")


def test_sentinels_are_read_and_written():
    tokenizer = SpanTokenizer(ByteTokenizer())
    ids = tokenizer.encode("a<extra_id_1>b<extra_id_200>")
    assert ids[1] == find_span_vocab(ByteTokenizer()).sentinels[1] and tokenizer.vocab == 357
    assert tokenizer.decode(ids) == "a<extra_id_1>b<extra_id_200>"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RunConfig(model=t5(), data=DataConfig(packed=True)), ["packed=True", "t5"]),
        (lambda: RunConfig(model=t5(), data=DataConfig(order="nsp")), ["order=nsp", "t5"]),
        (lambda: RunConfig(data=DataConfig(mean_span=2.0)), ["mean_span=2.0", "gpt"]),
        (lambda: Layout(context=2).check(t5()), ["context=2", "encoder_sequence"]),
        (lambda: Layout(slices=2, schedule="seq1f1b").check(t5()), ["slices=2", "t5"]),
        (lambda: Layout(tensor=2).check(t5(encoder_sequence=63)), ["encoder_sequence=63"]),
        (lambda: sample_lengths(t5(encoder_sequence=9000, sequence=9000), DataConfig()), ["spans"]),
    ],
)
def test_what_a_t5_has_not_is_refused(make, named):
    with pytest.raises(UserError) as error:
        make()
    names(error, *named)
