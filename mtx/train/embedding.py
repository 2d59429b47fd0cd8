"""Embeddings of texts by a BERT that was trained with mtx, by which neighbours are found (Borgeaud
et al. 2022, section 2.3: the mean of BERT's output over a chunk). The BERT is not trained further:
its parameters are read from a checkpoint, without an optimizer, and its embeddings are stored.

Legend: G rows of a batch · S sequence · n chunks · M tokens of a chunk · D hidden
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, RunConfig
from mtx.data.nearest import unit_length
from mtx.data.special_tokens import find_special_tokens
from mtx.data.tokenizer_base import Tokenizer
from mtx.errors import UserError
from mtx.layers.bert import Pooler, Pretraining
from mtx.layers.head import Fields, fields_of_targets
from mtx.layers.sublayer import Build
from mtx.step.trainer import Trainer
from mtx.train.finetune import with_pretrained

_ROWS = 32  # of a batch


@dataclass(frozen=True, kw_only=True)
class Means:
    """The config of a head that gives the mean of the last layer's output over each text."""

    pretraining: Pretraining  # the head that the model was trained with

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return MeansHead(self.pretraining, build, rngs)

    def positions(self, rows: int, positions: int, vocab: int) -> int:
        """All of them, because this head has no logits of tokens."""
        return positions

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        fields = fields_of_targets(rows, sequence)
        return fields | {"types": fields["tokens"], "segments": fields["tokens"]}

    def weigh(self, batch: Any, total: Callable) -> Any:
        return batch


class MeansHead(Pooler):
    """norm, if the last layer has none"""

    def scores(self, tokens_vD, x_BSD, batch):
        """float32 [B, D]"""
        weights_BS1 = (batch["segments"] > 0)[..., None].astype(jnp.float32)
        sums_BD = (self.final(x_BSD).astype(jnp.float32) * weights_BS1).sum(axis=1)
        return sums_BD / jnp.maximum(weights_BS1.sum(axis=1), 1)


class _MeansTrainer(Trainer):
    def head(self) -> Means:
        return Means(pretraining=self.run.model.stack().head)


class FrozenEmbedding:
    """A BERT's embeddings of chunks of another tokenizer's tokens. The text of a chunk is encoded
    by the BERT's own tokenizer, put between [CLS] and [SEP], and cut to the BERT's sequence. Runs
    on all devices as replicas."""

    def __init__(self, directory: str | Path, chunks: Tokenizer, *, step: int | None = None):
        """chunks: the tokenizer of the chunks. UserError for a model that is not a BERT."""
        checkpoints = Checkpoints(directory)
        run, self._tokenizer = checkpoints.run(step), checkpoints.tokenizer(step)
        if run.model.objective != "masked tokens":
            raise UserError(
                f"{directory} holds a model of family={run.model.family!r}; embeddings are of a "
                "'bert'"
            )
        self._chunks, self._special = chunks, find_special_tokens(self._tokenizer)
        self._trainer, self._state = _load(checkpoints, run, step)
        self.described = {
            "kind": "mean of a model's output", "model": str(directory),
            "step": checkpoints.latest() if step is None else step,
            "tokenizer": self._tokenizer.identity.sha256,
        }  # fmt: skip

    def __call__(self, tokens_nM: np.ndarray) -> np.ndarray:
        """float32 [n, D] of length 1."""
        rows = self._trainer.run.global_batch
        found = []
        for first in range(0, len(tokens_nM), rows):
            some = tokens_nM[first : first + rows]
            batch = self._trainer.place(self._batch(some, rows))
            means_GD = jax.device_get(self._trainer.score(self._state, batch))
            found.append(np.asarray(means_GD)[: len(some)])
        return unit_length(np.concatenate(found))

    def _batch(self, tokens_nM: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        special, sequence = self._special, self._trainer.run.model.sequence
        tokens_GS = np.full((rows, sequence), special.pad, np.int32)
        segments_GS = np.zeros((rows, sequence), np.int32)
        texts = [self._chunks.decode(row) for row in tokens_nM]
        for row, ids in enumerate(self._tokenizer.encode_all(texts)):
            ids = np.concatenate([[special.cls], ids[: sequence - 2], [special.sep]])
            tokens_GS[row, : len(ids)], segments_GS[row, : len(ids)] = ids, 1
        zeros = np.zeros_like(tokens_GS)
        return {
            "tokens": tokens_GS, "targets": zeros, "weights": zeros.astype(np.float32),
            "types": zeros, "segments": segments_GS,
        }  # fmt: skip


def _load(checkpoints: Checkpoints, run: RunConfig, step: int | None) -> tuple[Trainer, Any]:
    """The model with a `MeansHead`, on all devices as replicas."""
    replicas = jax.device_count()
    layout = Layout(data=replicas, microbatch=max(1, _ROWS // replicas))
    model = replace(run.model, dropout=0.0, attention_dropout=0.0)
    run = replace(run, model=model, layout=layout, global_batch=layout.microbatch * replicas)
    before = Trainer(run)
    trainer = _MeansTrainer(run, mesh=before.mesh)
    return trainer, with_pretrained(trainer, before, checkpoints.restore(before, step).params)
