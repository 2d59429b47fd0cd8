"""LLaVA on every kind of layout: losses and gradients of an unsharded reference."""

import dataclasses
import functools

import jax
import pytest
import reference
import reference_llava

import mtx
from mtx.config import Layout, ModelConfig

LLAVA = ModelConfig(
    family="llava", layers=8, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=40, vocab=101,
    vision_layers=4, vision_hidden=24, vision_heads=2, vision_ffn=36, image_size=12, patch_size=4,
    images=2, compute_dtype="float32", vocab_multiple=8, init_std=0.2, tied=False,
)  # fmt: skip
# Its first stage: of one image and one linear, and nothing behind what is read.
PROJECTOR = dataclasses.replace(
    LLAVA, projector_only=True, projector="linear", images=1, image_size=20, unread_layers=0
)

params_of = functools.cache(mtx.init_params)


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
        (LLAVA, Layout(pipe=2, context=2, tensor=2, schedule="zb_h1")),
    ],
)
def test_llava_equals_the_reference(model, layout):
    batch, want = made(model)
    reference.assert_same(
        mtx.loss_and_gradients(model, layout, batch, params=params_of(model)), want
    )
