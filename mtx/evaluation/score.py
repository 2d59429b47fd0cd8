"""The basis of every evaluation: rows of tokens in, the loss and the hit of each target out.

G rows of a batch · S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, RunConfig
from mtx.data import Tokenizer
from mtx.errors import UserError
from mtx.plan.fit import fit_layout
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

_LEAST_ROWS = 16  # a batch of one would leave a pipeline's stages idle
Report = Callable[[int, int], None]  # called with (rows done, all rows)


def evaluation_run(run: RunConfig, layout: Layout, *, batch: int = 0) -> RunConfig:
    """`run` on another layout, `batch` rows at once; by default as many as in training but at
    least 16, in whole microbatches on all replicas."""
    unit = layout.replicas * layout.microbatch
    batch = batch or max(max(run.global_batch, _LEAST_ROWS) // unit, 1) * unit
    return replace(run, layout=layout, global_batch=batch)


class LoadedModel(NamedTuple):
    """The first arguments of `generate`, `perplexity`, `cloze`, `choice` and `masked_perplexity`:
    mtx.generate(*mtx.load_model("runs/a"), ["The "])."""

    trainer: Trainer
    state: TrainState
    tokenizer: Tokenizer


def load_model(
    directory: str | Path, *, step: int | None = None, layout: Layout | None = None, batch: int = 0
) -> LoadedModel:
    """The model of a training run, or of a conversion: `directory` is its `out`.

    step: the checkpoint's, by default the newest. layout: by default the run's own, as far as there
    are devices. batch: see `evaluation_run`. UserError if there is no such checkpoint, or if it
    does not fit the layout.
    """
    checkpoints = Checkpoints(directory)
    run = checkpoints.run(step)
    layout = layout or fit_layout(run.layout, jax.device_count())
    trainer = Trainer(evaluation_run(run, layout, batch=batch))
    return LoadedModel(trainer, checkpoints.restore(trainer, step), checkpoints.tokenizer(step))


class Row(NamedTuple):
    """Tokens of which the last ones are predicted, each from all tokens before it."""

    tokens: np.ndarray  # int32 [at most S + 1]
    scored: int  # how many, from 1 to len(tokens) - 1


class Scores(NamedTuple):
    """The scores of one row's scored tokens."""

    losses: np.ndarray  # float32 [scored]: -ln of each one's probability
    hits: np.ndarray  # bool [scored]: whether it was the most likely one

    @property
    def log_likelihood(self) -> float:
        """ln of the probability of all scored tokens together."""
        return -float(self.losses.sum(dtype=np.float64))

    @property
    def greedy(self) -> bool:
        """Whether always taking the most likely token would have written all of them."""
        return bool(self.hits.all())


def score_rows(
    trainer: Trainer, state: TrainState, rows: Sequence[Row], *, report: Report | None = None
) -> Iterator[Scores]:
    """The scores of each row in order, on the layout of `trainer`, in batches of its global batch.

    The rest of the last batch is filled up with rows of weight 0. Every process of a cluster
    gets all scores. Raises UserError for a model that does not predict the next token, a token
    that the model does not know, and losses that are not finite.
    """
    if trainer.run.model.objective == "retrieval":
        raise UserError(
            f"family={trainer.run.model.family!r} reads texts with neighbours, and these have "
            "none; a run's held-out loss, with neighbours, is what mtx train prints and logs"
        )
    if not trainer.run.model.causal:
        raise UserError(
            f"family={trainer.run.model.family!r} does not predict the next token of a text; "
            "evaluate a model that does, or a 'bert' with the task mlm"
        )
    for first in range(0, len(rows), trainer.run.global_batch):
        some = rows[first : first + trainer.run.global_batch]
        batch = _batch(trainer, some)
        losses_GS, hits_GS = score_batch(trainer, state, batch)
        for losses_S, hits_S, weights_S in zip(losses_GS, hits_GS, batch["weights"][: len(some)]):
            scored = weights_S > 0
            yield Scores(losses_S[scored], hits_S[scored] > 0)
        if report is not None:
            report(first + len(some), len(rows))


def score_batch(
    trainer: Trainer, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(losses float32 [G, S], hits float32 [G, S]) of a batch of host arrays, on every host. Raises
    UserError for a token beyond the model's vocabulary, and if a loss of weight above 0 is not
    finite."""
    largest = max(int(batch[name].max()) for name in ("tokens", "targets"))
    if largest >= trainer.run.model.vocab:
        raise UserError(
            f"token {largest:,} is beyond the model's vocab={trainer.run.model.vocab:,}; use the "
            "tokenizer that the model was trained with"
        )
    losses_GS, hits_GS = to_host(trainer.score(state, trainer.place(batch)))
    if not np.isfinite(losses_GS[batch["weights"] > 0]).all():
        raise UserError(
            "the losses are not finite: the parameters are not, or they overflow in compute_dtype="
            f"{trainer.run.model.compute_dtype!r}; evaluate another checkpoint"
        )
    return losses_GS, hits_GS


def to_host(scores: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """The results of `Trainer.score` as whole host arrays, on every host."""
    if not scores[0].is_fully_addressable:
        scores = multihost_utils.process_allgather(scores, tiled=True)
    return jax.device_get(scores)


def continuation_row(
    context: np.ndarray, target: np.ndarray, *, eod: int | None, sequence: int, what: str
) -> Row:
    """`target` after `context`, whose beginning is left out if both together exceed S + 1 tokens.

    Without a context, the target begins a document: it is put after an end-of-document token.
    Raises UserError for a target that is empty or has more than S tokens, and for one without a
    context if there is no such token; `what` names it.
    """
    if not 0 < len(target) <= sequence:
        raise UserError(
            f"{what} has {len(target):,} tokens to predict, which must be between 1 and "
            f"sequence={sequence:,}"
        )
    if not len(context):
        if eod is None:
            raise UserError(
                f"{what} has no text before it, and the tokenizer no end-of-document token to "
                "stand there; leave it out"
            )
        context = np.array([eod], np.int32)
    tokens = np.concatenate([context, target]).astype(np.int32)
    return Row(tokens[-(sequence + 1) :], len(target))


def _batch(trainer: Trainer, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    shape = trainer.run.global_batch, trainer.run.model.sequence
    tokens_GS, targets_GS = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights_GS = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        end = len(row.tokens) - 1
        tokens_GS[i, :end] = row.tokens[:-1]
        targets_GS[i, :end] = row.tokens[1:]
        weights_GS[i, end - row.scored : end] = 1
    return {"tokens": tokens_GS, "targets": targets_GS, "weights": weights_GS}
