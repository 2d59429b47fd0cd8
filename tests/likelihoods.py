"""ln p of the next token by the reference model: the oracle of the evaluations' tests."""

from __future__ import annotations

import functools

import jax
import numpy as np
import reference
from parameters import params_of

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.step.trainer import Trainer

MODEL = ModelConfig(
    layers=2, hidden=32, heads=4, sequence=16, vocab=256, compute_dtype="float32", init_std=0.3,
    vocab_multiple=8,
)  # fmt: skip
SHARDED = Layout(data=2, pipe=2, tensor=2, microbatch=2)


@functools.cache
def sharded():
    """(trainer, state) of MODEL on eight devices, in batches of 8 rows; compiled once for all."""
    trainer = Trainer(RunConfig(model=MODEL, layout=SHARDED, global_batch=8))
    return trainer, trainer.state_from(params_of(MODEL, seed=3))


def log_probabilities_of(trainer, state):
    """A function: ids [1 to S] -> ln p float64 [V] of the token after them."""
    params = trainer.to_canonical(jax.device_get(state.params))
    logits = jax.jit(reference.logits)
    sequence = trainer.run.model.sequence

    def after(ids):
        padded = np.zeros((1, sequence), np.int32)
        padded[0, : len(ids)] = ids
        values = np.asarray(logits(params, padded), np.float64)[0, len(ids) - 1]
        return values - np.logaddexp.reduce(values)

    return after
