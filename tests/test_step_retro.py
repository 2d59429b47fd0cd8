"""RETRO on every kind of layout: losses and gradients equal an unsharded reference's."""

import dataclasses
import functools

import jax
import pytest
import reference
import reference_retro
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.step.trainer import Trainer

# Decoder layers 1 to 6, of which 2, 4 and 6 read neighbours; an encoder of other sizes
RETRO = ModelConfig(
    family="retro", layers=8, hidden=32, heads=4, head_dim=10, ffn=48, sequence=16, chunk=4,
    neighbours=2, retrieved=6, retrieval_first=2, retrieval_every=2, encoder_layers=2,
    encoder_hidden=24, encoder_heads=2, encoder_ffn=40, vocab=101, compute_dtype="float32",
    vocab_multiple=8, init_std=0.1,
)  # fmt: skip
# An encoder like the decoder, which shares its table; one neighbour, shorter than a chunk
SAME = dataclasses.replace(
    RETRO, encoder_hidden=None, encoder_heads=None, encoder_ffn=None, encoder_layers=3,
    neighbours=1, chunk=8, retrieved=4, retrieval_every=3, tied=False,
)  # fmt: skip


@functools.cache
def made(model):
    batch = reference_retro.batch_of_chunks(model, 4)
    return batch, jax.device_get(reference_retro.loss_and_gradients(params_of(model), batch, model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (RETRO, Layout(data=2, pipe=2, tensor=2, virtual=2, schedule="deferred_zb", zero=3,
                       recompute="selective")),
        (SAME, Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases", stash="inputs")),
        (SAME, Layout(
            data=2, pipe=2, tensor=2, weave="on", idle="phases", recompute="full"
        )),
    ],
)  # fmt: skip
def test_retro_equals_the_reference(model, layout):
    batch, want = made(model)
    reference.assert_same(
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model)), want
    )


def test_neighbours_change_nothing_before_their_chunk_ends():
    """If one chunk's neighbours are replaced, losses of later positions change and earlier ones do
    not, on a layout with pipe, tensor and sequence parallelism."""
    run = RunConfig(model=RETRO, layout=Layout(pipe=2, tensor=2), global_batch=1)
    trainer = Trainer(run)
    state = trainer.state_from(params_of(RETRO))
    batch = reference_retro.batch_of_chunks(RETRO, 1)
    of_chunk = batch["neighbours"].reshape(4, -1)

    def losses(neighbours):
        given = batch | {"neighbours": neighbours.reshape(1, -1)}
        return jax.device_get(trainer.score(state, trainer.place(given))[0])[0]

    whole = losses(of_chunk)
    for chunk in range(4):
        others = of_chunk.copy()
        others[chunk] = (others[chunk] + 1) % RETRO.vocab
        moved, first = losses(others) != whole, 4 * chunk + 3
        assert not moved[:first].any() and moved[first : first + 4].all(), chunk


def test_dropout_masks_do_not_depend_on_the_layout():
    short = dataclasses.replace(RETRO, layers=4, encoder_layers=1, retrieval_every=4)
    model = dataclasses.replace(short, dropout=0.1, attention_dropout=0.1)
    batch = reference_retro.batch_of_chunks(model, 4)
    one, other = (
        mtx.loss_and_gradients(model, layout, batch, params=params_of(short))
        for layout in (Layout(microbatch=4), Layout(data=2, pipe=2, tensor=2))
    )
    reference.assert_same(other, one)
    whole = reference_retro.loss(params_of(short), batch, short)
    assert abs(float(one[0]) - float(whole)) > 1e-3, "something is dropped"
