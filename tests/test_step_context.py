"""Sequences split over `context` give the values of one device, with every way of attention."""

import re
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from errors import names
from jax.interpreters import partial_eval
from parameters import params_of
from reference import assert_same, random_batch

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.evaluation.decoder import Decoder, programs_of
from mtx.layers import fused
from mtx.sharding import random
from mtx.sharding.sequence import zigzag
from mtx.step.trainer import Trainer

WAYS = "gather", "ring", "ulysses", "usp"
SIZES = {
    "layers": 4, "hidden": 32, "heads": 4, "sequence": 32, "vocab": 60, "vocab_multiple": 8,
    "compute_dtype": "float32",
}  # fmt: skip
LLAMA = ModelConfig(family="llama", kv_heads=2, **SIZES)
WINDOW = ModelConfig(family="mistral", kv_heads=2, window=5, **SIZES)
WIDE_WINDOW = replace(WINDOW, window=13)
DROPS = ModelConfig(dropout=0.1, attention_dropout=0.1, **SIZES)
GEMMA = ModelConfig(family="gemma2", kv_heads=2, **SIZES)
BERT = ModelConfig(family="bert", **SIZES)


def with_documents(batch):
    """The batch with several documents per row, each with its own positions."""
    rows, sequence = batch["tokens"].shape
    starts = np.random.default_rng(1).random((rows, sequence)) < 0.15
    starts[:, 0] = True
    place = np.broadcast_to(np.arange(sequence, dtype=np.int32), starts.shape)
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    segments = starts.cumsum(axis=1, dtype=np.int32)
    return batch | {"segments": segments, "positions": (place - first).astype(np.int32)}


def batch_of(model):
    batch = random_batch(model, 8)
    if model is not BERT:
        return batch
    random = np.random.default_rng(2)
    lengths = random.integers(8, model.sequence + 1, (8, 1))
    return batch | {
        "types": random.integers(0, 2, batch["tokens"].shape, dtype=np.int32),
        "segments": (np.arange(model.sequence) < lengths).astype(np.int32),
        "order": np.array([1, 1, 1, -1, 1, 1, 0, 1], np.int32),
    }


def trainer_of(model, **layout):
    return Trainer(RunConfig(model=model, layout=Layout(**layout), global_batch=8))


def loss_and_gradients(model, batch, **layout):
    trainer = trainer_of(model, **layout)
    return trainer.loss_and_gradients_of(trainer.masters_from(params_of(model)), batch)


_wanted = {}


def assert_as_on_one_device(model, *, documents=False, **layout):
    batch = with_documents(batch_of(model)) if documents else batch_of(model)
    if (model, documents) not in _wanted:
        _wanted[model, documents] = loss_and_gradients(model, batch)
    assert_same(loss_and_gradients(model, batch, **layout), _wanted[model, documents])


@pytest.mark.parametrize(
    "way, model, layout",
    [  # on two devices usp equals ulysses, and with a window a ring gathers: the same programs
        *((way, DROPS, {"context": 2, "tensor": 2, "pipe": 2, "virtual": 2}) for way in WAYS[:3]),
        *((way, WINDOW, {"context": 2, "data": 2, "zero": 3}) for way in WAYS[1:3]),
    ],
)
def test_every_way_of_attention_gives_the_numbers_of_one_device(way, model, layout):
    assert_as_on_one_device(model, context_attention=way, **layout)


@pytest.mark.parametrize(
    "way, model",
    [
        ("gather", replace(WIDE_WINDOW, attention_dropout=0.1)), ("ring", GEMMA),
        ("usp", replace(LLAMA, attention_dropout=0.1)),
    ],
    ids=["window", "gemma2", "llama"],
)  # fmt: skip
def test_more_devices_than_heads_of_keys(way, model):
    assert_as_on_one_device(model, context=4, pipe=2, context_attention=way)


@pytest.mark.parametrize(
    "model, layout",
    [
        (LLAMA, {"context": 8, "context_attention": "ring"}),
        (BERT, {"context": 2, "pipe": 2, "context_attention": "gather"}),
        (BERT, {"context": 2, "context_attention": "ring"}),
        (WIDE_WINDOW, {"context": 8}),
        (LLAMA, {"context": 2, "pipe": 2, "stage_layers": (3, 1)}),
        (LLAMA, {"context": 2, "pipe": 2, "schedule": "zb_h1", "context_attention": "ring"}),
        (LLAMA, {"context": 2, "pipe": 2, "recompute": "around_attention"}),
        (LLAMA, {"context": 2, "tensor": 2, "pipe": 2, "sequence_parallel": False}),
        (
            LLAMA,
            {"context": 2, "data": 2, "pipe": 2, "virtual": 2, "zero": 3, "zero_unit": "layer",
             "weave": "on", "idle": "phases"},
        ),
    ],
)  # fmt: skip
def test_beside_all_else(model, layout):
    assert_as_on_one_device(model, **layout)


@pytest.mark.parametrize(
    "layout",
    [
        {"context": 2, "tensor": 2, "context_attention": "gather"},
        {"context": 2, "pipe": 2, "context_attention": "ulysses"},
        {"context": 4, "pipe": 2, "context_attention": "ring"},
    ],
)
def test_documents_reach_over_devices(layout):
    assert_as_on_one_device(LLAMA, documents=True, **layout)


class Fused(Trainer):
    """A trainer with attention's kernel for GPUs, only to be traced."""

    def _kernel(self):
        return "described"


def kernels_of(jaxpr) -> Counter:
    """Counts of the primitives, which include attention's kernels, in all equations."""
    found = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += kernels_of(inner) if hasattr(inner, "eqns") else Counter()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("context", [2, 4])
