"""LLaVA on every kind of layout: losses and gradients equal an unsharded reference's."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import reference
import reference_llava
from parameters import params_of

import mtx
from mtx.api import trainer_for
from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig
from mtx.plan.flops import hardware_matmul_flops
from mtx.step.optimizer import state_arrays

LLAVA = ModelConfig(
    family="llava", layers=8, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=40, vocab=101,
    vision_layers=4, vision_hidden=24, vision_heads=2, vision_ffn=36, image_size=12, patch_size=4,
    images=2, compute_dtype="float32", vocab_multiple=8, init_std=0.2, tied=False,
)  # fmt: skip
# LLaVA's first stage of training, with one image, one linear and no layers after those read.
PROJECTOR = dataclasses.replace(
    LLAVA, projector_only=True, projector="linear", images=1, image_size=20, unread_layers=0
)


@functools.cache
def made(model):
    batch = reference_llava.batch_of_images(model, 4)
    want = reference_llava.loss_and_gradients(params_of(model), batch, model)
    return batch, jax.device_get(want)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LLAVA, Layout(microbatch=2)),
        (PROJECTOR, Layout(microbatch=4, recompute="selective")),
        (LLAVA, Layout(data=2, pipe=2, tensor=2, virtual=2)),
        (LLAVA, Layout(pipe=4, tensor=2, sequence_parallel=False, idle="phases", stash="inputs")),
        (PROJECTOR, Layout(data=2, pipe=2, tensor=2, virtual=2, schedule="deferred_zb", zero=3)),
        (LLAVA, Layout(pipe=2, context=2, tensor=2, schedule="zb_h1", weave="on", idle="phases")),
    ],
)
def test_llava_equals_the_reference(model, layout):
    batch, want = made(model)
    reference.assert_same(
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model)), want
    )


def matmuls_by_hand(model, rows):
    """FLOPs of a step: (vision transformer and projector, decoder and head without weight
    gradients, these weight gradients)."""
    hidden, size, ffn = model.hidden, model.vision_hidden, model.vision_ffn
    n, texts = model.patches + 1, rows * model.sequence
    images = rows * model.images * n
    layer = 2 * images * (4 * size * size + 2 * size * ffn) + 4 * images * n * size
    seen = (model.vision_layers - model.unread_layers) * layer
    seen += 2 * images * 3 * model.patch_size**2 * size
    if model.projector == "linear":  # F and W
        seen += 2 * 2 * images * size * hidden
    else:  # F, W and, for the second, B
        seen += 2 * images * (2 * size * hidden + 3 * hidden * hidden)
    kv = model.groups * model.head_size
    weights = 2 * texts * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * model.ffn_hidden)
    scores = 2 * texts * model.sequence * hidden  # per product; B computes the first again
    head = 2 * texts * hidden * model.padded_vocab(1)
    decoder = model.decoders * (2 * weights + (2 + 5) * scores) + 2 * head
    return seen, decoder, model.decoders * weights + head


@pytest.mark.parametrize("model", [LLAVA, PROJECTOR])
def test_what_is_frozen_has_no_gradient_state_or_backward_pass(model):
    rows = 4
    layout = Layout(microbatch=rows)
    trainer = trainer_for(model, layout, global_batch=rows)
    executed = read_program(trainer.compile_step().as_text()).matmul_flops()
    seen, decoder, of_weights = matmuls_by_hand(model, rows)
    assert executed == seen + decoder + (0 if model.projector_only else of_weights)
    assert hardware_matmul_flops(model, layout, rows, backend="xla") == executed

    state = trainer.state_from(params_of(model))
    before = jax.device_get(state.params)
    held = {path.partition(".")[2] for path in state_arrays(state.moments)}
    state, _ = trainer.train_step(state, trainer.place(made(model)[0]))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, state.params)
    assert moved == trainer.model.trained
    assert not moved["embed"]["vision"]["patches"] and moved["layers"]["projector"]
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="."): trained
        for path, trained in jax.tree.leaves_with_path(trainer.model.trained)
    }
    assert held == {path for path, trained in paths.items() if trained}
