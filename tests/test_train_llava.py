"""A LLaVA learns to say what is on pictures: it reads them, as well on eight devices as on one."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from mtx.config import Layout
from mtx.data import load_data
from mtx.presets import preset
from mtx.step.trainer import Trainer

STEPS, ALIKE = 32, 6
OF_PRESET = preset("miniature-llava")
RUN = replace(OF_PRESET, steps=STEPS, optimizer=replace(OF_PRESET.optimizer, lr=3e-3))


@functools.cache
def corpus():
    return load_data(RUN)


def trained(trainer, state, steps):
    """(the last state, losses)"""
    losses = []
    for step in range(steps):
        batch = corpus().batch(step * RUN.global_batch, RUN.global_batch)
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
    return state, losses


def test_it_reads_the_picture_on_any_layout(optimised):
    trainer, one = (
        Trainer(replace(RUN, layout=layout))
        for layout in (RUN.layout, Layout(microbatch=RUN.global_batch))
    )
    first = jax.device_get(trainer.init().params)
    state, losses = trained(trainer, trainer.init(), STEPS)
    assert (trainer.placement.count.ravel() > 0).all() and not trainer.placement.even
    _, alone = trained(one, one.state_from(trainer.to_canonical(first)), ALIKE)
    assert losses[:ALIKE] == pytest.approx(alone, rel=1e-6)

    frozen = jax.tree.map(lambda is_trained: not is_trained, trainer.model.trained)
    for part in ("embed", "layers"):
        same = jax.tree.map(np.array_equal, first[part], state.params[part])
        assert jax.tree.all(jax.tree.map(lambda a, b: a or not b, same, frozen[part]))

    (batch,) = corpus().eval_batches(1, RUN.global_batch)
    filled = int((batch["weights"].sum(axis=1) > 0).sum())
    shuffled = batch | {"pixels": np.roll(batch["pixels"][:filled], 1, axis=0)}
    shuffled["pixels"] = np.resize(shuffled["pixels"], batch["pixels"].shape)
    read, unread = (
        float(loss / weight)
        for loss, weight in (
            trainer.evaluate(state, trainer.place(each)) for each in (batch, shuffled)
        )
    )
    assert read < 0.25 and unread > 2 * read, (read, unread)