def test_attention_runs_forward_once_where_its_output_is_kept(way, context):
    counts = {}
    model = replace(LLAMA, kv_heads=4) if way == "ulysses" else LLAMA
    for recompute in ("none", "around_attention", "full"):
        layout = Layout(context=context, context_attention=way, recompute=recompute)
        trainer = Fused(RunConfig(model=model, layout=layout, global_batch=8))
        fields = trainer.model.batch_fields(8)
        step = jax.make_jaxpr(trainer.train_step)(trainer.states.shapes, fields).jaxpr
        step, _ = partial_eval.dce_jaxpr(step, [True] * len(step.outvars))
        counts[recompute] = kernels_of(step)
    forward, backward = fused.FORWARD.name, fused.BACKWARD.name
    assert counts["around_attention"][forward] == counts["none"][forward] > 0
    assert counts["full"][forward] == 2 * counts["none"][forward]
    assert len({found[backward] for found in counts.values()}) == 1


def test_five_steps_end_with_the_same_state():
    batch = random_batch(LLAMA, 8)

    def state_of(**layout):
        trainer = trainer_of(LLAMA, **layout)
        state = trainer.state_from(params_of(LLAMA))
        for _ in range(5):
            state, metrics = trainer.train_step(state, trainer.place(batch))
        params = trainer.to_canonical(jax.device_get(state.params))
        return [float(metrics.loss), float(metrics.gradient_norm)], params

    numbers, params = state_of(data=2, context=2, tensor=2)
    wanted, wanted_params = state_of()
    np.testing.assert_allclose(numbers, wanted, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted_params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_scores_come_back_in_the_order_of_positions():
    batch = random_batch(WINDOW, 8)
    last = np.arange(8, dtype=np.int32) * 4

    def found(**layout):
        trainer = trainer_of(WINDOW, **layout)
        state, rows = trainer.state_from(params_of(WINDOW)), trainer.place(batch)
        ends = trainer.place({"tokens": batch["tokens"], "last": last})
        logits = trainer.predict(state, ends)[:, : WINDOW.vocab]
        return jax.device_get((trainer.score(state, rows), trainer.evaluate(state, rows), logits))

    wanted = found()
    for got, want in zip(
        jax.tree.leaves(found(context=4, pipe=2)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", [{"context": 8}, {"context": 2, "tensor": 2, "pipe": 2}])
def test_texts_go_on_with_keys_and_values_kept_in_parts(layout):
    def written(**layout):
        trainer = trainer_of(WIDE_WINDOW, **layout)
        decoder = Decoder(trainer, trainer.state_from(params_of(WIDE_WINDOW)), vocab=60)
        texts = [[3, 4, 5], [7] * 20, [9, 8, 1, 2]]
        found, positions = [decoder.begin(texts, 30)], [len(text) for text in texts]
        for _ in range(8):
            tokens = [int(choice.logits.argmax()) for choice in found[-1]]
            found.append(decoder.extend(tokens, positions))
            positions = [position + 1 for position in positions]
        kept = jax.tree.leaves(decoder._past)[0]
        return np.stack([[c.logits for c in step] for step in found]), kept

    wanted, whole = written()
    got, kept = written(**layout)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert kept.addressable_shards[0].data.shape[-2] == whole.shape[-2] // layout["context"]


def test_a_first_pass_is_a_part_of_it_for_each_device():
    """Work falls by the factor c, and no computed array has all positions."""
    model, flops = replace(LLAMA, layers=1, hidden=24, vocab=40, sequence=128), []
    for context in (1, 4):
        trainer = trainer_of(model, context=context, context_attention="ring")
        state, programs = trainer.state_from(params_of(model)), programs_of(trainer)
        decoder = Decoder(trainer, state, vocab=40)
        batch = decoder._placed(decoder._padded([[n % 40 for n in range(64)]]))
        lowered = programs.begin.lower(1, 64, decoder._params, batch, decoder._vocab)
        compiled = lowered.compile().as_text()
        flops.append(read_program(compiled).matmul_flops())
        assert bool(re.search(r"f32\[(\d+,)*64(,\d+)*\]", compiled)) == (context == 1)
    assert flops[0] / 4 * 0.9 < flops[1] < flops[0] / 4 * 1.02  # the head takes one position


def test_a_device_has_an_early_and_a_late_chunk():
    assert zigzag(16, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    sees = np.arange(16) + 1  # keys that each query sees, causal: as many on both
    assert sees[zigzag(16, 2)].reshape(2, -1).sum(axis=1).tolist() == [68, 68]


@pytest.mark.parametrize(
    "model, layout, values",
    [
        (replace(LLAMA, sequence=30), {"context": 4}, ["sequence=30", "context=4", "32"]),
        (LLAMA, {"context": 2, "slices": 2, "schedule": "seq1f1b"}, ["slices=2", "context=2"]),
        (LLAMA, {"context": 4, "context_attention": "ulysses"}, ["kv_heads=2", "context=4"]),
        (LLAMA, {"context": 2, "tensor": 32, "sequence_parallel": True}, ["tensor=32"]),
    ],
)
def test_what_cannot_be_is_refused(model, layout, values):
    with pytest.raises(UserError) as error:
        Layout(**layout).check(model)
    assert names(error, *values)


def test_a_device_draws_its_own_part_of_a_mask():
    row, at = random.fold(random.key_data(3), 5), np.array([40, 3, 0, 99, 64])
    for keep in (0.9, 0.5, 0.01):
        whole = random._row_mask(row, keep, 100)
        assert (random._row_mask_at(row, keep, at) == whole[at]).all()
