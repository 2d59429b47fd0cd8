"""A LLaVA learns to say what pictures show; it reads them equally well on eight devices and one."""

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


def trained(layout, steps):
    """(trainer, initial parameters, last state, losses)"""
    trainer, losses = Trainer(replace(RUN, layout=layout)), []
    state = trainer.init()
    first = jax.device_get(state.params)
    for step in range(steps):
        batch = corpus().batch(step * RUN.global_batch, RUN.global_batch)
        state, metrics = trainer.train_step(state, trainer.place(batch))
        losses.append(float(metrics.loss))
    return trainer, first, state, losses


def test_it_reads_the_picture_on_any_layout(optimised):
    """Trained on one device, with the same first steps as the layout; evaluated on the layout."""
    alone, first, learnt, losses = trained(Layout(microbatch=RUN.global_batch), STEPS)
    trainer, begun, state, alike = trained(RUN.layout, ALIKE)
    assert (trainer.placement.count.ravel() > 0).all() and not trainer.placement.even
    assert alike == pytest.approx(losses[:ALIKE], rel=1e-6)

    for one, before, after in ((trainer, begun, state), (alone, first, learnt)):
        frozen = jax.tree.map(lambda trains: not trains, one.model.trained)
        for part in ("embed", "layers"):
            same = jax.tree.map(np.array_equal, before[part], after.params[part])
            assert jax.tree.all(jax.tree.map(lambda a, b: a or not b, same, frozen[part]))

    state = trainer.state_from(jax.device_get(alone.to_canonical(learnt.params)))
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
