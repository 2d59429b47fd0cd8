"""Text that goes on from prompts, sampled token by token from a trained model.

G rows of a batch · S sequence · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtx.data import Tokenizer
from mtx.errors import UserError
from mtx.pipeline.makers import forward_table
from mtx.train.step import Trainer, TrainState


def generate(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """Each prompt with at most `tokens` sampled tokens after it, on the layout of `trainer`.

    A text ends sooner at an end-of-document token. `temperature` 0 takes the most likely token.
    Prompt i draws from a stream of its own, (seed, i), on the host: the text is the same on every
    layout, to rounding, and does not depend on the other prompts. Of a text longer than S, the
    model sees the last S tokens.

    Every token is one forward pass over all S positions; nothing is kept from one to the next.
    Raises UserError for tokens below 1, a negative or infinite temperature, or a negative seed.
    """
    if tokens < 1:
        raise UserError(f"tokens={tokens} must be at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature={temperature} must be at least 0 (0: the most likely token)")
    if seed < 0:
        raise UserError(f"seed={seed} must be at least 0")
    if not prompts:
        return []
    trainer = _with_rows(trainer, len(prompts))
    texts = [[*tokenizer.encode(prompt).tolist()] or [tokenizer.eod] for prompt in prompts]
    streams = [np.random.default_rng((seed, i)) for i in range(len(prompts))]
    going_on = set(range(len(texts)))
    for _ in range(tokens):
        logits_GV = _next_logits(trainer, state, texts)[:, : tokenizer.vocab]
        for i in sorted(going_on):
            token = _sample(logits_GV[i], temperature, streams[i])
            texts[i].append(token)
            if token == tokenizer.eod:
                going_on.remove(i)
        if not going_on:
            break
    return [tokenizer.decode(text) for text in texts]


def _with_rows(trainer: Trainer, rows: int) -> Trainer:
    """A trainer of the same state on the same mesh, its global batch as small as `rows` allow.

    A whole one would cost, for each token, as much as the forward half of a training step.
    """
    layout = trainer.run.layout
    per_replica = -(-rows // layout.data)
    microbatch = min(per_replica, layout.microbatch)
    microbatches = -(-per_replica // microbatch)
    run = replace(
        trainer.run,
        layout=replace(layout, microbatch=microbatch, slices=1),
        global_batch=layout.data * microbatch * microbatches,
    )
    if run == trainer.run:
        return trainer
    table = forward_table(trainer.schedule.pieces, microbatches)
    return Trainer(run, mesh=trainer.mesh, schedule=table)


def _next_logits(trainer: Trainer, state: TrainState, texts: list[list[int]]) -> np.ndarray:
    """float64 [G, V padded]: of the token that follows each text, on every host."""
    sequence = trainer.run.model.sequence
    tokens_GS = np.zeros((trainer.run.global_batch, sequence), np.int32)
    positions_G = np.zeros(trainer.run.global_batch, np.int32)
    for row in range(trainer.run.global_batch):
        window = texts[row % len(texts)][-sequence:]  # rows beyond the prompts repeat them
        tokens_GS[row, : len(window)] = window
        positions_G[row] = len(window) - 1
    batch = trainer.place({"tokens": tokens_GS, "positions": positions_G})
    logits_GV = trainer.predict(state, batch)
    if not logits_GV.is_fully_addressable:
        logits_GV = multihost_utils.process_allgather(logits_GV, tiled=True)
    return np.asarray(jax.device_get(logits_GV), np.float64)


def _sample(logits_V: np.ndarray, temperature: float, stream: np.random.Generator) -> int:
    """A draw from softmax(logits / temperature), by Gumbel's argmax; the argmax itself at 0."""
    if temperature:
        logits_V = logits_V / temperature + stream.gumbel(size=logits_V.shape)
    return int(np.argmax(logits_V))
