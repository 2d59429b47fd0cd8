"""The head on one part of the sequence at a time: the values of the whole, without whole logits."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
from parameters import params_of
from test_step_families import BERT, LLAMA, of_bert, packed

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.layers import kernels
from mtx.layers.kernels import head_positions
from mtx.step.trainer import Trainer

GPT = ModelConfig(
    layers=4, hidden=32, heads=8, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8
)
GEMMA = ModelConfig(
    family="gemma2", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, sequence=16, vocab=101,
    window=6, logit_cap=2.0, compute_dtype="float32", vocab_multiple=8,
)  # fmt: skip
ROWS = 8
LAYOUTS = [
    Layout(),
    Layout(data=2, pipe=2, tensor=2, virtual=2),
    Layout(pipe=2, tensor=2, microbatch=2, sequence_parallel=False, schedule="zb_h1"),
    Layout(data=2, zero=3, tensor=2, idle="phases", weave="on"),
]


@functools.cache
def batch_of(model):
    if model.family == "bert":
        return of_bert(model, ROWS)[0]
    batch = reference.random_batch(model, ROWS)
    return packed(batch) if model.family == "llama" else batch


def trainer_of(model, layout, monkeypatch=None, positions=0):
    """A trainer whose head takes at most `positions` of a shard at once, unless 0."""
    if positions:
        shards = layout.tensor if layout.sequence_parallel else 1
        vocab = model.padded_vocab(layout.vocab_shards) // layout.vocab_shards
        most = 4 * layout.microbatch * shards * vocab * positions
        monkeypatch.setattr(kernels, "MOST_LOGITS_BYTES", most)
    return Trainer(RunConfig(model=model, layout=layout, global_batch=ROWS))


@functools.cache
def whole_of(model):
    """(loss, gradients) on one device."""
    trainer = trainer_of(model, Layout())
    return trainer.loss_and_gradients_of(trainer.masters_from(params_of(model)), batch_of(model))


MODELS = GPT, LLAMA, GEMMA, BERT


@pytest.mark.parametrize(
    "model, layout, positions",
    [  # every model on two layouts, every layout with two models
        pytest.param(MODELS[m], LAYOUTS[n], positions, id=f"{MODELS[m].family}-{n}")
        for m, n, positions in (
            (0, 0, 3),
            (0, 2, 4),
            (1, 1, 1),
            (1, 3, 3),
            (2, 0, 4),
            (2, 3, 1),
            (3, 1, 3),
            (3, 2, 3),
        )
    ],
)
def test_parts_give_what_the_whole_gives(model, layout, positions, monkeypatch):
    want = whole_of(model)
    trainer = trainer_of(model, layout, monkeypatch, positions)
    got = trainer.loss_and_gradients_of(trainer.masters_from(params_of(model)), batch_of(model))
    reference.assert_same(got, want)


def test_parts_give_what_the_reference_gives(monkeypatch):
    layout = Layout(data=2, pipe=2, tensor=2)
    trainer = trainer_of(GPT, layout, monkeypatch, 3)
    got = trainer.loss_and_gradients_of(trainer.masters_from(params_of(GPT)), batch_of(GPT))
    want = reference.loss_and_gradients(params_of(GPT), batch_of(GPT))
    reference.assert_same(got, jax.device_get(want))


@pytest.mark.parametrize(
    ("model", "layout"),
    [(GPT, LAYOUTS[1]), (GEMMA, LAYOUTS[0]), (BERT, LAYOUTS[1])],
    ids=["gpt", "gemma2", "bert"],
)
def test_scores_and_losses_of_parts_are_those_of_the_whole(model, layout, monkeypatch):
    whole = trainer_of(model, layout)
    state = whole.state_from(params_of(model))
    losses, hits = whole.score(state, whole.place(batch_of(model)))
    total, weight = whole.evaluate(state, whole.place(batch_of(model)))
    parts = trainer_of(model, layout, monkeypatch, 3)
    found = parts.score(state, parts.place(batch_of(model)))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)
    np.testing.assert_array_equal(found[1], hits)
    again = parts.evaluate(state, parts.place(batch_of(model)))
    assert float(again[0]) == pytest.approx(float(total), rel=1e-6) and again[1] == weight


def compiled(trainer):
    """(sizes of all arrays, FLOPs, temporary bytes) of the step."""
    step = trainer.compile_step()
    program = read_program(step.as_text())
    shapes = [s for c in program.computations.values() for i in c.values() for s in i.shapes]
    sizes = {math.prod(shape.dims) for shape in shapes}
    return sizes, program.matmul_flops(), step.memory_analysis().temp_size_in_bytes


def test_logits_are_never_whole(monkeypatch):
    """Nor is any logit computed twice, and memory is that of one part."""
    model = replace(GPT, sequence=64, vocab=4000, hidden=24, layers=2, vocab_multiple=1)
    layout, logits = Layout(pipe=2), 64 * 4000 // 2
    whole, flops, memory = compiled(trainer_of(model, layout))
    parts, flops_of_parts, memory_of_parts = compiled(trainer_of(model, layout, monkeypatch, 16))
    assert logits in whole and logits // 4 in parts and logits not in parts
    assert flops_of_parts == pytest.approx(flops)
    assert memory - memory_of_parts > 0.95 * 4 * 2 * (logits - logits // 4)


def behind_barriers(jaxpr) -> list:
    """The shapes of all that a barrier is over, in all equations."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            found += [atom.aval.shape for atom in eqn.invars]
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += behind_barriers(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_zeros_of_the_embeddings_gradient_are_behind_no_barrier(tied, monkeypatch):
    """XLA would keep them until the embedding's backward adds to them."""
    model = replace(LLAMA, tied=tied)
    trainer = trainer_of(model, Layout(microbatch=ROWS), monkeypatch, 3)
    step = trainer.train_step.trace(trainer.states.shapes, batch_of(model))
    table = trainer.states.param_shapes["embed"]["tokens"].shape
    assert behind_barriers(step.jaxpr.jaxpr).count(table) == (not tied)  # the head's own


@pytest.mark.parametrize(
    ("rows", "positions", "vocab", "at_once"),
    [
        (1, 8192, 32064, 8192),  # 1002 MiB
        (1, 8192, 128256, 2048),
        (1, 131072, 128256, 2048),
        (8, 16384, 16032, 2048),
        (1, 8191, 128256, 2048),
        (1, 3000, 128256, 1536),  # two halves, in units of 128
        (64, 512, 250_000, 16),
        (2**20, 3, 4096, 1),
    ],
)
def test_how_many_positions_a_head_takes_at_once(rows, positions, vocab, at_once):
    assert head_positions(rows, positions, vocab) == at_once
    assert at_once == 1 or 4 * rows * at_once * vocab <= kernels.MOST_LOGITS_BYTES
