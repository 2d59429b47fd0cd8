"""A model of different kinds of layers gives the loss and the gradients of its unsharded reference
with every family of schedules, however chunks divide its pattern; and it is saved and restored.
"""

import functools
from dataclasses import replace

import hybrid
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec
from parameters import drawn

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.schedules.makers import forward_table

MODEL = ModelConfig(
    layers=8, hidden=16, heads=4, sequence=8, vocab=37, vocab_multiple=8, ffn_multiple=2,
    compute_dtype="float32",
)  # fmt: skip
A, M, G = "attention", "mixer", "gate"
ALTERNATING = (A, M) * 4
RUNS = (A, A, M, M) * 2
THREE = (A, G, M, A, A, M, M, G)  # no two virtual stages alike
ROWS = 8


@functools.cache
def params_of(pattern):
    return hybrid.perturbed(drawn(trainer_of(pattern, Layout(), 1), 0.3))


def trainer_of(pattern, layout, rows):
    model = replace(MODEL, layers=len(pattern))
    run = RunConfig(model=model, layout=layout, global_batch=rows, steps=10)
    return hybrid.HybridTrainer(run, pattern)


@functools.cache
def wanted(pattern, rows):
    batch = reference.padded(reference.random_batch(MODEL, rows), ROWS)
    return jax.device_get(hybrid.loss_and_gradients(params_of(pattern), batch, pattern))


