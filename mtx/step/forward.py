"""Forward passes only: held-out loss, scores of every token, and logits of the next token.

Legend: G global batch · S sequence · M microbatches · B rows · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from mtx.layers.multi_token import without_second
from mtx.pipeline.head import by_parts
from mtx.pipeline.program import Pipeline
from mtx.schedules.makers import forward_table
from mtx.step.step import Step, sum_over_tokens

Tree = Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What can be computed from a model besides its gradients, on local shards; no dropout."""

    step: Step

    @cached_property
    def pipeline(self) -> Pipeline:
        """The step's pipeline with only its F, on whole sequences instead of slices."""
        pipeline = self.step.pipeline
        table = forward_table(pipeline.schedule.virtual_stages, self.step.run.microbatches)
        return replace(pipeline, schedule=table)

    def evaluate(self, masters: Tree, batch: Tree):
        """(sum of losses, sum of weights); float32 []."""
        params, batch = self._start(masters, batch)
        loss = by_parts(self.step.states.model, self.step.states.model.loss)
        losses_M = self.pipeline.forward(params, batch, loss)
        return sum_over_tokens((losses_M.sum(), batch["weights"].sum()))

    def predict(self, masters: Tree, batch: Tree):
        """logits [G, v] float32 of the token that follows each row's last one. batch: {"tokens":
        [G, S], "last": [G]}."""

        def output(shared, stream, batch):
            return self.step.states.model.next_logits(shared, stream, batch["last"])

        logits_MBv = self.pipeline.forward(*self._start(masters, batch), output)
        return logits_MBv.reshape(-1, logits_MBv.shape[-1])

    def score(self, masters: Tree, batch: Tree):
        """(losses, hits) [G, S] float32 of batch["targets"], unweighted."""
        params, batch = self._start(masters, batch)
        scores = by_parts(self.step.states.model, self.step.states.model.scores)
        scores_MBS = self.pipeline.forward(params, batch, scores)
        return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), scores_MBS)

    def _start(self, masters: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return self.step.gather(masters), without_second(self.step.microbatches(batch))
