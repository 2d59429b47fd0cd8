"""The programs that a run executes, compiled once: a run that rolls back does not recompile."""

from __future__ import annotations

from typing import Any

import jax

from mtx.step.state import TrainState
from mtx.step.trainer import Trainer
from mtx.train.audit import Audit

Tree = Any


class Programs:
    """The programs of a trainer, once `compile` has been called."""

    train_step: jax.stages.Compiled  # as `Trainer.train_step`
    evaluate: jax.stages.Compiled  # as `Trainer.evaluate`

    def __init__(self, trainer: Trainer):
        self.trainer, self.audit, self.compiled = trainer, Audit(trainer), False

    def compile(self, state: TrainState, batch: Tree, held_out: Tree, *, training: bool) -> None:
        """Compiles for a state and batches like these; without `training`, only the evaluation."""
        if training:
            self.train_step = self.trainer.train_step.lower(state, batch).compile()
        self.evaluate = self.trainer.evaluate.lower(state, held_out).compile()
        if training and self.trainer.run.guard.compare_every:
            self.audit.compile(state)
        self.compiled = True