logits = jax.jit(hybrid.logits, static_argnums=2)
LAYOUTS = {
    "one device": (RUNS, Layout(microbatch=2)),
    "tensor": (RUNS, Layout(data=2, pipe=2, tensor=2, microbatch=2)),
    "interleaved": (ALTERNATING, Layout(pipe=2, virtual=2, tensor=2, recompute="selective")),
    "a period a chunk": (RUNS, Layout(pipe=2, tensor=2, sequence_parallel=False, recompute="full")),
    "differing": (THREE, Layout(pipe=2, tensor=2, virtual=2, data=2)),
    "differing, inputs": (THREE, Layout(pipe=4, stash="inputs", idle="phases", schedule="gpipe")),
    "uneven": (THREE, Layout(pipe=4, tensor=2, stage_layers=(1, 4, 3, 0))),
    "a kind on a stage": ((A,) * 4 + (M,) * 4, Layout(pipe=2, schedule="1f1b", tensor=2)),
    "zero bubble": (ALTERNATING, Layout(pipe=4, tensor=2, schedule="zb_h1")),
    "zero bubble, differing": (THREE, Layout(pipe=2, schedule="zb_h2", idle="phases")),
    "vee": (THREE, Layout(pipe=2, virtual=2, tensor=2, schedule="zb_v", recompute="full")),
    "vee, uneven": (THREE, Layout(pipe=2, virtual=2, schedule="v_min", stage_layers="balanced")),
    "dualpipe": (RUNS, Layout(pipe=2, virtual=2, schedule="dualpipe_v", stash="inputs")),
    "breadth first": (
        THREE, Layout(data=2, pipe=2, virtual=2, zero=3, schedule="breadth_first"),
    ),
    "sharded, split": (ALTERNATING, Layout(data=2, pipe=2, tensor=2, zero=3, schedule="zb_h1")),
    "slices": (THREE, Layout(pipe=2, tensor=2, slices=4, schedule="seq1f1b")),
    "slices, inputs": (
        ALTERNATING, Layout(pipe=2, slices=2, schedule="terapipe", stash="inputs", idle="phases"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_the_reference(name):
    pattern, layout = LAYOUTS[name]
    rows = 4 * layout.data * layout.microbatch // (2 if layout.data > 1 else 1)
    trainer = trainer_of(pattern, layout, rows)
    masters = trainer.masters_from(params_of(pattern))
    got = trainer.loss_and_gradients_of(masters, reference.random_batch(MODEL, rows))
    reference.assert_same(got, wanted(pattern, rows))


@pytest.mark.parametrize("layout", [Layout(pipe=2, tensor=2, virtual=2), Layout(pipe=4)])
def test_held_out_losses_and_scores_equal_the_reference(layout):
    trainer = trainer_of(THREE, layout, 4)
    state, batch = trainer.state_from(params_of(THREE)), reference.random_batch(MODEL, 4)
    total, weight = trainer.evaluate(state, trainer.place(batch))
    assert float(total / weight) == pytest.approx(float(wanted(THREE, 4)[0]), rel=1e-6)
    all_logits = jax.device_get(logits(params_of(THREE), batch["tokens"], THREE))
    chosen = np.take_along_axis(all_logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = np.logaddexp.reduce(all_logits, axis=-1) - chosen
    got, _ = jax.device_get(trainer.score(state, trainer.place(batch)))
    np.testing.assert_allclose(got, losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "pattern, layout",
    [
        ((A, G) * 2, Layout(pipe=2, tensor=2)),
        ((A, G, G, A, A), Layout(pipe=2, virtual=2, stage_layers=(1, 0, 3, 1))),
        ((G, A, A, G), Layout(pipe=2, data=2, zero=3)),
    ],
    ids=["alternating", "uneven", "differing"],
)
def test_texts_go_on_with_what_each_kind_keeps(pattern, layout):
    """The logits of each next position equal those of the whole text."""
    layout = replace(layout, sequence_parallel=False)
    rows, first = 4, 5
    trainer = trainer_of(pattern, layout, rows)
    params = params_of(pattern)
    state, batch = trainer.state_from(params), reference.random_batch(MODEL, rows)
    tokens = batch["tokens"]
    want = logits(params, tokens, pattern)

    def forward(masters, tokens):
        step, (count, length) = trainer.step, tokens.shape
        table = forward_table(trainer.schedule.virtual_stages, 2)
        pipeline = replace(trainer.pipeline, schedule=table)
        params, found = step.gather(masters), []
        past = pipeline.empty_past(count, length)
        for start, stop in [(0, first), *((n, n + 1) for n in range(first, length))]:
            part = {"tokens": tokens[:, start:stop], "last": jnp.full(count, stop - start - 1)}
            if start:
                part["positions"] = jnp.full((count, 1), start)
            part = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), part)

            def output(shared, stream, batch):
                return pipeline.model.next_logits(shared, stream, batch["last"])

            logits, past = pipeline.forward(params, part, output, past)
            found.append(logits.reshape(count, -1))
        return jnp.stack(found, axis=1)

    rows_spec = PartitionSpec("data")
    mapped = trainer.shard_map(
        forward,
        (trainer.states.specs.params, rows_spec),
        PartitionSpec("data", None, trainer.axes.vocab or None),
    )
    got = jax.jit(mapped)(state.params, trainer.place({"tokens": tokens})["tokens"])
    got = jax.device_get(got)[..., : MODEL.vocab]
    np.testing.assert_allclose(got, want[:, first - 1 :], rtol=1e-4, atol=1e-5)


def test_a_state_of_kinds_is_restored_on_layouts_where_they_fall_otherwise(tmp_path):
    layouts = [
        Layout(pipe=2, virtual=2, data=2, tensor=2),
        Layout(pipe=4, stage_layers=(1, 4, 3, 0), tensor=2),
        Layout(data=2, pipe=2, zero=3, schedule="breadth_first", virtual=2),
        Layout(),
    ]
    one, *others = (trainer_of(THREE, layout, 4) for layout in layouts)
    batch = reference.random_batch(MODEL, 4)
    state, _ = one.train_step(one.state_from(params_of(THREE)), one.place(batch))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(one, state, tokenizer=ByteTokenizer())
        checkpoints.wait()
        names = set(checkpoints.manifest(1).catalog)
        assert {"params.layers.mixer.kernel", "nu.layers.attention.qkv", "mu.embed.tokens"} <= names
        want = one.to_canonical(jax.device_get(state.params))
        _, metrics = one.train_step(state, one.place(batch))
        for other in others:
            moved = checkpoints.restore(other, 1)
            got = other.to_canonical(jax.device_get(moved.params))
            jax.tree.map(np.testing.assert_array_equal, got, want)
            _, after = other.train_step(moved, other.place(batch))
            assert float(after.loss) == pytest.approx(float(metrics.loss), rel=1e-6)
